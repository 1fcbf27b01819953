"""`hotloop export`: a run's checkpoint as a folder that `hotloop serve` answers from. jax waits."""

from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hotloop import rehearsal
from hotloop.cli.command import Command, Context, Result
from hotloop.errors import CheckpointError, ModelError, OptionError
from hotloop.families.cnn.options import TrainConfig
from hotloop.families.cnn.presets import NETWORK_FILE, PRESETS, RUN_CONFIG
from hotloop.options import argument, non_negative, option, positive

if TYPE_CHECKING:
    from hotloop.engine.exportable import Exportable

FAMILIES = ("cnn", "recommender", "vcd", "estimator")
OF_CONFIG = {
    "recommender": ("users", "items", "drops"),
    "vcd": ("images", "method", "data"),
    "estimator": ("model_fn", "params"),
    "cnn": ("model_name", "dataset"),
}
"""Keys that tell whose config.json one is, where there is no checkpoint to ask."""
OF_FAMILIES = {
    "top": ("cnn", "recommender"),
    "weights": ("cnn",),
    "with_users": ("recommender",),
    "max_ratings": ("recommender",),
}
"""Options that only these families' models have."""
_export = partial(option, group="Export")
EPILOG = """Examples:
  hotloop export results/cifar_resnet8-... -o models          the newest checkpoint as models/cifar_resnet8/1
  hotloop export results/cifar_resnet8-... -o models --best   the one that validated best, as the next version
  hotloop export results/recommender-... -o models --with-users --top 20
  hotloop export --config resnet50_infer_bs16 -o models       random weights, to measure a server with
  hotloop export --refresh models/cifar_resnet8/1             a new program for a newer jax, from the folder alone

docs/serving.md has what lies in the folder, and what each family takes and gives."""


@dataclass(frozen=True)
class ExportConfig(TrainConfig):
    """What to export and where to; the options of `hotloop cnn train` are for a network without a checkpoint."""

    run: Path | None = argument(
        "Folder of a run, of its checkpoints, or of one of them; of the estimator, its MODEL_DIR.",
        default=None,
        metavar="RUN",
    )
    output: Path | None = _export(
        None, "Folder for models: DIR/NAME/VERSION is made.", aliases=("-o",), metavar="DIR"
    )
    step: int | None = _export(
        None, "Checkpoint after so many updates; left out, the newest.", check=non_negative
    )
    best: bool = _export(False, "The checkpoint that validated best.")
    name: str | None = _export(None, "What the model is called; left out, what the network is.")
    version: int | None = _export(None, "Its version; left out, the next free number.", check=positive)
    max_batch: int | None = _export(
        None,
        "Rows of the largest batch; left out, 64, or a configuration's micro-batch.",
        check=positive,
    )
    ladder: tuple[int, ...] | None = _export(
        None, "Batch sizes to compile, rising; left out, 1, 2, 4, ... up to --max-batch.", check=positive
    )
    top: int | None = _export(
        None, "So many of the likeliest classes (left out, 5), or items (left out, 10).", check=positive
    )
    weights: Literal["auto", "raw", "ema"] = _export(
        "auto",
        "cnn: raw, those that were trained; ema, their averages; auto, averages where the run has them (--ema).",
    )
    max_ratings: int | None = _export(
        None, "recommender: ratings that a user may send; left out, 512.", check=positive
    )
    with_users: bool = _export(
        False, "recommender: put the training ratings inside, so that `user` may stand for them."
    )
    format: Literal["hotloop", "savedmodel"] = _export(
        "hotloop", "savedmodel: besides, in the same folder, a SavedModel for TensorFlow Serving."
    )
    refresh: Path | None = _export(
        None, "A model's folder: make its program anew for this jax, as its next version.", metavar="DIR"
    )

    def check(self) -> None:
        super().check()
        rising = self.ladder is None or list(self.ladder) == sorted(set(self.ladder))
        if self.ladder is not None and not (self.ladder and rising):
            raise OptionError(f"--ladder {','.join(map(str, self.ladder))}: must rise, such as 1,2,4,8")
        if self.ladder and self.max_batch not in (None, self.ladder[-1]):
            raise OptionError(f"--max-batch {self.max_batch}: --ladder ends with {self.ladder[-1]}; keep one")
        if self.best and self.step is not None:
            raise OptionError(f"--step {self.step}: --best chooses the step; keep one")

    def rungs(self, largest: int) -> tuple[int, ...]:
        """The ladder; `largest` is its end where nobody named one."""
        from hotloop.engine.model_folder import make_ladder

        return self.ladder or make_ladder(self.max_batch or largest)


