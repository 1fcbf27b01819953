"""Kills and signals at random moments until a run is done, in every family: what is left is what an undisturbed run
leaves, bit for bit. The moments are drawn from a seed, which a failure names."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from small_runs import FAMILIES, Family, hears, make_data, start

from undisturbed import assert_same_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("signals_heard"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc"),
]

DISTURBANCES = 6
"""Processes that are disturbed before the run may end."""
LONGEST = 300
KINDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """A family's run, made once."""

    @cache
    def train(family: Family) -> Path:
        results = tmp_path_factory.mktemp(family.name)
        finish(family.command(data, results, resume=False))
        return results / "run"

    return train


def finish(command: list[str]) -> None:
    process = start(command)
    _, errors = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, errors


def lines_of(run: Path) -> int:
    events = run / "events.jsonl"
    return events.read_bytes().count(b"\n") if events.exists() else 0


def await_moment(process: "subprocess.Popen[str]", run: Path, moments: random.Random, records: int) -> None:
    """Until the process has written so many records more, or for so long, whichever was drawn; or until it ends."""
    while not hears(process) and process.poll() is None:
        time.sleep(0.002)
    if moments.random() < 0.3:
        limit, more = time.monotonic() + moments.expovariate(1), sys.maxsize
    else:
        limit, more = time.monotonic() + LONGEST, moments.randrange(1, max(2, records // 2))
    before = lines_of(run)
    while process.poll() is None and time.monotonic() < limit and lines_of(run) < before + more:
        time.sleep(0.002)
    time.sleep(moments.choice((0, 0, moments.random() / 20)))


def is_finished(run: Path) -> bool:
    events = run / "events.jsonl"
    last = events.read_text().splitlines()[-1:] if events.exists() else []
    return bool(last) and json.loads(last[0]).get("status") == "finished"


def disturb(process: "subprocess.Popen[str]", run: Path, kind: signal.Signals) -> bool:
    """Send the signal, check how the process ends, and say whether it was in time."""
    process.send_signal(kind)
    _, errors = process.communicate(timeout=LONGEST)
    # It may have ended by itself before the signal came; and Python's own end, when all is written, hears none.
    wanted = -kind if kind == signal.SIGKILL else 128 + kind
    after_the_end = (-kind,) if is_finished(run) else ()
    assert process.returncode in (wanted, 0, *after_the_end), (
        f"{kind.name}: status {process.returncode}, {errors}"
    )
    assert "Traceback" not in errors and "Exception" not in errors, errors
    if process.returncode == 128 + kind:
        said = [line for line in errors.splitlines() if line.startswith("hotloop: error:")]
        assert len(said) == 1, errors
    return process.returncode != 0


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_run_that_is_killed_and_stopped_again_and_again_leaves_what_an_undisturbed_one_does(
    family: Family, seed: int, data: Path, undisturbed: Callable[[Family], Path], tmp_path: Path
) -> None:
    whole, run = undisturbed(family), tmp_path / "disturbed" / "run"
    moments, records = random.Random(f"{family.name} {seed}"), lines_of(whole)
    disturbed = 0
    for _ in range(DISTURBANCES):
        process = start(family.command(data, run.parent, resume=(run / "events.jsonl").exists()))
        try:
            await_moment(process, run, moments, records)
            disturbed += disturb(process, run, moments.choice(KINDS))
        finally:
            process.kill()
    assert disturbed >= 2, f"seed {seed}: most processes ended before they could be disturbed"
    for _ in range(2):  # the second time it is finished already
        finish(family.command(data, run.parent, resume=(run / "events.jsonl").exists()))
        assert_same_run(run, whole)
