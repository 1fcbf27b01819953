"""Benchmark files: YAML in, `Benchmark` values out, or every problem at once with file and line. docs/benchmarks.md
has the format; names mean something only where a key is left out, as older files need it.
"""

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TypeVar

from hotloop.bench.benchmark import BRACES, Benchmark, Derived, Kind, Metric, Variant, fill, name_variants
from hotloop.bench.expressions import ExpressionError, check_expression
from hotloop.bench.metrics import REDUCTIONS, is_reduction
from hotloop.errors import OptionError, did_you_mean, one_line
from hotloop.options import (
    expand_path,
)
from hotloop.options.document import (
    LONGEST,
    LocatedList,
    LocatedMapping,
    LocatedPair,
    LocatedText,
    LocatedValue,
    NotYaml,
    ReportProblem,
    read_located,
)

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
FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
TIME_UNITS = ("s", "ms", "us", "sec", "secs", "seconds", "minutes", "hours")
UNITS = (*TIME_UNITS, "%", "percent", "nats", "TFLOPs", "GB")
KINDS: dict[str, Kind] = {"throughput": "throughput", "convergence": "convergence"}
LAYERS = ("grouped", "group", "depthwise", "pointwise", "separable", "dilated", "transposed")
MOST_VARIANTS = 10_000
Output = tuple[tuple[str, str], ...]
ParameterRow = dict[str, str]
T = TypeVar("T")


class SpecError(OptionError):
    """What is wrong in benchmark files: one `FILE:LINE: problem` a line."""

    def __init__(self, text: str):
        Exception.__init__(self, "\n".join(map(one_line, text.split("\n"))))


def load_benchmarks(files: Sequence[str | Path]) -> dict[str, Benchmark]:
    """The benchmarks of all files by name, in the order of the files; a SpecError if anything is wrong."""
    problems: dict[str, None] = {}  # each once: an anchor's mistake is met wherever it is used
    benchmarks: dict[str, Benchmark] = {}
    owners: dict[str, Benchmark] = {}
    for file in {Path(file).resolve(): Path(file) for file in files}.values():

        def report(line: int, text: str, file: Path = file) -> None:
            problems[one_line(f"{file}:{line}: {text}" if line else f"{file}: {text}")] = None

        count, document, found = len(problems), _read_document(file, report), {}
        if not isinstance(document, LocatedMapping):
            if len(problems) == count:
                report(1, "there are no benchmarks here; a file maps names to entries, each with a cmd")
            continue
        for name, (line, value) in document.pairs.items():
            if "options" in name:  # defaults for the others, which name them with `<<`
                continue
            if isinstance(value, LocatedMapping):
                found[name] = read_entry(name, line, Fields(value, "", report), file)
            else:
                report(line, f"'{name}' must be a mapping with a cmd")
        for name, benchmark in found.items():
            other = benchmarks.setdefault(name, benchmark)
            if other is not benchmark:
                place = f"{other.file}:{other.line}"
                report(benchmark.line, f"the name '{name}' is taken by {place}; rename one of the two")
                continue
            for variant in benchmark.variants:  # they name folders and results, so no two may be called alike
                other = owners.setdefault(variant.name, benchmark)
                if other is not benchmark:
                    same = f"'{variant.name}' is also a variant of {other.name} ({other.file}:{other.line})"
                    report(benchmark.line, f"{same}; rename one benchmark")
    if problems:
        raise SpecError("\n".join(problems))
    return benchmarks


def _read_document(file: Path, report: ReportProblem) -> LocatedValue | None:
    try:
        with file.open(encoding="utf-8") as stream:
            return read_located(stream.read(LONGEST + 1), report)  # which refuses more than LONGEST
    except UnicodeDecodeError:
        report(0, "is not UTF-8 text; a benchmark file is YAML")
    except OSError as error:
        report(0, f"cannot be read: {error.strerror}; give a benchmark file such as benchmarks.yml")
    except NotYaml as error:
        report(error.line or 1, f"no YAML: {error}; check indentation and quotes")
    return None


