"""What the package says of itself agrees with itself: versions, ranges, the workflow, the citation."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from hotloop.version import VERSION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
OLDEST = ROOT / ".github" / "oldest.py"


def load_oldest():
    spec = importlib.util.spec_from_file_location("oldest", OLDEST)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.oldest


def pythons():
    """The versions that the classifiers promise."""
    found = (
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in PROJECT["classifiers"]
    )
    return [each[1] for each in found if each]


def test_the_workflow_runs_every_python_that_is_promised():
    matrix = WORKFLOW["jobs"]["suite"]["strategy"]["matrix"]
    assert matrix["python"] == pythons() == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["requires-python"] == f">={pythons()[0]}"
    assert matrix["jax"] == ["oldest", "newest", "nightly"]


def test_the_workflow_runs_commands_that_make_knows():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [step.get("run", "") for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    named = [
        name
        for run in steps
        for line in re.findall(r"^make (.*)$", run, re.MULTILINE)
        for name in line.split()
    ]
    assert set(named) == {
        "test-slow",
        "test-kernels",
        "native-test",
        "native-sanitize",
        "docs",
        "docs-links",
        "package",
    }
    assert set(named) <= targets


def test_the_slow_tests_find_the_built_site():
    (run,) = (step["run"] for step in WORKFLOW["jobs"]["slow"]["steps"] if "run" in step)
    assert run.split() == ["make", "docs", "test-slow"]


def test_every_package_of_a_user_has_an_oldest_version_and_one_alone():
    found = load_oldest()(PROJECT)
    assert {"jax", "jaxlib", "optax", "numpy", "starlette", "pyarrow", "flax"} <= set(found)
    assert found["jaxlib"] == found["jax"]
    assert not {"pytest", "ruff", "sphinx", "torch"} & set(found)


@pytest.mark.parametrize(
    ("dependencies", "extras", "said"),
    [
        (["jax>=1", "numpy"], {}, "numpy: names no oldest version"),
        (["jax>=1", "numpy<3"], {}, "numpy<3: names no oldest version"),
        (["jax>=1", "numpy>=2"], {"x": ["numpy>=2.1"]}, "numpy>=2.1: another extra allows 2"),
    ],
)
def test_a_package_without_an_oldest_version_or_with_two_is_refused(dependencies, extras, said):
    with pytest.raises(SystemExit, match=re.escape(said)):
        load_oldest()({"dependencies": dependencies, "optional-dependencies": extras})


def test_the_oldest_versions_can_be_asked_for_by_name():
    run = subprocess.run(
        [sys.executable, OLDEST, "jax", "jaxlib"], capture_output=True, text=True, check=True
    )
    least = re.search(r"jax>=([\d.]+)", " ".join(PROJECT["dependencies"]))[1]
    assert run.stdout == f"jax=={least}\njaxlib=={least}\n"


def test_what_the_tests_install_allows_what_the_extras_ask_for():
    """The same range in `test` as in the extra, or the extra's range is not the one that is tested."""
    extras = PROJECT["optional-dependencies"]
    users = {
        line
        for name in ("tensorboard", "images", "weights", "serve", "recommender", "nnx", "keras")
        for line in extras[name]
    }
    assert users - set(extras["test"]) == set()


def test_the_citation_names_this_version_and_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION and citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Homepage"]


SUPPORT = (ROOT / "docs" / "support.md").read_text()


def test_the_support_page_has_the_ranges_of_the_package():
    for line in PROJECT["dependencies"]:
        assert f"`{line}`" in SUPPORT
    for python in pythons():
        assert re.search(rf"^\| {re.escape(python)} \|", SUPPORT, re.MULTILINE)


def test_the_support_page_says_the_policy_and_which_oldest_versions_were_run():
    """A bound that is changed is to be tried again, and said there."""
    assert re.findall(r"^## (.*)$", SUPPORT, re.MULTILINE) == ["Versions", "For how long", "What is tested"]
    found = load_oldest()(PROJECT)
    table = SUPPORT[SUPPORT.index("| package | oldest |") :]
    said = dict(re.findall(r"^\| ([\w, -]+) \| ([\d.]+) \|", table, re.MULTILINE))
    said |= dict.fromkeys(("jax", "jaxlib"), said.pop("jax, jaxlib"))
    assert {name: found[name] for name in said} == said
    assert {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]} <= set(said)
    others = set(re.findall(r"`([\w-]+)`", SUPPORT[SUPPORT.index("`wandb`") :]))
    installed = {re.match(r"[\w-]+", line)[0] for line in PROJECT["optional-dependencies"]["test"]}
    assert set(found) - installed - set(said) == others
