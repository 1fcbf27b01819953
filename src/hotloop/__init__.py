"""hotloop: models trained, measured and served as whole programs compiled for the device.

Importing the package costs nothing: no jax, no numpy. Each room (`engine`, `layers`, `families`, ...) is imported
by name when it is needed, and so is the estimator, whose names are here: `from hotloop import Estimator, RunConfig`.
"""

from hotloop.version import VERSION

# As `typing` has it, whose import takes longer than all else that comes before signals are heard.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from hotloop.families.estimator.config import EvalSpec as EvalSpec
    from hotloop.families.estimator.config import Mode as Mode
    from hotloop.families.estimator.config import ModelSpec as ModelSpec
    from hotloop.families.estimator.config import RunConfig as RunConfig
    from hotloop.families.estimator.config import TrainSpec as TrainSpec
    from hotloop.families.estimator.estimator import Estimator as Estimator
    from hotloop.families.estimator.estimator import train_and_evaluate as train_and_evaluate
    from hotloop.families.estimator.hooks import Hook as Hook
    from hotloop.families.estimator.inputs import Arrays as Arrays

__version__ = VERSION

_HOMES = {
    "Arrays": "hotloop.families.estimator.inputs",
    "Estimator": "hotloop.families.estimator.estimator",
    "EvalSpec": "hotloop.families.estimator.config",
    "Hook": "hotloop.families.estimator.hooks",
    "Mode": "hotloop.families.estimator.config",
    "ModelSpec": "hotloop.families.estimator.config",
    "RunConfig": "hotloop.families.estimator.config",
    "TrainSpec": "hotloop.families.estimator.config",
    "train_and_evaluate": "hotloop.families.estimator.estimator",
}
"""The module of each public name."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *_HOMES]
