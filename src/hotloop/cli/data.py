"""`hotloop data list|fetch|verify`: what data is on this machine, where, and whether it is what it should be."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.cli.command import Command, Context, Result
from hotloop.errors import DataError
from hotloop.options import argument, option

if TYPE_CHECKING:
    from hotloop.data.local_files import FileVerdict

_DATA_DIR = (
    "Look here first, and fetch to here; else HOTLOOP_DATA, else the data folder of the user (XDG_DATA_HOME)."
)


@dataclass(frozen=True)
class ListConfig:
    data_dir: Path | None = option(None, _DATA_DIR, metavar="DIR")


@dataclass(frozen=True)
class SetConfig:
    name: str = argument("The data set; `hotloop data list` shows them.", metavar="NAME")
    data_dir: Path | None = option(None, _DATA_DIR, metavar="DIR")


def list_sets(config: ListConfig, context: Context) -> Result:
    from hotloop.data.catalogue import SETS
    from hotloop.data.local_files import check_named_folders, find_set, verify_set

    check_named_folders(config.data_dir)
    sets, rows = [], []
    for known in SETS.values():
        found = find_set(known, config.data_dir)
        where = str(found.folder) if found else None
        verified = _summary(verify_set(known, found)) if found else None
        absent = "not here" if known.files else "not fetched: licence; give a path"
        size = f"{known.size / 1e6:,.0f} MB" if known.size else "-"
        rows.append([known.name, size, where or absent, verified or "-", known.what, known.licence])
        about = {"name": known.name, "what": known.what, "bytes": known.size or None, "where": where}
        expected = known.expected or [file.stored_as for file in known.files]
        sets.append({**about, "verified": verified, "licence": known.licence, "expected": expected})
    context.table(["name", "size", "where", "verified", "what", "licence"], rows)
    return {"sets": sets}


def fetch_set(config: SetConfig, context: Context) -> Result:
    from hotloop.data.catalogue import known_set
    from hotloop.data.fetch import fetch

    known = known_set(config.name)
    fetched = fetch(known, config.data_dir, context.progress)
    context.say(f"{known.name}: {'fetched to' if fetched.new else 'already at'} {fetched.folder}, verified")
    files = [asdict(file) for file in fetched.files]
    return {"name": known.name, "where": str(fetched.folder), "fetched": fetched.new, "files": files}


def show_verdicts(config: SetConfig, context: Context) -> Result:
    """Size and checksum of each file of one set; DataError when one is bad or missing."""
    from hotloop.data.catalogue import known_set
    from hotloop.data.local_files import check_named_folders, find_set, verify_set

    check_named_folders(config.data_dir)
    known = known_set(config.name)
    if not known.files:
        raise DataError(f"{known.name}: has no published checksums; expected files: {known.expected}")
    found = find_set(known, config.data_dir)
    if found is None:
        raise DataError(f"{known.name}: not on this machine; `hotloop data fetch {known.name}` brings it")
    files = verify_set(known, found)
    rows = [[file.path or file.name, file.size, file.status, file.reason or file.checksum] for file in files]
    context.table(["file", "bytes", "status", "checksum or reason"], rows)
    if bad := [file for file in files if file.status != "OK"]:
        raise DataError(
            f"{known.name} at {found.folder}: {_summary(files)}; first {bad[0].name} ({bad[0].reason})"
        )
    return {"name": known.name, "where": str(found.folder), "files": [asdict(file) for file in files]}


def _summary(files: "tuple[FileVerdict, ...]") -> str:
    """One word for a set: yes, or what stands against it."""
    counts = {status: sum(file.status == status for file in files) for status in ("BAD", "missing")}
    wrong = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return wrong or ("yes" if files else "no checksums")


COMMAND = Command(
    children=(
        Command("list", "What is on this machine, where, and whether it is verified.", ListConfig, list_sets),
        Command("fetch", "Download a set, check it and unpack it.", SetConfig, fetch_set),
        Command("verify", "Size and checksum of each file of a set.", SetConfig, show_verdicts),
    ),
)
