"""What several processes have of each other, as JSON on standard output: `two_processes.check` starts it.

Not a test: it computes, and the tests know what must come out.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import staged_model as model
import weight_toys
from jax.sharding import NamedSharding, PartitionSpec

from hotloop import Resident, Streamed
from hotloop.engine import drive, precision, process_group, processes
from hotloop.engine.batch_sources import InputEnded, IterableBatches
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepAll, KeepBest
from hotloop.engine.device import REPLICA, device_mesh, setup
from hotloop.engine.stage_rows import divide, whole
from hotloop.errors import CheckpointError, HotloopError
from same_numbers import share_apart, with_moved_weight, with_other_label


def words() -> Any:
    """Process 0's word as every process has it; the others say something else."""
    said = {"text": "naïve\n", "large": 2**40, "zero": 0, "none": None, "list": [1, 2.5, "a"]}
    heard = processes.agreed(said if processes.is_writer() else {"wrong": processes.index()})
    many = [processes.agreed(processes.index() or number) for number in range(process_group.KEPT + 20)]
    return processes.gathered([heard, many == [*range(process_group.KEPT + 20)], processes.index()])


def ask_for_one() -> None:
    processes.agreed(1)


def disagreement() -> Any:
    """Processes that do not do the same are told so."""
    said = []
    try:
        processes.barrier(f"place {processes.index()}")
    except HotloopError as error:
        said.append(str(error))
    try:
        ask_for_one() if processes.is_writer() else processes.agreed(2)
    except HotloopError as error:
        said.append(str(error))
    return processes.gathered(said)


