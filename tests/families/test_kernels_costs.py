"""Every row of the worked table of costs: operations and compulsory bytes in float16, as published."""

import pytest

from hotloop.families.kernels import catalogue, hmc
from hotloop.families.kernels.config import Dense, GroupedConv, Hmc, LstmMulti


def layer(gates, rows, time, inputs, hidden, train=False):
    return catalogue.recurrent_cost(gates, time, rows, inputs, hidden, 2, train)


ROWS = {
    "dense 32x1024 infer": (catalogue.dense_cost(Dense(), 2), "0.0671", "2.23e6", "30"),
    "dense 32x1024 train": (catalogue.dense_cost(Dense(train=True), 2), "0.136", "4.26e6", "32"),
    "conv default": (catalogue.grouped_conv_cost(GroupedConv(), 2), "0.0361", "0.81e6", "44"),
    "conv B8": (catalogue.grouped_conv_cost(GroupedConv(batch_size=8), 2), "0.289", "6.43e6", "45"),
    "conv R20 group-dim 8": (
        catalogue.grouped_conv_cost(GroupedConv(block_repeats=20, group_dim=8), 2), "0.578", "0.99e6", "586",
    ),
    "rnn default": (layer(1, 1, 5, 128, 128), "0.000328", "68e3", "4.8"),
    "gru default": (layer(3, 1, 5, 128, 128), "0.000983", "200e3", "4.9"),
    "lstm default": (layer(4, 1, 5, 128, 128), "0.00131", "266e3", "4.9"),
    "lstm B256 T25 H1024": (layer(4, 256, 25, 1024, 1024), "107", "43.0e6", "2500"),
    "lstm B128 T50 H1536": (layer(4, 128, 50, 1536, 1536), "242", "77.1e6", "3130"),
    "lstm B64 T25 H2048": (layer(4, 64, 25, 2048, 2048), "107", "80.2e6", "1340"),
    "lstm B1024 T150 H256": (layer(4, 1024, 150, 256, 256), "161", "158e6", "1020"),
    "lstm B64 T25 H512": (layer(4, 64, 25, 512, 512), "6.71", "7.5e6", "898"),
    "gru B256 T25 I128 H1024": (layer(3, 256, 25, 128, 1024), "45.3", "21.8e6", "2080"),
    "gru B64 T25 I128 H2048": (layer(3, 64, 25, 128, 2048), "42.8", "33.7e6", "1270"),
    "rnn B256 T25 H1024": (layer(1, 256, 25, 1024, 1024), "26.8", "30.4e6", "883"),
    "lstm_multi B1": (catalogue.lstm_multi_cost(LstmMulti(), 2), "0.321", "1.62e6", "199"),
    "lstm_multi B64": (catalogue.lstm_multi_cost(LstmMulti(batch_size=64), 2), "20.6", "2.02e6", "1.0e4"),
    "lstm_multi B512": (catalogue.lstm_multi_cost(LstmMulti(batch_size=512), 2), "164", "4.89e6", "3.4e4"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_worked_row(name):
    cost, gflop, moved, intensity = ROWS[name]
    assert rounded_like(gflop, cost.flops / 1e9) == float(gflop)
    assert rounded_like(moved, cost.bytes) == float(moved)
    assert rounded_like(intensity, cost.flops / cost.bytes) == float(intensity)


def rounded_like(published, value):
    """The value with as many digits as were published, three at most."""
    digits = min(3, len(published.split("e")[0].replace(".", "").lstrip("0")))
    return float(f"{value:.{digits}g}")


@pytest.mark.parametrize(
    ("cost", "megabytes"),
    [
        (layer(1, 1, 5, 128, 128), 0.066),
        (layer(3, 1, 5, 128, 128), 0.197),
        (layer(4, 1, 5, 128, 128), 0.263),
        (layer(4, 256, 25, 1024, 1024), 16.8),
        (layer(4, 64, 25, 2048, 2048), 67.1),
        (layer(3, 64, 25, 128, 2048), 26.8),
        (catalogue.lstm_multi_cost(LstmMulti(), 2), 1.61),
    ],
)
def test_weights_read_at_each_step(cost, megabytes):
    assert cost.weight_bytes / 1e6 == pytest.approx(megabytes, rel=5e-3)


@pytest.mark.parametrize(
    ("config", "megabytes"),
    [
        (GroupedConv(), 8.04),
        (GroupedConv(batch_size=8), 64.2),
        (GroupedConv(block_repeats=20, group_dim=8), 16.2),
    ],
)
def test_convolutions_layer_by_layer_move_far_more(config, megabytes):
    assert catalogue.grouped_conv_cost(config, 2).streamed_bytes / 1e6 == pytest.approx(megabytes, rel=3e-3)


def test_a_second_bias_is_read_and_written_too():
    for train, times in ((False, 1), (True, 2)):
        one, two = (catalogue.recurrent_cost(3, 5, 1, 128, 128, 2, train, biases) for biases in (1, 2))
        assert two.weight_bytes - one.weight_bytes == 2 * 3 * 128
        assert two.bytes - one.bytes == times * 2 * 3 * 128 and two.flops == one.flops


def test_the_gru_with_the_reset_gate_after_has_two_biases():
    import jax

    from hotloop.families.kernels.catalogue import build
    from hotloop.families.kernels.config import Gru

    for after in (False, True):
        kernel = build(Gru(fused=True, reset_after=after))
        params = kernel.init(jax.random.key(0), "float32")
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        assert kernel.cost(4).weight_bytes == held
        assert ("recurrent_bias" in params) == after


def test_lstm_multi_has_the_published_parameters_and_operations():
    cost = catalogue.lstm_multi_cost(LstmMulti(), 2)
    assert cost.weight_bytes == 2 * 805_121
    assert cost.flops == pytest.approx(321.1e6, rel=2e-4)
    assert cost.serial_steps == 201


def test_training_counts_the_published_multiples():
    ratio = (
        catalogue.grouped_conv_cost(GroupedConv(train=True), 2).flops
        / catalogue.grouped_conv_cost(GroupedConv(), 2).flops
    )
    assert ratio == pytest.approx(2.9)
    assert layer(4, 64, 25, 512, 512, train=True).flops == 3 * layer(4, 64, 25, 512, 512).flops


def test_strided_convolutions_shrink_as_same_padding_does():
    config = GroupedConv(input_size=112, stride=3, filter_in=32, filter_out=16)
    assert catalogue.conv_sizes(config) == [112, 38, 13, 5, 2, 1, 1, 1, 1, 1, 1]


def test_hmc_costs_are_the_published_ones():
    assert hmc.toy(Hmc(leapfrog_steps=5)).cost.flops == 50
    assert hmc.vcd(Hmc(leapfrog_steps=1, chains=1)).cost.flops == 795_200
    assert hmc.vcd(Hmc(leapfrog_steps=6, chains=1)).cost.flops * 8 == pytest.approx(38.2e6, rel=2e-3)
