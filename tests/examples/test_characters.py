"""The sixth family, written with the front door alone: it learns, and a run that is stopped goes on bit for bit."""

import ast
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from family_protocol import same_tree
from hotloop.engine.interrupt import Interrupted
from hotloop.engine.run import Run, current_records, read_events

EXAMPLE = Path(__file__).parents[2] / "examples" / "characters.py"
spec = importlib.util.spec_from_file_location("characters_example", EXAMPLE)
assert spec and spec.loader
characters: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(characters)

characters.topics = dict(sorted(characters.topics.items())[:12])  # enough text to see that it learns
SMALL = characters.Config(epochs=2, batch_size=64, context=16, width=16, heads=2, layers=1)
pytestmark = pytest.mark.usefixtures("signals_heard")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("characters") / "whole"
    return folder, characters.train_characters(SMALL, folder)


def figures(folder: Path, event: str, name: str) -> list[tuple[int, float]]:
    found = current_records(read_events(folder))
    return [(record["update"], record[name]) for record in found if record["event"] == event]


def test_it_is_short_and_takes_nothing_but_the_front_door() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 120
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [node.module for node in imports if "hotloop" in ast.unparse(node)] == ["hotloop"]


@pytest.mark.slow
def test_its_loss_on_text_that_it_never_saw_falls(whole: tuple[Path, Any]) -> None:
    (_, first), (_, last) = figures(whole[0], "validation", "loss")
    assert last < first < np.log(128)


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_bit_for_bit(
    whole: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Run.event

    def stop_at_the_first_log(self: Run, event: str, **figures: Any) -> Any:
        if event == "log":
            os.kill(os.getpid(), signal.SIGTERM)
        return record(self, event, **figures)

    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "event", stop_at_the_first_log)
        with pytest.raises(Interrupted, match="to resume: call train again with resume=True"):
            characters.train_characters(SMALL, folder)
    state = characters.train_characters(SMALL, folder, resume=True)
    if jax.default_backend() == "cpu":
        same_tree(state, whole[1], "resumed")
    # Elsewhere the embeddings' gradients are summed by atomic additions, in another order in every run.
    exactness = 0 if jax.default_backend() == "cpu" else 1e-3
    for event in ("log", "validation"):
        again, expected = (np.array(figures(each, event, "loss")) for each in (folder, whole[0]))
        np.testing.assert_allclose(again, expected, rtol=exactness)
    (resumed,) = (record["update"] for record in read_events(folder) if record["event"] == "resume")
    assert 0 < resumed < figures(folder, "log", "loss")[-1][0]
