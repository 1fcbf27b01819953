"""Host events and calls: the published examples number for number, then what holds for every plan."""

import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hotloop.engine.plan import Batch, Plan, closest_divisor
from hotloop.errors import PlanError

RESNET8 = Batch.of(8, accumulation=8)  # cifar_resnet8 of the examples: 50,000 samples, 781 updates an epoch


def resnet8(epochs: int = 6, **frequencies) -> Plan:
    return Plan.for_epochs(50_000, epochs, RESNET8, **frequencies)


def one_update_an_epoch(epochs: int, **frequencies) -> Plan:
    return Plan.for_epochs(1, epochs, Batch(), **frequencies)


@pytest.mark.parametrize(
    ("logs_per_epoch", "updates_per_call", "logs", "calls", "warning"),
    [
        ("1", 781, 6, 6, None),
        ("2", 781, 6, 6, "adjusted to 1 an epoch"),
        ("10", 71, 66, 66, "adjusted to 11 an epoch"),
        ("1/2", 1562, 3, 3, None),
        ("1/3", 2343, 2, 2, None),
        ("0", 4686, 0, 1, "the entire run of 4686 weight updates is one call on the device"),
    ],
)
def test_published_example(logs_per_epoch, updates_per_call, logs, calls, warning):
    plan = resnet8(logs_per_epoch=logs_per_epoch)
    assert (plan.updates_per_call, len(plan.updates("log")), plan.calls) == (updates_per_call, logs, calls)
    assert plan.total_updates == 4686
    assert {span.count for span in plan.spans()} == {updates_per_call}
    assert len(plan.warnings) == (warning is not None)
    assert warning is None or warning in plan.warnings[0]


def test_published_example_that_is_an_error():
    with pytest.raises(
        ValueError, match=r"^It is not possible to log 2\.0 epochs a time for 5 epochs"
    ) as caught:
        resnet8(epochs=5, logs_per_epoch="1/2")
    assert isinstance(caught.value, PlanError)
    assert "logs_per_epoch=1 or 1/5 would fit" in str(caught.value)


@pytest.mark.parametrize("logs_per_epoch", ["1/2", "1/3", "0"])
@pytest.mark.parametrize("ckpts_per_epoch", [1, 2, "1/6", 11, 71, "1/5"])
def test_checkpoints_shorten_calls_but_lose_no_log(logs_per_epoch, ckpts_per_epoch):
    alone = resnet8(logs_per_epoch=logs_per_epoch)
    both = resnet8(logs_per_epoch=logs_per_epoch, ckpts_per_epoch=ckpts_per_epoch)
    assert both.updates("log") == alone.updates("log")


@pytest.mark.parametrize(
    ("logs_per_epoch", "checkpoints"),
    [
        ("10", [781, 1562, 2343, 3124, 3905, 4686]),
        ("1", [781, 1562, 2343, 3124, 3905, 4686]),
        ("1/3", [2343, 4686]),
        ("0", [4686]),
    ],
)
def test_checkpoints_nobody_asked_for_come_at_most_once_an_epoch_and_at_the_end(logs_per_epoch, checkpoints):
    assert list(resnet8(logs_per_epoch=logs_per_epoch).updates("checkpoint")) == checkpoints


def test_no_checkpoints_when_none_are_wanted():
    assert resnet8(ckpts_per_epoch=0).updates("checkpoint") == ()


@pytest.mark.parametrize(
    ("epochs", "ckpts_per_epoch", "first", "checkpoints"),
    [
        (5, "1/3", 2, [2, 5]),
        (6, 1, 2, [2, 3, 4, 5, 6]),
        (38, "1/4", 2, list(range(2, 39, 4))),
        (6, "1/4", 0, [4, 6]),
        (6, "1/100", 0, [6]),
        (6, 1, 6, [6]),
        (6, "2/3", 6, [6]),
        (6, None, 3, [3, 4, 5, 6]),
    ],
)
def test_first_checkpoint_epoch(epochs, ckpts_per_epoch, first, checkpoints):
    plan = one_update_an_epoch(epochs, ckpts_per_epoch=ckpts_per_epoch, first_ckpt_epoch=first)
    assert list(plan.updates("checkpoint")) == checkpoints


