"""Two commits of a repository side by side: work trees in a temporary folder, gone when the comparison is over.

It knows git and folders, and nothing of benchmarks.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hotloop.errors import OptionError, RunError

HOOKLESS = (
    "-c",
    f"core.hooksPath={os.devnull}",
)  # what a repository does after a checkout is not wanted here


@contextmanager
def work_trees(commits: Sequence[str], file: Path) -> Iterator[list[Path]]:
    """The given file as it is now, in a work tree of each commit."""
    file = file.resolve()
    top = _repository(file)
    names = [_commit(top, commit) for commit in commits]
    with TemporaryDirectory(prefix="hotloop-ab-") as folder:
        trees = [Path(folder) / str(place) for place in range(len(names))]
        try:
            for tree, name in zip(trees, names, strict=True):
                _git(top, *HOOKLESS, "worktree", "add", "--detach", "--quiet", str(tree), name)
            yield [_copied(file, tree / file.relative_to(top)) for tree in trees]
        finally:
            for tree in trees:
                shutil.rmtree(tree, ignore_errors=True)
            _git(top, "worktree", "prune")


def python_path(file: Path) -> str:
    """Where Python finds the packages of the work tree that a file is in, before any other."""
    top = _repository(file)
    kept = os.environ.get("PYTHONPATH")
    return os.pathsep.join(
        [*(str(each) for each in (top / "src", top) if each.is_dir()), *([kept] if kept else [])]
    )


def _copied(file: Path, place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)
    return place


def _repository(file: Path) -> Path:
    try:
        return Path(_git(file.parent, "rev-parse", "--show-toplevel"))
    except RunError as error:
        raise OptionError(
            f"--spec {file}: is in no git repository, so there are no commits to compare"
        ) from error


def _commit(top: Path, name: str) -> str:
    try:
        return _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except RunError as error:
        raise OptionError(f"--ab {name}: is no commit of {top}; give a hash, branch or tag") from error


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise RunError(
            f"git: cannot be started ({error.strerror}); it is needed to compare commits"
        ) from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["no reason given"]
        raise RunError(f"git {words[0]}: {said[-1]}") from error
    return done.stdout.strip()
