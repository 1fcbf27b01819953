"""Reads inputs that are meant to hurt, in a process of its own: `python fuzz_child.py SEED INPUTS [READER [NUMBER]]`.

Input NUMBER of a reader is the same for the same seed, whatever else runs. Each failing one is a line of JSON on
standard output; the last line says how many were read, how much memory that took, and which readers refuse a seed as it
is. A reader that does not answer within the time limit ends the process, and what it was given is in the file `current`
of the working folder.
"""

import contextlib
import faulthandler
import json
import os
import random
import resource
import shutil
import sys
import traceback
from pathlib import Path

from mutations import mutated
from readers import Reader, table

from hotloop.engine.device import peak_bytes
from hotloop.errors import HotloopError

SECONDS = 10  # that an input may take
ADDRESSES = 16 << 30  # a wrong size must fail here, not take the machine's memory
LONGEST_MESSAGE = 1500


def main(seed: int, inputs: int, only: str | None = None, number: int | None = None) -> None:
    """Read the seeds, then `inputs` inputs made of them, the readers in turn."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    readers = [reader for reader in table() if only in (None, reader.name)]
    rounds = [number] if number is not None else range(-(-inputs // len(readers)))
    answers = os.fdopen(os.dup(1), "w")
    with (
        Path(os.devnull).open("w") as silence,
        contextlib.redirect_stdout(silence),
        contextlib.redirect_stderr(silence),
    ):
        refused = [reader.name for reader in readers if any(refuses(reader, data) for data in reader.seeds)]
        before = peak_bytes()  # what the libraries need depends on the machine
        for count in rounds:
            for reader in readers:
                if said := failure(reader, seed, count):
                    line = {"reader": reader.name, "number": count, **said}
                    print(json.dumps(line), file=answers, flush=True)
    last = {"inputs": len(rounds) * len(readers), "bytes": peak_bytes() - before, "refused": refused}
    print(json.dumps(last), file=answers)


def empty_folder() -> Path:
    """The one that a reader may write to."""
    folder = Path("work")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def refuses(reader: Reader, data: bytes) -> bool:
    """Whether a reader refuses what it should read."""
    try:
        reader.read(empty_folder(), data)
    except HotloopError:
        return True
    return False


def failure(reader: Reader, seed: int, number: int) -> dict[str, str] | None:
    """What is wrong with how a reader took one input; None where it read or refused it."""
    data = mutated(random.Random(f"{seed}/{reader.name}/{number}"), reader.seeds)
    Path("current").write_text(json.dumps({"reader": reader.name, "number": number, "seed": seed}))
    folder, before = empty_folder(), peak_bytes()
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
    try:
        reader.read(folder, data)
        wrong = ""
    except (HotloopError, *reader.also) as error:
        wrong = "" if reader.lines else wrong_message(str(error))
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        wrong = f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    finally:
        faulthandler.cancel_dump_traceback_later()
    if peak_bytes() - before > 1 << 29:
        wrong = f"{peak_bytes() - before >> 20} MiB of memory for one input"
    return {"error": wrong, "input": repr(data[:300])} if wrong else None


def wrong_message(text: str) -> str:
    """Why a message is not one for the user."""
    if len(text.splitlines()) > 1:
        return f"a message of several lines: {text[:300]!r}"
    return f"a message of {len(text)} characters: {text[:300]!r}" if len(text) > LONGEST_MESSAGE else ""


if __name__ == "__main__":
    first, count, *rest = sys.argv[1:]
    main(int(first), int(count), *rest[:1], *map(int, rest[1:]))
