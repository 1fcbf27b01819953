"""What `from hotloop import ...` offers: lazily, with the types that checkers see, and an example of each that runs."""

import ast
import doctest
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import hotloop
from hotloop.engine.run import read_events

NAMES = [name for name in dir(hotloop) if not name.startswith("_")]
WITHOUT_JAX = ("EarlyStopping", "EvalSpec", "Hook", "Mode", "ModelSpec", "Plan", "RunConfig", "TrainSpec")


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    if name == "from_keras":
        os.environ.setdefault("KERAS_BACKEND", "jax")
        pytest.importorskip("keras")
    examples = doctest.DocTestParser().get_doctest(
        inspect.getdoc(getattr(hotloop, name)) or "", {}, name, name, 0
    )
    assert examples.examples, f"{name} has no example in its docstring"
    printed: list[str] = []
    results = doctest.DocTestRunner().run(examples, out=printed.append)
    assert not results.failed, "".join(printed)


def test_the_names_are_those_that_are_promised() -> None:
    engine = {"Program", "Resident", "Streamed", "Evaluation", "Plan", "train", "hmc", "layers"}
    estimator = {"Arrays", "Estimator", "EvalSpec", "Hook", "Mode", "ModelSpec", "RunConfig", "TrainSpec"}
    assert set(NAMES) == engine | estimator | {"EarlyStopping", "from_keras", "train_and_evaluate"}
    with pytest.raises(AttributeError, match="module 'hotloop' has no attribute 'Pogram'"):
        hotloop.Pogram  # noqa: B018


def test_type_checkers_see_the_objects_that_programs_get() -> None:
    tree = ast.parse(Path(hotloop.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for line in block.body:
        assert isinstance(line, ast.ImportFrom) and line.module
        for name in line.names:
            assert name.asname == name.name, "a strict checker takes no other import as an export"
            found = import_module(line.module)
            seen[name.name] = getattr(found, name.name)
    assert seen == {name: getattr(hotloop, name) for name in NAMES}


def test_an_estimator_shows_what_its_page_describes_and_no_more(tmp_path: Path) -> None:
    estimator = hotloop.Estimator(lambda: None, model_dir=tmp_path, warm_start_from=tmp_path, quiet=True)
    shown = {name for name in dir(estimator) if not name.startswith("_")}
    verbs = {"train", "evaluate", "measure", "predict", "export", "latest_checkpoint", "weights", "to_keras"}
    assert shown == verbs | {"config", "params", "model_dir", "last_run"}
    page = (Path(__file__).parents[1] / "docs" / "estimator.md").read_text()
    assert all(re.search(rf"`{name}\b", page) for name in shown)


def run(text: str) -> None:
    subprocess.run([sys.executable, "-c", text], check=True)


def test_importing_the_package_imports_neither_jax_nor_numpy() -> None:
    # Some installations import typing before anything of ours is.
    run("import sys; before = {*sys.modules}; import hotloop; dir(hotloop); "
        "assert not {'jax', 'numpy', 'typing'} & ({*sys.modules} - before)")  # fmt: skip


def test_names_that_need_no_jax_do_not_import_it() -> None:
    run(f"import sys; from hotloop import {', '.join(WITHOUT_JAX)}; assert 'jax' not in sys.modules")


def test_a_whole_program_needs_three_imports_and_eighty_lines() -> None:
    lines = (Path(__file__).parents[1] / "examples" / "digits.py").read_text().splitlines()
    imports = [line for line in lines if line.startswith(("from hotloop", "import hotloop"))]
    assert len(imports) <= 3 and len(lines) <= 80


def test_the_program_in_the_readme_learns_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (program,) = re.findall("```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    assert abs(float(names["state"]["a"]) - 3) < 0.01 and abs(float(names["state"]["b"]) - 1) < 0.01
    calls = [event for event in read_events(tmp_path / "results" / "line") if event["event"] == "validation"]
    assert [event["update"] for event in calls] == [128, 256, 384, 512, 640]
