import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.bench import metrics
from hotloop.bench.benchmark import Benchmark, Derived, Metric, Variant
from hotloop.bench.metrics import extract

THROUGHPUT = r"throughput: *(.*?) samples\/sec"


def benchmark(*metrics: Metric, derived: tuple[Derived, ...] = (), cmd: str = "python3 x.py") -> Benchmark:
    return Benchmark("b", Path("b.yml"), 1, cmd, metrics=metrics, derived=derived)


def lines(*values: object) -> list[str]:
    return [f"step 1, throughput: {value} samples/sec, loss: 0.5\n" for value in values]


def test_values_come_in_order_of_printing_and_skip_drops_the_first() -> None:
    found = extract(benchmark(Metric("throughput", THROUGHPUT, skip=1)), lines(1000, 100, 10), [])
    assert found.values == {"throughput": [1000.0, 100.0, 10.0]}
    assert found.results == {"throughput": 55.0}
    assert found.problems == {}


@pytest.mark.parametrize(("name", "expected"), [("throughput", 550.0), ("latency", 55.0)])
def test_the_old_sorted_rule_is_there_when_asked_for(name: str, expected: float) -> None:
    metric = Metric(name, THROUGHPUT, skip=1, sorted_skip=True)
    assert extract(benchmark(metric), lines(1000, 100, 10), []).results == {name: expected}


def test_the_sorted_rule_does_not_change_which_value_is_the_last() -> None:
    metric = Metric("loss", THROUGHPUT, skip=1, sorted_skip=True, reduction="final")
    assert extract(benchmark(metric), lines(1000, 10, 100), []).results == {"loss": 100.0}


def test_standard_error_comes_after_standard_output_and_a_line_may_hold_several() -> None:
    metric = Metric("x", r"x=(\d+)", reduction="final")
    found = extract(benchmark(metric), ["x=1 x=2"], ["x=3"])
    assert found.values["x"] == [1.0, 2.0, 3.0] and found.results["x"] == 3.0


@pytest.mark.parametrize(
    ("regexp", "line"),
    [
        (r"(?P<value>\d+) of (\d+)", "3 of 7"),
        (r"(\d+) of (?P<value>\d)", "7 of 3"),
        (r"\d+", "is 3"),
        (r"(?:at|is) (\d+)", "is 3"),
    ],
)
def test_the_number_is_the_named_group_or_the_only_one_or_the_match(regexp: str, line: str) -> None:
    assert extract(benchmark(Metric("x", regexp)), [line], []).results == {"x": 3.0}


@pytest.mark.parametrize(
    ("regexp", "line", "why"),
    [
        (r"x: (.*) s", "x: fast s", "matched 'fast', which is no number"),
        (r"x: (\d*)", "x: ", "matched an empty text"),
        (r"x: (\d+.\d*?)", "x: 0.75", "ends in a lazy group"),
        (r"x: *(\d*?)", "x: 0.75", "ends in a lazy group"),
        (r"(\d) of (\d)", "1 of 2", "has 2 groups"),
        (r"(?P<a>\d) of (?P<b>\d)", "1 of 2", "has 2 groups"),
        (r"x: (\d)|y", "y", "matched an empty text"),
        (r"x: (nan)", "x: nan", "value 1 of 1 is nan"),
        (r"x: (-?inf)", "x: -inf", "value 1 of 1 is -inf"),
        (r"x: (\d", "x: 1", "unterminated"),
        (r"z: (\d)", "x: 1", "nothing matched the regexp"),
    ],
)
def test_a_bad_metric_is_its_own_problem_and_names_its_regexp(regexp: str, line: str, why: str) -> None:
    found = extract(benchmark(Metric("bad", regexp), Metric("good", r"(\d)")), [line, "5"], [])
    assert why in found.problems["bad"]
    assert "value 1" in why or f"'{regexp}'" in found.problems["bad"]
    assert "bad" not in found.results and "good" in found.results


def test_too_few_values_are_a_problem() -> None:
    found = extract(benchmark(Metric("throughput", THROUGHPUT, skip=2)), lines(1, 2), [])
    assert found.problems == {"throughput": "2 values were found and the first 2 are skipped"}
    assert found.values == {"throughput": [1.0, 2.0]}


def test_more_values_than_fit_are_a_problem(monkeypatch) -> None:
    monkeypatch.setattr(metrics, "MOST_VALUES", 3)
    found = extract(benchmark(Metric("throughput", THROUGHPUT)), lines(1, 2, 3, 4, 5), [])
    assert "more than 3" in found.problems["throughput"] and len(found.values["throughput"]) == 4


def test_only_the_front_of_a_long_line_is_searched() -> None:
    line = "x" * metrics.LONGEST_SEARCHED + "y=3"
    assert "y" in extract(benchmark(Metric("y", r"y=(\d)")), [line], []).problems


