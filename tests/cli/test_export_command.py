"""`hotloop export` from the command line: what it writes and says, and one line for what cannot be."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hotloop.cli.command import Context
from hotloop.cli.export import ExportConfig, find_checkpoint
from hotloop.cli.main import main
from hotloop.cli.request import data_of_run
from hotloop.engine import checkpoint_folder, model_folder
from hotloop.errors import OptionError
from hotloop.serve.artefact import Artefact

TOY = ["--model-name", "toy_model", "--dataset", "mnist", "--precision", "32.32", "--micro-batch-size", "3"]


@pytest.fixture
def without_comparing(monkeypatch):
    monkeypatch.setattr(model_folder, "compare_in_fresh_process", lambda folder: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model's folder, by the command."""
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_folder, "compare_in_fresh_process", lambda folder: None)
        assert main(["export", *TOY, "-o", str(root), "--device", "cpu"]) == 0
    return root / "toy_model" / "1"


def refused(capsys, *words):
    """The one line of an export that ends with status 2."""
    assert main(["export", *map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_network_without_a_checkpoint_is_exported_with_a_loud_warning(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        model_folder, "compare_in_fresh_process", lambda folder: print("comparing", file=sys.stderr)
    )
    assert main(["export", *TOY, "-o", str(tmp_path / "models"), "--name", "toy", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert result["folder"] == str(tmp_path / "models" / "toy" / "1")
    assert result["ladder"] == [1, 2, 3]  # the micro-batch is the largest
    assert err.count("RANDOM WEIGHTS") == 1
    assert err.index("RANDOM WEIGHTS") < err.index("comparing")  # before the long work
    assert Artefact.open(result["folder"]).kind == "image"


def test_the_whole_way_ends_with_a_comparison_in_a_fresh_process(tmp_path, capsys):
    assert main(["export", *TOY, "-o", str(tmp_path / "models"), "--ladder", "1,2"]) == 0
    assert "batches of 1, 2; compared in a fresh process" in capsys.readouterr().out


def test_a_refreshed_model_is_its_next_version_from_the_folder_alone(without_comparing, model, capsys):
    assert main(["export", "--refresh", str(model), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    new = Path(result["folder"])
    assert new.parent == model.parent and result["version"] == 2
    old, made = (json.loads((folder / "model.json").read_text()) for folder in (model, new))
    same = ("signature", "ladder", "classes", "config", "source", "preprocessing", "tolerance")
    assert {key: old[key] for key in same} == {key: made[key] for key in same}
    assert (model / "weights.safetensors").read_bytes() == (new / "weights.safetensors").read_bytes()
    assert main(["export", "--refresh", str(model.parent), "--json"]) == 0  # of a model, its newest version
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["version"] == 3


def test_what_cannot_be_is_one_line(model, tmp_path, capsys):
    run, file, full = tmp_path / "run", tmp_path / "file", tmp_path / "full"
    run.mkdir(), file.touch(), full.mkdir(), (full / "notes").touch()
    (run / "config.json").write_text(json.dumps({"model_name": "toy_model", "dataset": "mnist"}))
    other, new = tmp_path / "other", tmp_path / "new"
    other.mkdir(), (other / "config.json").write_text(json.dumps({"model_fn": "mine", "params": {}}))
    lines = {
        (run,): "-o DIR is needed",
        (run, "-o", file): f"--output {file}: is a file",
        (run, "-o", new): f"{run}: has no checkpoint in",
        (tmp_path / "gone", "-o", new): "no such folder; give a run's folder",
        (full, "-o", new): "is no run's folder (no config.json there)",
        (*TOY, "-o", full): f"--output {full}: is not empty and holds no model",
        (*TOY, "-o", model.parent): "is the folder of one model",
        (*TOY, "-o", model.parent.parent, "--name", "toy_model", "--version", "1"): "--version 1: ",
        (*TOY, "-o", new, "--version", "0"): "--version 0: must be at least 1",
        (*TOY, "-o", new, "--name", "../x"): "--name ../x: must begin with a letter",
        (*TOY, "-o", new, "--ladder", "1,4,2"): "--ladder 1,4,2: must rise",
        (*TOY, "-o", new, "--ladder", "1,1,2"): "--ladder 1,1,2: must rise",
        (*TOY, "-o", new, "--ladder", "0,1"): "--ladder 0 1: must be at least 1",
        (*TOY, "-o", new, "--ladder", "1,2", "--max-batch", "4"): "--max-batch 4: --ladder ends with 2",
        (*TOY, "-o", new, "--top", "11"): "--top 11: there are only 10 classes",
        (*TOY, "-o", new, "--best"): "--best, --step and --weights choose what a run has: they need RUN",
        (run, "-o", new, "--best", "--step", "3"): "--step 3: --best chooses the step",
        (run, "-o", new, "--precision", "32.32"): "--precision: RUN",
        (run, "-o", new, "--config", "resnet50_infer_bs16"): "--config resnet50_infer_bs16: RUN",
        (run, "-o", new, "--with-users"): f"--with-users: is for recommender, and {run} is of cnn",
        (other, "-o", new, "--top", "3"): f"--top: is for cnn and recommender, and {other} is of estimator",
        (other, "-o", new): "was trained by a program of your own",
        ("-o", new): "RUN is needed",
        ("-o", new, "--config", "resnet51"): "--config resnet51",
        ("--refresh", full): f"{full}: no model.json there",
        (run, "--refresh", model): "RUN: --refresh takes all from the folder",
        ("--refresh", model, "-o", new): "--output: --refresh takes all from the folder",
    }
    for words, wanted in lines.items():
        said = refused(capsys, *words)
        assert wanted in said, (words, said)
    assert not new.exists()


def test_a_version_that_is_there_is_refused_before_the_device(model, monkeypatch, capsys):
    monkeypatch.setattr(Context, "open_device", lambda self: pytest.fail("a device was opened"))
    place = ("-o", model.parent.parent, "--version")
    said = refused(capsys, *TOY, *place, "1")
    assert f"--version 1: {model.parent} has it already" in said
    assert "of at most 18 digits" in refused(capsys, *TOY, *place, 10**18)


def test_a_checkpoint_stands_for_its_run_and_its_step(tmp_path, monkeypatch):
    run, step = tmp_path / "run", tmp_path / "run" / "checkpoints" / "00000005"
    step.mkdir(parents=True)
    (step / "manifest.json").touch(), (run / "config.json").touch()
    monkeypatch.setattr(
        checkpoint_folder, "read_manifest", lambda folder: SimpleNamespace(step=5, family="cnn")
    )
    places = [find_checkpoint(ExportConfig(run=path)) for path in (step, step.parent, run)]
    assert [(each.run, each.step) for each in places] == [(run, 5), (run, None), (run, None)]
    (run / "config.json").write_text(json.dumps({"model_name": "m", "dataset": "mnist"}))
    assert data_of_run(step) == ("mnist", None)
    for more in ({"best": True}, {"step": 6}):
        with pytest.raises(OptionError, match="is one checkpoint, that of step 5"):
            find_checkpoint(ExportConfig(run=step, **more))


def test_a_program_of_ones_own_is_not_refreshed(model, tmp_path, capsys):
    about = json.loads((model / "model.json").read_text()) | {"config": None}
    about["sha256"] = model_folder.self_digest(about)
    folder = tmp_path / "toy_model" / "1"
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps(about))
    assert "from a program of your own" in refused(capsys, "--refresh", folder)


def test_without_its_packages_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    said = refused(capsys, *TOY, "-o", tmp_path / "new")
    assert "needs flatbuffers: pip install 'hotloop[serve]'" in said


def test_help_answers_without_jax():
    code = "import sys; from hotloop.cli.main import main; main(['export', '--help']); assert 'jax' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.index("\nExport:") < found.stdout.index("\nRun:")
    assert "--refresh" in found.stdout and "--with-users" in found.stdout


def test_a_dry_run_of_the_older_script_ends_before_any_work(tmp_path, capsys):
    words = ["export_for_serving.py", "--export-dir", str(tmp_path / "new"), *TOY]
    assert main(["compat", "--dry-run", *words]) == 0
    assert f"exporting to {tmp_path / 'new'}" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def status_of(*words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def test_the_older_script_exports_what_it_did(without_comparing, tmp_path, capsys):
    old = f"python3 export_for_serving.py --export-dir {tmp_path / 'models'} --iterations 1 --use-serving-api"
    assert status_of("compat", *old.split(), *TOY, "--pipeline-serving-model") == 0
    err = capsys.readouterr().err
    assert "--pipeline-serving-model: there are no --pipeline-splits, so it is off" in err
    assert "no longer exist are left out: --iterations, --use-serving-api" in err
    assert "RANDOM WEIGHTS" in err
    assert (tmp_path / "models" / "toy_model" / "1" / "program.bin").exists()
    gone = ["--checkpoint-input-path", str(tmp_path / "gone"), "--config", "x"]
    assert status_of("compat", "export_for_serving.py", "--export-dir", str(tmp_path), *gone) == 2
    err = capsys.readouterr().err
    assert "other options are left out: --config" in err and "no such folder" in err
