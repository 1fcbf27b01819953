"""Files, modules, names, options and links that docs/*.md, README.md and CONTRIBUTING.md mention exist."""

import ast
import builtins
import fnmatch
import re
from functools import cache
from pathlib import Path

import pytest

from hotloop.cli.command import Common
from hotloop.cli.main import COMMANDS, find_command
from hotloop.options import options_of

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "hotloop"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def page_name(page):
    return str(page.relative_to(ROOT))


FOLDERS = ("src", "tests", "benchmarks", "examples", "docs", ".github")

OTHER_PACKAGES = {"jax", "lax", "jnp", "np", "numpy", "optax", "flax", "keras", "torch", "tf", "os", "pip"}
"""First words of dotted names that are other people's."""
OTHER_NAMES = {
    # jax
    "NamedSharding", "P", "Auto", "sqrt", "as_text", "cost_analysis", "memory_analysis",
    # the old programs, TensorFlow's Estimator, torch's and Keras's recurrent layers, the reader's own module
    "Net", "EstimatorSpec", "IPURunConfig", "SessionRunHook", "after_run", "before_run", "export_saved_model",
    "iterations_per_loop", "minimize", "sparse_softmax_cross_entropy", "autoencoder_benchmark.py", "lstm_multi.py",
    "IPUPipelineEstimatorSpec", "computational_stages", "OptimizerFunctionOutput", "offload_weight_update_variables",
    "cifar10_ipu_estimator.py", "cifar10_ipu_estimator_replica.py", "cifar10_ipu_pipeline_estimator.py",
    "LARS_random", "SGD_random", "MLPerf_LARS", "BestExporter", "LatestExporter", "FinalExporter",
    "export_for_serving.py", "IPUEstimator", "autoencoder_main.py", "main.py", "train.py", "lstm.py",
    "ipu_estimator_cnn.py", "get_data.sh",
    "bias_ih_l0", "bias_hh_l0", "recurrent_kernel", "pod16_conv", "train_small_batch_8", "benchmarks.yml",
}  # fmt: skip
OTHER_OPTIONS = {
    "--np": "mpirun's",
    "--num-instance": "a prefix, as it was typed",
    "--xla": "the beginning of the flags of XLA",
    "--app-args": "the old run_and_time.py's",
    "--batch": "a prefix, for an example",
    **dict.fromkeys(
        (
            "--checkpoint-input-path",
            "--export-dir",
            "--iterations",
            "--pipeline-serving-model",
            "--pytest",
            "--serving-bin-path",
            "--use-serving-api",
        ),
        "the old export_for_serving.py's",
    ),
    **dict.fromkeys(
        ("--no-keras", "--no-nnx"), "of benchmarks/peers/estimator.py, which makes them of names"
    ),
    "--opt": "any option",
    "--micro": "a prefix, for an example",
}
"""Options on our pages that no command of ours has, and whose they are."""

FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)")
FILE = re.compile(r"[\w*./-]*[\w*]\.(?:py|yml|toml|md|svg|png)")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?=\(|$)")
SOURCE_FILE = re.compile(r"(?<![\w/.*])[\w*/]+\.py\b")
DATA_FILE = re.compile(r"[\w.*-]+\.(?:bin|csv|data|gz|html|json|jsonl|npz|pb|safetensors|txt|xml)")
CALL = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\(")
CAMEL_CASE = re.compile(r"[A-Z]\w*[a-z]\w*")
SNAKE_CASE = re.compile(r"[a-z]\w*_\w+")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
IMPORT = re.compile(r"^\s*from (hotloop[\w.]*) import ([\w, ]+)$", re.MULTILINE)


@cache
def code():
    """Our Python files, parsed, by path from the root."""
    paths = (path for folder in ("src", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT): ast.parse(path.read_bytes()) for path in paths}


@cache
def files():
    return [str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")] + [
        path.name for path in ROOT.iterdir()
    ]


@cache
def defined():
    """Every name that our code gives to something: functions, classes, methods, fields, constants, arguments."""
    names = set()
    for tree in code().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
    return names


@cache
def attributes():
    """Those of them that stand behind a dot: not the variables and arguments of functions."""
    names = set(modules())
    for tree in code().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            if isinstance(node, ast.Module | ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.Assign | ast.AnnAssign):
                        names.update(
                            part.id
                            for part in ast.walk(each)
                            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
                        )
    return names


@cache
def modules():
    """What each module of the package has at its top, by its dotted name; imported names count."""
    found = {}
    for path, tree in code().items():
        if path.parts[0] == "src":
            parts = path.with_suffix("").parts[1:]
            names = found[".".join(part for part in parts if part != "__init__")] = set()
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    names.add(node.name)
                for each in ast.walk(node) if not isinstance(node, ast.FunctionDef | ast.ClassDef) else ():
                    if isinstance(each, ast.alias):
                        names.add(each.asname or each.name)
                    elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        names.add(each.id)
    return found


@cache
def words():
    """Every word in our code, its texts included: names of options, keys of records, presets."""
    paths = [*(ROOT / path for path in code()), *SOURCE.rglob("*.yml")]
    return {word for path in paths for word in re.findall(r"\w+", path.read_text())}


@cache
def options():
    def of(command):
        for option in (*options_of(command.config), *options_of(Common)):
            yield from (option.spelling, f"--no-{option.spelling[2:]}", *option.aliases)
        for child in command.children:
            yield from of(child)

    return {"--help", "--version"}.union(
        *(of(find_command([name])[0]) for name in COMMANDS), benchmark_options()
    )


def benchmark_options():
    """Of the programs in benchmarks/: the first words of their parsers' arguments."""
    for path, tree in code().items():
        for node in ast.walk(tree) if path.parts[0] == "benchmarks" else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                yield from (word.value for word in node.args if isinstance(word, ast.Constant))


def is_file(name):
    """A file of ours, by as much of its path as is given: `engine/loop.py`, `loop.py`, `bench/spec*.py`."""
    return any(fnmatch.fnmatch(f"/{file}", f"*/{name.removeprefix('./')}") for file in files())


def is_dotted_name(name):
    """A module (`engine.loop`), a name in one (`loop.Program`), or an attribute of some object of ours."""
    parts = name.split(".")
    if parts[0] in OTHER_PACKAGES:
        return True
    ours = False
    for module, names in modules().items():
        for cut in range(1, len(parts) + 1):
            if f".{module}".endswith("." + ".".join(parts[:cut])):
                ours = True
                if (
                    all(part in attributes() for part in parts[cut + 1 :])
                    and set(parts[cut : cut + 1]) <= names
                ):
                    return True
    # A variable of an example may be called as a module is: `cache.entries`, `plan.describe()`.
    return (
        parts[0] != "hotloop" and not (ours and parts[0] not in defined()) and set(parts[1:]) <= attributes()
    )


def unknown_in_span(span):
    if span in OTHER_NAMES or DATA_FILE.fullmatch(span):
        return
    if FILE.fullmatch(span):
        yield from () if is_file(span) else (span,)
        return
    if found := DOTTED.match(span):
        yield from () if is_dotted_name(found[0]) else (found[0],)
    for name in CALL.findall(span):
        if name not in defined() | OTHER_NAMES and not hasattr(builtins, name):
            yield name
    known = attributes() if CAMEL_CASE.fullmatch(span) else words() if SNAKE_CASE.fullmatch(span) else {span}
    if span not in known and not hasattr(builtins, span):
        yield span


def unknown_in(text):
    """What a page names and nobody has."""
    for span in SPAN.findall(FENCE.sub("", text)):
        yield from unknown_in_span(span)
    for fence in FENCE.finditer(text):
        yield from (
            name for name in SOURCE_FILE.findall(fence[0]) if name not in OTHER_NAMES and not is_file(name)
        )
    yield from (each for each in OPTION.findall(text) if each not in options() and each not in OTHER_OPTIONS)
    for module, names in IMPORT.findall(text):
        wanted = {f"{module}.{name.split(' as ')[0].strip()}" for name in names.split(",")}
        yield from (name for name in wanted if not is_dotted_name(name))


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_name_on_a_page_exists(page):
    assert sorted(set(unknown_in(page.read_text()))) == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize(
    "text",
    [
        "`engine/no_such_file.py`",
        "`families/cnn/loop.py`",
        "`no_such*.py`",
        "`hotloop.engine.loop.NoSuchName`",
        "`hotloop.engine.no_such_module`",
        "`engine.loop.NoSuchName`",
        "`loop.NoSuchName`",
        "`no_such_call(3)`",
        "`console.no_such_method()`",
        "`product.turned`",
        "`NoSuchClass`",
        "`no_such_name`",
        "`hotloop cnn train --no-such-option`",
        "```\nhotloop cnn train --no-such-option\n```",
        "```\nengine/no_such_file.py | a diagram\n```",
        "```python\nfrom hotloop.engine.loop import NoSuchName\n```",
    ],
)
def test_a_name_that_nobody_has_is_found(text):
    assert len(list(unknown_in(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "`engine/loop.py`",
        "`loop.py`",
        "`hotloop.engine.loop.Program`",
        "`engine.loop`",
        "`loop.Program`",
        "`jax.jit`",
        "`Program`",
        "`context.open_device()`",
        "`make test`",
        "`hotloop cnn train --micro-batch-size 8`",
        "`{a: 1}`",
        "```python\nfrom hotloop.engine.loop import Program\n```",
    ],
)
def test_names_of_ours_and_of_others_pass(text):
    assert list(unknown_in(text)) == []
