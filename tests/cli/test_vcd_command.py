"""`hotloop vcd ...` from the command line: old lines, presets, records, resuming, one-line errors, real digits."""

import gzip
import json
import os
import shutil
import signal
import struct
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from hotloop.cli import vcd
from hotloop.cli.command import Common
from hotloop.cli.main import find_command, main
from hotloop.cli.parser import resolve, scan
from hotloop.data.catalogue import known_set
from hotloop.data.local_files import find_set
from hotloop.engine import progress
from hotloop.engine.run import Run, read_events, take_folder, write_json
from hotloop.engine.sinks import Announcer
from hotloop.errors import RunError
from hotloop.families.vcd import evaluation, images, model, train
from hotloop.families.vcd.config import PRESETS, VcdTrain
from hotloop.families.vcd.images import Images
from hotloop.options import build, options_of, to_jsonable
from listener import Listener
from old_benchmarks import read as read_old
from undisturbed import assert_same_run, records

pytestmark = pytest.mark.usefixtures("signals_heard")

ROOT = Path(
    os.environ.get("HOTLOOP_DATA") or Path(__file__).resolve().parents[2] / "../shared/data"
).resolve()
SMALL = [
    "--z-dim",
    "2",
    "--hidden",
    "8",
    "8",
    "--hmc-steps",
    "2",
    "--leapfrog-steps",
    "2",
    "-b",
    "10",
    "--log-every",
    "4",
]
QUICK = ["--iwae-samples", "20", "--burn-in", "2", "--kept", "3"]


def read(line):
    """The options that a command line means, presets and files included."""
    command, _, words = find_command(["vcd", *line.split()])
    return resolve(command, scan(words, options_of(command.config)))


def write_idx(path, images):
    header = (
        struct.pack(">IIII", 2051, *images.shape)
        if images.ndim == 3
        else struct.pack(">II", 2049, len(images))
    )
    path.write_bytes(gzip.compress(header + images.tobytes()))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder with 120 + 30 images in MNIST's files."""
    folder = tmp_path_factory.mktemp("mnist")
    generator = np.random.default_rng(0)
    for name, count in (("train", 120), ("t10k", 30)):
        write_idx(
            folder / f"{name}-images-idx3-ubyte.gz", generator.integers(0, 256, (count, 28, 28), np.uint8)
        )
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", generator.integers(0, 10, count, np.uint8))
    return folder


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train -r where/to/store_results/", {"results_dir": "where/to/store_results/"}),
        ("train -c bs_experiment --micro_batch_size 512", {**PRESETS["bs_experiment"], "micro_batch_size": 512}),
        ("train -c benchmark --no-testing -b 3072", {**PRESETS["benchmark"], "micro_batch_size": 3072}),
        ("train -c configs/benchmark_config.json --no-testing -b 3072",
         {**PRESETS["benchmark"], "micro_batch_size": 3072}),
        ("train -v -R 3 -n name -l 1e-3 --log-level WARNING",
         {"validation": True, "repeats": 3, "run_name": "name", "learning_rate": 1e-3, "log_level": "WARNING"}),
        ("train --config global_cv --method hoffman", {**PRESETS["global_cv"], "method": "hoffman"}),
    ],
)  # fmt: skip
def test_the_old_programs_lines_are_understood(line, expected):
    found = read(line).config
    wanted = build(VcdTrain, {**expected, "config_file": found.config_file})
    assert found == wanted


def test_an_old_file_that_is_not_there_is_its_preset_and_says_so():
    (notice,) = read("train -c configs/global_cv_config.json").notices
    assert "global_cv" in notice


def test_a_file_in_the_old_shape_loads_and_the_command_line_wins(tmp_path):
    training = {"n_epoch": 7, "mcmc": {"n_burn_in_steps": 3, "n_hmc_steps": 1}}
    args = {"micro_batch_size": 20, "network": {"z_dim": 4}, "training": training}
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"model": [{"args": args}], "experiment": {"args": {"testing": False}}}))
    found = read(f"train -c {path} -b 30").config
    assert (found.epochs, found.hmc_steps, found.z_dim, found.testing) == (7, 4, 4, False)
    assert found.micro_batch_size == 30