@pytest.mark.parametrize(
    ("cmd", "copies"),
    [
        ("mpirun --np 4 python3 x.py", 4),
        ("mpirun -np 4 python3 x.py", 4),
        ("mpirun --tag-output -n 4 python3 x.py", 4),
        ("mpirun --np=4 python3 x.py", 4),
        ("mpirun " * 200_000, 1),  # and at once
        ("python3 x.py --np 4", 1),
    ],
)
def test_throughput_counts_every_copy_that_mpirun_starts(cmd: str, copies: int) -> None:
    metrics = Metric("throughput", THROUGHPUT), Metric("loss", r"loss: (\S+)")
    found = extract(benchmark(*metrics, cmd=cmd), lines(10), [])
    assert found.results == {"throughput": 10.0 * copies, "loss": 0.5}
    assert found.values["throughput"] == [10.0 * copies]


def test_events_are_preferred_over_the_regexp_and_only_logs_count_for_a_plain_name() -> None:
    out = [
        '{"event": "start", "throughput": 5}',
        '{"event": "log", "throughput": 1, "loss": 3}',
        "throughput: 99 samples/sec",
        '{"event": "validation", "loss": 7}',
        '{"event": "log", "throughput": 2.5}',
        '{"throughput": 42}',
    ]
    metrics = (
        Metric("throughput", THROUGHPUT, skip=1),
        Metric("held_out", None, field="validation.loss"),
    )
    found = extract(benchmark(*metrics), out, [])
    assert found.values == {"throughput": [1.0, 2.5], "held_out": [7.0]}
    assert found.results == {"throughput": 2.5, "held_out": 7.0}


