"""Mixup and cutmix against numpy: shares as often as a beta distribution has them, partners, boxes and labels."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cnn_words import typed
from scipy.stats import beta

from hotloop.engine.keys import sample_keys, seed_key, stream
from hotloop.families.cnn import mixing

HEIGHT, WIDTH, MANY = 8, 12, 20_000
KEYS = sample_keys(seed_key(3), 0, 64)
BOTH = ("--mixup", "0.4", "--cutmix", "1")


@cache
def drawn(*words, count=None):
    config = typed(*words).config
    keys = KEYS if count is None else sample_keys(seed_key(5), 0, count)
    return jax.tree.map(np.asarray, mixing.draw_mixing(config, keys, HEIGHT, WIDTH))


def words_of_bits():
    """The four words that each sample draws, one key at a time."""
    return np.stack([jax.random.bits(stream(key, "mixing", 0), (4,), jnp.uint32) for key in KEYS])


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_of_mixup_are_distributed_as_beta(alpha):
    shares = drawn("--mixup", str(alpha), count=MANY).share
    places = np.array([0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999])
    found = (shares[:, None] < places).mean(0)
    # Five standard deviations of a share of as many draws, and half a slice of the table.
    bound = 2.5 / np.sqrt(MANY) + 0.5 / mixing.QUANTILES
    assert np.abs(found - beta(alpha, alpha).cdf(places)).max() < bound
    assert np.abs(found - beta(1.5 * alpha, 1.5 * alpha).cdf(places)).max() > bound


def test_mixup_is_a_sum_of_both_images_in_the_shares_drawn():
    made = drawn("--mixup", "0.4")
    own, other = np.random.default_rng(0).normal(size=(2, len(KEYS), HEIGHT, WIDTH, 3))
    found = mixing.mix(made, jnp.asarray(own, jnp.float32), jnp.asarray(other, jnp.float32))
    place = words_of_bits()[:, 0] >> 20
    shares = beta(0.4, 0.4).ppf((place + 0.5) / 4096)
    np.testing.assert_allclose(made.share, shares, rtol=1e-6, atol=1e-30)
    wanted = [share * one + (1 - share) * two for share, one, two in zip(shares, own, other, strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert not made.is_cut.any()


def test_cutmix_puts_a_box_of_the_other_image_into_each_and_counts_its_pixels():
    made = drawn("--cutmix", "1")
    own, other = np.random.default_rng(0).normal(size=(2, len(KEYS), HEIGHT, WIDTH, 3)).astype(np.float32)
    found = np.asarray(mixing.mix(made, jnp.asarray(own), jnp.asarray(other)))
    wanted, shares = own.copy(), []
    for number, word in enumerate(words_of_bits()):
        side = np.sqrt(1 - (int(word[0] >> 20) + 0.5) / 4096)  # Beta(1, 1) is even
        box = []
        for length, bits in ((HEIGHT, word[2]), (WIDTH, word[3])):
            centre, half = int(bits >> 16) * length >> 16, int(length * side) // 2
            box.append(slice(max(centre - half, 0), min(centre + half, length)))
        wanted[number][tuple(box)] = other[number][tuple(box)]
        shares.append(np.mean(wanted[number] == own[number]))
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(made.share, shares, rtol=1e-6)
    assert made.is_cut.all() and min(shares) < 0.5 and max(shares) > 0.9


def test_of_both_each_sample_has_one_and_half_of_them_either():
    made = drawn(*BOTH, count=MANY)
    assert abs(made.is_cut.mean() - 0.5) < 4 * 0.5 / np.sqrt(MANY)
    alone = {way: drawn(*words, count=MANY) for way, words in ((True, BOTH[2:]), (False, BOTH[:2]))}
    for is_cut, one in alone.items():
        chosen = made.is_cut == is_cut
        np.testing.assert_array_equal(made.share[chosen], one.share[chosen])


def test_a_partner_is_as_far_from_the_end_as_its_sample_from_the_beginning():
    batch = {"image": jnp.arange(5), "label": 10 * jnp.arange(5)}
    found = mixing.add_partners(batch)
    assert found["other_image"].tolist() == [4, 3, 2, 1, 0] and found["other_label"][0] == 40
    assert found["image"] is batch["image"]


def test_a_partner_draws_what_no_sample_draws_for_itself():
    own, other = (np.asarray(jax.random.key_data(keys)) for keys in (KEYS, mixing.partner_keys(KEYS)))
    assert len({tuple(row) for row in np.concatenate([own, other])}) == 2 * len(KEYS)
