"""The next trial of a sweep by what the earlier ones gave: Optuna's tree-structured Parzen estimator.

The sampler is made anew for each trial from our own journal, so that there is no data base, a sweep may stop and go on
anywhere, and a trial's draw depends on its number and on what was known when it began. Optuna is an extra.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from random import Random
from typing import Any, NamedTuple

from hotloop.options import to_jsonable
from hotloop.sweeps.space import Choices, Space


class Known(NamedTuple):
    """A trial that began before: its values as the journal has them, and what it gave (None: it still runs)."""

    values: Mapping[str, Any]
    result: float | None  # infinite for the worst that can be


def is_available() -> bool:
    return find_spec("optuna") is not None


def suggest_values(
    space: Space, known: Sequence[Known], *, maximise: bool, seed: int, number: int
) -> dict[str, Any]:
    """The values for a trial; the first ten or so are drawn at random."""
    optuna: Any = import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = _distributions(optuna.distributions, space)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that trials at the same time should not be alike is still an experiment there
        sampler = optuna.samplers.TPESampler(
            seed=Random(f"{seed}/{number}/bayes").getrandbits(32), constant_liar=True
        )
    study = optuna.create_study(direction="maximize" if maximise else "minimize", sampler=sampler)
    states = optuna.trial.TrialState
    for each in known:
        params = {name: _parameter(space, name, each.values[name]) for name in space}
        state = states.RUNNING if each.result is None else states.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(
                params=params, distributions=distributions, value=each.result, state=state
            )
        )
    found = study.ask(distributions).params
    return {name: _value(space, name, found[name]) for name in space}


def worst(maximise: bool) -> float:
    return -math.inf if maximise else math.inf


def _distributions(kinds: Any, space: Space) -> dict[str, Any]:
    found = {}
    for name, domain in space.items():
        if isinstance(domain, Choices):
            # By place: a value may be a mapping or a list, which Optuna takes no choices of.
            found[name] = kinds.CategoricalDistribution(tuple(range(len(domain.values))))
        else:
            kind = kinds.IntDistribution if domain.whole else kinds.FloatDistribution
            found[name] = kind(domain.low, domain.high, log=domain.log)
    return found


def _parameter(space: Space, name: str, value: Any) -> Any:
    domain = space[name]
    return to_jsonable(domain.values).index(value) if isinstance(domain, Choices) else value


def _value(space: Space, name: str, parameter: Any) -> Any:
    domain = space[name]
    return domain.values[parameter] if isinstance(domain, Choices) else parameter
