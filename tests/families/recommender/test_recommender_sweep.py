"""The sweep: what it may be asked, what its trials are told, and what their figures add up to."""

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from hotloop.cli.command import Context
from hotloop.cli.parser import scan
from hotloop.cli.recommender import write_plot
from hotloop.errors import DataError, MissingExtra, RunError
from hotloop.families.recommender import sweep
from hotloop.families.recommender.commands_config import SWEEP_PRESETS, SweepOptions
from hotloop.families.recommender.config import TrainOptions
from hotloop.families.recommender.sweep import add_throughputs
from hotloop.families.recommender.trials import TrialFigures, read_figures
from hotloop.options import build, options_of
from hotloop.sweeps.trial import Trial, TrialOutcome
from old_benchmarks import read as read_old

pytestmark = pytest.mark.usefixtures("signals_heard")

CPU = Context(device="cpu")

# Stands in for `hotloop recommender train`: the exponent says what becomes of the trial.
CHILD = """
import json, os, pathlib, signal, sys
given = dict(word.partition("=")[::2] for word in sys.argv[1:])
exponent = float(given["--base-learning-rate"])
folder = pathlib.Path(given["--results-dir"], given["--run-name"])
if exponent == -3:
    sys.exit("hotloop: error: no luck")
folder.mkdir()
config = {"batch_size": 64, "base_learning_rate": exponent, "learning_rate_decay": [0.5, 0.1]}
(folder / "config.json").write_text(json.dumps(config))
rates = [(10, 100.0), (30, 400.0)]
events = [{"event": "compile", "update": 0, "compile_seconds": 1e6}]
events += [{"event": "log", "update": u, "throughput": r, "learning_rate": 0.25, "loss": -exponent / u, "rmse": 2.0}
           for u, r in rates]
if exponent == -2:
    events = events[:2] + [{"event": "end", "update": 10, "status": "failed", "error": "Diverged: loss is nan"}]
(folder / "events.jsonl").write_text("".join(json.dumps(event) + "\\n" for event in events))
print("warning: the data are a stand-in", file=sys.stderr)
if exponent == -2:
    sys.exit("hotloop: error: loss is nan")
if exponent == -9:
    print("so far so good", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps({"run": str(folder), "validation": {"rmse": 1 + (exponent + 13) ** 2}, "test": {"rmse": 3.0}}))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(sweep, "TRAIN", (sys.executable, str(script)))


def swept(tmp_path, rates, **options):
    texts = tuple(map(str, rates))
    config = SweepOptions(
        base_learning_rates=texts, num_devices=len(texts), results_dir=tmp_path / "logs", **options
    )
    return sweep.run(config, CPU)


def given(*words):
    return build(SweepOptions, scan(words, options_of(SweepOptions)))


@pytest.mark.parametrize(
    ("text", "count", "exponents"),
    [
        ("16..20", 5, [-16, -17, -18, -19, -20]),
        ("16..20", 4, [-16, -16 - 4 / 3, -16 - 8 / 3, -20]),
        ("16..20", 2, [-16, -20]),
        ("16..20", 1, [-16]),
        ("20..16", 3, [-20, -18, -16]),
        ("12.5..13", 2, [-12.5, -13]),
        ("16,17.5,0", 3, [-16, -17.5, 0]),
        ("1e1", 1, [-10]),
    ],
)
def test_rates_are_a_list_or_a_range_with_both_ends(text, count, exponents):
    found = given("--num-ipus", str(count), "--base-learning-rates", text).exponents
    np.testing.assert_allclose(found, exponents, rtol=1e-15)
    assert (found[0], len(found)) == (exponents[0], count)


def test_the_usual_sweep_is_sixteen_rates():
    config = given()
    assert config.exponents == tuple(-12.5 - 0.5 * n for n in range(16))
    assert (config.num_devices, config.steps_per_log) == (16, 40)


MANY = """--num-devices 1 --base-learning-rates 14.3 --micro-batch-size 32 --size 256 --no-tied --no-selu
--precision 16.32 --half bfloat16 --learning-rate-decay 1,0.3 --learning-rate-schedule 0.4 --epochs 3 --seed 7
--device-iterations 20 --fractions 0.5 0.25 0.25 --split user-time --no-clip --data procedural --patience 4
--validation-batch-size 9 --weight-decay 1e-5 --dropout 0.1"""


def test_a_trial_is_told_every_option_of_the_sweep(tmp_path):
    config = given(*MANY.split())
    words = sweep.trial_command(
        config, config.exponents[0], tmp_path, 1, Context(device="gpu", only_accelerator=True)
    )
    assert words[: len(sweep.TRAIN)] == sweep.TRAIN
    rest = [
        word
        for word in words[len(sweep.TRAIN) :]
        if word not in ("--json", "--device=gpu", "--only-accelerator")
    ]
    assert len(rest) == len(words) - len(sweep.TRAIN) - 3
    told = build(TrainOptions, scan(rest, options_of(TrainOptions)))
    assert told == replace(config.training(-14.3), results_dir=tmp_path, run_name="trial-01")
    assert (told.batch_size, told.base_learning_rate, told.steps_per_log, told.tied) == (
        32,
        -14.3,
        40,
        False,
    )
    assert (told.learning_rate_decay, told.seed, told.no_validation) == ((1.0, 0.3), 7, False)


def test_a_trial_is_told_the_parameters_of_optimiser_and_schedule(tmp_path):
    words = [
        "--num-devices",
        "1",
        "--base-learning-rates",
        "14",
        "--optimizer",
        "RMSprop",
        "--lr-schedule",
        "cosine",
    ]
    params = ["--optimizer-params", "{decay: 0.8}", "--lr-schedule-params", "{epochs_to_total_decay: 2.5}"]
    config = given(*words, *params)
    command = sweep.trial_command(config, -14.0, tmp_path, 1, CPU)
    rest = [word for word in command[len(sweep.TRAIN) :] if word not in ("--json", "--device=cpu")]
    told = build(TrainOptions, scan(rest, options_of(TrainOptions)))
    assert (told.optimizer_params, told.lr_schedule) == ({"decay": 0.8}, "cosine")
    assert told.lr_schedule_params == {"epochs_to_total_decay": 2.5}


def test_files_are_named_so_that_any_folder_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = SweepOptions(num_devices=1, base_learning_rates=("16",), training_data_file=Path("3m_train.txt"))
    words = sweep.trial_command(config, -16.0, tmp_path, 1, CPU)
    assert f"--training-data-file={tmp_path / '3m_train.txt'}" in words
    assert "--no-validation=True" in words  # there is nothing to validate with


def test_only_ratings_that_mean_something_are_validated():
    one = {"num_devices": 1, "base_learning_rates": ("16",)}
    assert not SweepOptions(**one).is_validated
    assert SweepOptions(**one, data="procedural").is_validated
    assert not SweepOptions(**one, data="procedural", no_validation=True).is_validated
    files = {"training_data_file": Path("3m_train.txt"), "validation_data_file": Path("3m_valid.txt")}
    assert SweepOptions(**one, **files).is_validated


def test_presets_are_those_of_train():
    assert SWEEP_PRESETS["ml-100k"]["epochs"] == 150
    assert build(SweepOptions, SWEEP_PRESETS["ml-100k"]).batch_size == 64


def test_the_average_is_users_by_time_and_the_maximum_the_fastest_log(tmp_path, fake):
    found = swept(tmp_path, [16])["trials"][0]
    seconds = 10 * 64 / 100 + 20 * 64 / 400
    assert found["average_users_per_second"] == pytest.approx(
        30 * 64 / seconds, rel=1e-12
    )  # not (100 + 400) / 2
    assert found["maximum_users_per_second"] == 400
    assert (found["updates"], found["loss"], found["rmse"]) == (30, 16 / 30, 2.0)
    assert found["learning_rate"] == 2.0**-16 * 64 * 0.5  # what the training began with
    assert found["last_learning_rate"] == 0.25


def outcome(number, slot, users, seconds, maximum):
    figures = TrialFigures(users=users, seconds=seconds, maximum=maximum)
    return TrialOutcome(Trial(number, {"exponent": -16.0}, Path(), ()), slot, 0, 1.0, {}, "", figures)


def test_rates_of_the_same_time_add_up_and_those_of_one_after_the_other_do_not():
    together = [outcome(1, 0, 600, 2.0, 350.0), outcome(2, 1, 800, 2.0, 500.0)]
    assert add_throughputs(together) == (300 + 400, 350 + 500)
    in_turn = [outcome(1, 0, 600, 2.0, 350.0), outcome(2, 0, 800, 8.0, 500.0)]
    assert add_throughputs(in_turn) == (1400 / 10, 500)
    assert add_throughputs([*in_turn, outcome(3, 1, 50, 1.0, 60.0)]) == (140 + 50, 560)
    assert add_throughputs([outcome(1, 0, 0, 0.0, None)]) == (0.0, 0.0)


def test_a_child_that_dies_is_reported_and_the_others_go_on(tmp_path, fake, capsys):
    result = swept(tmp_path, [3, 9, 12, 13, 2], data="procedural", run_name="mixed")
    assert [each["status"] for each in result["trials"]] == [
        "failed",
        "failed",
        "finished",
        "finished",
        "diverged",
    ]
    reasons = [each["reason"] for each in result["trials"]]
    assert reasons[0] == "exit status 1: hotloop: error: no luck"
    assert reasons[1] == "killed by SIGKILL: so far so good"
    assert reasons[2:] == [None, None, "exit status 1: hotloop: error: loss is nan"]
    assert (result["best"], result["unfinished"]) == (-13.0, 3)  # validation decides, not the loss
    assert [each["validation_rmse"] for each in result["trials"]] == [None, None, 2.0, 1.0, None]
    assert result["trials"][1]["average_users_per_second"] is not None  # as far as it came
    folder = tmp_path / "logs" / "mixed"
    assert json.loads((folder / "sweep.json").read_text()) == result
    said = capsys.readouterr()
    assert said.err.count("a stand-in") == 1
    assert "trial 2 of 5, exponent -9 failed, killed by SIGKILL: so far so good" in said.err
    assert "Aggregate average throughput: 182 samples/sec" in said.out  # 100 of 640 users, 200 of 5760
    assert "Aggregate maximum throughput = 400 samples/sec" in said.out
    for file in ("autoencoder.yml", "older/autoencoder.yml"):
        found = read_old(file, "tf1_autoencoder_train_gen_2ipu", said.out.splitlines(), result)
        assert found["throughput"] == pytest.approx(result["average_throughput"], abs=0.5)  # not the maximum
        assert (
            found.get("loss", result["loss"]) == result["loss"] == result["trials"][3]["loss"]
        )  # of the best
    assert "lowest validation RMSE: train with --base-learning-rate -13" in said.out
    with pytest.raises(RunError, match="choose another --run-name"):
        swept(tmp_path, [12], run_name="mixed")


def test_a_sweep_of_which_nothing_came_is_an_error(tmp_path, fake):
    with pytest.raises(
        RunError, match="every trial failed, the first with exit status 1: hotloop: error: no luck"
    ):
        swept(tmp_path, [3, 3])


def test_a_missing_file_is_found_before_any_trial(tmp_path, fake):
    with pytest.raises(DataError, match=r"--training-data-file .*3m_train.txt: there is no such file"):
        swept(tmp_path, [12], training_data_file=tmp_path / "3m_train.txt")
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(("concurrent", "slots"), [(None, 1), (2, 2), (9, 3)])
def test_so_many_trials_run_at_a_time(tmp_path, fake, concurrent, slots):
    result = swept(tmp_path, [12, 13, 14], concurrent=concurrent)
    assert {each["slot"] for each in result["trials"]} == set(range(slots))
    assert result["concurrent"] == slots
    assert result["average_throughput"] == pytest.approx(200 * slots)


def test_the_plot_is_an_svg_of_what_finished(tmp_path, fake):
    result = swept(tmp_path, [13, 12, 3], data="procedural")
    path = write_plot(result)
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    dots = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(dots) == 3 * 2  # loss, RMSE, validation RMSE of the two that finished
    xs = [float(dot.get("cx")) for dot in dots[:2]]
    assert xs[0] < xs[1]  # by exponent, not by trial
    assert "validation RMSE" in path.read_text()


def test_a_run_that_never_began_has_no_figures(tmp_path):
    assert read_figures(tmp_path) == TrialFigures()
    assert TrialFigures().average is None


def test_without_ray_the_extra_is_named(tmp_path, fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"--engine ray needs ray: pip install 'hotloop\[ray\]'"):
        swept(tmp_path, [12], engine="ray")


def test_an_address_where_no_cluster_is_is_named_at_once(tmp_path, fake):
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RunError, match=f"--ray-address {address}: no cluster there"):
        swept(tmp_path, [12], engine="ray", ray_address=address, run_name="lost")
    assert swept(tmp_path, [12], run_name="lost")["best"] == -12.0  # its name is still free


SAME = (
    "exponent",
    "learning_rate",
    "loss",
    "rmse",
    "validation_rmse",
    "average_users_per_second",
    "reason",
    "status",
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a cluster's start forks; jax, if it runs, says so
def test_a_ray_cluster_runs_the_same_trials(tmp_path, fake):
    pytest.importorskip("ray")
    rates = [12, 3, 13]
    here = swept(tmp_path, rates, run_name="here")
    there = swept(tmp_path, rates, run_name="there", engine="ray", concurrent=2)
    for one, other in zip(here["trials"], there["trials"], strict=True):
        assert {name: one[name] for name in SAME} == {name: other[name] for name in SAME}
    assert (there["best"], there["unfinished"], there["concurrent"]) == (here["best"], 1, 2)


def ratings(path, seed):
    rng = np.random.default_rng(seed)
    lines = [
        f"{user}\t{item}\t{rng.integers(1, 6)}.0" for user in range(48) for item in rng.permutation(20)[:9]
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def small(tmp_path, **options):
    files = {
        "training_data_file": ratings(tmp_path / "3m_train.txt", 0),
        "validation_data_file": ratings(tmp_path / "3m_valid.txt", 1),
    }
    return swept(tmp_path, [13, 16], epochs=6, batch_size=8, steps_per_log=2, **files, **options)


def check_small(result):
    first, second = result["trials"]
    assert (first["status"], second["status"], result["unfinished"]) == ("finished", "finished", 0)
    assert (first["learning_rate"], second["learning_rate"]) == (2.0**-13 * 8, 2.0**-16 * 8)
    assert first["updates"] == second["updates"] == 36
    assert first["loss"] < second["loss"]  # the larger of two small rates comes further in six epochs
    assert first["validation_rmse"] < second["validation_rmse"]
    assert result["best"] == -13.0
    for each in (first, second):
        assert 0 < each["average_users_per_second"] <= each["maximum_users_per_second"]
        assert (Path(each["run"]) / "checkpoints").is_dir()


@pytest.mark.slow
def test_two_real_trials_train_and_the_better_rate_is_found(tmp_path, capsys):
    check_small(small(tmp_path))
    assert "Aggregate average throughput: " in capsys.readouterr().out


@pytest.mark.slow
def test_two_real_trials_train_on_a_ray_cluster(tmp_path):
    pytest.importorskip("ray")
    check_small(small(tmp_path, engine="ray"))
