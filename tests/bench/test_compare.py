import json

import pytest

from bench_logs import log_folder, record, repeats
from hotloop.bench.compare import better_direction, load_baselines
from hotloop.cli.bench_compare import COMMAND
from hotloop.cli.main import execute
from hotloop.errors import DataError

A, FASTER, SLOWER = [100, 101, 99, 100.5], [120, 121, 119, 120.5], [80, 81, 79, 80.5]


@pytest.fixture
def run(tmp_path, capsys):
    def go(*words):
        status = 0
        try:
            execute(COMMAND, "hotloop bench compare", [*map(str, words), "--json"])
        except SystemExit as leaving:
            status = leaving.code
        captured = capsys.readouterr()
        return status, json.loads(captured.out.splitlines()[-1]), captured.err

    return go


@pytest.fixture
def logs(tmp_path):
    def make(name, **variants):
        runs = [each for variant, values in variants.items() for each in repeats(variant, values)]
        return log_folder(tmp_path / name, runs)

    return make


def words(found):
    return {(row["variant"], row["metric"]): row["word"] for row in found["rows"]}


@pytest.mark.parametrize(
    ("metric", "unit", "better"),
    [
        ("throughput", "", "higher"),
        ("images_per_second", "", "higher"),
        ("speed", "samples/sec", "higher"),
        ("accuracy", "%", "higher"),
        ("elbo", "nats", "higher"),
        ("latency", "", "lower"),
        ("p99", "latency(ms)", "lower"),
        ("validation_loss", "", "lower"),
        ("compile_seconds", "", "lower"),
        ("microseconds_per_iteration", "", "lower"),
        ("time_to_train", "hours", "lower"),
        ("memory_bytes", "", "lower"),
        ("test_rmse", "stars", "lower"),
        ("tflops", "", "higher"),
        ("hours_for_800_epochs", "hours", "lower"),
        ("minutes", "", "lower"),
        ("tt", "days", "lower"),
        ("mse", "", "lower"),
        ("negative_log_likelihood", "nats", "lower"),
        ("log_likelihood", "nats", "higher"),
        ("energy", "J", "lower"),
        ("peak", "MiB", "lower"),
        ("memory_bandwidth", "GB/s", "higher"),
        ("power_efficiency", "samples per joule", "higher"),
        ("images", "images per ms", "higher"),
        ("accuracy", "%", "higher"),
    ],
)
def test_names_and_units_say_which_direction_is_better(metric, unit, better):
    assert better_direction(metric, unit) == better


def test_more_throughput_and_less_latency_are_both_fast(run, logs):
    status, found, _ = run(logs("a", x=A, y=A), logs("b", x=FASTER, y=SLOWER))
    assert status == 0
    assert words(found) == {
        ("x", "throughput"): "FAST",
        ("x", "latency"): "FAST",
        ("y", "throughput"): "SLOW",
        ("y", "latency"): "SLOW",
    }
    assert found["counts"] == {"FAST": 2, "SLOW": 2}
    assert found["rows"][0]["verdict"]["ratio"] == pytest.approx(1.2, abs=0.01)


def test_the_direction_can_be_said(run, logs):
    _, found, _ = run(logs("a", x=A), logs("b", x=FASTER), "--lower-is-better", "through*")
    assert words(found)["x", "throughput"] == "SLOW"


def test_one_run_is_never_a_verdict(run, logs):
    _, found, _ = run(logs("a", x=[100]), logs("b", x=[200]))
    assert set(words(found).values()) == {"AMBIGUOUS"}


@pytest.mark.parametrize(
    ("values", "fail_on", "status"),
    [
        (SLOWER, "slow", 1),
        (SLOWER, "missing", 0),
        (A, "slow", 0),
        ([100], "ambiguous", 1),
        ([], "missing", 1),
    ],
)
def test_the_status_is_1_only_on_what_was_asked_for(run, logs, values, fail_on, status):
    other = logs("b", x=values, z=A)
    left, found, _ = run(logs("a", x=A, z=A), other, "--fail-on", fail_on)
    assert left == status
    assert found["failed"] == 2 * status


def test_only_the_metrics_asked_for_are_compared(run, logs):
    _, found, _ = run(logs("a", x=A), logs("b", x=A), "--metric", "lat*")
    assert list(words(found)) == [("x", "latency")]