OWN = frozenset(each.name for each in fields(ExportConfig)) - {each.name for each in fields(TrainConfig)}
"""The options that `cnn train` has not."""
COMMON = frozenset({"device", "only_accelerator", "json", "debug", "print_config"})


def run_export(config: ExportConfig, context: Context) -> Result:
    """Write the model's folder and compare it in a fresh process; nothing is left where that fails."""
    if config.refresh is not None:
        return refresh(config, context)
    config = find_checkpoint(config)
    family = _check_before_device(config, context)
    from hotloop.engine.model_folder import LARGEST_BATCH
    from hotloop.engine.model_place import check_place

    check_extras(config)
    assert config.output is not None
    check_place(config.output, config.name or expected_name(family, config), config.version)
    rehearsal.begin_work(f"exporting to {config.output}")
    context.open_device()
    check_alone()
    if config.run is None:
        exportable = import_module("hotloop.families.cnn.export").from_options(config, top=config.top)
    else:
        exportable = _read_run(family, config)
    largest = config.micro_batch_size if config.run is None else LARGEST_BATCH
    return _write(exportable, config.output, config.name, config.rungs(largest), config, context)


def _check_before_device(config: ExportConfig, context: Context) -> str:
    """The family of what is to be exported; OptionError, or CheckpointError, for what needs no device to be refused."""
    if config.output is None:
        raise OptionError("-o DIR is needed: the folder in which the model gets its own")
    if config.run is None:
        if context.config is None and "model_name" not in context.given:
            raise OptionError("RUN is needed: the folder of a run or of its checkpoints; or --config NAME")
        if config.best or config.step is not None or config.weights != "auto":
            raise OptionError("--best, --step and --weights choose what a run has: they need RUN")
        family = "cnn"
    else:
        others = sorted(context.given - OWN - COMMON - {"config"})
        if others or context.config is not None:
            named = f"--{others[0].replace('_', '-')}" if others else f"--config {context.config}"
            raise OptionError(f"{named}: RUN {config.run} has its own; it is for an export without a RUN")
        family = find_family(config.run)
    for name, owners in OF_FAMILIES.items():
        if name in context.given and family not in owners:
            raise OptionError(
                f"--{name.replace('_', '-')}: is for {' and '.join(owners)}, and {config.run or 'this'} is of {family}"
            )
    return family


def expected_name(family: str, config: ExportConfig) -> str | None:
    """What the model will be called, where that is known before a checkpoint is read."""
    if family == "cnn":
        return config.model_name if config.run is None else None
    return None if family == "estimator" else family


def check_extras(config: ExportConfig) -> None:
    """MissingExtra where a package is lacking that the formats asked for need."""
    from hotloop.engine.exported_program import check_serialisable
    from hotloop.serve.saved_model import import_tensorflow

    check_serialisable()
    if config.format == "savedmodel":
        import_tensorflow()


def check_alone() -> None:
    """OptionError in one of several processes: each would write a version of its own."""
    from hotloop.engine import processes

    if processes.count() > 1:
        raise OptionError(
            "hotloop export: is one process, whatever number has trained; run it without hotloop launch"
        )


def find_checkpoint(config: ExportConfig) -> ExportConfig:
    """The run whose checkpoints `run` is, or one of whose steps, which is then the step; else the same. OptionError for
    another step besides."""
    from hotloop.engine.checkpoint_folder import MANIFEST, read_manifest

    path, step = config.run, config.step
    if path is None:
        return config
    if (path / MANIFEST).is_file():
        found = read_manifest(path).step
        if config.best or step not in (None, found):
            raise OptionError(f"{path}: is one checkpoint, that of step {found}; leave out --step and --best")
        path, step = path.absolute().parent, found
    if path.name == "checkpoints" and (path.parent / RUN_CONFIG).exists():
        path = path.parent
    return replace(config, run=path, step=step)


