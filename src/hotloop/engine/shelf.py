"""The folder that holds a run's steps: which are whole, how one gets in, how one goes.

A step is written in a temporary folder beside the others and put in place by one rename. What is deleted is
first renamed to such a temporary name, so that a kill leaves nothing half there. Only what hotloop wrote is
ever deleted.
"""

import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from hotloop.engine import manifest as manifests
from hotloop.engine.manifest import Damaged, Manifest
from hotloop.engine.step_folder import ARRAYS, locked, sync
from hotloop.errors import CheckpointError

_TEMPORARY = ".hotloop-tmp-"


def numbered(shelf: Path, mark: str = "") -> dict[int, Path]:
    """Everything that is named like a step, whole or not; with a run's mark also what bears it, `00000012-MARK`."""
    form = re.compile(rf"\d+(-{mark})?" if mark else r"\d+")
    try:
        found = [path for path in shelf.iterdir() if form.fullmatch(path.name)]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{shelf} cannot be read: {error.strerror}") from None
    return {number(path): path for path in sorted(found, key=lambda path: len(path.name))}


def number(folder: Path) -> int:
    """The step that a folder's name tells."""
    return int(folder.name.partition("-")[0])


def whole(folder: Path, step: int) -> Manifest:
    """The manifest of a step whose files are all there in full size; `Damaged` if it is not that step."""
    manifest = manifests.read(folder)
    if manifest.step != step:
        raise Damaged(f"{folder} holds step {manifest.step}: it was renamed or copied")
    manifests.check_sizes(folder, manifest)
    return manifest


def complete(shelf: Path) -> dict[int, Manifest]:
    """The steps that are whole, by a quick look."""
    found = {}
    for step, folder in numbered(shelf).items():
        with suppress(Damaged):
            found[step] = whole(folder, step)
    return found


def temporary(shelf: Path, step: int) -> Path:
    """A name of its own for a step that is being written or deleted."""
    return shelf / f"{_TEMPORARY}{step}-{secrets.token_hex(4)}"


def put_in_place(written: Path, target: Path) -> None:
    """Make a written step visible; a damaged or foreign one of that name is set aside, never deleted."""
    if manifests.is_ours_alone(target):
        remove(target)
    elif target.exists():
        target.rename(target.with_name(f"{target.name}.set-aside-{secrets.token_hex(4)}"))
    written.rename(target)
    sync(target.parent)


def remove(folder: Path) -> None:
    """Delete a step, unless somebody put files of their own into it."""
    if manifests.is_ours_alone(folder):
        doomed = temporary(folder.parent, number(folder))
        folder.rename(doomed)
        shutil.rmtree(doomed)


def clean(shelf: Path) -> None:
    """Delete what a killed process left half written; what a living one holds, or others put there, stays."""
    for folder in filter(Path.is_dir, shelf.glob(f"{_TEMPORARY}*")):
        names = {path.name.partition(".orbax")[0] for path in folder.iterdir()}
        with suppress(BlockingIOError), locked(folder):
            if names <= {ARRAYS, manifests.NAME}:
                shutil.rmtree(folder)
