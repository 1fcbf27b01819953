"""The old program's JSON configurations, read as options of `hotloop vcd train`.

Most keys are an option under another name; some decide one together; what changed an old run and changes nothing
here is named in one notice. Which keys there are is `old_keys`' business. It reads no files and imports no jax.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from hotloop.errors import OptionError
from hotloop.families.vcd.config import Train
from hotloop.families.vcd.old_keys import DATA, EXPERIMENT, MODEL, OPTIONS, read
from hotloop.options.declare import show_value

HELD_OUT = 10_000
"""Images that the old program kept back for validation: of its 50,000, as many as are kept back here."""
TEST_TARGET = 0.9
"""Acceptance that the evaluation's sampler aims at, in both programs."""
Values = dict[str, Any]


def is_old(document: Any) -> bool:
    """Whether a file has the old program's shape."""
    return isinstance(document, Mapping) and "model" in document and "experiment" in document


def translate(document: Mapping[str, Any], where: str) -> tuple[Values, list[str]]:
    """Values by the names of `Train`'s fields, and what the user should know; `where` names the file."""
    found = read(document, where)
    args, experiment = _under(found, MODEL), _under(found, EXPERIMENT)
    args |= _same_data(args, experiment, where)
    values = {name: args[key] for key, name in OPTIONS.items() if key in args}
    values |= _method(args) | _calls(args) | _decay(args) | _data(args, experiment)
    return values, _notices(args, values, where)


def _under(found: Values, path: str) -> Values:
    return {key.removeprefix(f"{path}."): value for key, value in found.items() if key.startswith(f"{path}.")}


def _same_data(args: Values, experiment: Values, where: str) -> Values:
    """What the experiment says of the data, which must not differ from what the model says."""
    for key in DATA:
        if key in args and key in experiment and args[key] != experiment[key]:
            raise OptionError(
                f"{where}: {MODEL}.{key} {show_value(args[key])}: {EXPERIMENT}.{key} is {show_value(experiment[key])}; "
                "must be the same"
            )
    return {key: experiment[key] for key in DATA if key in experiment}


def _method(args: Values) -> Values:
    """HMC iterations and control variate; without iterations the old program minimised the plain ELBO."""
    burn_in, kept = _iterations(args)
    variate: Values = {}
    if "training.control_variate.use_local_control_variate" in args:
        local = args["training.control_variate.use_local_control_variate"]
        variate = {"control_variate": "local" if local else "global"}
    if burn_in + kept == 0:
        return {"method": "kl", **variate}
    if not args.get("training.control_variate.use_control_variate", True):
        variate = {"method": "vcd-no-cv", "control_variate": "none"}
    # The step size adapted in the iterations called burn-in, and in no others.
    constant = {} if burn_in else {"adaptation": "constant"}
    return {"hmc_steps": burn_in + kept, **variate, **constant}


def _iterations(args: Values) -> tuple[int, int]:
    return args.get("training.mcmc.n_burn_in_steps", 8), args.get("training.mcmc.n_hmc_steps", 0)


def _calls(args: Values) -> Values:
    """The old program looped on the device or not at all; here it always does, for as long as is useful."""
    if args.get("training.use_infeed") and "training.n_infeed_batches" in args:
        return {"updates_per_call": args["training.n_infeed_batches"]}
    return {}


def _decay(args: Values) -> Values:
    """A file that leaves the decay open gets as many decays as 800 epochs have at one in 30."""
    if "training.lr_kwargs.epoch_timescale" in args or "training.n_epoch" not in args:
        return {}
    return {"decay_epochs": Fraction(30 * args["training.n_epoch"], 800)}


def _data(args: Values, experiment: Values) -> Values:
    values = {"data": args["data.loading.set"]} if "data.loading.set" in args else {}
    if "testing" in experiment:
        values["testing"] = experiment["testing"]
    if "data.n_validation" in args or "validation" in experiment:
        values["validation"] = args.get("data.n_validation", 0) > 0 or experiment.get("validation", False)
    return values


def _notices(args: Values, values: Values, where: str) -> list[str]:
    notices = []
    if values.get("method") == "kl":
        notices.append(f"{where}: no HMC iterations, so the method is kl (the usual ELBO)")
    if idle := [f"{key} ({instead})" for key, instead in _idle(args, values)]:
        notices.append(f"{where}: without effect here: {', '.join(idle)}")
    return notices


def _idle(args: Values, values: Values) -> Iterator[tuple[str, str]]:
    """The keys that an old run with these values depended on, and what happens here instead."""
    epochs = values.get("epochs", Train.epochs)
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
        if args.get(key, epochs) < epochs and values.get(wanted, getattr(Train, wanted)):
            yield key, "evaluated once, at the end"
    if min(_iterations(args)) > 0:
        yield "training.mcmc.n_hmc_steps", "the step size adapts in every iteration"
    yield from _idle_in_evaluation(args, values)


def _idle_in_evaluation(args: Values, values: Values) -> Iterator[tuple[str, str]]:
    if "testing.iwae_samples_test_micro_batch_size" in args:
        yield "testing.iwae_samples_test_micro_batch_size", "no result depends on it"
    if "testing.mcmc.hmc_step_size_init" in args and not args.get("testing.mcmc.use_train_step_size_init"):
        yield "testing.mcmc.hmc_step_size_init", "starts with the trained step size"
    if args.get("testing.mcmc.acceptance_target", TEST_TARGET) != TEST_TARGET:
        yield "testing.mcmc.acceptance_target", f"always {TEST_TARGET}"
    leapfrogs = values.get("leapfrog_steps", Train.leapfrog_steps)
    if args.get("testing.mcmc.n_leapfrog_steps", leapfrogs) != leapfrogs:
        yield "testing.mcmc.n_leapfrog_steps", "as many as in training"
