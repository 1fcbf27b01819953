"""Commands that the pages show can be typed: every `hotloop` line is understood, and those that only plan are run."""

import re
import shlex
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hotloop.cli.main import find_command, main
from hotloop.cli.parser import resolve, scan
from hotloop.errors import CheckpointError, OptionError, RunError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (hotloop .*)$", re.MULTILINE)
SPAN = re.compile(r"`(hotloop [^`\n]+)`")
ABBREVIATED = re.compile(
    r"\||\.\.\.|…|\[|ARGS|COMMAND|^hotloop \S+$|RECIPE|SHAPE|EPOCHS|SEED|MODE|SPLIT|METHOD|NAME| X\b|\bN\b"
)
"""A line that stands for several, or leaves something to the reader."""
THEIR_FILES = ("path/to/config.json", "bs_experiment_config.json", "own.json", "sweep.yml", "FILE")
THEIR_FOLDERS = ("DIR", "OUT", "photos", "records")


def lines_of(page):
    """What a reader would type: lines of blocks, with what follows a backslash, and spans of code."""
    text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
    for _, language, block in FENCE.findall(text):
        if language.strip() in ("", "bash", "console", "sh", "shell", "{code-cell}"):
            for line in block.splitlines():
                if found := re.match(r"\s*(?:\$ )?((?:[A-Z_]+=\S+ )*hotloop .*)", line):
                    yield found[1]
    without = FENCE.sub("", text)
    yield from INDENTED.findall(without)
    yield from SPAN.findall(without)


def words_of(line):
    """The words after `hotloop`; what stands behind a gap is a remark."""
    words = shlex.split(re.split(" {2,}", line)[0], comments=True)
    return words[words.index("hotloop") + 1 :]


def understand(words):
    """The command and its config are found, or the error is raised that a person would see."""
    command, _, rest = find_command(list(words))
    if words[0] == "launch" and "--" in rest:
        understand(rest[rest.index("--") + 1 :])
    if words[0] != "compat" and command.run is not None:
        with suppress(RunError, CheckpointError):  # a run of the reader's, which is not here
            resolve(command, scan(rest, command.options))


COMMANDS = sorted(
    {
        (str(page.relative_to(ROOT)), line.strip())
        for page in PAGES
        for line in lines_of(page)
        if not ABBREVIATED.search(line.split("  ")[0]) and not any(name in line for name in THEIR_FILES)
    }
)


def test_there_are_commands_on_the_pages_that_teach():
    pages = {page for page, _ in COMMANDS}
    assert {"README.md", "docs/how-to/serve.md", "docs/tutorials/cnn.md", "docs/migration/cnn.md"} <= pages
    assert len(COMMANDS) > 150


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_every_command_of_a_page_is_understood(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for folder in THEIR_FOLDERS:  # an own set of images must be there
        (tmp_path / folder).mkdir()
    for name, line in COMMANDS:
        if name == page:
            try:
                understand(words_of(line))
            except OptionError as error:  # prose may name a command without what it needs
                lacks = any(words in str(error) for words in (" is needed", ": say what to try"))
                assert lacks and len(words_of(line)) < 4, f"{line}: {error}"


def test_a_command_that_nobody_has_is_found():
    for line in (
        "hotloop cnn trian",
        "hotloop cnn train --no-such-option",
        "hotloop vcd train --updates many",
    ):
        with pytest.raises(OptionError):
            understand(words_of(line))


PLANS = [  # those of the tutorials are made by `make docs`
    pytest.param(line, marks=pytest.mark.slow if "photos" in line else ())
    for page, line in COMMANDS
    if "--plan" in line and "how-to" in page
]


@pytest.mark.parametrize("line", PLANS)
def test_a_plan_that_a_page_shows_is_made(line, monkeypatch, tmp_path, capsys):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTLOOP_OFFLINE", "1")
    (tmp_path / "ratings.csv").write_text("".join(f"{n % 40},{n % 23},{1 + n % 5}\n" for n in range(800)))
    for part, name in (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "dog")):
        (tmp_path / "photos" / part / name).mkdir(parents=True)
        for number in range(32):
            Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(
                tmp_path / "photos" / part / name / f"{number}.jpeg"
            )
    assert main(words_of(line)) == 0
    assert "updates" in capsys.readouterr().out
