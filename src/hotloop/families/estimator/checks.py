"""Checks of what the verbs of an Estimator are called with: one line for what cannot work, before any work is done."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from hotloop.errors import DataError, OptionError
from hotloop.families.estimator.config import EvalSpec, RunConfig, TrainSpec, is_number, is_path, is_whole
from hotloop.families.estimator.hooks import Hook
from hotloop.options import folder_name

HOOK_METHODS = ("begin", "after_call", "on_checkpoint", "end")


OPTIONAL_PARTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model_dir": ("a path", is_path),
    "warm_start_from": ("a path", is_path),
    "say": ("a function", callable),
    "progress": ("a function", callable),
}
"""What each part of an Estimator that may be left out must be, in words and in fact."""


def check_estimator(model_fn: Any, config: Any, params: Any, quiet: Any, **optional: Any) -> None:
    """What an Estimator is made of."""
    if not callable(model_fn):
        raise OptionError(f"Estimator: model_fn must be a function, not {_kind(model_fn)}")
    if config is not None and not isinstance(config, RunConfig):
        raise OptionError(f"Estimator: config must be a RunConfig, not {_kind(config)}")
    if params is not None and not isinstance(params, Mapping):
        raise OptionError(f"Estimator: params must be a dict, not {_kind(params)}")
    for name, value in optional.items():
        wanted, fits = OPTIONAL_PARTS[name]
        if value is not None and not fits(value):
            raise OptionError(f"Estimator: {name}={value!r} must be {wanted}")
    if not isinstance(quiet, bool):
        raise OptionError(f"Estimator: quiet={quiet!r} must be True or False")
    if quiet and (optional["say"] or optional["progress"]):
        raise OptionError(
            "Estimator: quiet=True leaves nothing for say or progress to show: give one or the other"
        )


def check_specs(estimator: Any, kind: type, train_spec: Any, eval_spec: Any) -> None:
    """What train_and_evaluate is called with."""
    for name, value, wanted in (
        ("estimator", estimator, kind),
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
    ):
        if not isinstance(value, wanted):
            article = "an" if wanted is kind else "a"
            raise OptionError(
                f"train_and_evaluate: {name} must be {article} {wanted.__name__}, not {_kind(value)}"
            )
    seconds = eval_spec.throttle_seconds
    if not is_number(seconds) or not seconds >= 0:
        raise OptionError(f"EvalSpec: throttle_seconds={seconds!r} must be a number from 0")
    check_name(eval_spec.name)
    check_repeatable(eval_spec.input_fn)


def check_steps(steps: Any, max_steps: Any = None) -> tuple[int | None, int | None]:
    """The same as Python's numbers: whole ones from 1, and one of the two at most."""
    if steps is not None and max_steps is not None:
        raise OptionError(
            f"steps={steps} and max_steps={max_steps}: the first is how many more, the second how many in all; give one"
        )
    return _count("steps", steps), _count("max_steps", max_steps)


def check_checkpoint(number: Any) -> int | None:
    """The number of a checkpoint, if it is one."""
    if number is not None and not is_whole(number):
        raise OptionError(f"checkpoint={number!r}: must be a whole number")
    return None if number is None else int(number)


def check_name(name: Any) -> None:
    """The name of an evaluation is a part of its folder's, and leads nowhere else."""
    if name is not None and (not isinstance(name, str) or folder_name(f"eval_{name}")):
        raise OptionError(f"name={name!r}: must be a word that can stand in a folder's name, without /")


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not is_whole(value):
        raise OptionError(f"{name}={value!r}: must be a whole number")
    if value < 1:
        raise OptionError(f"{name}={value}: must be at least 1")
    return int(value)


def check_hooks(hooks: Any) -> tuple[Hook, ...]:
    """The hooks, if they are some."""
    if not isinstance(hooks, Iterable):
        raise OptionError(f"hooks={_kind(hooks)}: must be a list of hooks, as hooks=[hook]")
    found = tuple(hooks)
    for hook in found:
        if isinstance(hook, type) or not all(hasattr(hook, name) for name in HOOK_METHODS):
            raise OptionError(
                f"hooks: {_kind(hook)} is no Hook: derive a class from Hook and give an object of it"
            )
    return found


def check_repeatable(input_fn: Any) -> None:
    """Refuse what a second evaluation would find used up."""
    if isinstance(input_fn, Iterator):
        raise DataError(
            "EvalSpec: input_fn is an iterator, which can be gone through once: give arrays, a list of batches, or a "
            "function that makes the iterator anew for each evaluation"
        )


def check_best(config: RunConfig, metrics: Collection[str]) -> None:
    """Refuse a keep_best that no evaluation will give."""
    known = ["loss", *metrics]
    if config.best and config.best[0] not in known:
        raise OptionError(
            f"RunConfig: keep_best={config.keep_best!r} is none of the model's figures: {', '.join(known)}"
        )


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
