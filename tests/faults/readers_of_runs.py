"""Readers of what runs leave: configs, events, ratings, manifests, ceilings."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from readers import Reader, in_file, in_folder, of_text

from hotloop.cli.main import find_command
from hotloop.cli.parser import resolve
from hotloop.data.rating_matrix import build_matrix
from hotloop.engine import checkpoint_folder, measure
from hotloop.engine.run import Run, current_records, read_config, read_events
from hotloop.families.cnn import saved_network as cnn
from hotloop.families.cnn.options import TrainConfig as CnnTrain
from hotloop.families.cnn.sweep import check_rows, rank_rows
from hotloop.families.cnn.sweep import read_figures as read_run_figures
from hotloop.families.cnn.sweep_plan import SweepPlan
from hotloop.families.cnn.train import seconds_of_processes
from hotloop.families.estimator.cifar.program import seconds_to
from hotloop.families.recommender import commands_config
from hotloop.families.recommender import saved_run as recommender
from hotloop.families.recommender.config import TrainOptions
from hotloop.families.recommender.trials import read_figures
from hotloop.families.vcd import model as vcd
from hotloop.families.vcd.config import VcdTrain
from hotloop.options import to_jsonable, values_of
from hotloop.sweeps.journal import open_journal
from hotloop.sweeps.space import Choices
from hotloop.sweeps.trial import parse_answer


def of_runs() -> list[Reader]:
    frame = {"epoch": 0.5, "time": 1e9, "elapsed": 2.5}
    figures = {"loss": 0.5, "rmse": 1.0, "throughput": 10.0, "learning_rate": 0.1, "accuracy": 0.5, "message": "x",
               "updates_per_call": 10}  # fmt: skip
    names = (
        "start",
        "compile",
        "training",
        "log",
        "warning",
        "validation",
        "stop",
        "start",
        "resume",
        "log",
        "end",
    )
    events = "".join(
        json.dumps({"event": name, "update": n, **frame, **figures}) + "\n" for n, name in enumerate(names)
    )
    config = {"batch_size": 64, "base_learning_rate": -13, "learning_rate_decay": [0.5, 0.1], "seed": 1, "users": 2,
              "items": 2, "drops": [1, 2], "low": 1.0, "high": 5.0, "images": 10}  # fmt: skip
    extra = {name: config[name] for name in commands_config.EXTRA}
    norm = {"kind": "batch", "momentum": 0.9, "groups": None, "channels_per_group": None}
    network = {"network": {"model": "cifar_resnet8", "shape": [32, 32, 3], "classes": 10, "norm": norm,
               "variant": "keras"}, "dataset": "cifar10", "precision": "32.32", "half": "float16",
               "updates_per_epoch": 10}  # fmt: skip
    limits = {"device": "x", "matmul_tflops": {"float32": 1.0}, "float32_uses": "float32", "copy_gbps": 1.0,
              "measured": "", "jax": ""}  # fmt: skip
    ratings = build_matrix(np.array([0, 1]), np.array([0, 1]), np.array([1.0, 2.0]), warn=lambda _: None)
    ids = np.arange(2)
    step = checkpoint_folder.format_manifest(
        checkpoint_folder.Manifest(3, {}, {"a": checkpoint_folder.StoredFile(1, "00000000")})
    )

    plan = SweepPlan(
        {"seed": Choices((1, 2))}, None, {}, {}, {}, "epoch_to_target", "grid", 3, 2, Path("sweep")
    )
    about_sweep = to_jsonable(plan.about)
    row = {"trial": 1, "objective": 0.5, "status": "finished", "validation_accuracy": 0.5, "epoch_to_target": 1.0,
           "optimization_metric": None, "epoch": 2.0, "seconds": 3.5}  # fmt: skip
    lines: list[dict[str, object]] = [
        {"event": "sweep", "about": about_sweep},
        {"event": "begin", "trial": 1, "values": {"seed": 1}},
        {"event": "end", "trial": 1, "row": row},
    ]
    journal = "".join(f"{json.dumps(line)}\n" for line in lines)

    def training(folder: Path, data: bytes) -> None:
        (folder / "ratings.npz").write_bytes(data)
        found = recommender.read_matrix(folder, ids, ids)
        found.values()
        [found.row(user) for user in range(found.users)]

    def recorded(file: Path) -> None:
        current_records(read_events(file))
        seconds_of_processes(read_events(file))
        seconds_to(0.9, read_events(file), 32)

    def trial(file: Path) -> None:
        (file.parent / "config.json").write_text(json.dumps(config))
        read_figures(file.parent)

    def cnn_trial(file: Path) -> None:
        read_run_figures(file.parent)

    def swept(file: Path) -> None:
        with open_journal(file.parent, about_sweep, resume=True) as found:
            check_rows(plan, found)
            rank_rows(found.rows.values(), plan.maximise)

    def trial_config(file: Path) -> None:
        (file.parent / "events.jsonl").write_text(events)
        read_figures(file.parent)

    def resumed(file: Path) -> None:
        (file.parent / "config.json").write_text(json.dumps(config))
        (file.parent / "events.jsonl").write_text(events)
        Run(file.parent, config, command="", resume=True, environment={"cores": 2, "jax": "1"}).close()

    def configured(file: Path) -> None:
        (file.parent / "environment.json").write_text("{}")
        Run(file.parent, config, command="", resume=True, environment={}).close()

    def used(*words: str) -> Callable[[Path], object]:
        """The options of a run, as a command that is given its folder takes them."""
        command = find_command(list(words))[0]
        return lambda folder: resolve(command, {"run": str(folder)})

    def cnn_config(folder: Path) -> object:
        return read_config(folder, "cnn", {"seed": int})

    def poplar(text: str) -> None:
        measure._poplar(text, None, lambda _: None)

    def training_kept(folder: Path) -> bytes:
        ratings.write(folder / "ratings.npz")
        return (folder / "ratings.npz").read_bytes()

    with tempfile.TemporaryDirectory() as folder:
        kept = training_kept(Path(folder))
    options, environment = json.dumps(config).encode(), b'{"cores": 2, "jax": "1", "devices": ["x"]}'
    vcd_options = json.dumps({**to_jsonable(VcdTrain()), "images": 10}).encode()
    cnn_options = json.dumps(
        to_jsonable(values_of(CnnTrain(dataset="cifar10", model_name="cifar_resnet8")))
    ).encode()
    about = json.dumps(network).encode()
    sized = replace(TrainOptions(), size=128, batch_size=64)
    recommender_options = json.dumps({**to_jsonable(sized), **extra}).encode()
    evaluated, predicted = (
        in_folder("config.json", used("recommender", verb)) for verb in ("evaluate", "predict")
    )
    return [
        Reader("events", [events.encode()], in_file("events.jsonl", recorded)),
        Reader("events of a trial", [events.encode()], in_file("events.jsonl", trial)),
        Reader("events of a cnn trial", [events.encode()], in_file("events.jsonl", cnn_trial)),
        Reader("journal of a sweep", [journal.encode()], in_file("trials.jsonl", swept)),
        Reader("config of a trial", [options], in_file("config.json", trial_config)),
        Reader("a trial's answer", [b'warning\n{"loss": 1}\n'], of_text(parse_answer)),
        Reader("config of a run", [options], in_folder("config.json", cnn_config)),
        Reader("config of a vcd run", [vcd_options], in_folder("config.json", vcd.load_run)),
        Reader("config of a recommender run", [recommender_options], in_folder("config.json", recommender.load_run)),
        Reader("vcd evaluate RUN", [vcd_options], in_folder("config.json", used("vcd", "evaluate"))),
        Reader("vcd samples RUN", [vcd_options], in_folder("config.json", used("vcd", "samples"))),
        Reader("recommender evaluate RUN", [recommender_options], evaluated),
        Reader("recommender predict RUN", [recommender_options], predicted),
        Reader("cnn validate RUN", [cnn_options], in_folder("config.json", used("cnn", "validate"))),
        Reader("cnn validate CHECKPOINTS", [about], in_folder("network.json", used("cnn", "validate"))),
        Reader("config of a run, resumed", [options], in_file("config.json", configured)),
        Reader("environment of a run", [environment], in_file("environment.json", resumed)),
        Reader("ratings of a run", [kept], training),
        Reader("network.json", [about], in_folder("network.json", cnn.read_saved_network)),
        Reader("ceilings", [json.dumps(limits).encode()], in_file("x.json", measure._read_ceilings)),
        Reader(
            "manifests of checkpoints",
            [step.encode()],
            in_folder("manifest.json", checkpoint_folder.read_manifest),
        ),
        Reader("Poplar's options", [b'{"autoReport.all": "true", "autoReport.directory": "x"}'], of_text(poplar)),
    ]  # fmt: skip