def test_first_checkpoint_after_the_end_is_an_error():
    with pytest.raises(PlanError, match=r"^first_ckpt_epoch=7: the run ends after 6 epochs"):
        one_update_an_epoch(6, ckpts_per_epoch=1, first_ckpt_epoch=7)


def test_first_checkpoint_inside_an_update_moves_to_the_nearest_boundary():
    plan = resnet8(ckpts_per_epoch=1, first_ckpt_epoch=0.5)
    assert plan.updates("checkpoint")[:2] == (390, 1171)
    assert "moved to update 390" in plan.warnings[0]


@pytest.mark.parametrize("n", [49, 93, 98, 99, 103, 105, 107])
@pytest.mark.parametrize("spell", [lambda n: Fraction(1, n), lambda n: f"1/{n}", lambda n: 1 / n])
def test_one_log_a_run_is_legal_for_any_number_of_epochs(n, spell):
    assert resnet8(epochs=n, logs_per_epoch=spell(n)).updates("log") == (781 * n,)


def test_a_fraction_that_divides_the_epochs_exactly_is_legal():
    plan = Plan.for_epochs(3, 10, Batch(), logs_per_epoch="3/10")
    assert (plan.updates("log"), plan.warnings) == ((10, 20, 30), ())


def test_a_fraction_that_fits_the_epochs_but_not_the_updates_is_adjusted():
    plan = resnet8(logs_per_epoch="2/3")
    assert plan.updates("log") == (1562, 3124, 4686)
    assert "logs_per_epoch=2/3" in plan.warnings[0]
    assert "adjusted to 1/2 an epoch, one every 1562 updates" in plan.warnings[0]


@pytest.mark.parametrize(("frequency", "checkpoints"), [(0.3, 2), (0.9, 6), ("3/2", 6)])
def test_a_checkpoint_frequency_that_does_not_fit_is_adjusted_with_a_warning(frequency, checkpoints):
    plan = resnet8(ckpts_per_epoch=frequency)
    assert len(plan.updates("checkpoint")) == checkpoints
    assert len(plan.warnings) == 1


@pytest.mark.parametrize(
    ("number", "target", "divisor"),
    [
        (781, 2, 1),
        (781, 10, 11),
        (781, 42, 71),
        (781, 41, 11),
        (12, 5, 6),
        (625, 25, 25),
        (36, 6, 6),
        (9, 3, 3),
        (4, 2, 2),
        (1, 7, 1),
        (7, Fraction(39, 10), 1),
        (7, Fraction(41, 10), 7),
    ],
)
def test_closest_divisor(number, target, divisor):
    assert closest_divisor(number, target) == divisor


@settings(deadline=None)
@given(st.integers(1, 5000), st.fractions(0, 6000, max_denominator=50))
def test_no_divisor_is_nearer_than_the_closest(number, target):
    best = closest_divisor(number, target)
    assert number % best == 0
    assert abs(best - target) == min(abs(n - target) for n in range(1, number + 1) if number % n == 0)


def test_a_data_set_smaller_than_a_global_batch_is_a_readable_error():
    with pytest.raises(PlanError, match="63 samples do not fill one global batch of 64"):
        Plan.for_epochs(63, 1, RESNET8)


def test_updates_per_epoch_can_be_set():
    assert resnet8(weight_updates_per_epoch=100).total_updates == 600
    plan = resnet8(weight_updates_per_epoch=1000)
    assert plan.updates_per_epoch == 1000
    assert "64000 samples of a set of 50000" in plan.warnings[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"logs_per_epoch": -1}, "logs_per_epoch=-1: must be at least 0"),
        ({"ckpts_per_epoch": "-1/2"}, "ckpts_per_epoch=-1/2: must be at least 0"),
        ({"first_ckpt_epoch": -0.5}, "first_ckpt_epoch=-0.5: must be at least 0"),
        ({"validations_per_epoch": -3}, "validations_per_epoch=-3: must be at least 0"),
        ({"logs_per_epoch": "1/0"}, "logs_per_epoch=1/0: not a number"),
        ({"logs_per_epoch": float("nan")}, "logs_per_epoch=nan: not a number"),
        ({"logs_per_epoch": float("inf")}, "logs_per_epoch=inf: not a number"),
        ({"logs_per_epoch": "often"}, "logs_per_epoch=often: not a number"),
        ({"weight_updates_per_epoch": 0}, "weight_updates_per_epoch=0: must be at least 1"),
        ({"epochs": 0}, "epochs=0: must be at least 1"),
    ],
)
def test_bad_values_name_the_option(options, text):
    with pytest.raises(PlanError, match=f"^{text}"):
        resnet8(**options)


