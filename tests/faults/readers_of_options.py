"""Readers of options: command lines, old and new, config files, values, documents."""

import json
import shlex
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from readers import Read, Reader, in_file, of_text

from hotloop.bench.compat import translate
from hotloop.cli.command import Common
from hotloop.cli.main import COMMANDS, find_command
from hotloop.cli.parser import resolve, scan
from hotloop.cli.plan import PlanConfig, make_plan
from hotloop.data.catalogue import known_set
from hotloop.engine.device import parse_size
from hotloop.families.cnn.sweep_options import SweepConfig
from hotloop.families.cnn.sweep_plan import find_space
from hotloop.options import Params, build, expand_path, options_of
from hotloop.options.document import parse_document
from hotloop.options.files import parse_json
from hotloop.sweeps.space import draw_values


def words(text: str) -> list[str]:
    with suppress(ValueError):
        return shlex.split(text)
    return text.split()


def resolved(line: list[str]) -> object:
    """What a command line asks for, as far as its options tell."""
    command, _, rest = find_command(line)
    return resolve(command, scan(rest, (*options_of(command.config), *options_of(Common))))


def every_option() -> list:
    todo, found = [import_module(module).COMMAND for module, _ in COMMANDS.values()], []
    while todo:
        command = todo.pop()
        todo += command.children
        found += options_of(command.config)
    return list({(option.name, option.kind): option for option in found}.values())


def of_options() -> list[Reader]:
    options = every_option()

    def accept(text: str) -> None:
        from hotloop.errors import OptionError

        refusals = 0
        for option in options:
            try:
                option.accept(text)
            except OptionError as error:
                refusals += 1
                assert "\n" not in str(error), str(error)
        if refusals:
            raise OptionError("one of them refused it")

    def compat(text: str) -> None:
        resolved(translate(words(text)).command[1:])

    def over(text: str) -> None:
        config = SweepConfig(
            over=tuple(part.strip() for part in text.split(",") if part.strip()), named="LARS_random"
        )
        for number in (1, 2):
            draw_values(find_space(config, None), 3, number)

    def plan(folder: Path, data: bytes) -> object:
        (folder / "plan.yml").write_bytes(data)
        command = find_command(["plan"])[0]
        return make_plan(resolve(command, {"config_path": str(folder / "plan.yml")}).config).as_dict()

    def config(*path: str) -> Read:
        command = find_command(list(path))[0]
        return in_file("config.yml", lambda file: resolve(command, {"config_path": str(file)}))

    def old(file: Path) -> object:
        return resolve(find_command(["vcd", "train"])[0], {"config_file": str(file)})

    def document(text: str) -> object:
        return hash(Params({"all": parse_document(text, "text")}))

    yaml = [
        b"a: &b {lr: 1e-4, tag: ON}\nrun:\n  <<: *b\n  tag: 16.10\n  list: [1, 2.5, ~, 'x']\n",
        b'{"a": {"b": [1]}}',
    ]
    values = [
        b"1",
        b"0.5",
        b"1/2",
        b"true",
        b"cifar10",
        b"16.16",
        b"1,2,3",
        b"~/x",
        b'{"momentum": 0.9}',
        b"2GB",
        b"none",
    ]
    lines = [
        b"cnn train --config cifar_resnet8 --num-epochs 2 --micro-batch-size=8 --no-shuffle",
        b"vcd train --updates 100 --learning-rate 1e-3 --json", b"plan --num-epochs 6 --logs-per-epoch 1/2",
        b"kernel lstm --batch-size 4 --train", b"recommender train --epochs 3 --batch-size 64",
        b"bench compare a b --threshold 0.1", b"data fetch mnist --data-dir ~/data", b"estimator --epochs 1",
        b"bench run --spec a.yml b.yml --repeats 3", b"cnn predict runs/x a.png b.png --top 3",
    ]  # fmt: skip
    scripts = [
        b"python3 train.py --config resnet50_mlperf_pod16_lars --micro-batch-size 4 --bn-momentum 0.9",
        b"poprun --num-replicas 16 python3 train.py --training False", b"A=1 python lstm.py --train --batch-size 8",
        b"python3 -m examples_utils benchmark --spec benchmarks.yml", b"python3 main.py -c default_config.json -v",
        b"autoencoder_main.py --batches-per-step 10 --compiler-report",
        b"run_mlperf_sweep.py --config resnet50_mlperf_pod16_bs20 --num_epochs 38 --init_lr 2e-3 --abs_end_lr 1e-3 "
        b"--warmup_epochs 2 --label_smoothing 0.1 --micro_batch_size 20 --grad_accum 3 --num_replicas 64",
    ]  # fmt: skip
    files = [
        b"dataset: cifar10\nmicro_batch_size: 8\nnum-epochs: 2\nlogs_per_epoch: 1/2\n",
        b'{"micro_batch_size": 8, "num_epochs": 1, "global_batch_size": 64, "logs_per_epoch": 2}',
    ]
    training = {"base_lr": {"decoder": 5e-4}, "lr_kwargs": {"epoch_timescale": 30}, "n_epoch": 8, "use_infeed": True,
                "mcmc": {"n_burn_in_steps": 8, "n_leapfrog_steps": 5, "acceptance_target": 0.9}}  # fmt: skip
    args = {"micro_batch_size": 100, "network": {"z_dim": 10}, "n_replicas": 1, "training": training, "testing":
            {"n_iwae_samples_test": 2000, "mcmc": {"hmc_step_size_init": 0.05}}}  # fmt: skip
    vcd = [json.dumps({"model": [{"args": args}], "experiment": {"args": {"testing": True}}}).encode()]
    tried = [
        b"seed=1,2",
        b"weight-decay=log:1e-4..1e-1",
        b"norm-layer={name: group_norm, num_groups: 2}",
        b"lr-schedule-params.power=int:1..9",
    ]
    return [
        Reader("option values", values, of_text(accept)),
        Reader("command lines", lines, of_text(lambda text: resolved(words(text) or ["plan"]))),
        Reader("old command lines", scripts, of_text(compat)),
        Reader("config files of plan", files, config("plan")),
        Reader("config files of cnn train", files, config("cnn", "train")),
        Reader("config files of vcd train", vcd, in_file("old_config.json", old)),
        Reader("plans", files, plan),
        Reader("what a sweep tries", tried, of_text(over)),
        Reader("documents", yaml, of_text(document), (ValueError,)),
        Reader("JSON", [*yaml[1:], *vcd], lambda _, data: parse_json(data), (ValueError,)),
        Reader("paths", [b"~/a/b", b"/a/b.txt"], of_text(expand_path), (ValueError,)),
        Reader("sizes", [b"2GB", b"500 MB", b"1.5GiB", b"none"], of_text(parse_size), (ValueError,)),
        Reader("names of sets", [b"mnist", b"cifar10", b"movielens-100k"], of_text(known_set)),
        Reader(
            "configs",
            [b"1", b"20"],
            of_text(lambda text: build(PlanConfig, {"num_epochs": text, "samples": text})),
        ),
    ]