def test_a_flat_file_of_options_loads_too(tmp_path):
    (tmp_path / "own.yml").write_text("method: kl\nz-dim: 3\n")
    found = read(f"train -c {tmp_path / 'own.yml'}").config
    assert (found.method, found.z_dim) == ("kl", 3)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_prints_its_resolved_values(name, capsys):
    assert main(["vcd", "train", "-c", name, "--print-config", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    for key, value in PRESETS[name].items():
        assert str(said["config"][key]) == str(value)
        assert said["sources"][key] == f"preset {name}"


@pytest.mark.slow
def test_a_run_leaves_records_with_every_figure_and_a_result(digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SLOW", 0)
    words = [
        "vcd",
        "train",
        *SMALL,
        *QUICK,
        "--updates",
        "9",
        "--data",
        str(digits),
        "-r",
        str(tmp_path),
        "--json",
    ]
    assert main(words) == 0
    out, said = capsys.readouterr()
    result = json.loads(out)
    for program in ("", "ELBO of the test images: ", "ELBO: ", "HMC: "):
        assert f"\n{program}compiled in " in said
    assert result["updates"] == 9
    assert np.isfinite(
        [result["test_elbo"], result["test"]["log_likelihood"], result["test"]["standard_error"]]
    ).all()
    events = list(read_events(tmp_path / "default"))
    logs = [event for event in events if event["event"] == "log"]
    assert [log["update"] for log in logs] == [4, 8, 9]
    names = {
        "elbo", "log_joint_z0", "log_joint_zt", "acceptance", "step_size", "learning_rate",
        "control_variate", "throughput", "seconds_per_10000_updates", "loss",
    }  # fmt: skip
    assert all(names <= set(log) for log in logs)
    assert not any(
        {"vcd", "images_per_second"} & set(log) for log in logs
    )  # the loss and the throughput once more
    assert logs[0]["epoch"] == pytest.approx(4 * 10 / 100)
    assert model.load_run(tmp_path / "default").step == 9
    assert main([*words[:-1], "--no-testing"]) == 0
    assert "Finished training" in capsys.readouterr().out
    assert (tmp_path / "default_0").is_dir()
    assert main(["vcd", "evaluate", str(tmp_path / "default"), *QUICK, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["log_likelihood"] == pytest.approx(result["test"]["log_likelihood"], abs=1e-3)
    assert main(["vcd", "samples", str(tmp_path / "default"), "--rows", "2", "--columns", "2"]) == 0
    assert "drawing: compiled in " in capsys.readouterr().out
    assert (tmp_path / "default" / "samples" / "prior.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("file", "name"), [("...yaml", "vcd"), ("..yaml", "vcd"), ("some/.night.yaml", "night")]
)
def test_no_name_of_a_configuration_leads_out_of_the_results(file, name, tmp_path):
    assert train.run_folder(replace(VcdTrain(), config_file=file, results_dir=tmp_path)) == tmp_path / name


def test_the_name_of_a_run_killed_before_its_first_record_is_free(tmp_path):
    config = replace(VcdTrain(), results_dir=tmp_path, run_name="night")
    (tmp_path / "night").mkdir()
    (tmp_path / "night" / "config.json").write_text("{}")
    assert train.run_folder(config) == tmp_path / "night"
    with Run(tmp_path / "night", {}, command="x", environment={}):
        assert train.run_folder(config) == tmp_path / "night_0"
    assert train.run_folder(config) == tmp_path / "night_0"
    lock = take_folder(tmp_path / "night_0", resume=False)  # another process is about to begin there
    assert train.run_folder(config) == tmp_path / "night_1"
    os.close(lock)


@pytest.mark.parametrize(("words", "count"), [("--images 3", 3), ("--test-images 3", 3), ("", 20)])
def test_the_test_after_a_training_takes_as_many_images_as_asked_for(words, count, monkeypatch):
    seen = []
    sums = {"elbo": -400.0, "samples": 20}
    monkeypatch.setattr(train, "Evaluation", lambda *_, **__: lambda state: sums)
    monkeypatch.setattr(
        evaluation, "estimate_likelihoods", lambda job, state, rows, *_: seen.append(len(rows)) or {}
    )
    rows = np.zeros((20, 784), np.uint8)
    data = Images("digits", "", rows, rows, rows)
    options = build(VcdTrain, scan(f"--updates 9 -b 5 -v {words}".split(), options_of(VcdTrain)))
    with Announcer([]) as record:
        figures = train.final_figures(options, model.make_job(options, 20), None, data, record, Listener())
    assert seen == [count, count] and figures["test_elbo"] == -20  # the bound costs little, and is of all


@pytest.mark.slow
def test_validation_holds_images_out_and_repeats_follow_each_other(digits, tmp_path, capsys):
    words = ["vcd", "train", *SMALL, *QUICK, "--epochs", "1", "--data", str(digits), "-r", str(tmp_path)]
    assert main([*words, "-v", "--no-testing", "-R", "2", "-n", "twice", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [run["seed"] for run in result["runs"]] == [0, 1]
    assert [Path(run["run"]).name for run in result["runs"]] == ["twice", "twice_0"]
    assert result["updates"] == 8 and result["validation"]["images"] == 20  # 100 training images: 80 + 20
    assert "test" not in result


def trained(options, listener=None):
    """The last state of a run, and its result."""
    result = train.run(options, listener or Listener(), "test")
    return model.load_run(Path(result["run"])).state


@pytest.fixture(scope="module")
def listened():
    """Who listened to the run that nothing disturbed."""
    return Listener()


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory, listened):
    """A run of 40 updates that nothing disturbed: options and final state."""
    options = build(
        VcdTrain,
        {"z_dim": 2, "hidden": (8, 8), "hmc_steps": 2, "leapfrog_steps": 2, "micro_batch_size": 7, "updates": 40,
         "log_every": 3, "shared_updates": 15, "decay_epochs": "1/2", "data": str(digits), "testing": False,
         "results_dir": tmp_path_factory.mktemp("runs"), "run_name": "whole"},
    )  # fmt: skip
    return options, trained(options, listened)


@pytest.mark.parametrize("file", ["vcd.yml", "older/vcd.yml"])
def test_old_benchmarks_estimate_the_training_time_from_10_000_updates_whatever_a_log_is_for(
    whole, listened, file
):
    options, _ = whole
    logs = [log for log in read_events(options.results_dir / "whole") if log["event"] == "log"]
    assert [log["update"] for log in logs[:2]] == [3, 6]  # logs every 3 updates
    found = read_old(file, "tf1_mcmc_vae_synth_pod4", listened.lines, {"run": options.results_dir / "whole"})
    seconds = np.mean([10_000 * 7 / log["throughput"] for log in logs])  # 7 images an update
    assert found["time_per_iters"] == pytest.approx(seconds, rel=1e-4)
    assert found["est_time_to_train"] == pytest.approx(seconds * 400_000 / 10_000, rel=1e-4)
    # The oldest file had a batch of 100 in its formula; the other one reads the true figure.
    images = np.mean([log["throughput"] for log in logs]) if file == "vcd.yml" else 100 * 10_000 / seconds
    assert found["throughput"] == pytest.approx(images, rel=1e-4)


def test_every_record_has_the_epoch_of_its_update(whole):
    options, _ = whole
    run = options.results_dir / "whole"
    per_epoch = json.loads((run / "config.json").read_text())["images"] / 7
    places = {(event["event"], event["update"], event["epoch"]) for event in read_events(run)}
    assert all(epoch == pytest.approx(update / per_epoch) for _, update, epoch in places)
    assert {("start", 0, 0.0), ("end", 40, 40 / per_epoch)} <= places


def test_a_run_from_before_there_was_an_option_resumes_with_its_default_alone(whole, tmp_path):
    options, _ = whole
    shutil.copytree(options.results_dir / "whole", tmp_path / "whole")
    config = tmp_path / "whole" / "config.json"
    settings = json.loads(config.read_text())
    assert settings.pop("optimizer") == "rmsprop"
    config.write_text(json.dumps(settings))
    again = replace(options, results_dir=tmp_path, resume=True)
    with pytest.raises(RunError, match="cannot resume with another config: optimizer: rmsprop -> adam; use"):
        train.run(replace(again, optimizer="adam"), Listener(), "test")
    assert train.run(again, Listener(), "test")["updates"] == 40


def same(one, other):
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.array_equal(np.asarray(left), np.asarray(right))


def test_a_stopped_run_resumes_to_the_same_bits(whole, tmp_path):
    from dataclasses import replace

    from hotloop.engine.drive import Interrupted

    options, state = whole
    stopped = replace(options, results_dir=tmp_path, run_name="stopped", updates_per_call=2)

    def stop(text):
        if text.startswith("update 21,"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="--resume --run-name stopped"):
        train.run(stopped, Listener(stop), "test")
    assert model.load_run(tmp_path / "stopped").step < 40
    same(trained(replace(stopped, resume=True)), state)
    one, other = (
        [record for record in records(folder) if record["event"] != "compile"]  # calls of another length
        for folder in (tmp_path / "stopped", options.results_dir / "whole")
    )
    assert one == other


def test_a_killed_run_resumes_to_the_same_bits_and_figures(whole, tmp_path):
    """A kill leaves the checkpoints so far and half a record."""
    import shutil
    from dataclasses import replace

    options, state = whole
    shutil.copytree(options.results_dir / "whole", tmp_path / "killed")
    for step in (tmp_path / "killed" / "checkpoints").iterdir():
        if step.name.isdigit() and int(step.name) > 36:
            shutil.rmtree(step)
    events = tmp_path / "killed" / "events.jsonl"
    events.write_bytes(events.read_bytes()[:-20])
    same(trained(replace(options, results_dir=tmp_path, run_name="killed", resume=True)), state)
    assert_same_run(tmp_path / "killed", options.results_dir / "whole")


@pytest.mark.slow
def test_another_number_of_updates_a_call_gives_the_same_bits(whole, tmp_path):
    from dataclasses import replace

    options, state = whole
    same(trained(replace(options, results_dir=tmp_path, run_name="short", updates_per_call=1)), state)


def test_the_plan_says_what_would_run_and_runs_nothing(digits, tmp_path, capsys):
    words = [
        "vcd",
        "train",
        "-c",
        "benchmark",
        "-b",
        "30",
        "--data",
        str(digits),
        "-r",
        str(tmp_path),
        "--plan",
    ]
    assert main([*words, "--json"]) == 0
    out, said = capsys.readouterr()
    plan = json.loads(out)
    assert plan["total_updates"] == 200 * 100 // 30
    assert plan["updates_per_epoch"] == pytest.approx(100 / 30)
    assert "41 gradients an update" in said and "memory on the device" in said
    assert "micro batch 30 x replicas 1" in said
    assert not list(tmp_path.iterdir())


BAD = [
    ("--method map", "--method map: "),
    ("-c bs_experiment -b 200", "--micro-batch-size 200: no tuned learning rate"),
    ("-b 500 --data DIGITS", "--micro-batch-size 500: there are only 100 training images"),
    ("--data /nowhere/mnist", "--data /nowhere/mnist: neither a set"),
    ("-c nothing.json", "--config-file nothing.json: no such file or preset"),
    ("--resume --data DIGITS -n nobody", "nobody"),
    ("--resume -R 2", "--resume: goes on with one run"),
    (
        "--replicas 3 --data DIGITS",
        "--replicas 3: 100 images an update cannot be shared evenly; take a --micro-batch",
    ),
    ("--num-replicas 50 --data DIGITS", "--replicas 50: only "),
    ("--sampler fused --hidden 300 300 --data DIGITS", "--sampler fused: made for"),
    ("--sampler fused --data DIGITS", "--sampler fused: a GPU kernel"),
    (
        "--sampler hopper --z-dim 50 --data DIGITS",
        "--sampler hopper: made for two hidden layers of 191 to 206",
    ),
    (
        "--sampler hopper --data DIGITS",
        "--sampler hopper: a kernel for NVIDIA's Hopper cards, and this is a cpu",
    ),
    ("--data /tmp", "--data /tmp: "),
    ("-c default --config test", "--config-file default: names a configuration"),
    ("--hmc-steps 0", "--hmc-steps 0: "),
]


@pytest.mark.parametrize(("line", "begins"), BAD)
def test_bad_options_get_one_line_and_exit_status_2(line, begins, digits, tmp_path, capsys):
    if ("a GPU kernel" in begins or "and this is a cpu" in begins) and jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    words = line.replace("DIGITS", str(digits)).split()
    assert main(["vcd", "train", *words, "-r", str(tmp_path)]) == 2
    (said,) = [text for text in capsys.readouterr().err.splitlines() if not text.startswith("data:")]
    assert begins in said
    assert not list(tmp_path.iterdir())


def test_a_broken_data_file_is_named_with_its_line(digits, tmp_path, capsys):
    for split in ("train", "valid", "test"):
        (tmp_path / f"binarized_mnist_{split}.amat").write_text("0 " * 783 + "1\n" + "0 2 " * 392 + "\n")
    assert main(["vcd", "train", "--data", str(tmp_path), "-r", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert "binarized_mnist_train.amat" in said and "line 2" in said


def used(line):
    """What a command line that uses a run means, and what it says about the run's own options."""
    command, _, words = find_command(line.split())
    found = resolve(command, scan(words, (*options_of(command.config), *options_of(Common))))
    return found.config, list(found.replacements)


@pytest.fixture
def recorded(tmp_path):
    """A run's folder with nothing but its config."""
    options = build(VcdTrain, {"iwae_samples": 77, "burn_in": 5, "kept": 6, "test_batch_size": 9, "seed": 3,
                            "hmc_steps": 4, "data": "fashion_mnist"})  # fmt: skip
    run = tmp_path / "run"
    run.mkdir()
    write_json(run / "config.json", {**to_jsonable(asdict(options)), "images": 60_000})
    return run


def test_evaluate_takes_the_runs_options_and_says_what_the_command_line_replaces(recorded):
    config, said = used(f"vcd evaluate {recorded}")
    found = (
        config.iwae_samples,
        config.burn_in,
        config.kept,
        config.test_batch_size,
        config.seed,
        config.data,
    )
    assert found == (77, 5, 6, 9, 3, "fashion_mnist") and said == []
    assert (config.images, config.split) == (None, "test")  # not the number of the training images
    config, said = used(f"vcd evaluate {recorded} --iwae-samples 50 --kept 6 --data digits")
    assert (config.iwae_samples, config.kept, config.data, config.burn_in) == (50, 6, "digits", 5)
    assert sorted(said) == [
        "option --data: digits (the run had fashion_mnist)", "option --iwae-samples: 50 (the run had 77)",
    ]  # fmt: skip


def test_evaluate_takes_as_many_images_as_the_run_evaluated(recorded):
    had = json.loads((recorded / "config.json").read_text())
    write_json(recorded / "config.json", {**had, "test_images": 40})
    config, said = used(f"vcd evaluate {recorded}")
    assert config.images == 40 and said == []
    config, said = used(f"vcd evaluate {recorded} --images none")
    assert config.images is None and said == ["option --images: none (the run had 40)"]


def test_a_finished_run_without_checkpoints_does_not_start_over(recorded):
    (recorded / "events.jsonl").write_text(
        '{"event": "end", "update": 9, "epoch": 1.0, "status": "finished"}\n'
    )
    config = VcdTrain(
        results_dir=recorded.parent, run_name=recorded.name, resume=True, save_checkpoints=False
    )
    with pytest.raises(RunError, match=r"--resume: .* is finished and has no checkpoints; to train again"):
        train.run(config, Listener(), "test")


def test_samples_takes_the_runs_images_and_hmc(recorded):
    config, said = used(f"vcd samples {recorded} --hmc-steps 8")
    assert (config.data, config.hmc_steps, config.seed) == ("fashion_mnist", 8, 0)
    assert said == ["option --hmc-steps: 8 (the run had 4)"]


@pytest.mark.slow
def test_a_run_keeps_a_path_to_its_images_that_means_the_same_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(images, "load_binarised", lambda *_: images.binarise_dataset(draw()))
    draw = partial(images.stand_in_images, "digits", "")
    (tmp_path / "mine").mkdir()
    assert images.load_images("mine", Listener()).origin == str(tmp_path / "mine")
    assert images.load_images("digits", Listener()).origin == "digits"


def test_evaluating_a_run_that_saved_nothing_says_why_and_what_would_help(recorded, capsys):
    options = recorded / "config.json"
    options.write_text(json.dumps({**json.loads(options.read_text()), "save_checkpoints": False}))
    assert main(["vcd", "evaluate", str(recorded), "--data", "digits"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == (
        f"hotloop: error: {recorded}: trained with --no-save-checkpoints, as by -c test, so its weights are gone; "
        "train with --save-checkpoints to keep them"
    )


def test_evaluating_what_is_no_run_is_one_line(tmp_path, capsys):
    assert main(["vcd", "evaluate", str(tmp_path)]) == 2
    assert "not a run's folder" in capsys.readouterr().err


def test_help_names_every_command_and_preset(capsys):
    assert main(["vcd", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(child.name in said for child in vcd.COMMAND.children)
    main(["vcd", "train", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in PRESETS)


@pytest.mark.skipif(not (ROOT.is_dir() and find_set(known_set("mnist"), ROOT)), reason=f"no mnist in {ROOT}")
@pytest.mark.slow
def test_a_short_run_on_real_digits_lowers_the_bound_and_raises_the_test_likelihood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLOOP_DATA", str(ROOT))
    options = build(
        VcdTrain,
        {"updates": 60, "log_every": 10, "testing": False, "results_dir": tmp_path, "data": str(ROOT)},
    )
    data = images.load_images(options.data, Listener())
    before = model.make_job(options, len(data.train))
    from hotloop.engine.keys import seed_key, stream

    quick = build(VcdTrain, {"iwae_samples": 50, "burn_in": 10, "kept": 10})
    start = model.init(before, stream(seed_key(0), "init", 0))
    end = trained(options)
    first, last = (
        evaluation.estimate_likelihoods(before, state, data.test[:100], quick, 0, Listener())
        for state in (start, end)
    )
    assert last["elbo"] > first["elbo"] + 100
    assert last["log_likelihood"] - first["log_likelihood"] > 10 * last["standard_error"]
    logs = [event for event in read_events(tmp_path / "default") if event["event"] == "log"]
    assert logs[-1]["elbo"] > logs[0]["elbo"] and logs[-1]["log_joint_zt"] > logs[0]["log_joint_zt"]
