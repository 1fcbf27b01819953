"""A run that began on two devices goes on on one, and the other way round: the same checkpoints, the same weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_replicas_processes import one_moved_weight

from hotloop.engine.device import setup
from hotloop.families.recommender import config as recommender_config
from hotloop.families.recommender import saved_run
from hotloop.families.recommender import train as recommender
from hotloop.families.recommender.config import TrainOptions
from hotloop.families.vcd import model as vcd_model
from hotloop.families.vcd import train as vcd
from hotloop.families.vcd.config import VcdTrain
from hotloop.families.vcd.images import Images
from listener import Listener
from same_numbers import assert_same_numbers, assert_seen

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices"),
    pytest.mark.usefixtures("signals_heard"),
]
BITS = np.random.default_rng(0).integers(0, 2, (20, 784), dtype=np.uint8)
UPDATES = 6


def train_vcd(folder: Path, *, changed: bool = False, **changes: Any) -> Any:
    """The last state; `changed`: with one pixel of one image inverted."""
    options = VcdTrain(
        z_dim=2,
        hidden=(6,),
        hmc_steps=2,
        leapfrog_steps=1,
        micro_batch_size=8,
        shared_updates=2,
        learning_rate=1e-4,
        updates=UPDATES,
        testing=False,
        results_dir=folder,
        run_name="run",
    )
    bits = BITS.copy()
    bits[7, 300] ^= changed
    data = Images("digits", "drawn", bits, bits[:0], bits[:5], origin="digits")
    vcd.train_run(replace(options, **changes), data, Listener(), "test")
    return vcd_model.load_run(folder / "run").state


def train_recommender(folder: Path, *, changed: bool = False, **changes: Any) -> Any:
    """The same; `changed`: with one other rating."""
    generator = np.random.default_rng(1)
    users, items = np.nonzero(generator.random((16, 9)) < 0.5)
    ratings = folder.parent / "3m_train.txt"
    values = 1 + (users * items) % 5
    values[3] = 1 + values[3] % 5 if changed else values[3]
    lines = (f"{u}\t{i}\t{v}\n" for u, i, v in zip(users, items, values, strict=True))
    ratings.write_text("".join(lines))
    options = TrainOptions(
        training_data_file=ratings,
        no_validation=True,
        batch_size=8,
        epochs=UPDATES // 2,
        device_iterations=1,
        valid_per_epoch=2,
        base_learning_rate=-10,
        results_dir=folder,
        run_name="run",
    )
    recommender.run(replace(options, **changes), Listener(), "test")
    return saved_run.load_run(folder / "run").state


FAMILIES = {"vcd": train_vcd, "recommender": train_recommender}


@pytest.fixture(autouse=True, scope="module")
def cached() -> None:
    """Programs that several of these runs have are compiled once."""
    setup()


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recommender_config.LAYERS, 128, (5, 4))


def leaves_of(run: Path) -> dict[str, Any]:
    """What the last checkpoint's manifest says of each array, but for its content."""
    step = max(path for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    manifest = json.loads((step / "manifest.json").read_text())
    return {name: [leaf["shape"], leaf["dtype"]] for name, leaf in manifest["leaves"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_on_on_another_number_of_devices(family: str, tmp_path: Path) -> None:
    train, states = FAMILIES[family], {}
    for began, goes_on in ((1, 2), (2, 1)):
        folder = tmp_path / f"on-{began}"
        states[began] = train(folder, replicas=began)
        shutil.copytree(folder, tmp_path / f"on-{goes_on}-again")
    assert leaves_of(tmp_path / "on-1" / "run") == leaves_of(tmp_path / "on-2" / "run")
    for replicas in (1, 2):
        folder = tmp_path / f"on-{replicas}-again"
        steps = sorted(each for each in (folder / "run" / "checkpoints").iterdir() if each.name.isdigit())
        assert len(steps) >= 2 and int(steps[-1].name) == UPDATES
        shutil.rmtree(steps[-1])
        states[f"again {replicas}"] = train(folder, replicas=replicas, resume=True)
    for state in states.values():
        assert int(state["update"]) == UPDATES
        assert_same_numbers(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, states[1]), 1e-6)
    controls = [train(tmp_path / "changed", changed=True)]
    with one_moved_weight(family):
        controls.append(train(tmp_path / "moved"))

    def same_weights(state: Any) -> None:
        found, wanted = (jax.tree.map(np.asarray, each["params"]) for each in (state, states[1]))
        assert_same_numbers(found, wanted, 1e-6)

    assert_seen(same_weights, *controls)
