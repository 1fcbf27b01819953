"""The old program's JSON configurations, read as options of `hotloop vcd train`.

Most keys are an option under another name; some decide one together; what changed an old run and changes nothing here
is named in one notice.
"""

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

from hotloop.errors import OptionError, did_you_mean
from hotloop.families.vcd.config import VcdTrain
from hotloop.options import Check, Kind, non_negative, options_of, positive, read_value, show_value
from hotloop.options.document import Key

MODEL, EXPERIMENT = "model[0].args", "experiment.args"
HELD_OUT = 10_000
"""Images that the old program kept back for validation: of its 50,000, as many as are kept back here."""
TEST_TARGET = 0.9  # acceptance that the evaluation's sampler aims at, in both programs
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
    option = next(each for each in options_of(VcdTrain) if each.name == name)
    try:
        return option.accept(None if value == "" and option.kind.optional else value)
    except OptionError as error:
        raise ValueError(str(error.__cause__)) from None


def _must(holds: Callable[[Any], Any], reason: str) -> Reader:
    """Of a key that is checked and has no value here."""

    def reader(value: Any) -> None:
        if not holds(value):
            raise ValueError(reason)

    return reader


FLAG = _typed(Kind(bool))
COUNT, SOME = _typed(Kind(int), non_negative), _typed(Kind(int), positive)
NUMBER = _typed(Kind(float), positive)
VCD = _typed(Kind(str, choices=("vcd",)))
ANYTHING = _must(lambda value: True, "")
NO_WIDTHS = _must(lambda value: not value, "must be empty; give the networks' widths with --hidden")

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
    **dict.fromkeys((*INERT, "device", "training.mcmc.hmc_only"), ANYTHING),
    "n_replicas": SOME,
    "network.encoder.name": VCD,
    "network.encoder.kwargs": NO_WIDTHS,
    "network.decoder.name": VCD,
    "network.decoder.kwargs": NO_WIDTHS,
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
    **dict.fromkeys(INERT, ANYTHING),
    "checkpoint_path": _must(
        lambda value: not value or str(value).lower() == "null",
        "the old program's checkpoints cannot be read; use --resume to go on with a run of this one",
    ),
    "testing": FLAG,
    "training": _must(FLAG, "must be true; `hotloop vcd evaluate RUN` evaluates a run without training it"),
    "validation": FLAG,
}
KEYS: dict[str, Reader] = {
    **{f"{MODEL}.{key}": reader for key, reader in MODEL_KEYS.items()},
    **{f"{EXPERIMENT}.{key}": reader for key, reader in EXPERIMENT_KEYS.items()},
    **dict.fromkeys((f"model[0].flags.{key}" for key in ("ATTRIBUTE", "MODULE", "NAME", "TUNING")), ANYTHING),
}


def _leaves(branch: Mapping[str, Any], path: str, where: str) -> Iterator[tuple[str, Any]]:
    """Every value by its path, or one line that says which path is unknown or wrong."""

    def below(path: str) -> list[str]:
        return sorted({key.removeprefix(path).split(".")[0] for key in KEYS if key.startswith(path)})

    for key, value in branch.items():
        here = f"{where}, line {key.line}" if isinstance(key, Key) else where
        full = f"{path}{key}"
        if full in KEYS:
            try:
                yield full, KEYS[full](value)
            except ValueError as error:
                raise OptionError(f"{here}: {full} {show_value(value)}: {error}") from None
        elif names := below(f"{full}."):
            if not isinstance(value, Mapping):
                raise OptionError(f"{here}: {full} {show_value(value)}: must hold keys ({', '.join(names)})")
            yield from _leaves(value, f"{full}.", where)
        else:
            raise OptionError(f"{here}: {full}: unknown key{did_you_mean(key, below(path))}")


