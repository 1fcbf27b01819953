"""Checks of what the verbs of an Estimator are called with: one line for what cannot work, before any work is done."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from os import PathLike
from typing import Any

from hotloop.errors import DataError, OptionError
from hotloop.families.estimator.hooks import Hook
from hotloop.families.estimator.run_config import RunConfig, is_whole
from hotloop.options import folder_name

MOMENTS = ("begin", "after_call", "on_checkpoint", "end")


def check_estimator(model_fn: Any, config: Any, params: Any, model_dir: Any) -> None:
    """What an Estimator is made of."""
    if not callable(model_fn):
        raise OptionError(f"Estimator: model_fn must be a function, not {_kind(model_fn)}")
    if config is not None and not isinstance(config, RunConfig):
        raise OptionError(f"Estimator: config must be a RunConfig, not {_kind(config)}")
    if params is not None and not isinstance(params, Mapping):
        raise OptionError(f"Estimator: params must be a dict, not {_kind(params)}")
    if model_dir is not None and not isinstance(model_dir, str | PathLike):
        raise OptionError(f"Estimator: model_dir={model_dir!r} must be a path")


def check_steps(steps: Any, max_steps: Any = None) -> None:
    """Whole numbers from 1, and one of the two at most."""
    if steps is not None and max_steps is not None:
        raise OptionError(
            f"steps={steps} and max_steps={max_steps}: the first is how many more, the second how many in all; give one"
        )
    for name, value in (("steps", steps), ("max_steps", max_steps)):
        if value is not None:
            _check_count(name, value)


def check_name(name: Any) -> None:
    """The name of an evaluation is a part of its folder's, and leads nowhere else."""
    if name is not None and (not isinstance(name, str) or folder_name(f"eval_{name}")):
        raise OptionError(f"name={name!r}: must be a word that can stand in a folder's name, without /")


def _check_count(name: str, value: Any) -> None:
    if not is_whole(value):
        raise OptionError(f"{name}={value!r}: must be a whole number")
    if value < 1:
        raise OptionError(f"{name}={value}: must be at least 1")


def checked_hooks(hooks: Any) -> tuple[Hook, ...]:
    """The hooks, if they are some."""
    if not isinstance(hooks, Iterable):
        raise OptionError(f"hooks={_kind(hooks)}: must be a list of hooks, as hooks=[hook]")
    found = tuple(hooks)
    for hook in found:
        if isinstance(hook, type) or not all(hasattr(hook, name) for name in MOMENTS):
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
