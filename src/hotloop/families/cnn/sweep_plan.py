"""Which trials a sweep is made of: what they try, the words of each one's command, and what is refused beforehand.

A trial is `hotloop cnn train` with the words that were given to the sweep and the values that it tries. No jax.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from hotloop.engine.run import default_path
from hotloop.errors import HotloopError, MissingExtra, OptionError, did_you_mean
from hotloop.families.cnn.options import TrainConfig
from hotloop.families.cnn.sweep_options import NAMED, OBJECTIVES, NamedSweep, SweepConfig
from hotloop.options import Option, Params, options_of, show_value, to_jsonable
from hotloop.sweeps import bayes
from hotloop.sweeps.journal import Journal, read_about
from hotloop.sweeps.places import SweepConsole
from hotloop.sweeps.space import (
    Choices,
    Space,
    count_combinations,
    draw_values,
    grid_values,
    parse_domain,
    split_over,
)

USUAL_TRIALS = 16
OWN = {each.name for each in fields(SweepConfig)} - {each.name for each in fields(TrainConfig)}
OF_SWEEP = OWN | {"results_dir", "run_name", "resume", "plan", "sweep", "seed", "expect"}
"""What a trial is not told as it was given to the sweep."""
ReadTraining = Callable[[Sequence[str]], TrainConfig]
"""The training that words ask for, as its command line would read them; HotloopError where it would refuse."""


class Context(SweepConsole, Protocol):
    """How the sweep was called: a console that knows its options."""

    @property
    def config(self) -> str | None: ...

    @property
    def config_path(self) -> Path | None: ...

    @property
    def given(self) -> frozenset[str]: ...


@dataclass(frozen=True)
class SweepPlan:
    space: Space
    named: NamedSweep | None
    fixed: Mapping[str, Any]  # what a named sweep does not draw
    base: Mapping[str, Mapping[str, Any]]  # mappings of which single keys are tried
    words: Mapping[str, str]  # option name -> the word that every trial has
    objective: str
    method: str
    seed: int
    count: int
    folder: Path

    @property
    def maximise(self) -> bool:
        return OBJECTIVES[self.objective].maximise

    @property
    def about(self) -> dict[str, Any]:
        """What makes it this sweep and no other; how many trials there are and where they run may change."""
        return {
            "space": to_jsonable(dict(self.space)),
            "fixed": to_jsonable(self.fixed),
            "words": list(self.words.values()),
            "objective": self.objective,
            "seed": self.seed,
        }

    def choose(self, number: int, journal: Journal | None = None) -> dict[str, Any]:
        """The values of a trial, as JSON has them; by `bayes` they depend on the trials that ended before."""
        if self.method == "grid":
            found = grid_values(self.space, number)
        elif self.method == "bayes" and journal is not None:
            known = list(self._known(journal))
            found = bayes.suggest_values(
                self.space, known, maximise=self.maximise, seed=self.seed, number=number
            )
        else:
            found = draw_values(self.space, self.seed, number)
        values: dict[str, Any] = to_jsonable(found)
        return values

    def _known(self, journal: Journal) -> Iterator[bayes.Known]:
        for number, values in journal.begun.items():
            row = journal.rows.get(number)
            if row is None:
                yield bayes.Known(values, None)
            elif row["status"] != "failed":  # which says something about a machine, not about the values
                worst = bayes.worst(self.maximise)
                yield bayes.Known(values, worst if row["objective"] is None else row["objective"])

    def trial_words(self, number: int, values: Mapping[str, Any]) -> tuple[str, ...]:
        """The options of a trial's training."""
        options: dict[str, Any] = {}
        tried = dict(values)
        if self.named is not None:
            parameters = {name: tried.pop(name) for name in self.named.parameters & tried.keys()}
            options = self.named.runner.options({**self.fixed, **parameters})
        for name, value in tried.items():
            option, _, key = name.partition(".")
            if key:
                value = {**options.get(option, self.base.get(option, {})), key: value}
            options[option] = value
        own = {"results_dir": self.folder, "run_name": trial_name(number), "sweep": True, "seed": self.seed}
        made = {name: spell(name, value) for name, value in {**own, **options}.items()}
        return tuple({**self.words, **made}.values())