def test_coprime_periods_do_not_collapse_the_calls():
    plan = Plan.for_updates(100, log_every=10, checkpoint_every=7)
    assert plan.updates_per_call == 7
    assert plan.updates("log") == tuple(range(10, 101, 10))
    assert plan.updates("checkpoint") == (*range(7, 99, 7), 100)
    assert plan.calls == len({*range(10, 101, 10), *range(7, 99, 7)})


def test_events_after_the_same_update_come_in_the_order_log_validate_checkpoint():
    plan = Plan.for_updates(4, log_every=2, checkpoint_every=2, validate_every=4)
    last = list(plan.spans())[-1]
    assert [event.kind for event in last.events] == ["log", "validate", "checkpoint"]
    assert [event.call for event in last.events] == [2, 2, 2]


def test_a_plan_by_updates_counts_epochs_when_it_can():
    plan = Plan.for_updates(250, log_every=100, updates_per_epoch=100)
    assert [event.epoch for event in plan.events if event.kind == "log"] == [1.0, 2.0, 2.5]
    assert plan.epochs == Fraction(5, 2)
    assert Plan.for_updates(250, log_every=100).events[0].epoch == 100 / 250


def test_a_plan_by_updates_without_events_is_one_call_with_a_warning():
    plan = Plan.for_updates(1000, checkpoint_every=0)
    assert (plan.calls, plan.updates_per_call, plan.events) == (1, 1000, ())
    assert "one call" in plan.warnings[0]


@pytest.mark.parametrize("name", ["log_every", "checkpoint_every", "validate_every"])
def test_a_plan_by_updates_refuses_negative_periods(name):
    with pytest.raises(PlanError, match="-5: must be at least 0"):
        Plan.for_updates(10, **{name: -5})


def test_a_plan_can_be_a_dictionary_key_and_cannot_be_changed():
    assert {resnet8(): 1}[resnet8()] == 1
    assert resnet8() != resnet8(logs_per_epoch=0)
    with pytest.raises(AttributeError):
        resnet8().total_updates = 3


def test_a_million_calls_are_listed_one_by_one():
    plan = Plan.for_updates(10**9, log_every=1000)
    assert plan.calls == 10**6
    last = tuple((kind, 10**9, 1.0, 10**6) for kind in ("log", "checkpoint"))
    assert next(plan.spans(999_999_500)) == (999_999_500, 500, 10**6, last)


def test_the_plan_as_json_has_updates_per_call_calls_and_events():
    plan = json.loads(json.dumps(resnet8(logs_per_epoch="1/2").as_dict()))
    assert (plan["updates_per_call"], plan["calls"], plan["total_updates"]) == (1562, 3, 4686)
    assert plan["batch"] == {"micro": 8, "replicas": 1, "accumulation": 8, "global": 64}
    assert plan["events"][:2] == [
        {"event": "log", "update": 1562, "epoch": 2.0, "call": 1},
        {"event": "checkpoint", "update": 1562, "epoch": 2.0, "call": 1},
    ]


def test_the_plan_in_words_says_all_that_matters():
    text = resnet8(logs_per_epoch=2).describe()
    for part in (
        "micro batch 8 x replicas 1 x accumulation 8 = global batch 64",
        "50,000 samples: 781 weight updates an epoch, 16 samples of each begin the next",
        "epochs: 6 = 4,686 weight updates; calls: 6 of 781 updates",
        "log: 6, after update 781, 1562, 2343, 3124, 3905, 4686",
    ):
        assert part in text


def test_planning_imports_neither_jax_nor_numpy():
    code = "import sys, hotloop.engine.plan; sys.exit(any(name in sys.modules for name in ('jax', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


frequencies = st.one_of(st.integers(0, 40), st.fractions(0, 8, max_denominator=12))


