"""One entry of a benchmark file as a `Benchmark`: its variants, where it runs, and what follows from its name.

Explicit keys decide; names mean something only where a key is left out, as older files need it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hotloop.bench import spec_metrics
from hotloop.bench.model import Benchmark, Derived, Kind, Variant
from hotloop.bench.spec_fields import Fields
from hotloop.bench.spec_parameters import Row, rows
from hotloop.bench.spec_yaml import Pairs, Text
from hotloop.bench.variants import fill, named, unfilled
from hotloop.options.files import expand_path

KEYS = (
    *(
        "cmd",
        "notebook",
        "description",
        "data",
        "derived",
        "output",
        "parameters",
        "env",
        "location",
        "timeout",
    ),
    *("requirements_file", "pre_run_commands", "generated", "synthetic", "allow_wandb"),
    *("kind", "needs_dataset", "devices", "tags"),
)
IGNORED = (
    *("requirements_path", "required_apt_packages", "required_apt_packages_path"),
    *("reference_directory", "repository", "benchmark_path"),
)
"""Keys of older files that had an effect only elsewhere, or none."""
KINDS: dict[str, Kind] = {"throughput": "throughput", "convergence": "convergence"}
NOTEBOOK_KEYS = ("file", "working_directory", "timeout")
LAYERS = ("grouped", "group", "depthwise", "pointwise", "separable", "dilated", "transposed")
SERVING_CLIENT = "send_request.py"


def entry(name: str, line: int, fields: Fields, file: Path) -> Benchmark:
    """The benchmark that an entry describes; what is wrong with it is reported."""
    fields.refuse_unknown((*KEYS, *IGNORED))
    choices = rows(fields.value("parameters"), fields.report)
    output = spec_metrics.output_of(fields)
    metrics = spec_metrics.metrics(fields, output)
    derived = spec_metrics.derived(fields, metrics, choices[0], output)
    said = Benchmark(name, file, line, _cmd(line, fields), metrics=metrics, derived=derived, output=output)
    said = replace(
        said,
        description=fields.text("description", "").strip(),
        env=_env(fields),
        folder=_home(file, fields.text("location", "")),
        timeout=fields.seconds("timeout", None),
        requirements_file=_requirements(file, fields),
        pre_run=fields.texts("pre_run_commands"),
        devices=fields.whole("devices", None, least=1),
        tags=tuple(tag.strip() for text in fields.texts("tags") for tag in text.split(",") if tag.strip()),
        allow_wandb=fields.flag("allow_wandb", False),
        kind=_kind(name, fields),
        skip=_skip(fields),
    )
    return replace(
        said,
        needs_dataset=_needs_dataset(said, fields),
        variants=_variants(said, choices, fields.text("location", "")),
        notices=tuple(_notices(said, choices[0], fields)),
    )


def _home(file: Path, location: str) -> Path:
    return file.resolve().parent / location


def _cmd(line: int, fields: Fields) -> str:
    if ("cmd" in fields) == ("notebook" in fields):
        fields.report(line, "an entry needs a cmd (the command to run), or else a notebook, and not both")
    return " ".join(fields.text("cmd", "").split("\n")).strip()


def _env(fields: Fields) -> dict[str, str]:
    env = {}
    for name, (line, value) in fields.mapping("env").items():
        if isinstance(value, Text):
            env[name] = value.text
        else:
            fields.report(line, f"env.{name} must be a text")
    return env


def _variants(said: Benchmark, choices: Sequence[Row], location: str) -> tuple[Variant, ...]:
    return tuple(
        Variant(
            name,
            row,
            fill(said.cmd, row),
            {key: fill(text, row) for key, text in said.env.items()},
            _home(said.file, fill(location, row)),
            tuple(replace(one, expr=_filled_expression(one, row)) for one in said.derived),
        )
        for name, row in named(said.name, choices).items()
    )


def _filled_expression(one: Derived, row: Mapping[str, str]) -> str:
    """Braces with a parameter's name become its value; those with a metric's name wait for it."""
    return re.sub(r"\{([\w-]+)\}", lambda found: row.get(found[1], found[0]), one.expr)


def _requirements(file: Path, fields: Fields) -> Path | None:
    """The requirements file where it is: in the folder of the run, else beside the benchmark file."""
    name = _path(fields, "requirements_file")
    here = _home(file, _path(fields, "location")) / name
    return None if not name else here if here.exists() else _home(file, name)


def _path(fields: Fields, key: str) -> str:
    """The text of a key that names a file or folder; nothing where there can be none of that name."""
    text = fields.text(key, "")
    try:
        expand_path(text)
    except ValueError as error:
        return fields.wrong(key, f"'{text}' {error}", "")
    return text


def _kind(name: str, fields: Fields) -> Kind:
    """A name that ends in _conv means convergence, but a grouped_conv is a layer."""
    *before, last = name.lower().split("_")
    default: Kind = "convergence" if last == "conv" and before and before[-1] not in LAYERS else "throughput"
    word = fields.text("kind", default)
    if word in KINDS:
        return KINDS[word]
    return fields.wrong("kind", f"must be throughput or convergence, not '{word}'", default)


def _needs_dataset(said: Benchmark, fields: Fields) -> bool:
    """Left out: what DATASETS_DIR is named for, unless the entry or its name says that data are made up."""
    made_up = fields.flag("generated", False) or fields.flag("synthetic", False)
    words = set(re.split(r"[_\W]+", said.name.lower()))
    made_up = made_up or bool(words & {"gen", "synth", "generated", "synthetic"})
    named = any("DATASETS_DIR" in text for text in (said.cmd, *said.env.values(), *said.pre_run))
    return fields.flag("needs_dataset", named and not made_up)


def _skip(fields: Fields) -> str | None:
    value = fields.value("notebook")
    if value is not None:
        notebook = Fields(value, "notebook", fields.report) if isinstance(value, Pairs) else None
        if notebook:
            notebook.refuse_unknown(NOTEBOOK_KEYS)
        name = notebook.text("file", "?") if notebook else fields.text("notebook", "?")
        return f"a notebook ({name}), and hotloop runs commands alone: save it as a script and give its cmd"
    if SERVING_CLIENT in fields.text("cmd", ""):
        return f"a client of a model server ({SERVING_CLIENT}), and hotloop does not serve models yet"
    return None


def _notices(said: Benchmark, row: Row, fields: Fields) -> list[str]:
    """What the author may not expect: keys without effect, braces that stay, parameters and labels of nothing."""
    notices = [f"{key} has no effect here" for key in IGNORED if key in fields]
    templates = [said.cmd, fields.text("location", ""), *said.env.values()]
    stay = dict.fromkeys(name for text in templates for name in unfilled(text, row))
    notices += [f"{{{name}}} is no parameter and stays as it is" for name in stay]
    uses = " ".join([*templates, *(one.expr for one in said.derived)])
    notices += [
        f"the parameter {name} fills nothing in"
        for name in row
        if not re.search(rf"\b{re.escape(name)}\b", uses)
    ]
    known = {metric.name for metric in said.metrics} | {one.name for one in said.derived}
    notices += [f"output names {name}, which is no metric" for _, name in said.output if name not in known]
    return notices