def translate(document: Any, where: str) -> tuple[Any, list[str]]:
    """Values by the names of `VcdTrain`'s fields, and what the user should know; `where` names the file.

    A document that has not the old program's shape is handed back as it is.
    """
    if not (isinstance(document, Mapping) and "model" in document and "experiment" in document):
        return document, []
    models = document["model"]
    if not isinstance(models, list) or len(models) != 1:
        raise OptionError(f"{where}: model: must be a list of one model")
    rest = {key: value for key, value in document.items() if key != "model"}
    found = dict(_leaves({"model[0]": models[0], **rest}, "", where))
    args, experiment = (
        {key.removeprefix(path): value for key, value in found.items() if key.startswith(path)}
        for path in (f"{MODEL}.", f"{EXPERIMENT}.")
    )
    for key in DATA:
        if key in experiment and args.setdefault(key, experiment[key]) != experiment[key]:
            raise OptionError(
                f"{where}: {MODEL}.{key} {show_value(args[key])}: {EXPERIMENT}.{key} is {show_value(experiment[key])}; "
                "must be the same"
            )
    values = {name: args[key] for key, name in OPTIONS.items() if key in args}
    if "training.control_variate.use_local_control_variate" in args:
        local = args["training.control_variate.use_local_control_variate"]
        values["control_variate"] = "local" if local else "global"
    burn_in, kept = args.get("training.mcmc.n_burn_in_steps", 8), args.get("training.mcmc.n_hmc_steps", 0)
    if burn_in + kept == 0:  # then the old program minimised the plain ELBO
        values["method"] = "kl"
    else:
        values["hmc_steps"] = burn_in + kept
        if not args.get("training.control_variate.use_control_variate", True):
            values |= {"method": "vcd-no-cv", "control_variate": "none"}
        if not burn_in:  # the step size adapted in the iterations called burn-in, and in no others
            values["adaptation"] = "constant"
    # The old program looped on the device or not at all; here it always does, for as long as is useful.
    if args.get("training.use_infeed") and "training.n_infeed_batches" in args:
        values["updates_per_call"] = args["training.n_infeed_batches"]
    # A file that leaves the decay open gets as many decays as 800 epochs have at one in 30.
    if "training.lr_kwargs.epoch_timescale" not in args and "training.n_epoch" in args:
        values["decay_epochs"] = Fraction(30 * args["training.n_epoch"], 800)
    if "data.loading.set" in args:
        values["data"] = args["data.loading.set"]
    if "testing" in experiment:
        values["testing"] = experiment["testing"]
    if "data.n_validation" in args or "validation" in experiment:
        values["validation"] = args.get("data.n_validation", 0) > 0 or experiment.get("validation", False)
    notices = []
    if values.get("method") == "kl":
        notices.append(f"{where}: no HMC iterations, so the method is kl (the usual ELBO)")
    if idle := [f"{key} ({instead})" for key, instead in _idle(args, values)]:
        notices.append(f"{where}: without effect here: {', '.join(idle)}")
    return values, notices


def _idle(args: dict[str, Any], values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The keys that an old run with these values depended on, and what happens here instead."""
    epochs = values.get("epochs", VcdTrain.epochs)
    if args.get("n_replicas", 1) > 1:
        yield "n_replicas", "one device is used"
    if args.get("data.loading.shuffle_pre_split"):
        yield "data.loading.shuffle_pre_split", "the last images are kept back"
    if args.get("data.n_validation", 0) not in (0, HELD_OUT):
        yield "data.n_validation", "one training image in five is kept back"
    for key, wanted in (
        ("training.n_epoch_freq_val", "validation"),
        ("testing.n_epoch_freq_test", "testing"),
    ):
        if args.get(key, epochs) < epochs and values.get(wanted, getattr(VcdTrain, wanted)):
            yield key, "evaluated once, at the end"
    if args.get("training.mcmc.n_burn_in_steps", 8) > 0 and args.get("training.mcmc.n_hmc_steps", 0) > 0:
        yield "training.mcmc.n_hmc_steps", "the step size adapts in every iteration"
    if "testing.iwae_samples_test_micro_batch_size" in args:
        yield "testing.iwae_samples_test_micro_batch_size", "no result depends on it"
    if "testing.mcmc.hmc_step_size_init" in args and not args.get("testing.mcmc.use_train_step_size_init"):
        yield "testing.mcmc.hmc_step_size_init", "starts with the trained step size"
    if args.get("testing.mcmc.acceptance_target", TEST_TARGET) != TEST_TARGET:
        yield "testing.mcmc.acceptance_target", f"always {TEST_TARGET}"
    leapfrogs = values.get("leapfrog_steps", VcdTrain.leapfrog_steps)
    if args.get("testing.mcmc.n_leapfrog_steps", leapfrogs) != leapfrogs:
        yield "testing.mcmc.n_leapfrog_steps", "as many as in training"