def describe_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {format_cell(value)}" for name, value in values.items())


def format_cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def trial_name(number: int) -> str:
    return f"trial-{number:03d}"


def spell(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')}={_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(to_jsonable(value))
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    if isinstance(value, Path):
        return str(value.absolute())
    return repr(value) if isinstance(value, float) else str(value)  # every digit of a float


def plan_sweep(config: SweepConfig, context: Context, read: ReadTraining) -> SweepPlan:
    """The sweep, each trial of which its training would take; OptionError else, with the trial's values."""
    named = NAMED.get(config.named or "")
    space = find_space(config, named)
    fixed = _fixed_values(config, context, named, space)
    method, count = _method_and_count(config, named, space, context.warn)
    folder = Path(config.results_dir) / (
        config.run_name or default_path(f"sweep-{config.named or 'over'}").name
    )
    seed = config.seed
    if seed is None:
        seed = int(read_about(folder)["seed"]) if _goes_on(config, folder) else secrets.randbits(32)
    plan = SweepPlan(
        space=space,
        named=named,
        fixed=fixed,
        base=_base_mappings(config, context, fixed, space, read),
        words=_common_words(config, context),
        objective=config.objective or (named.objective if named else "validation_accuracy"),
        method=method,
        seed=seed,
        count=count,
        folder=folder.absolute(),
    )
    for number in range(1, count + 1):
        check_trial(plan, number, read)
    return plan


def _goes_on(config: SweepConfig, folder: Path) -> bool:
    return config.resume and folder.is_dir()


def check_trial(plan: SweepPlan, number: int, read: ReadTraining) -> TrainConfig:
    values = plan.choose(number)
    try:
        return read(plan.trial_words(number, values))
    except HotloopError as error:
        raise OptionError(f"trial {number} ({describe_values(values)}): {error}") from None


def find_space(config: SweepConfig, named: NamedSweep | None) -> dict[str, Any]:
    """What each name of --over may be, after what a named sweep draws."""
    found = dict(named.space) if named else {}
    parameters = named.parameters if named else frozenset()
    for name, text in split_over(config.over).items():
        option = None if name in parameters else _find_option(name, [*parameters])
        own_name = name
        if option is not None and "." not in name:
            own_name = option.name
        if option is not None and option.name in OF_SWEEP - {"seed"}:
            raise OptionError(f"--over {name}: is the sweep's own, not a training's")
        try:
            domain = parse_domain(text, option.kind if option and "." not in name else None)
        except (ValueError, OptionError) as error:
            raise OptionError(f"--over {name} {show_value(text)}: {error}") from None
        if option is not None and "." not in name:
            ends = domain.values if isinstance(domain, Choices) else (domain.low, domain.high)
            for value in ends:
                option.accept(value, f"--over {name}: ")
        found[own_name] = domain
    return found


def _find_option(name: str, parameters: Sequence[str]) -> Option:
    """The option of a training that NAME or NAME.KEY is, by its name or another that it has."""
    options = [each for each in options_of(TrainConfig) if not each.positional]
    known = {each.name: each for each in options}
    known |= {alias.lstrip("-").replace("-", "_"): each for each in options for alias in each.aliases}
    word, _, key = name.partition(".")
    if word not in known:
        names = [each.name for each in options if not each.hidden]
        keyed = [f"{each.name}.KEY" for each in options if each.kind.element is Params]
        hint = (
            did_you_mean(word, [*names, *parameters])
            or f"; keys of a mapping are tried as {', '.join(keyed)}"
        )
        raise OptionError(f"--over {name}: no such option{hint}")
    if key and known[word].kind.element is not Params:
        raise OptionError(f"--over {name}: {known[word].spelling} has no keys; leave out .{key}")
    return known[word]


def _fixed_values(
    config: SweepConfig, context: Context, named: NamedSweep | None, space: Space
) -> dict[str, Any]:
    """What a named sweep keeps, as far as the command line has no word on it; OptionError for what is tried as well."""
    parameters = named.parameters if named else frozenset()
    for name in space:
        option, _, key = name.partition(".")
        if option in context.given and (not key or key in (getattr(config, option) or {})):
            by = f"by {config.named}" if name in parameters else f"by --over {name}"
            raise OptionError(f"--{option.replace('_', '-')}: is given and tried {by}; keep one")
    if named is None:
        return {}
    fixed = {name: value for name, value in named.fixed.items() if name not in space}
    sample = {name: domain.pick(0.0) for name, domain in named.space.items()}
    made = named.runner.options({**named.fixed, **sample})
    for name in context.given - {"config"}:
        if name in fixed:
            fixed[name] = getattr(config, name)
        elif name in made:
            raise OptionError(
                f"--{name.replace('_', '-')}: is made of what {config.named} tries; leave it out, or say --over"
            )
    if context.config is not None:
        fixed["config"] = context.config
    return fixed


def _method_and_count(
    config: SweepConfig, named: NamedSweep | None, space: Space, warn: Callable[[str], None]
) -> tuple[str, int]:
    combinations = count_combinations(space)
    usual = named.method if named else "random" if combinations is None else "grid"
    method = config.method or usual
    if method == "bayes" and not bayes.is_available():
        if config.method:
            raise MissingExtra("optuna", "sweep", "--method bayes")
        warn(
            f"{config.named} chooses by what earlier trials gave, which needs optuna (pip install 'hotloop[sweep]'): "
            "its trials are drawn at random"
        )
        method = "random"
    if method != "grid":
        return method, config.trials or USUAL_TRIALS
    if combinations is None:
        ranges = [name for name, domain in space.items() if not isinstance(domain, Choices)]
        raise OptionError(f"--method grid: {ranges[0]} is a range; give a list, or --method random")
    if (config.trials or 0) > combinations:
        raise OptionError(f"--trials {config.trials}: the lists have only {combinations} combinations")
    return method, config.trials or combinations


def _base_mappings(
    config: SweepConfig, context: Context, fixed: Mapping[str, Any], space: Space, read: ReadTraining
) -> dict[str, Mapping[str, Any]]:
    """The other keys of each mapping of which one is tried: of the command line, the configuration or the default."""
    wanted = {name.partition(".")[0] for name in space if "." in name}
    has_own = context.config is not None or context.config_path is not None or "config" not in fixed
    source: TrainConfig = config
    if wanted and not has_own:
        source = read([spell("config", fixed["config"])])
        own = {name: getattr(config, name) for name in wanted & context.given}
        source = replace(source, **own)
    return {name: getattr(source, name) or {} for name in wanted}


def _common_words(config: SweepConfig, context: Context) -> dict[str, str]:
    """What every trial is told, by the name of the option: what was typed, with paths that are good in any folder."""
    words = {"device": spell("device", context.device)}
    if context.only_accelerator:
        words["only_accelerator"] = "--only-accelerator"
    for name in ("config", "config_path"):
        if getattr(context, name) is not None:
            words[name] = spell(name, getattr(context, name))
    given: Set[str] = context.given - OF_SWEEP
    for each in options_of(TrainConfig):
        value = getattr(config, each.name, config.without_effect.get(each.name, each.default))
        # A path of a configuration is meant as seen from here.
        is_path = each.kind.element is Path and value != each.default and each.name not in OF_SWEEP
        if each.name in given or (is_path and value is not None):
            words[each.name] = spell(each.name, value)
    return words