def sums(mesh: Any) -> Any:
    """A sum over all devices of 4 MiB each, whose right value is known for every number."""
    devices, length = mesh.size, 2**20
    rows = np.arange(devices, dtype=np.float32)[:, None] + np.arange(length, dtype=np.float32) % 97
    placed = processes.place(rows, NamedSharding(mesh, PartitionSpec(REPLICA)))

    def own_share(row: jax.Array) -> jax.Array:
        total = jax.lax.psum(row[0], REPLICA)
        return jax.lax.dynamic_slice_in_dim(
            total, jax.lax.axis_index(REPLICA) * (length // devices), length // devices
        )

    spread = jax.jit(
        jax.shard_map(own_share, mesh=mesh, in_specs=PartitionSpec(REPLICA), out_specs=PartitionSpec(REPLICA))
    )(placed)
    found = processes.fetch(spread)
    return processes.gathered(bool((found == rows.sum(axis=0)).all()) and float(found[100]) > 0)


def keys(mesh: Any) -> Any:
    """Random keys, counters and 64-bit numbers placed on all devices, and read back."""
    tree = {"key": jax.random.key(2**31 + 5), "count": 7, "wide": np.arange(3, dtype=np.int64)}
    placed = processes.place(tree, NamedSharding(mesh, PartitionSpec()))
    data = processes.fetch(jax.random.key_data(placed["key"]))
    same = bool((data == np.asarray(jax.random.key_data(tree["key"]))).all())
    return processes.gathered([same, int(placed["count"]), processes.fetch(placed["wide"]).tolist()])


def toys(mesh: Any) -> Any:
    """The weight after one update of each toy and of its controls, for every accumulation that its samples allow."""
    found: dict[str, list[list[float]]] = {}
    everywhere = NamedSharding(mesh, PartitionSpec())
    for name, toy in weight_toys.TOYS.items():
        for accumulation in (1, 4):
            split = NamedSharding(mesh, PartitionSpec(REPLICA))
            feed = Resident(toy.data, toy.samples, sharding=split)
            policy, optimiser = precision.parse("32.32"), optax.sgd(toy.rate)

            def update(state: Any, arguments: Any, toy: Any = toy, accumulation: int = accumulation) -> Any:
                def loss(params: Any, carry: Any, samples: Any, keys: Any) -> Any:
                    return toy.loss(params["w"], samples), (carry, {})

                return precision.update_weights(
                    loss,
                    state,
                    feed.batch(arguments, np.uint32(0)),  # noqa: B023 - called before the next toy
                    jax.random.key(0),
                    jax.random.key(1),
                    policy=policy,  # noqa: B023
                    optimiser=optimiser,  # noqa: B023
                    scale=1.0,
                    mesh=mesh,
                    accumulation=accumulation,
                )[0]

            run, ended = jax.jit(update), []
            for other, data in ((toy, toy.data), *toy.changed):
                fresh = precision.init_trained(policy, optimiser, 1.0, {"w": jnp.float32(other.start)})
                arguments = Resident(data, toy.samples, sharding=split).arguments(0, 1)
                ended.append(float(run(processes.place(fresh, everywhere), arguments).params["w"]))
            found.setdefault(name, []).append(ended)
    return processes.gathered(found)


def rows(mesh: Any) -> Any:
    """The samples that each process reads for the batches of two passes, and the batches that come of them."""
    read: list[int] = []

    def fetch(indices: Any) -> Any:
        read.extend(int(index) for index in indices)
        return {"x": indices.astype(np.float32)}

    sharding = NamedSharding(mesh, PartitionSpec(REPLICA))
    with Streamed(fetch, 8, seed=4, samples=24, sharding=sharding) as feed:
        read.clear()  # what was read to see the form
        batches = processes.fetch(feed.arguments(0, 6)["batches"]["x"])
    resident = Resident({"x": np.arange(24, dtype=np.float32)}, 8, seed=4)
    alike = [resident.batch(resident.arguments(step, 1), np.uint32(0))["x"].tolist() for step in range(6)]
    return processes.gathered([read, batches.tolist() == alike])


def end_of_input(mesh: Any) -> Any:
    """Where an input of other lengths in each process ends for all of them."""
    length = 5 + processes.index()
    batches = IterableBatches(lambda: iter([{"x": np.ones(8, np.float32)}] * length), 8)
    with Streamed(batches, 8, sharding=NamedSharding(mesh, PartitionSpec(REPLICA))) as feed:
        feed.arguments(0, 4)
        try:
            feed.arguments(4, 4)
        except InputEnded as end:
            feed.arguments(4, end.left)
            return processes.gathered(end.left)
    return None


def stages(folder: Path) -> Any:
    """A tree written in four stages over both processes, in two beside two replicas, and whole; each read as each."""
    tree = weight_toys.stage_tree()
    meshes = [device_mesh(1, 4), device_mesh(2, 2), device_mesh(4)]
    everywhere = NamedSharding(meshes[2], PartitionSpec())

    def as_on(mesh: Any) -> Any:
        if mesh.shape["stage"] == 1:
            return {"params": processes.place(tree, everywhere), "update": 3}
        each = len(tree) // mesh.shape["stage"]
        names = [*tree]
        parts = [
            {name: tree[name] for name in names[first : first + each]} for first in range(0, len(names), each)
        ]
        return {"params": divide(parts, tree, mesh), "update": 3}

    same = []
    for number, mesh in enumerate(meshes):
        with Checkpoints(folder / str(number)) as checkpoints:
            checkpoints.save(7, as_on(mesh), position={"n": number})
            for other in meshes:
                blank = jax.tree.map(lambda leaf: leaf * 0, as_on(other))
                restored = checkpoints.restore(blank).state
                got = restored["params"] if other.shape["stage"] == 1 else whole(restored["params"])
                leaves = zip(jax.tree.leaves(processes.fetch(got)), jax.tree.leaves(tree), strict=True)
                same.append(all((one == right).all() and one.dtype == right.dtype for one, right in leaves))
    return processes.gathered([len(same), all(same)])


def own_steps(folder: Path) -> Any:
    """What is gone on from where each process has steps of its own, and what is said where they have none in common."""
    like, said = {"w": np.zeros(3, np.float32)}, []
    with Checkpoints(folder / "own", KeepBest("score"), each_process=True) as own:
        own.keep = KeepAll()
        for step in (2, 4, 6, 8, 10):
            score = step + 100 * processes.index() * (step == 2)
            own.save(step, {"w": np.full(3, step, np.float32)}, position={}, metrics={"score": score})
            own.wait()
        if processes.index() == 1:  # the newest is gone, the one before it damaged
            own.remove(10)
            (own.folder / "00000008" / "manifest.json").write_text("{")
        processes.barrier("torn")
        restored = own.restore(like)
        said.append([own.begun(), own.steps(), restored.step, restored.state["w"].tolist(), restored.skipped])
        own.keep = KeepBest("score")
        said.append([own.best(), own.metrics(2)])
        if processes.index() == 1:
            for step in (2, 4, 6):
                own.remove(step)
            (own.folder / "00000008" / "manifest.json").unlink()
        for step in (None, 4):
            try:
                own.restore(like, step)
            except CheckpointError as error:
                said.append(str(error).replace(str(folder), ""))
        said.append(own.begun())
    with Checkpoints(folder / "own", each_process=False) as together:
        together.save(3, like, position={})
    with Checkpoints(folder / "own" / "rank0" / "none", each_process=True) as own:
        said.append(own.begun())
    processes.barrier("saved")
    if processes.is_writer():
        shutil.copytree(folder / "own" / "00000003", folder / "whole" / "00000003")
    processes.barrier("copied")
    with Checkpoints(folder / "whole", each_process=True) as own:
        try:
            own.begun()
        except CheckpointError as error:
            said.append(str(error).replace(str(folder), ""))
    return processes.gathered(said)


def compilations(mesh: Any) -> Any:
    """Barriers after a program's first call, its second, one of another form, and one on this process's devices."""
    spread = processes.place(np.ones((mesh.size, 2), np.float32), NamedSharding(mesh, PartitionSpec(REPLICA)))
    counts, met, before = [], [], processes.barrier
    processes.barrier = met.append
    try:
        for given in (spread, spread, {"other": spread}, np.ones(2, np.float32)):
            met.clear()
            processes.agreed(None)
            finite = bool(drive._is_finite(jax.tree.map(jnp.asarray, given)))
            counts.append([[*met], finite])
    finally:
        processes.barrier = before
    processes.barrier("counted")
    return processes.gathered(counts)


def staged_gradients(mesh: Any) -> Any:
    """How far an update in stages is from the undivided model's: four stages over both processes, and 2 x 2."""
    found = []
    plain, batch, key = optax.sgd(0.05, momentum=0.0), model.draw_batch(), jax.random.key(7)
    whole = jax.jit(model.whole_update(model.WIDE, plain, accumulation=4))
    expected, figures = whole(model.start(model.WIDE, plain), batch, key)
    for starts, replicas in (("bcd", 1), ("c", 2)):
        counts = {"replicas": replicas, "accumulation": 4 // replicas}
        update, spread = model.staged_update(starts, "Interleaved", model.WIDE, plain, **counts)
        split = NamedSharding(device_mesh(replicas, 4 // replicas), PartitionSpec(REPLICA))
        start = model.start(model.WIDE, plain)
        states = [spread(each) for each in (start, with_moved_weight(start, "params", "a", "kernel"))]
        processes.barrier("spread")
        run = jax.jit(lambda old, batch, update=update: update(old, batch, key))
        placed, relabelled = (processes.place(each, split) for each in (batch, with_other_label(batch, 3)))
        new, others = run(states[0], placed)
        changed, moved = run(states[0], relabelled)[0], run(states[1], placed)[0]
        gradients, label, weight, theirs = (
            model.merged(each).optimiser[0].trace for each in (new, changed, moved, expected)
        )
        same = max(share_apart(gradients, theirs), share_apart(processes.fetch(others), figures))
        found.append([same, share_apart(label, theirs), share_apart(weight, theirs)])
    return processes.gathered(found)


if __name__ == "__main__":
    setup("cpu")
    mesh = device_mesh(2 * processes.count())
    found = {"words": words(), "disagreement": disagreement()}
    found |= {
        check.__name__: check(mesh)
        for check in (sums, keys, toys, rows, end_of_input, compilations, staged_gradients)
    }
    found["stages"] = stages(Path(sys.argv[1]))
    found["own_steps"] = own_steps(Path(sys.argv[1]))
    print(json.dumps(found))