def find_family(run: Path) -> str:
    """Whose run it is: by its checkpoints, else by its config.json; CheckpointError where it is nobody's."""
    from hotloop.engine.checkpoint_folder import DamagedStep, find_steps, read_manifest
    from hotloop.engine.run import read_json

    if not run.is_dir():
        raise CheckpointError(f"{run}: no such folder; give a run's folder or its folder of checkpoints")
    for folder in (run, run / "checkpoints"):
        if (folder / NETWORK_FILE).exists():
            return "cnn"
        for step in find_steps(folder).values():
            try:
                family = read_manifest(step).family
            except DamagedStep:
                continue
            if family in FAMILIES:
                return family
    keys = read_json(run / RUN_CONFIG) if (run / RUN_CONFIG).exists() else {}
    for family, needed in OF_CONFIG.items():
        if all(key in keys for key in needed):
            return family
    what = "has no checkpoint" if keys else f"is no run's folder (no {RUN_CONFIG} there)"
    raise CheckpointError(f"{run}: {what}; give a run that has saved one, or a folder of checkpoints")


def _read_run(family: str, config: ExportConfig) -> "Exportable":
    module = import_module(f"hotloop.families.{family}.export")
    settings: dict[str, Any] = {"step": config.step, "best": config.best}
    if family in ("cnn", "recommender"):
        settings["top"] = config.top
    if family == "cnn":
        settings["weights"] = config.weights
    if family == "recommender":
        settings |= {"max_ratings": config.max_ratings, "with_users": config.with_users}
    found: Exportable = module.from_run(config.run, **settings)
    return found


def _write(
    exportable: "Exportable",
    output: Path,
    name: str | None,
    ladder: tuple[int, ...],
    config: ExportConfig,
    context: Context,
) -> Result:
    from hotloop.engine.model_folder import write_model
    from hotloop.serve.saved_model import write_saved_model

    extend = write_saved_model if config.format == "savedmodel" else None
    for line in exportable.warnings:
        context.warn(line)
    with context.progress("exporting and comparing"):
        folder, programs = write_model(
            exportable, output, name=name, version=config.version, ladder=ladder, extend=extend
        )
    for line in programs.notices:
        context.warn(line)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    context.say(
        f"{folder}: {size:,} bytes, batches of {', '.join(map(str, ladder))}; compared in a fresh process"
    )
    return {
        "folder": str(folder),
        "name": folder.parent.name,
        "version": int(folder.name),
        "bytes": size,
        "ladder": list(ladder),
        "platforms": list(programs.platforms),
        "warnings": [*exportable.warnings, *programs.notices],
    }


def refresh(config: ExportConfig, context: Context) -> Result:
    """A new version of a model whose program is made by this jax, from the folder's own weights and config."""
    if extra := sorted(context.given - COMMON - {"refresh", "version", "format"}):
        named = "RUN" if extra[0] == "run" else f"--{extra[0].replace('_', '-')}"
        raise OptionError(f"{named}: --refresh takes all from the folder; leave it out")
    from hotloop.engine import model_folder, model_place, weights_file

    check_extras(config)
    assert config.refresh is not None
    folder = config.refresh
    if versions := model_place.versions_in(folder):
        folder = versions[max(versions)]
    about = model_folder.read_about(folder)
    family = about.get("family")
    if about.get("config") is None or family not in FAMILIES:
        raise ModelError(
            f"{folder}: was exported from a program of your own, which alone can make it anew: run that"
        )
    output = folder.absolute().parent.parent
    model_place.check_place(output, about["name"], config.version)
    context.open_device()
    check_alone()
    signature = model_folder.parse_signature(about["signature"])
    weights = weights_file.parse_weights(model_folder.read_file(folder, about, weights_file.WEIGHTS))
    data = model_folder.read_file(folder, about, model_folder.EXAMPLES)
    inputs, answers = model_folder.parse_examples(data, signature)
    module = import_module(f"hotloop.families.{family}.export")
    exportable = module.rebuild(about, weights_file.nest(weights), inputs)
    _compare_with_old(exportable, answers, folder)
    return _write(exportable, output, about["name"], tuple(about["ladder"]), config, context)


def _compare_with_old(exportable: "Exportable", answers: Any, folder: Path) -> None:
    from hotloop.engine.model_folder import answer_examples
    from hotloop.serve.artefact import find_disagreement

    if reason := find_disagreement(answers, answer_examples(exportable), exportable.tolerance):
        raise ModelError(f"{folder}: made anew it answers its examples otherwise: {reason}")


COMMAND = Command(config=ExportConfig, run=run_export, presets=PRESETS, epilog=EPILOG, first_group="Export")