class Fields:
    """The keys of one mapping as typed values; `place` is how the file's author would call it, such as `data.loss`.

    A value that does not fit is reported with its line and replaced by the default, so that reading goes on.
    """

    def __init__(self, pairs: LocatedMapping, place: str, report: ReportProblem):
        self.pairs, self.place, self.report = pairs.pairs, place, report

    def __contains__(self, key: str) -> bool:
        pair = self.pairs.get(key)
        return pair is not None and not (isinstance(pair.value, LocatedText) and pair.value.is_null)

    def wrong(self, key: str, why: str, default: T) -> T:
        self.report(self.pairs[key].line, f"{self.place + '.' if self.place else ''}{key} {why}")
        return default

    def refuse_unknown(self, known: Sequence[str]) -> None:
        where = f" in {self.place}" if self.place else ""
        for key, pair in self.pairs.items():
            if key not in known:
                self.report(pair.line, f"unknown key '{key}'{where}{did_you_mean(key, known)}")

    def value(self, key: str) -> LocatedValue | None:
        return self.pairs[key].value if key in self else None

    def text(self, key: str, default: T) -> str | T:
        value = self.value(key)
        if value is None or isinstance(value, LocatedText):
            return value.text if value else default
        return self.wrong(key, "must be a text", default)

    def flag(self, key: str, default: bool = False) -> bool:
        word = self.text(key, "").lower()
        if not word or word in FLAGS:
            return FLAGS.get(word, default)
        return self.wrong(key, f"must be true or false, not '{word}'", default)

    def whole(self, key: str, default: T, least: int) -> int | T:
        text = self.text(key, "")
        if not text:
            return default
        if text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least:
            return int(text)
        return self.wrong(key, f"must be a whole number from {least}, not '{text}'", default)

    def seconds(self, key: str) -> float | None:
        text = self.text(key, "")
        with suppress(ValueError):
            if not text or 0 < float(text) < math.inf:
                return float(text) if text else None
        return self.wrong(key, f"must be a number of seconds above 0, not '{text}'", None)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of scalars; a single one is a list of one."""
        value = self.value(key)
        items = value.items if isinstance(value, LocatedList) else () if value is None else (value,)
        texts = tuple(item.text for item in items if isinstance(item, LocatedText))
        return texts if len(texts) == len(items) else self.wrong(key, "must be a list of texts", ())

    def mapping(self, key: str) -> dict[str, LocatedPair]:
        value = self.value(key)
        if value is None or isinstance(value, LocatedMapping):
            return dict(value.pairs) if value else {}
        return self.wrong(key, "must be a mapping", {})

    def parts(self, key: str) -> dict[str, "Fields"]:
        """The mappings in a mapping: `data` and `derived`; an empty place is an empty mapping."""
        parts = {}
        for name, (line, value) in self.mapping(key).items():
            if isinstance(value, LocatedText) and value.is_null:
                value = LocatedMapping({}, value.line)
            if isinstance(value, LocatedMapping):
                parts[name] = Fields(value, f"{key}.{name}", self.report)
            else:
                self.report(line, f"{key}.{name} must be a mapping")
        return parts


def read_entry(name: str, line: int, fields: Fields, file: Path) -> Benchmark:
    fields.refuse_unknown((*KEYS, *IGNORED))
    rows = read_parameters(fields.value("parameters"), fields.report)
    output = _read_output(fields)
    metrics = _read_metrics(fields, output)
    derived = _read_derived(fields, [*rows[0], *(metric.name for metric in metrics)], output)
    if ("cmd" in fields) == ("notebook" in fields):
        fields.report(line, "an entry needs a cmd (the command to run), or else a notebook, and not both")
    home, location = file.resolve().parent, fields.text("location", "")
    env = {}
    for variable, (place, value) in fields.mapping("env").items():
        if isinstance(value, LocatedText):
            env[variable] = value.text
        else:
            fields.report(place, f"env.{variable} must be a text")
    said = Benchmark(
        name,
        file,
        line,
        " ".join(fields.text("cmd", "").split("\n")).strip(),
        metrics=metrics,
        derived=derived,
        output=output,
        description=fields.text("description", "").strip(),
        env=env,
        folder=home / location,
        timeout=fields.seconds("timeout"),
        requirements_file=_requirements(home, fields),
        pre_run=fields.texts("pre_run_commands"),
        devices=fields.whole("devices", None, least=1),
        tags=tuple(tag.strip() for text in fields.texts("tags") for tag in text.split(",") if tag.strip()),
        allow_wandb=fields.flag("allow_wandb"),
    )
    # A name that ends in _conv means convergence, but a grouped_conv is a layer.
    *before, last = name.lower().split("_")
    kind: Kind = "convergence" if last == "conv" and before and before[-1] not in LAYERS else "throughput"
    if (word := fields.text("kind", kind)) not in KINDS:
        fields.wrong("kind", f"must be throughput or convergence, not '{word}'", None)
    said = replace(said, kind=KINDS.get(word, kind), skip=_skip(fields))
    variants = [
        Variant(
            variant,
            row,
            fill(said.cmd, row),
            {key: fill(text, row) for key, text in env.items()},
            home / fill(location, row),
            tuple(replace(one, expr=fill(one.expr, row)) for one in derived),
        )
        for variant, row in name_variants(name, rows).items()
    ]
    notices = _notices(said, rows[0], location, fields)
    # Left out: what DATASETS_DIR is named for, unless the entry or its name says that data are made up.
    words = set(re.split(r"[_\W]+", name.lower())) & {"gen", "synth", "generated", "synthetic"}
    made_up = fields.flag("generated") or fields.flag("synthetic") or bool(words)
    named = any("DATASETS_DIR" in text for text in (said.cmd, *env.values(), *said.pre_run))
    needs_dataset = fields.flag("needs_dataset", named and not made_up)
    return replace(said, needs_dataset=needs_dataset, variants=tuple(variants), notices=tuple(notices))


def _requirements(home: Path, fields: Fields) -> Path | None:
    """The requirements file where it is: in the folder of the run, else beside the benchmark file."""
    names = {}
    for key in ("requirements_file", "location"):
        names[key] = fields.text(key, "")
        try:
            expand_path(names[key])
        except ValueError as error:  # there can be no file or folder of that name
            names[key] = fields.wrong(key, f"'{names[key]}' {error}", "")
    name = names["requirements_file"]
    here = home / names["location"] / name
    return None if not name else here if here.exists() else home / name


def _skip(fields: Fields) -> str | None:
    value = fields.value("notebook")
    if value is not None:
        notebook = Fields(value, "notebook", fields.report) if isinstance(value, LocatedMapping) else None
        if notebook:
            notebook.refuse_unknown(("file", "working_directory", "timeout"))
        name = notebook.text("file", "?") if notebook else fields.text("notebook", "?")
        return f"a notebook ({name}), and hotloop runs commands alone: save it as a script and give its cmd"
    return None


def _notices(said: Benchmark, row: ParameterRow, location: str, fields: Fields) -> list[str]:
    """What the author may not expect: keys without effect, braces that stay, parameters and labels of nothing."""
    notices = [f"{key} has no effect here" for key in IGNORED if key in fields]
    templates = [said.cmd, location, *said.env.values()]
    named = dict.fromkeys(found[1] for text in templates for found in BRACES.finditer(text) if found[1])
    notices += [f"{{{name}}} is no parameter and stays as it is" for name in named if name not in row]
    uses = " ".join([*templates, *(one.expr for one in said.derived)])
    unused = [name for name in row if not re.search(rf"\b{re.escape(name)}\b", uses)]
    notices += [f"the parameter {name} fills nothing in" for name in unused]
    known = {metric.name for metric in said.metrics} | {one.name for one in said.derived}
    notices += [f"output names {name}, which is no metric" for _, name in said.output if name not in known]
    return notices


def _read_output(fields: Fields) -> Output:
    value = fields.value("output")
    if value is None:
        return ()
    if not isinstance(value, LocatedList):
        return fields.wrong("output", "must be a list of [label, metric]", ())
    pairs = []
    for item in value.items:
        texts = []
        if isinstance(item, LocatedList):
            texts = [part.text for part in item.items if isinstance(part, LocatedText)]
        elif isinstance(item, LocatedMapping) and len(item.pairs) == 1:
            ((label, (_, metric)),) = item.pairs.items()
            texts = [label, metric.text] if isinstance(metric, LocatedText) else []
        if len(texts) == 2:
            pairs.append((texts[0], texts[1]))
        else:
            example = "such as [samples/sec, throughput]"
            fields.report(item.line, f"output must be a list of [label, metric], {example}")
    return tuple(pairs)


def _read_metrics(fields: Fields, output: Output) -> tuple[Metric, ...]:
    """The metrics of `data`; `output` has their units."""
    found = []
    for name, part in fields.parts("data").items():
        part.refuse_unknown(("regexp", "skip", "reduction_type", "field", "unit", "sorted_skip"))
        regexp = part.text("regexp", None)
        try:
            re.compile(regexp or "")
        except (re.error, RecursionError, OverflowError) as error:
            part.wrong("regexp", f"'{regexp}' is no regular expression: {error}", None)
        skip, reduction = part.whole("skip", 0, least=0), _reduction(part)
        field, unit = part.text("field", None), _unit(name, part, output)
        found.append(Metric(name, regexp, skip, reduction, field, unit, part.flag("sorted_skip")))
    return tuple(found)


def _read_derived(fields: Fields, known: Iterable[str], output: Output) -> tuple[Derived, ...]:
    """The metrics of `derived`; each may use metrics, parameters (both are known) and those before it."""
    names = set(known)
    found = []
    for name, part in fields.parts("derived").items():
        part.refuse_unknown(("expr", "reduction_type", "unit"))
        expr, line = part.text("expr", ""), fields.pairs["derived"].line
        try:
            check_expression(expr, names)
        except ExpressionError as error:
            fields.report(part.pairs["expr"].line if "expr" in part else line, f"derived.{name}: {error}")
        if name in names:
            part.report(line, f"derived.{name} has the name of a metric or parameter")
        names.add(name)
        found.append(Derived(name, expr, _reduction(part), _unit(name, part, output)))
    return tuple(found)


def _reduction(part: Fields) -> str:
    kind = part.text("reduction_type", "mean")
    if is_reduction(kind):
        return kind
    known = [*REDUCTIONS, "p50", "p99"]
    hint = did_you_mean(kind, known) or f"; known: {', '.join(known)}"
    return part.wrong("reduction_type", f"'{kind}' is not known{hint}", "mean")


def _unit(name: str, part: Fields, output: Output) -> str:
    """A metric's unit, or what its label tells of it: `samples/sec`, the ms of `latency(ms)`; none from `loss`."""
    label = next((label for label, metric in output if metric == name), "")
    inner = re.search(r"\(([^()]+)\)\s*$", label)
    return part.text("unit", inner[1] if inner else label if "/" in label or label in UNITS else "")


