"""Benchmark files: YAML in, `Benchmark` values out, or every problem at once with file and line. docs/benchmarks.md
has the format; names mean something only where a key is left out, as older files need it.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hotloop.bench.benchmark import Benchmark, Kind, Variant, fill, fill_known, name_variants, unknown_names
from hotloop.bench.spec_fields import (
    Fields,
    ParameterRow,
    read_derived,
    read_metrics,
    read_output,
    read_parameters,
)
from hotloop.errors import OptionError, one_line
from hotloop.options.document import LONGEST, LocatedMapping, NotYaml, read_located
from hotloop.options.files import expand_path

KEYS = (
    *("cmd", "notebook", "description", "data", "derived", "output", "parameters", "env", "location"),
    *("timeout", "requirements_file", "pre_run_commands", "generated", "synthetic", "allow_wandb"),
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


class SpecError(OptionError):
    """What is wrong in benchmark files: one `FILE:LINE: problem` a line."""

    def __init__(self, text: str):
        Exception.__init__(self, "\n".join(map(one_line, text.split("\n"))))


class Problems:
    """The problems of one file, each kept once: an anchor's mistake is met wherever it is used."""

    def __init__(self, file: Path):
        self.file = file
        self.lines: dict[str, None] = {}

    def __call__(self, line: int, text: str) -> None:
        """Add one; line 0 stands for the whole file."""
        self.lines[one_line(f"{self.file}:{line}: {text}" if line else f"{self.file}: {text}")] = None


def load_benchmarks(files: Sequence[str | Path]) -> dict[str, Benchmark]:
    """The benchmarks of all files by name, in the order of the files; a SpecError if anything is wrong."""
    reports = [Problems(file) for file in {Path(file).resolve(): Path(file) for file in files}.values()]
    benchmarks: dict[str, Benchmark] = {}
    owners: dict[str, Benchmark] = {}
    for report in reports:
        for name, benchmark in _entries(report.file, report).items():
            other = benchmarks.setdefault(name, benchmark)
            if other is not benchmark:
                place = f"{other.file}:{other.line}"
                report(benchmark.line, f"the name '{name}' is taken by {place}; rename one of the two")
                continue
            for (
                variant
            ) in benchmark.variants:  # which name folders and results, so no two may be called alike
                other = owners.setdefault(variant.name, benchmark)
                if other is not benchmark:
                    where = f"{other.name} ({other.file}:{other.line})"
                    report(
                        benchmark.line, f"'{variant.name}' is also a variant of {where}; rename one benchmark"
                    )
    if lines := [line for report in reports for line in report.lines]:
        raise SpecError("\n".join(lines))
    return benchmarks


def _entries(file: Path, report: Problems) -> dict[str, Benchmark]:
    document = None
    try:
        with file.open(encoding="utf-8") as stream:
            document = read_located(stream.read(LONGEST + 1), report)  # which refuses more than LONGEST
    except UnicodeDecodeError:
        report(0, "is not UTF-8 text; a benchmark file is YAML")
    except OSError as error:
        report(0, f"cannot be read: {error.strerror}; give a benchmark file such as benchmarks.yml")
    except NotYaml as error:
        report(error.line or 1, f"no YAML: {error}; check indentation and quotes")
    if not isinstance(document, LocatedMapping):
        if not report.lines:
            report(1, "there are no benchmarks here; a file maps names to entries, each with a cmd")
        return {}
    found = {}
    for name, (line, value) in document.pairs.items():
        if "options" in name:  # defaults for the others, which name them with `<<`
            continue
        if isinstance(value, LocatedMapping):
            found[name] = read_entry(name, line, Fields(value, "", report), file)
        else:
            report(line, f"'{name}' must be a mapping with a cmd")
    return found


def read_entry(name: str, line: int, fields: Fields, file: Path) -> Benchmark:
    """The benchmark that an entry describes; what is wrong with it is reported."""
    fields.refuse_unknown((*KEYS, *IGNORED))
    rows = read_parameters(fields.value("parameters"), fields.report)
    output = read_output(fields)
    metrics = read_metrics(fields, output)
    derived = read_derived(fields, metrics, rows[0], output)
    if ("cmd" in fields) == ("notebook" in fields):
        fields.report(line, "an entry needs a cmd (the command to run), or else a notebook, and not both")
    location = fields.text("location", "")
    said = Benchmark(
        name,
        file,
        line,
        " ".join(fields.text("cmd", "").split("\n")).strip(),
        metrics=metrics,
        derived=derived,
        output=output,
        description=fields.text("description", "").strip(),
        env=fields.mapping_of_texts("env"),
        folder=file.resolve().parent / location,
        timeout=fields.seconds("timeout", None),
        requirements_file=_requirements(file, fields),
        pre_run=fields.texts("pre_run_commands"),
        devices=fields.whole("devices", None, least=1),
        tags=tuple(tag.strip() for text in fields.texts("tags") for tag in text.split(",") if tag.strip()),
        allow_wandb=fields.flag("allow_wandb", False),
        kind=_kind(name, fields),
        skip=_skip(fields),
    )
    variants = [
        Variant(
            variant,
            row,
            fill(said.cmd, row),
            {key: fill(text, row) for key, text in said.env.items()},
            file.resolve().parent / fill(location, row),
            tuple(replace(one, expr=fill_known(one.expr, row)) for one in said.derived),
        )
        for variant, row in name_variants(name, rows).items()
    ]
    notices = _notices(said, rows[0], location, fields)
    needs_dataset = _needs_dataset(said, fields)
    return replace(said, needs_dataset=needs_dataset, variants=tuple(variants), notices=tuple(notices))


def _requirements(file: Path, fields: Fields) -> Path | None:
    """The requirements file where it is: in the folder of the run, else beside the benchmark file."""
    names = {}
    for key in ("requirements_file", "location"):
        names[key] = fields.text(key, "")
        try:
            expand_path(names[key])
        except ValueError as error:  # there can be no file or folder of that name
            names[key] = fields.wrong(key, f"'{names[key]}' {error}", "")
    home, name = file.resolve().parent, names["requirements_file"]
    here = home / names["location"] / name
    return None if not name else here if here.exists() else home / name


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
        notebook = Fields(value, "notebook", fields.report) if isinstance(value, LocatedMapping) else None
        if notebook:
            notebook.refuse_unknown(NOTEBOOK_KEYS)
        name = notebook.text("file", "?") if notebook else fields.text("notebook", "?")
        return f"a notebook ({name}), and hotloop runs commands alone: save it as a script and give its cmd"
    if SERVING_CLIENT in fields.text("cmd", ""):
        return f"a client of a model server ({SERVING_CLIENT}), and hotloop does not serve models yet"
    return None


def _notices(said: Benchmark, row: ParameterRow, location: str, fields: Fields) -> list[str]:
    """What the author may not expect: keys without effect, braces that stay, parameters and labels of nothing."""
    notices = [f"{key} has no effect here" for key in IGNORED if key in fields]
    templates = [said.cmd, location, *said.env.values()]
    stay = dict.fromkeys(name for text in templates for name in unknown_names(text, row))
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
