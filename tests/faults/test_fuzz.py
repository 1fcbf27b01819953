"""Inputs that are meant to hurt, for every reader and parser: only errors for the user come out, soon and in little
memory.

A failing input is printed with its number: `python tests/faults/fuzz_child.py SEED 1 READER NUMBER` reads it again,
with the folders of PATHS on PYTHONPATH.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hotloop.errors import OptionError, one_line

pytest.importorskip("PIL")
pytest.importorskip("pyarrow")

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
PATHS = (SOURCE, HERE.parent, HERE)
MEMORY = 1 << 30

UNREAD = {"option values", "config of a vcd run", "config of a recommender run"}
"""Readers that refuse their seeds: no value fits every option, and these runs have no checkpoints."""

PLACES = {
    r"\bjson\.loads?\(": {
        "options/files",
        "cli/own_server",  # these three between processes of our own
        "engine/processes",
        "families/recommender/validation",
        "engine/weights_file",  # a head that safetensors has read and bounded
        "serve/client",  # answers of a server
        "serve/tensors",  # requests, which tests/serve fuzzes
    },
    r"\byaml\.(compose|parse|scan|load|safe_load)": {"options/document"},
    r"\b(Image|module)\.open\(": {"data/jpeg"},
    r"\bgzip\.(open|GzipFile|decompress)": {"data/content"},
    r"\b(ZipFile|tarfile\.open)\(": {"data/content", "data/fetch"},
    r"\bexpanduser\(": {"options/__init__"},
    r"\bnp\.load\((?![^)]*allow_pickle=False)|\bimport pickle\b|(?<![\w.])(eval|exec)\(": set(),
}
"""What reads what anybody may have written, and the modules that may call it: each bounds it, and is fuzzed."""


def fuzz(folder, seed, inputs):
    """What a child process said of so many inputs: the failures, and its last line."""
    paths = os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "HOTLOOP_OFFLINE": "1"}
    command = [sys.executable, str(HERE / "fuzz_child.py"), str(seed), str(inputs)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    current = folder / "current"
    assert done.returncode == 0, f"{current.exists() and current.read_text()}\n{done.stderr[-3000:]}"
    *failures, last = map(json.loads, done.stdout.splitlines())
    return failures, last


@pytest.mark.parametrize(
    ("seed", "inputs"), [(0, 400), pytest.param(1, 12_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_every_reader_answers_every_input_with_a_value_or_an_error_for_the_user(seed, inputs, tmp_path):
    failures, last = fuzz(tmp_path, seed, inputs)
    assert failures == []
    assert last["inputs"] >= inputs
    assert last["bytes"] < MEMORY
    assert set(last["refused"]) == UNREAD  # else changing a seed a little gets nowhere


@pytest.mark.parametrize("pattern", PLACES)
def test_what_anybody_may_have_written_is_read_in_few_places(pattern):
    found = {
        str(file.relative_to(SOURCE / "hotloop").with_suffix(""))
        for file in (SOURCE / "hotloop").rglob("*.py")
        if re.search(pattern, re.sub(r'"""(.|\n)*?"""|#.*', "", file.read_text()))
    }
    assert found <= PLACES[pattern]


def test_a_message_is_one_line_of_bounded_length_whatever_is_in_it():
    text = str(OptionError("--a x\ny\0\ud800\x1b[31m: " + "z" * 5000 + ": is too large"))
    assert text.startswith("--a x y\\x00\\ud800\\x1b[31m: zzz")
    assert text.endswith("zzz: is too large")
    assert len(text) < 1500
    assert one_line("é, 日本: fine") == "é, 日本: fine"
