"""The estimator family: train, evaluate and predict with a run config, for any model.

The names are looked up when they are used, so that reading options does not import jax.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Arrays": "inputs",
    "Estimator": "estimator",
    "EvalSpec": "spec",
    "Hook": "hooks",
    "Mode": "spec",
    "ModelSpec": "spec",
    "RunConfig": "run_config",
    "TrainSpec": "spec",
    "train_and_evaluate": "estimator",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