@st.composite
def epoch_plans(draw) -> tuple[Plan, Fraction | int]:
    logs = draw(frequencies)
    epochs = draw(st.integers(1, 12))
    assume(logs >= 1 or (logs * epochs) % 1 == 0)
    plan = Plan.for_epochs(
        draw(st.integers(64, 3000)),
        epochs,
        Batch.of(draw(st.integers(1, 4)), draw(st.integers(1, 4)), accumulation=draw(st.integers(1, 4))),
        logs_per_epoch=logs,
        ckpts_per_epoch=draw(st.none() | frequencies),
        first_ckpt_epoch=draw(st.fractions(0, epochs, max_denominator=6)),
        validations_per_epoch=draw(frequencies),
    )
    return plan, logs


update_plans = st.builds(
    Plan.for_updates,
    st.integers(1, 2000),
    log_every=st.integers(0, 300),
    checkpoint_every=st.none() | st.integers(0, 300),
    validate_every=st.integers(0, 3000),
)
plans = epoch_plans().map(lambda drawn: drawn[0]) | update_plans


@settings(deadline=None)
@given(plans)
def test_calls_tile_the_run_without_gap_or_overlap(plan):
    done = 0
    for number, span in enumerate(plan.spans(), start=1):
        assert span.first == done
        assert span.count >= 1
        assert span.call == number
        done += span.count
    assert done == plan.total_updates
    assert plan.calls == number
    assert plan.updates_per_call == max(span.count for span in plan.spans())


@settings(deadline=None)
@given(plans)
def test_every_event_is_at_the_end_of_its_call(plan):
    ends = {span.call: span.first + span.count for span in plan.spans()}
    for event in plan.events:
        assert ends[event.call] == event.update
        assert event.epoch == event.update / plan.updates_per_epoch
    assert len(set(plan.events)) == len(plan.events)
    assert [event.update for event in plan.events] == sorted(event.update for event in plan.events)


@settings(deadline=None)
@given(plans)
def test_no_call_ends_without_an_event_except_the_last(plan):
    assert all(span.events for span in plan.spans() if span.call < plan.calls)


@settings(deadline=None)
@given(epoch_plans())
def test_every_log_is_there_whatever_the_other_events(drawn):
    plan, wanted = drawn
    logs = plan.updates("log")
    if wanted == 0:
        assert logs == ()
        return
    period = logs[0]
    assert logs == tuple(range(period, plan.total_updates + 1, period))
    assert logs[-1] == plan.total_updates
    exactly = Fraction(plan.updates_per_epoch, period) == wanted
    assert exactly != any("logs_per_epoch=" in warning for warning in plan.warnings)


@settings(deadline=None)
@given(plans, st.data())
def test_a_run_continued_anywhere_makes_the_same_remaining_events(plan, data):
    start = data.draw(st.integers(0, plan.total_updates))
    rest = list(plan.spans(start))
    assert sum(span.count for span in rest) == plan.total_updates - start
    assert [event for span in rest for event in span.events] == [e for e in plan.events if e.update > start]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Plan.for_epochs(2**62, 2**62, Batch()),
            "weight updates: at most 1,000,000,000,000 can be planned",
        ),
        (lambda: Plan.for_updates(2**63 - 1), "weight updates: at most 1,000,000,000,000 can be planned"),
        (
            lambda: Plan.for_updates(10**12, log_every=1),
            "1,000,000,000,001 logs, validations and checkpoints: at most",
        ),
        (lambda: Plan.for_epochs(10, 10**11, Batch(), logs_per_epoch="1/7"), "not possible to log"),
    ],
)
def test_a_plan_beyond_all_measure_is_refused_at_once(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_a_plan_of_many_updates_and_few_events_is_made():
    assert Plan.for_epochs(10**6, 10**6, Batch(), logs_per_epoch="1/1000").calls == 1_000_000 // 1000


@pytest.mark.parametrize(("per_epoch", "shown"), [(Fraction(6), "6"), (6, "6"), (Fraction(13, 2), "6.5")])
def test_whole_updates_an_epoch_are_a_whole_number_in_json(per_epoch, shown):
    plan = replace(Plan.for_updates(12), updates_per_epoch=per_epoch)
    assert json.dumps(plan.as_dict()["updates_per_epoch"]) == shown
