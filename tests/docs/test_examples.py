"""Programs of the pages run as they are typed, given what a page leaves to its reader; those of estimator.md and hmc.md
are whole and have tests of their own beside what they show."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ELSEWHERE = {"estimator.md", "hmc.md"}
NOT_RUN = {
    "tour.md": "three signatures, no program",
    "layers.md 0": "it ends the process, which is what it is there for",
}
Names = dict[str, Any]


def blocks() -> dict[str, str]:
    """Page and number -> its text."""
    found = {}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for number, text in enumerate(BLOCK.findall(page.read_text())):
            found[f"{page.relative_to(ROOT / 'docs')} {number}"] = text
    return found


def after_command(names: Names, capsys: Any) -> None:
    said: list[str] = []
    context = type("Context", (), {"say": staticmethod(said.append)})()
    assert names["run"](names["GreetConfig"]("you", times=2), context) == {"greetings": 2}
    assert said == ["hello you"] * 2


def for_data() -> Names:
    return {"data_dir": None}


def after_data(names: Names, capsys: Any) -> None:
    assert names["digits"].train.images.shape == (60000, 28, 28, 1)
    assert names["digits"].train.labels.dtype == np.int32 and len(names["digits"].test.images)
    assert names["photos"].classes == 10 and names["photos"].source and names["photos"].stand_in
    assert len(names["films"].ratings.users) == len(names["films"].ratings.times)
    assert names["bits"].train.shape[1:] == (28, 28, 1) and set(np.unique(names["bits"].test)) == {0, 1}


def for_engine() -> Names:
    images, labels = np.ones((64, 3), np.float32), np.ones(64, np.float32)

    def update(config: Any) -> Any:
        def step(state: Any, batch: Any, key: Any) -> Any:
            loss = jnp.square(batch["image"].sum(-1) * state - batch["label"]).mean()
            return state * 0.9, {"loss": loss}

        return step

    from dataclasses import asdict, make_dataclass

    return {
        "jax": jax, "asdict": asdict, "samples": 64, "epochs": 2, "images": images, "labels": labels,
        "config": make_dataclass("Config", [("rate", float)])(0.1), "update": update, "folder": "run",
        "test": {"image": images, "label": labels}, "init": lambda config, key: jnp.ones(()),
        "evaluate": lambda config: lambda state, batch: {"error": batch["label"] * state},
        "key": jax.random.key(1), "resume": False,
    }  # fmt: skip


def after_engine(names: Names, capsys: Any) -> None:
    assert float(names["state"]) == pytest.approx(0.9**4)
    assert names["plan"].total_updates == 4 and (Path("run") / "events.jsonl").exists()


def for_own_data() -> Names:
    import optax

    from hotloop import Estimator, ModelSpec

    def model_fn(features: Any) -> Any:
        return ModelSpec(
            init=lambda key: jnp.zeros((3, 2)), apply=lambda weights, x: x @ weights, optimizer=optax.sgd(0.1)
        )

    images, labels = np.ones((64, 3), np.float32), np.ones(64, np.int32)
    loader = [(images[:32], labels[:32]), (images[32:], labels[32:])]
    estimator = Estimator(model_fn, model_dir="model", quiet=True)
    return {"estimator": estimator, "images": images, "labels": labels, "loader": loader}


def after_own_data(names: Names, capsys: Any) -> None:
    assert names["estimator"].evaluate((names["images"], names["labels"]))["global_step"] == 1000


def for_kernels() -> Names:
    return {
        "log_density": lambda x: -0.5 * (x**2).sum(-1), "positions": jnp.zeros((7, 3)),
        "key": jax.random.key(0), "step_size": jnp.float32(0.1),
    }  # fmt: skip


def after_kernels(names: Names, capsys: Any) -> None:
    assert names["info"].acceptance.shape == names["info"].energy_change.shape == (7,)
    assert names["state"].position.shape == (7, 3) and 0.05 < float(names["step_size"]) < 0.2


def after_layers(names: Names, capsys: Any) -> None:
    assert "onednn" in names["conv"].forward.paths


def for_records() -> Names:
    from hotloop.engine.run import Run

    with Run("results/...", {"seed": 1}, command="test") as run:
        run.event("log", update=3, epoch=0.5, loss=2.0)
    return {}


def after_records(names: Names, capsys: Any) -> None:
    assert names["record"]["event"] == "end"


def for_checkpoints() -> Names:
    feed = type("Feed", (), {"position": staticmethod(lambda update: {"update": update})})()
    run = type("Run", (), {"checkpoints": Path("checkpoints")})()
    return {"run": run, "feed": feed, "state": {"weights": jnp.ones(3)}}


def after_checkpoints(names: Names, capsys: Any) -> None:
    restored = names["restored"]
    assert (
        restored.step == 781 and restored.position == {"update": 781} and restored.metrics["accuracy"] == 0.93
    )


def nothing() -> Names:
    return {}


PROGRAMS: dict[str, tuple[Callable[[], Names], Callable[[Names, Any], None]]] = {
    "command-line.md 0": (nothing, after_command),
    "data.md 0": (for_data, after_data),
    "engine.md 0": (for_engine, after_engine),
    "how-to/own-data.md 0": (for_own_data, after_own_data),
    "kernels.md 0": (for_kernels, after_kernels),
    "layers.md 1": (nothing, after_layers),
    "runs.md 0": (for_records, after_records),
    "runs.md 1": (for_checkpoints, after_checkpoints),
}
SERVED = "how-to/serve.md 0"


def test_every_program_of_a_page_is_run_somewhere():
    left = {
        name for name in blocks() if name.split()[0] not in {*ELSEWHERE, *NOT_RUN} and name not in NOT_RUN
    }
    assert left == {*PROGRAMS, SERVED}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "data" in name else ()) for name in PROGRAMS]
)
def test_the_program_of_a_page_runs_as_it_is_typed(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTLOOP_OFFLINE", "1")
    given, check = PROGRAMS[name]
    with unchanged_paths():
        names = given()
        exec(compile(blocks()[name], name, "exec"), names)  # noqa: S102
        check(names, capsys)


@contextmanager
def unchanged_paths() -> Iterator[None]:
    """What a page registers for convolutions is taken back."""
    from hotloop.layers import conv

    before = dict(conv.forward._paths), dict(conv.forward._by_platform)
    try:
        yield
    finally:
        conv.forward._paths, conv.forward._by_platform = before
