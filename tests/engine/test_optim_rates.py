"""Learning rates: the reference's values, every formula against float64, purity, and refusals by name."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.engine.optim import learning_rate
from hotloop.engine.optim_keys import check_loss_scaling
from hotloop.errors import OptionError

COSINE = {"initial_learning_rate": 0.0001220703125, "epochs_to_total_decay": 100}
POLYNOMIAL = {
    "initial_learning_rate": 0.001991319444444,
    "epochs_to_total_decay": 39,
    "end_learning_rate_ratio": 2.18e-5,
    "power": 2,
}
LARS = {
    "initial_learning_rate": 0.003045455,
    "epochs_to_total_decay": 36,
    "end_learning_rate_ratio": 9.32836e-6,
    "power": 2,
}
STEPPED = {"boundaries": [1.5, 3, 3], "values": [0.5, 0.25, 0.1, 0.05]}
ONE_CYCLE = {"initial_learning_rate": 0.002, "total_epochs": 10, "peak_epoch": 2.5}
CONST = {"initial_learning_rate": 0.0001}
PARAMS = {
    "const": CONST,
    "cosine": COSINE,
    "stepped": STEPPED,
    "polynomial": POLYNOMIAL,
    "exponential": {"initial_learning_rate": 0.01, "decay_rate": 0.9, "decay_epochs": 1.5},
    "one_cycle": ONE_CYCLE,
}


def warmup(mode: str, epochs: float) -> dict:
    return {"warmup_mode": mode, "warmup_epochs": epochs}


def reference(name, params, batch, per_epoch, warm=None, staircase=False):
    """The formulas as they are written down, in Python's own arithmetic."""

    def base(t):
        if name == "stepped":
            boundaries = [int(b * per_epoch) for b in params["boundaries"]]
            return params["values"][sum(t > b for b in boundaries)]
        lr = params["initial_learning_rate"] * batch
        if name == "const":
            return lr
        if name == "exponential":
            return lr * float(np.float32(params["decay_rate"])) ** (
                t // int(params["decay_epochs"] * per_epoch)
            )
        if name == "cosine":
            total = int(params["epochs_to_total_decay"] * per_epoch)
            return lr * math.cos(math.pi / 2 * min(t, total) / total) ** 2  # = (1 + cos) / 2
        if name == "polynomial":
            end, total = lr * params["end_learning_rate_ratio"], params["epochs_to_total_decay"] * per_epoch
            return (lr - end) * (1 - min(t, total) / total) ** params["power"] + end
        top, total = int(params["peak_epoch"] * per_epoch), int(params["total_epochs"] * per_epoch)
        return lr * ((t + 1) / (top + 1) if t < top else max(total - t, 0) / (total - top))

    def warmed(t):
        if warm is None:
            return base(t)
        updates = int(warm["warmup_epochs"] * per_epoch)
        shift = warm["warmup_mode"] == "shift"
        if t < updates:
            return base(0 if shift else t) * (t + 1) / (updates + 1)
        return base(t - updates if shift else t)

    return lambda t: warmed(t // per_epoch * per_epoch if staircase else t)


RUNS = {  # epoch -> rate, as computed by the program that is replaced
    "8k": (
        {"name": "cosine", "params": COSINE, "global_batch_size": 8192, "updates_per_epoch": 156},
        {"warmup": warmup("mask", 5), "staircase": True},
        {
            0: 0.001280,
            1: 0.200975,
            4: 0.797101,
            5: 0.993844,
            10: 0.975528,
            50: 0.5,
            75: 0.146447,
            99: 0.000247,
        },
    ),
    "16k": (
        {
            "name": "cosine",
            "params": {**COSINE, "epochs_to_total_decay": 95},
            "global_batch_size": 16384,
            "updates_per_epoch": 78,
        },
        {"warmup": warmup("shift", 5), "staircase": True},
        {0: 0.005115, 1: 0.404092, 4: 1.601023, 5: 2.0, 6: 1.999453, 50: 1.082579, 99: 0.000547},
    ),
}
ENDS = {  # first and last update: their rates, each with half a unit of the last digit noted
    "mlperf_bs16": (POLYNOMIAL, 2304, 556, 5, 44, (0.00164977, 5e-9), (0.00010003, 5e-9)),
    "pod16_bs20": (POLYNOMIAL, 1920, 667, 5, 40, (0.00114608, 5e-9), (0.0403318, 5e-8)),
    "lars": (LARS, 3456, 370, 2, 38, (0.0142039, 5e-8), (0.0000982412, 5e-11)),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_reference_rates_of_the_cosine_configurations(run):
    schedule, more, expected = RUNS[run]
    rate = learning_rate(**schedule, **more)
    per_epoch = schedule["updates_per_epoch"]
    for place in (0, per_epoch - 1):  # a staircase: the first and the last update of the epoch alike
        rates = rate(np.array([epoch * per_epoch + place for epoch in expected]))
        np.testing.assert_allclose(rates, list(expected.values()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("run", ENDS)
def test_the_reference_rates_of_the_polynomial_configurations(run):
    params, batch, per_epoch, warm, epochs, first, last = ENDS[run]
    rate = learning_rate(
        "polynomial",
        params,
        global_batch_size=batch,
        updates_per_epoch=per_epoch,
        warmup=warmup("shift", warm),
    )
    for update, (expected, digit) in ((0, first), (epochs * per_epoch - 1, last)):
        assert float(rate(update)) == pytest.approx(expected, rel=0, abs=digit)


def test_the_reference_rates_of_the_cifar_configuration():
    rate = learning_rate(
        "cosine",
        {**COSINE, "epochs_to_total_decay": 65},
        global_batch_size=2000,
        updates_per_epoch=25,
        warmup=warmup("shift", 5),
    )
    assert float(rate(0)) == pytest.approx(0.00193762, abs=5e-9)
    assert float(rate(125)) == pytest.approx(0.244140625, rel=1e-6)
    assert float(rate(70 * 25)) == 0


def test_nine_updates_of_warm_up_rise_by_tenths():
    for mode in ("shift", "mask"):
        rate = learning_rate(
            "const",
            CONST,
            global_batch_size=10,
            updates_per_epoch=3,
            warmup=warmup(mode, 3),
        )
        np.testing.assert_allclose(
            rate(np.arange(12)), [k / 10e3 for k in range(1, 10)] + [1e-3] * 3, rtol=1e-6
        )


@pytest.mark.parametrize("staircase", [False, True])
@pytest.mark.parametrize("warm", [None, warmup("shift", 0.7), warmup("mask", 2)])
@pytest.mark.parametrize("name", PARAMS)
def test_every_schedule_equals_its_formula_at_every_update(name, warm, staircase):
    settings = {"global_batch_size": 96, "updates_per_epoch": 13, "warmup": warm, "staircase": staircase}
    updates = np.arange(0, 110 * 13, 7 if name in ("cosine", "polynomial") else 1)
    expected = list(map(reference(name, PARAMS[name], 96, 13, warm, staircase), updates.tolist()))
    rates = learning_rate(name, PARAMS[name], **settings)(updates)
    assert rates.dtype == jnp.float32
    np.testing.assert_allclose(rates, expected, rtol=1e-6, atol=1e-12)


@given(
    st.sampled_from(["cosine", "polynomial", "one_cycle"]),
    st.sampled_from(["shift", "mask"]),
    st.integers(0, 2**32 - 1),
)
def test_rates_keep_six_digits_at_update_numbers_that_float32_cannot_hold(name, mode, update):
    per_epoch, params = 1_000_003, {**PARAMS[name]}
    params.update({"epochs_to_total_decay": 3000} if name != "one_cycle" else {"total_epochs": 3000})
    warm = warmup(mode, 20.5)
    rate = learning_rate(name, params, global_batch_size=256, updates_per_epoch=per_epoch, warmup=warm)
    expected = reference(name, params, 256, per_epoch, warm)(update)
    assert float(rate(update)) == pytest.approx(expected, rel=1e-6, abs=1e-30)


def test_the_last_rates_are_as_exact_as_the_first():
    per_epoch, total = 400_000, 40_000_000
    rate = learning_rate("cosine", COSINE, global_batch_size=8192, updates_per_epoch=per_epoch)
    left = np.array([1, 2, 3, 10, 1000, 100_001])
    exact = [math.sin(math.pi / 2 * n / total) ** 2 for n in left.tolist()]
    np.testing.assert_allclose(rate(total - left), exact, rtol=1e-6)


def test_epochs_become_updates_as_python_truncates():
    # 0.29 * 100 is 28.999999999999996, which is 28 updates.
    params = {"initial_learning_rate": 1.0, "epochs_to_total_decay": 0.29}
    rate = learning_rate("cosine", params, global_batch_size=1, updates_per_epoch=100)
    assert float(rate(27)) > 0 == float(rate(28))
    steps = learning_rate(
        "stepped", {"boundaries": [0.29], "values": [1, 2]}, global_batch_size=64, updates_per_epoch=100
    )
    assert [float(steps(t)) for t in (0, 28, 29, 10**6)] == [1, 1, 2, 2]


def test_a_polynomial_may_end_between_two_updates():
    params = {**POLYNOMIAL, "epochs_to_total_decay": 1.5, "power": 0.5}
    rate = learning_rate("polynomial", params, global_batch_size=1, updates_per_epoch=3)
    expected = list(map(reference("polynomial", params, 1, 3), range(8)))
    assert expected[4] > expected[5] == expected[7]
    np.testing.assert_allclose(rate(np.arange(8)), expected, rtol=1e-6)


def test_evaluating_changes_nothing_and_traced_numbers_give_the_same():
    rate = learning_rate(
        "cosine",
        COSINE,
        global_batch_size=8192,
        updates_per_epoch=156,
        warmup=warmup("mask", 5),
        staircase=True,
    )
    compiled = jax.jit(rate)
    updates = [0, 3, 800, 3, 15_599, 15_600, 3]
    once = [float(rate(update)) for update in updates]
    for kind in (jnp.int32, jnp.uint32):
        np.testing.assert_allclose([compiled(kind(update)) for update in updates], once, rtol=2e-7)
    assert once[1] == once[3] == once[6]
    in_a_loop = jax.lax.map(rate, jnp.asarray(updates, jnp.int32))
    np.testing.assert_allclose(in_a_loop, once, rtol=2e-7)


def test_rates_stay_float32_when_doubles_are_enabled():
    with jax.enable_x64(True):
        for name, params in PARAMS.items():
            rate = learning_rate(name, params, global_batch_size=8, updates_per_epoch=5)
            assert jax.eval_shape(rate, 7).dtype == jnp.float32


ZERO = {"initial_learning_rate": 1, "epochs_to_total_decay": 0.01}
REFUSED = [
    ("cosin", CONST, None, r"learning_rate: name=cosin: must be one of const, cosine, stepped, polynomial"),
    ("const", {}, None, r"learning_rate: params: .*found none; const takes initial_learning_rate"),
    (
        "cosine",
        CONST,
        None,
        r"learning_rate: params: epochs_to_total_decay missing: found initial_learning_rate;",
    ),
    (
        "const",
        COSINE,
        None,
        r"learning_rate: params: epochs_to_total_decay unknown: found initial_learning_rate,",
    ),
    (
        "stepped",
        {"boundaries": [1], "values": [1]},
        None,
        r"learning_rate: params: 1 values and 1 boundaries",
    ),
    ("stepped", {"boundaries": [2, 1], "values": [1, 2, 3]}, None, r"learning_rate: params: .*ascending"),
    (
        "stepped",
        {"boundaries": 2, "values": [1, 2]},
        None,
        r"learning_rate: params: .*boundaries 2: must be a list",
    ),
    ("stepped", {"boundaries": ["a"], "values": [1, 2]}, None, r"boundaries .*each must be a finite number"),
    (
        "const",
        {"initial_learning_rate": "fast"},
        None,
        r"learning_rate: params: .*fast: must be a finite number",
    ),
    ("const", {"initial_learning_rate": math.nan}, None, r"learning_rate: params: .*nan: must be a finite"),
    ("const", {"initial_learning_rate": -1}, None, r"learning_rate: params: .*-1: must be at least 0"),
    ("cosine", {**COSINE, "epochs_to_total_decay": 0}, None, r"learning_rate: params: .*greater than 0"),
    ("cosine", ZERO, None, r"learning_rate: params: epochs_to_total_decay 0.01: less than one update"),
    (
        "cosine",
        {**COSINE, "epochs_to_total_decay": 1e9},
        None,
        r"epochs_to_total_decay 1.*: more than 4294967294",
    ),
    (
        "one_cycle",
        {**ONE_CYCLE, "peak_epoch": 10},
        None,
        r"learning_rate: params: peak_epoch 10: must lie before",
    ),
    (
        "const",
        CONST,
        {"warmup_mode": "shift"},
        r"learning_rate: warmup: warmup_epochs missing: found warmup_mode;",
    ),
    ("const", CONST, {**warmup("shift", 1), "mode": 1}, r"learning_rate: warmup: mode unknown"),
    ("const", CONST, warmup("jump", 1), r"learning_rate: warmup: .*jump: must be shift or mask"),
    ("const", CONST, warmup("mask", -1), r"learning_rate: warmup: .*-1: must be at least 0"),
    ("const", CONST, warmup("mask", 1e9), r"learning_rate: warmup: warmup_epochs .*more than"),
]


@pytest.mark.parametrize(("name", "params", "warm", "message"), REFUSED)
def test_what_cannot_work_is_refused_in_the_options_name(name, params, warm, message):
    with pytest.raises(OptionError, match=message) as refused:
        learning_rate(name, params, global_batch_size=8, updates_per_epoch=50, warmup=warm)
    assert "\n" not in str(refused.value)


def test_static_and_automatic_loss_scaling_exclude_each_other_and_nothing_else_does():
    check_loss_scaling(128.0, automatic=False)
    check_loss_scaling(0.0, automatic=True)
    with pytest.raises(OptionError, match=r"automatic=True and static=128: .*static=0"):
        check_loss_scaling(128.0, automatic=True)


def test_a_stepped_rate_without_steps_is_one_value_and_keeps_no_empty_array():
    rate = learning_rate(
        "stepped", {"boundaries": [], "values": [0.3]}, global_batch_size=64, updates_per_epoch=100
    )
    updates = jnp.arange(3, dtype=jnp.uint32)
    np.testing.assert_array_equal(rate(updates), np.full(3, 0.3, np.float32))
    # An empty constant inside shard_map ends the compiler of jaxlib 0.11.
    assert all(np.size(each) for each in jax.make_jaxpr(rate)(updates).consts)
