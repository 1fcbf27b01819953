"""Damaged checkpoints: what comes back is a saved state bit for bit, or one line says why nothing does.

Damage is drawn with a seed: flipped bytes, cut and emptied files, missing, swapped and foreign ones, odd manifests.
"""

import json
import random
import shutil
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from short_runs import FAMILIES, IMAGES, resumed, words, write_digits

from hotloop.cli.main import main
from hotloop.data import dataset
from hotloop.engine import checkpoint_folder as manifests
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepAll
from hotloop.engine.drive import check_position
from hotloop.engine.run import read_events
from hotloop.errors import CheckpointError

STEPS = (1, 2, 3)


def state_of(step):
    generator = np.random.default_rng(step)
    params = {
        "w": jnp.asarray(generator.normal(size=(5, 7)), jnp.float32),
        "b": jnp.full(3, step, jnp.bfloat16),
    }
    return {
        "params": params,
        "optimiser": optax.adam(1e-3).init(params),
        "key": jax.random.key(step),
        "update": step,
    }


def position_of(step):
    return {"feed": {"update": step}, "window": {"sums": {"loss": 0.5 * step}, "updates": step}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with whole steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoints"
    with Checkpoints(folder, KeepAll()) as checkpoints:
        for step in STEPS:
            checkpoints.save(step, state_of(step), position=position_of(step), metrics={"loss": 1.0 / step})
    return folder


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(folder, draw):
    path = draw.choice([path for path in files(folder) if path.stat().st_size])
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 20])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut(folder, draw):
    path = draw.choice([path for path in files(folder) if path.stat().st_size])
    path.write_bytes(path.read_bytes()[: draw.choice([0, draw.randrange(path.stat().st_size)])])


def lengthen(folder, draw):
    with draw.choice(files(folder)).open("ab") as file:
        file.write(draw.randbytes(draw.choice([1, 4096])))


def lose(folder, draw):
    path = draw.choice(list(folder.rglob("*")))
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def swap(folder, draw):
    """Two files of the checkpoints change places, of one step or of two."""
    one, other = draw.choice(files(folder)), draw.choice(files(folder.parent))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def swap_steps(folder, draw):
    other = draw.choice([path for path in folder.parent.iterdir() if path != folder])
    folder.rename(folder.parent / "between")
    other.rename(folder)
    (folder.parent / "between").rename(other)


def replace(folder, draw):
    """A file becomes a folder, or a link to nowhere, to itself or to another file."""
    path = draw.choice(files(folder))
    path.unlink()
    kind = draw.choice(["folder", "nowhere", "itself", "another"])
    if kind == "folder":
        path.mkdir()
    else:
        target = {"nowhere": "not there", "itself": path.name, "another": draw.choice(files(folder.parent))}[
            kind
        ]
        path.symlink_to(target)


def add(folder, draw):
    place = draw.choice([path for path in (folder, *folder.rglob("*")) if path.is_dir()])
    (place / draw.choice(["notes.txt", "manifest.json.bak", "d", "0"])).write_bytes(draw.randbytes(64))


def odd_manifest(folder, draw):
    path = folder / manifests.MANIFEST
    text = path.read_text()
    path.write_text(draw.choice([
        "", "{", "[]", "null", "[" * 200_000, '{"a":' * 200_000, text[: draw.randrange(len(text))], text * 2,
        text.replace("hotloop", "another"), text.replace('"step"', '"stop"'), "\0" * len(text), "\ufeff" + text,
    ]))  # fmt: skip


def forge(folder, draw):
    """A manifest with a right checksum, and something else in it."""
    path = folder / manifests.MANIFEST
    body = json.loads(path.read_text())
    del body["checksum"]
    place, keys = body, []
    while isinstance(place, dict) and place and (not keys or draw.random() < 0.6):
        keys.append(draw.choice(sorted(place)))
        holder, place = place, place[keys[-1]]
    odd = [None, 3, -1, 1e308, "x", [], {}, [[]], {"float": "x"}, True, ["1"], 2**70]
    if draw.random() < 0.2:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = draw.choice(odd)
    path.write_text(json.dumps({**body, "checksum": manifests._self_checksum(body)}))


DAMAGES = (flip, cut, lengthen, lose, swap, swap_steps, replace, add, odd_manifest, forge)


def bits(state):
    plain = {**state, "key": jax.random.key_data(state["key"])}
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]


def check_restore(folder, about):
    """What can be restored is a saved state, whole; what cannot is one line."""
    try:
        back = Checkpoints(folder).restore(state_of(1), check=check_position)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 2_000, about
        return None
    assert back.step in STEPS, about
    assert bits(back.state) == bits(state_of(back.step)), about
    for line in back.skipped:
        assert "\n" not in line and line.startswith("skipped step"), about
    return back.step


def damage(whole, place, draw, steps):
    folder = shutil.copytree(whole, place)
    done = []
    for step in steps:
        if (target := folder / f"{step:08d}").is_dir():
            kind = draw.choice(DAMAGES)
            done.append((step, kind.__name__))
            # An earlier damage may have taken what this one wants.
            with suppress(OSError, LookupError, RecursionError, TypeError, ValueError):
                kind(target, draw)
    return folder, done


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_step_is_never_restored_altered(seed, whole, tmp_path):
    folder, done = damage(whole, tmp_path / "checkpoints", random.Random(seed), [3])
    assert check_restore(folder, done) is not None, done  # steps 1 and 2, or one of them, are whole


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_damage_of_any_steps_restores_anything_altered(part, whole, tmp_path):
    for seed in range(100 + 50 * part, 150 + 50 * part):
        draw = random.Random(seed)
        steps = [3] * draw.choice([1, 2]) + [step for step in (1, 2) if draw.random() < 0.5]
        folder, done = damage(whole, tmp_path / "checkpoints", draw, steps)
        check_restore(folder, (seed, done))
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("data") / "mnist")


def steps_of(run):
    """Its steps, oldest first, without what was set aside."""
    return sorted(path for path in (run / "checkpoints").iterdir() if path.name.isdigit())


def saved_bits(run):
    """The newest step's weights as they lie on disk."""
    newest = steps_of(run)[-1]
    leaves = json.loads((newest / manifests.MANIFEST).read_text())["leaves"]
    return newest.name, {name: leaf["checksum"] for name, leaf in leaves.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_on_from_an_older_step_to_the_same_bits_or_says_that_none_is_whole(
    family, digits, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(dataset.IMAGE_SETS, "cifar10", IMAGES)
    line = words(family, digits, tmp_path)
    assert main(line) == 0
    run, expected = tmp_path / "run", saved_bits(tmp_path / "run")
    steps = steps_of(run)
    assert len(steps) > 1
    draw = random.Random(family)
    (steps[-1] / manifests.MANIFEST).write_text("[" * 200_000)
    capsys.readouterr()
    assert main(resumed(family, line)) == 0
    assert saved_bits(run) == expected
    warnings = [each["message"] for each in read_events(run) if each["event"] == "warning"]
    assert any(f"skipped step {int(steps[-1].name)}" in text for text in warnings)
    for step in steps_of(run):
        cut(step / "state", draw)
    capsys.readouterr()
    assert main(resumed(family, line)) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    (error,) = [text for text in err.splitlines() if text.startswith("hotloop: error:")]
    assert "no complete checkpoint" in error