def read_parameters(value: LocatedValue | None, report: ReportProblem) -> list[ParameterRow]:
    """The parameter values of each variant, at least one row; problems are reported.

    A mapping of names gives every combination; its values may be comma strings or lists. A list gives the rows
    themselves: names first and then values, or a mapping a row.
    """
    if value is None:
        return [{}]
    if isinstance(value, LocatedText) or (isinstance(value, LocatedList) and not value.items):
        report(value.line, "parameters must be a mapping of names to values, or a list of rows")
        return [{}]
    if isinstance(value, LocatedMapping):
        choices: dict[str, list[str]] = {}
        for name, (line, options) in value.pairs.items():
            choices[name] = _cells(options)
            if isinstance(options, LocatedMapping):  # unquoted {3, 4} is to YAML a mapping of them to nothing
                nothing = [isinstance(one, LocatedText) and one.is_null for _, one in options.pairs.values()]
                choices[name] = list(options.pairs) if all(nothing) else []
            if not choices[name] or not all(choices[name]):
                wanted = "values such as '1, 32' or [1, 32], none of them empty"
                report(line, f"parameters.{name} must be {wanted}")
                return [{}]
        if math.prod(map(len, choices.values())) > MOST_VARIANTS:
            many = f"parameters have more than {MOST_VARIANTS} combinations; list the rows that matter"
            report(value.line, many)
            return [{}]
        return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    if isinstance(value.items[0], LocatedMapping):
        rows: list[ParameterRow] = []
        for item in value.items:
            pairs = item.pairs if isinstance(item, LocatedMapping) else {}
            row = {key: pair.value.text for key, pair in pairs.items() if isinstance(pair.value, LocatedText)}
            if not row or len(row) != len(pairs) or (rows and set(row) != set(rows[0])):
                said = "each row of parameters must be a mapping of the same names to single values"
                report(item.line, said)
            rows.append(row)
        return rows
    names, *cells = map(_cells, value.items)
    if not all(names) or len(set(names)) != len(names) or not cells:
        said = "parameters need a first row of different names, and rows of values after it"
        report(value.items[0].line, said)
        return [{}]
    for item, texts in zip(value.items[1:], cells, strict=True):
        if len(texts) != len(names):
            report(item.line, f"this row of parameters has {len(texts)} values for {len(names)} names")
    return [dict(zip(names, texts, strict=False)) for texts in cells]


def _cells(value: LocatedValue) -> list[str]:
    """The texts of a list, or of a comma string: `3, 4`, `[3, 4]` or `{3, 4}`."""
    if isinstance(value, LocatedList):
        return [item.text if isinstance(item, LocatedText) else "" for item in value.items]
    if not isinstance(value, LocatedText):
        return []
    text = value.text.strip()
    bare = text[1:-1] if text[:1] + text[-1:] in ("[]", "{}") else text
    return [part.strip() for part in bare.split(",")]
