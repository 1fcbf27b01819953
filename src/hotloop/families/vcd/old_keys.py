"""The keys of the old program's JSON configurations: which there are, and what each may hold.

`read` flattens a document to values by dotted path, or says in one line which path is unknown or wrong. What a
value means here it does not know, except that a key which is an option here holds what that option holds.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from hotloop.errors import OptionError
from hotloop.families.vcd.config import Train
from hotloop.options import Check, did_you_mean, non_negative, options_of, positive
from hotloop.options.declare import show_value
from hotloop.options.document import Key
from hotloop.options.values import Kind, read_value

MODEL, EXPERIMENT = "model[0].args", "experiment.args"
Reader = Callable[[Any], Any]
"""What makes a key's value out of a file's, or says in a ValueError why it cannot."""

OPTIONS = {
    # The old command line always put its own batch size (100 where none was typed) in place of the file's. Here
    # the rule is that of every option: command line, then file, then default.
    "micro_batch_size": "micro_batch_size",
    "save_checkpoints": "save_checkpoints",
    "network.z_dim": "z_dim",
    "testing.micro_batch_size_test": "test_batch_size",
    "testing.n_iwae_samples_test": "iwae_samples",
    "testing.mcmc.n_burn_in_steps": "burn_in",
    "testing.mcmc.n_hmc_steps": "kept",
    "training.base_lr.decoder": "decoder_rate",
    "training.base_lr.encoder.mean": "encoder_mean_rate",
    "training.base_lr.encoder.std": "encoder_spread_rate",
    "training.control_variate.decay": "variate_decay",
    "training.control_variate.independent_iterations": "shared_updates",
    "training.lr_kwargs.epoch_timescale": "decay_epochs",
    "training.mcmc.acceptance_target": "target_acceptance",
    "training.mcmc.hmc_step_size_init": "step_size",
    "training.mcmc.n_leapfrog_steps": "leapfrog_steps",
    "training.mcmc.step_size_adaption_fn": "adaptation",
    "training.mcmc.step_size_adaption_rate": "adaptation_rate",
    "training.n_epoch": "epochs",
}
"""The keys of model[0].args that are options of their own here."""


def _typed(kind: Kind, check: Check | None = None) -> Reader:
    def reader(value: Any) -> Any:
        result = read_value(kind, value)
        if check and (reason := check(result)):
            raise ValueError(reason)
        return result

    return reader


def _as_option(name: str, value: Any) -> Any:
    """A learning rate that is the empty text is the tuned one, for which the option's word is none."""
    option = next(each for each in options_of(Train) if each.name == name)
    try:
        return option.accept(None if value == "" and option.kind.optional else value)
    except OptionError as error:
        raise ValueError(str(error.__cause__)) from None


def _no_widths(value: Any) -> None:
    if value:
        raise ValueError("must be empty; give the networks' widths with --hidden")


def _no_checkpoint(value: Any) -> None:
    if value and str(value).lower() != "null":
        raise ValueError(
            "the old program's checkpoints cannot be read; use --resume to go on with a run of this one"
        )


def _trains(value: Any) -> None:
    if not FLAG(value):
        raise ValueError("must be true; `hotloop vcd evaluate RUN` evaluates a run without training it")


def _anything(value: Any) -> None:
    """Nothing depends on it."""


FLAG = _typed(Kind(bool))
COUNT, SOME, NUMBER = (
    _typed(Kind(int), non_negative),
    _typed(Kind(int), positive),
    _typed(Kind(float), positive),
)
VCD = _typed(Kind(str, choices=("vcd",)))

DATA: dict[str, Reader] = {
    "data.loading.set": _typed(Kind(str, choices=("binarised_mnist", "mnist", "fashion_mnist"))),
    "data.loading.shuffle_pre_split": FLAG,
    "data.n_validation": COUNT,
}
"""What the old files state twice, for the model and for the experiment."""
INERT = (
    "_evaluate",
    "data.formats.np",
    "data.formats.tf",
    "data.loading.dynamic_binarise",
    "data.loading.shuffle_each_epoch",
    "data.use_tfp_data",
)
"""Read by the old program and without effect there too, or about how it held its arrays."""

MODEL_KEYS: dict[str, Reader] = {
    **{key: partial(_as_option, name) for key, name in OPTIONS.items()},
    **DATA,
    **dict.fromkeys((*INERT, "device", "training.mcmc.hmc_only"), _anything),
    "n_replicas": SOME,
    "network.encoder.name": VCD,
    "network.encoder.kwargs": _no_widths,
    "network.decoder.name": VCD,
    "network.decoder.kwargs": _no_widths,
    "testing.iwae_samples_test_micro_batch_size": SOME,
    "testing.n_epoch_freq_test": SOME,
    "testing.mcmc.use_train_step_size_init": FLAG,
    "testing.mcmc.hmc_step_size_init": NUMBER,
    "testing.mcmc.acceptance_target": NUMBER,
    "testing.mcmc.n_leapfrog_steps": SOME,
    "training.control_variate.use_control_variate": FLAG,
    "training.control_variate.use_local_control_variate": FLAG,
    "training.mcmc.n_burn_in_steps": COUNT,
    "training.mcmc.n_hmc_steps": COUNT,
    "training.n_epoch_freq_val": SOME,
    "training.n_infeed_batches": SOME,
    "training.optimiser_config": VCD,
    "training.use_infeed": FLAG,
}
EXPERIMENT_KEYS: dict[str, Reader] = {
    **DATA,
    **dict.fromkeys(INERT, _anything),
    "checkpoint_path": _no_checkpoint,
    "testing": FLAG,
    "training": _trains,
    "validation": FLAG,
}
KEYS: dict[str, Reader] = {
    **{f"{MODEL}.{key}": reader for key, reader in MODEL_KEYS.items()},
    **{f"{EXPERIMENT}.{key}": reader for key, reader in EXPERIMENT_KEYS.items()},
    **dict.fromkeys(
        (f"model[0].flags.{key}" for key in ("ATTRIBUTE", "MODULE", "NAME", "TUNING")), _anything
    ),
}


def read(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Every value of the document by its path; `where` names the file in errors."""
    models = document["model"]
    if not isinstance(models, list) or len(models) != 1:
        raise OptionError(f"{where}: model: must be a list of one model")
    rest = {key: value for key, value in document.items() if key != "model"}
    return dict(_leaves({"model[0]": models[0], **rest}, "", where))


def _leaves(branch: Mapping[str, Any], path: str, where: str) -> Iterator[tuple[str, Any]]:
    for key, value in branch.items():
        here = f"{where}, line {key.line}" if isinstance(key, Key) else where
        full = f"{path}{key}"
        if full in KEYS:
            yield full, _leaf(full, value, here)
        elif names := _below(f"{full}."):
            if not isinstance(value, Mapping):
                raise OptionError(f"{here}: {full} {show_value(value)}: must hold keys ({', '.join(names)})")
            yield from _leaves(value, f"{full}.", where)
        else:
            raise OptionError(f"{here}: {full}: unknown key{did_you_mean(key, _below(path))}")


def _leaf(path: str, value: Any, here: str) -> Any:
    try:
        return KEYS[path](value)
    except ValueError as error:
        raise OptionError(f"{here}: {path} {show_value(value)}: {error}") from None


def _below(path: str) -> list[str]:
    """The names that may follow a path."""
    return sorted({key.removeprefix(path).split(".")[0] for key in KEYS if key.startswith(path)})