BACKTRACKING = """
import sys
from pathlib import Path
from hotloop.bench import metrics
from hotloop.bench.metrics import extract
from hotloop.bench.benchmark import Benchmark, Metric
metrics.TICK = 0.01
metrics.LINE_SECONDS, metrics.ALL_SECONDS = map(float, sys.argv[1:3])
metrics = Metric("slow", sys.argv[3]), Metric("rate", r"rate (\\S+)")
lines = ["a" * int(sys.argv[4]) + "b", "rate 7"] * int(sys.argv[5])
found = extract(Benchmark("x", Path("f.yml"), 1, "c", metrics=metrics), lines, [])
print(found.problems["slow"], found.results)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["0.1", "9", "(a+)+$", "40", "1"], "more than 0.1 seconds for one line"),
        (["9", "0.2", "a*a*a*a*(c)", "60", "100000"], "more than 0.2 seconds for all lines"),
    ],
)
def test_a_pattern_that_backtracks_without_end_is_given_up_and_named(words, said) -> None:
    """As a process: what is tested is that it ends."""
    done = subprocess.run(
        [sys.executable, "-c", BACKTRACKING, *words], capture_output=True, text=True, timeout=60
    )
    assert f"the regexp '{words[2]}' was given up, it needed {said}" in done.stdout, done.stderr
    assert done.stdout.endswith("{'rate': 7.0}\n")  # the other pattern goes on


def test_a_field_with_alternatives_is_one_series_in_the_order_of_the_events() -> None:
    out = [
        '{"event": "log", "share": 0.25}',
        '{"event": "validation", "right": 0.5}',
        '{"event": "log", "other": 9}',
        '{"event": "log", "share": 0.75}',
    ]
    found = extract(benchmark(Metric("accuracy", None, field="share|validation.right")), out, [])
    assert found.values == {"accuracy": [0.25, 0.5, 0.75]}


def test_events_on_standard_error_count_too() -> None:
    found = extract(benchmark(Metric("loss", None)), [], ['{"event": "log", "loss": 3}'])
    assert found.results == {"loss": 3.0}


def test_the_last_json_line_of_standard_output_is_the_result() -> None:
    out = ['{"rate": 1}', "text", '{"rate": 2, "seconds": {"all": [4, 5, 9], "median": 5}}', "bye"]
    metrics = (
        Metric("speed", r"speed (\d)", field="rate", skip=5),
        Metric("seconds", None, field="seconds.all", skip=1),
        Metric("seconds.median", None),
    )
    found = extract(benchmark(*metrics), out, ['{"rate": 3}'])
    assert found.results == {"speed": 2.0, "seconds": 7.0, "seconds.median": 5.0}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("null", "value 1 of 1 is nan"),
        ("NaN", "value 1 of 1 is nan"),
        ('"fast"', 'is "fast", which is no number'),
        ("true", "is true, which is no number"),
        ("{}", "is {}, which is no number"),
        ("[]", "no values"),
        ("1" + "0" * 400, "which is no number"),
    ],
)
def test_json_that_is_no_finite_number_is_a_problem(value: str, why: str) -> None:
    found = extract(benchmark(Metric("x", None)), [f'{{"x": {value}}}'], [])
    assert why in found.problems["x"] and not found.results


@pytest.mark.parametrize(
    "line", ["{", "{]}", "{'x': 1}", "[1]", "{" * 5000 + "}" * 5000, '{"x": 1} trailing', "\0{}"]
)
def test_lines_that_are_no_json_are_left_to_the_regexps(line: str) -> None:
    found = extract(benchmark(Metric("x", r"y=(\d)")), [line, "y=2"], [])
    assert found.results == {"x": 2.0}


def write_run(folder: Path, *records: dict[str, object]) -> None:
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_events_are_taken_from_the_run_that_the_result_names(tmp_path: Path) -> None:
    write_run(
        tmp_path / "runs" / "a",
        {"event": "start"},
        {"event": "log", "throughput": 1.0},
        {"event": "start"},
        {"event": "log", "throughput": 10.0, "loss": 5.0},
        {"event": "log", "throughput": 20.0, "loss": 4.0},
    )
    metrics = Metric("throughput", None, skip=1), Metric("loss", r"loss: (\d)"), Metric("updates", None)
    variant = Variant("b", {}, "hotloop", folder=tmp_path)
    out = ['{"run": "runs/a", "updates": 3}']
    found = extract(benchmark(*metrics), out, ["loss: 9"], variant)
    assert found.values["throughput"] == [10.0, 20.0]  # of this process alone
    assert found.results == {"throughput": 20.0, "loss": 9.0, "updates": 3.0}


@pytest.mark.parametrize("run", ["nowhere", "\0", 5, None, ["x"]])
def test_a_run_that_is_not_there_leaves_a_problem(run: object, tmp_path: Path) -> None:
    variant = Variant("b", {}, "hotloop", folder=tmp_path)
    found = extract(benchmark(Metric("loss", None)), [json.dumps({"run": run})], [], variant)
    assert found.problems == {"loss": "no JSON line of the program has a 'loss'"}


def test_derived_metrics_use_any_reduction_parameters_and_earlier_ones() -> None:
    derived = (
        Derived("total", "{time} * 400000 / 10000", unit="s"),
        Derived("each", "total / batch"),
    )
    metrics = (Metric("time", r"Time taken: (.*?),", reduction="final"),)
    variant = Variant("b", {"batch": "4", "config": "small"}, "x")
    found = extract(benchmark(*metrics, derived=derived), ["Time taken: 2,", "Time taken: 3,"], [], variant)
    assert found.results == {"time": 3.0, "total": 120.0, "each": 30.0}
    assert found.values["total"] == [120.0]


def test_a_variant_s_own_derived_expressions_are_used() -> None:
    variant = Variant("b", {"n": "2"}, "x", derived=(Derived("d", "x * 2"),))
    found = extract(
        benchmark(Metric("x", r"x=(\d)"), derived=(Derived("d", "x * {n}"),)), ["x=3"], [], variant
    )
    assert found.results["d"] == 6.0


@pytest.mark.parametrize(
    ("expr", "why"), [("time / 0", "needs time, which is missing"), ("1 / 0", "divides by zero")]
)
def test_a_derived_metric_without_a_value_says_what_it_lacks(expr: str, why: str) -> None:
    found = extract(benchmark(Metric("time", r"t=(\d)"), derived=(Derived("d", expr),)), [], [])
    assert why in found.problems["d"] and set(found.problems) == {"time", "d"}


@given(st.lists(st.one_of(st.text(max_size=30), st.sampled_from(lines(1, "nan", "", "1e999")))))
def test_nothing_that_a_program_prints_raises(printed: list[str]) -> None:
    metrics = Metric("throughput", THROUGHPUT), Metric("any", r"(.*)"), Metric("x", None)
    found = extract(benchmark(*metrics, derived=(Derived("d", "throughput / any"),)), printed, printed)
    assert set(found.results) | set(found.problems) == {"throughput", "any", "x", "d"}
    assert all(math.isfinite(value) for value in found.results.values())


def test_a_text_in_a_json_line_does_not_hide_the_number_that_a_regexp_finds() -> None:
    metric = Metric("loss", r"loss (\S+)", reduction="final")
    found = extract(benchmark(metric), ['{"loss": "mse", "lr": 0.1}\n', "loss 0.25\n"], [])
    assert (found.results, found.problems) == ({"loss": 0.25}, {})


def test_a_number_whose_square_is_none_is_refused() -> None:
    found = extract(benchmark(Metric("throughput", THROUGHPUT)), lines(1e300), [])
    assert "too large" in found.problems["throughput"]
