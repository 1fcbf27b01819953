"""Where a model's folder goes, `DIR/NAME/VERSION`: whether there is a place, a folder beside it to fill, the renaming.

It knows nothing of what is in such a folder but the name of the file that every whole one has.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hotloop.engine.checkpoint_folder import hold_lock, sync
from hotloop.engine.run import check_can_make
from hotloop.errors import OptionError

MODEL = "model.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What a model may be called: it is a folder's name and a part of addresses."""
RESERVED = "stats"
"""A part of addresses that is the server's own."""
VERSION = re.compile(r"[1-9][0-9]{0,17}")
_PART = re.compile(r"\.[0-9]+-[0-9a-f]{16}\.part")
"""What a folder is called that is not in its place yet."""


def check_place(output: Path, name: str | None, version: int | None) -> None:
    """OptionError where a model cannot be written there; nothing is touched. Name None: it is not known yet, and what
    depends on it is not looked at."""
    if name is not None and NAME.fullmatch(name) is None:
        raise OptionError(f"name={name}: must begin with a letter or digit, and have only these and . _ -")
    if name == RESERVED:
        raise OptionError(f"name={name}: is an address of the server's own; give another")
    if version is not None and VERSION.fullmatch(str(version)) is None:
        raise OptionError(f"version={version}: must be a whole number from 1, of at most 18 digits")
    if output.exists() and not output.is_dir():
        raise OptionError(f"output={output}: is a file; give a folder for models")
    if versions_in(output):
        raise OptionError(
            f"output={output}: is the folder of one model; give the one above it, {output.parent}"
        )
    # An export that was killed has left a model's folder with nothing that counts in it.
    filled = [each for each in _entries(output) if not each.is_dir() or _entries(each)]
    if filled and not any(versions_in(each) for each in filled):
        raise OptionError(
            f"output={output}: is not empty and holds no model; give a new folder, or one with models"
        )
    if name is not None:
        _check_folder(output, name, version)
    try:
        check_can_make(output / (name or "model"))
    except OSError as error:
        raise OptionError(f"output={output}: cannot be written: {error.strerror}") from None


def _check_folder(output: Path, name: str, version: int | None) -> None:
    """OptionError where the version is there already, or the folder of this name is no model's."""
    if version is not None and (output / name / str(version)).exists():
        there = ", ".join(map(str, sorted(versions_in(output / name))))
        raise OptionError(f"version={version}: {output / name} has it already (there: {there}); leave it out")
    if _entries(output / name) and not versions_in(output / name):
        raise OptionError(f"name={name}: {output / name} is not empty and holds no model; give another name")


def versions_in(model: Path) -> dict[int, Path]:
    """The versions of a model by number, whole or not: folders with a model.json."""
    found = (path for path in _entries(model) if VERSION.fullmatch(path.name) and (path / MODEL).is_file())
    return {int(path.name): path for path in found}


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []


@contextmanager
def staged(model: Path) -> Iterator[Path]:
    """A new folder in that of a model, to be put in place; if the block fails nothing of it, nor a folder made for it,
    is left. What exports that were killed have left there goes."""
    made = [path for path in (model, *model.parents) if not path.exists()]
    # Processes of two containers may have one number, and one folder that both see.
    part = model / f".{os.getpid()}-{secrets.token_hex(8)}.part"
    try:
        _make(model)
        with ExitStack() as stack:
            with hold_lock(model, wait=True):  # nobody takes the new folder for an abandoned one
                _remove_abandoned(model)
                part.mkdir()
                stack.enter_context(hold_lock(part))
            yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # somebody else's model may have come meanwhile
                folder.rmdir()
        raise


def _make(model: Path) -> None:
    """OptionError where it cannot be made, whatever looks as if it could."""
    try:
        model.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"output={model.parent}: cannot be written: {error.strerror}") from None


def _remove_abandoned(model: Path) -> None:
    """Whoever fills such a folder holds its lock, which the system gives back when the process has gone."""
    for left in (path for path in model.iterdir() if _PART.fullmatch(path.name)):
        with (
            suppress(OSError),
            hold_lock(left),
        ):  # a living one's, or one that another export removes meanwhile
            shutil.rmtree(left)


def put_in_place(part: Path, version: int | None) -> Path:
    """Rename a whole folder to its version, the next free number where none is given."""
    model = part.parent
    sync(part)
    while True:
        taken = [int(path.name) for path in _entries(model) if VERSION.fullmatch(path.name)]
        number = version or max(taken, default=0) + 1
        place = model / str(number)
        try:
            part.rename(place)
        except OSError:
            if not place.exists():
                raise
            if version is not None:
                raise OptionError(f"version={version}: {place} has come meanwhile; leave it out") from None
            continue
        sync(model)
        return place
