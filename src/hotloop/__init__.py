"""hotloop: models trained, measured and served as whole programs compiled for the device.

Importing the package costs nothing: no jax, no numpy. What it offers is imported when it is asked for:

* `Program` (many updates in one compiled call), `Resident` and `Streamed` (its data), `Plan`, `train`, `Evaluation`;
* `Estimator` and what belongs to it: train, evaluate and predict for any model;
* `hmc` and `layers`, usable on their own.
"""

from hotloop.version import VERSION

# As `typing` has it, whose import takes longer than all else that comes before signals are heard.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from hotloop import layers as layers
    from hotloop.engine.batch_sources import Streamed as Streamed
    from hotloop.engine.feed import Resident as Resident
    from hotloop.engine.loop import Evaluation as Evaluation
    from hotloop.engine.loop import Program as Program
    from hotloop.engine.plan import Plan as Plan
    from hotloop.engine.training import train as train
    from hotloop.families.estimator.config import EvalSpec as EvalSpec
    from hotloop.families.estimator.config import Mode as Mode
    from hotloop.families.estimator.config import ModelSpec as ModelSpec
    from hotloop.families.estimator.config import RunConfig as RunConfig
    from hotloop.families.estimator.config import TrainSpec as TrainSpec
    from hotloop.families.estimator.estimator import Estimator as Estimator
    from hotloop.families.estimator.estimator import train_and_evaluate as train_and_evaluate
    from hotloop.families.estimator.hooks import EarlyStopping as EarlyStopping
    from hotloop.families.estimator.hooks import Hook as Hook
    from hotloop.families.estimator.inputs import Arrays as Arrays
    from hotloop.families.estimator.keras_model import from_keras as from_keras
    from hotloop.mcmc import hmc as hmc

__version__ = VERSION

_HOMES = {
    "Arrays": "hotloop.families.estimator.inputs",
    "EarlyStopping": "hotloop.families.estimator.hooks",
    "Estimator": "hotloop.families.estimator.estimator",
    "EvalSpec": "hotloop.families.estimator.config",
    "Evaluation": "hotloop.engine.loop",
    "Hook": "hotloop.families.estimator.hooks",
    "Mode": "hotloop.families.estimator.config",
    "ModelSpec": "hotloop.families.estimator.config",
    "Plan": "hotloop.engine.plan",
    "Program": "hotloop.engine.loop",
    "Resident": "hotloop.engine.feed",
    "RunConfig": "hotloop.families.estimator.config",
    "Streamed": "hotloop.engine.batch_sources",
    "TrainSpec": "hotloop.families.estimator.config",
    "from_keras": "hotloop.families.estimator.keras_model",
    "hmc": "hotloop.mcmc.hmc",
    "layers": "hotloop.layers",
    "train": "hotloop.engine.training",
    "train_and_evaluate": "hotloop.families.estimator.estimator",
}
"""The module of each public name, or the module that it is."""


if not TYPE_CHECKING:  # or a checker would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        home = import_module(_HOMES[name])
        return home if home.__name__.endswith(f".{name}") else getattr(home, name)


def __dir__() -> list[str]:
    return ["__version__", *_HOMES]