def test_the_table_is_read_by_people_and_as_markdown(logs, capsys):
    a, b = logs("a", **{"x|y": A}), logs("b", **{"x|y": FASTER})
    execute(COMMAND, "hotloop bench compare", [str(a), str(b)])
    text = capsys.readouterr().out
    assert "FAST" in text
    assert "100.25 samples/sec" in text
    execute(COMMAND, "hotloop bench compare", [str(a), str(b), "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| variant | metric |")
    assert lines[2].startswith(
        "| x\\|y | throughput | higher | 100.25 samples/sec | 120.25 samples/sec | 1.1995 |"
    )


def test_another_machine_or_specification_is_warned_of(run, tmp_path):
    a = log_folder(tmp_path / "a", repeats("x", A), device="one")
    b = log_folder(tmp_path / "b", repeats("x", A, spec={"sha256": "1"}), device="two")
    _, _, said = run(a, b)
    assert "A was measured on one, B on two" in said
    assert "the specification changed between A and B: x" in said


def test_a_baseline_is_kept_by_device_and_updated_without_losing_the_rest(run, logs, tmp_path):
    file = tmp_path / "baselines.json"
    run("--baseline", file, logs("a", x=A, y=A), "--update-baseline")
    run("--baseline", file, log_folder(tmp_path / "o", repeats("x", A), device="other"), "--update-baseline")
    run("--baseline", file, logs("b", y=FASTER), "--update-baseline")
    known = load_baselines(file).devices
    assert list(known) == ["a <fast> device", "other"]
    assert known["a <fast> device"]["x", "throughput"].values == tuple(A)
    assert known["a <fast> device"]["y", "throughput"].values == tuple(FASTER)


def test_results_are_judged_against_the_baseline_of_their_device_and_its_thresholds(run, logs, tmp_path):
    file = tmp_path / "baselines.json"
    run("--baseline", file, logs("a", x=A, y=A), "--update-baseline")
    status, found, _ = run("--baseline", file, logs("b", x=SLOWER), "--fail-on", "slow")
    assert status == 1
    assert set(words(found)) == {("x", "throughput"), ("x", "latency")}  # y did not run: nothing to say
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"thresholds": {"thr*": 0.5}}))
    assert words(run("--baseline", file, tmp_path / "b")[1]) == {
        ("x", "throughput"): "SAME",
        ("x", "latency"): "SLOW",
    }


def test_a_variant_that_fails_now_is_missing_against_its_baseline(run, logs, tmp_path):
    file = tmp_path / "baselines.json"
    run("--baseline", file, logs("a", x=A), "--update-baseline")
    failed = log_folder(tmp_path / "b", [record("x", 1, status="failed", metrics={})])
    status, found, _ = run("--baseline", file, failed, "--fail-on", "missing")
    assert status == 1
    assert set(words(found).values()) == {"MISSING"}


def test_a_device_without_a_baseline_is_told(run, logs, tmp_path):
    file = tmp_path / "baselines.json"
    run("--baseline", file, logs("a", x=A), "--update-baseline")
    other = log_folder(tmp_path / "o", repeats("x", A), device="other")
    with pytest.raises(DataError, match="no baseline of other, only of a <fast> device"):
        run("--baseline", file, other)


@pytest.mark.parametrize("text", ["", "[]", '{"devices": 3}', '{"devices": {"d": {"v": {"m": {}}}}}'])
def test_a_damaged_file_of_baselines_is_told(logs, tmp_path, text, run):
    (tmp_path / "baselines.json").write_text(text)
    with pytest.raises(DataError, match="is no file of baselines"):
        run("--baseline", tmp_path / "baselines.json", logs("a", x=A))


JITTER = (1, 1.01, 0.99, 1.005)


def paced(folder, values, pace, kind="cpu", several=True):
    readings = [[500 * pace * one * other for other in JITTER] for one in JITTER]
    said = [{"paces": each} if several else {"pace": each[0]} for each in readings]
    runs = [record("v", value, n, **said[n]) for n, value in enumerate(values)]
    return log_folder(folder, runs, kind=kind)


@pytest.mark.parametrize("several", [True, False], ids=["several readings", "an older record's one"])
@pytest.mark.parametrize(("pace", "word"), [(1.0, "SLOW"), (0.82, "AMBIGUOUS"), (1.2, "SLOW")])
def test_a_difference_that_the_machines_own_pace_explains_is_no_verdict(run, tmp_path, pace, word, several):
    a, b = (
        paced(tmp_path / "a", A, 1.0, several=several),
        paced(tmp_path / "b", SLOWER, pace, several=several),
    )
    _, found, _ = run(a, b)
    assert set(words(found).values()) == {word}
    if word == "AMBIGUOUS":
        assert all("the machine itself was at 0.82 of its pace" in row["reason"] for row in found["rows"])


def test_paces_that_were_read_in_two_ways_are_not_compared(run, tmp_path):
    a, b = paced(tmp_path / "a", A, 1.0, several=False), paced(tmp_path / "b", SLOWER, 0.82)
    assert set(words(run(a, b)[1]).values()) == {"SLOW"}


def test_what_was_measured_on_an_accelerator_is_not_excused_by_the_processors_pace(run, tmp_path):
    a, b = paced(tmp_path / "a", A, 1.0, kind="gpu"), paced(tmp_path / "b", SLOWER, 0.82, kind="gpu")
    assert set(words(run(a, b)[1]).values()) == {"SLOW"}


def test_a_baseline_remembers_the_machines_pace(run, tmp_path):
    file = tmp_path / "baselines.json"
    run("--baseline", file, paced(tmp_path / "a", A, 1.0), "--update-baseline")
    _, found, _ = run("--baseline", file, paced(tmp_path / "b", SLOWER, 0.82))
    assert set(words(found).values()) == {"AMBIGUOUS"}


@pytest.mark.parametrize("share", ["-1", "NaN", "Infinity", '"much"'])
def test_thresholds_of_a_file_of_baselines_are_shares(tmp_path, share):
    path = tmp_path / "baselines.json"
    path.write_text(f'{{"thresholds": {{"*": {share}}}, "devices": {{}}}}')
    with pytest.raises(DataError, match="is no file of baselines"):
        load_baselines(path)
