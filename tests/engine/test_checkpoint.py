"""A saved state comes back bit for bit, or a line says why not; only whole steps are ever seen."""

import json
import logging
import math
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hotloop.engine import checkpoint_folder as manifests
from hotloop.engine import optim
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepAll, KeepBest, KeepLast
from hotloop.errors import CheckpointError


def small_state(scale=1.0):
    params = {"dense": {"w": jnp.full((3, 4), float(scale)), "b": jnp.zeros(4, jnp.bfloat16)}}
    return {"params": params, "optimiser": optax.adam(1e-3).init(params), "step": jnp.int32(7)}


def saved(folder, steps=(1, 2), **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, small_state(step), position={"update": step})
    return checkpoints


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    saved(folder)
    return folder


@pytest.fixture
def steps(two_steps, tmp_path):
    """A folder with whole steps 1 and 2, to damage at will."""
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


def weight(restored):
    return float(restored.state["params"]["dense"]["w"][0, 0])


def bits(leaf):
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(data).tobytes()


def test_every_type_comes_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    payloads = rng.integers(0, 2**16, 4096, dtype=np.uint16)  # every kind of NaN, infinity and subnormal
    state = {
        "bf16": jnp.asarray(payloads.view(jnp.bfloat16)),
        "fp16": jnp.asarray(payloads.view(np.float16)),
        "fp32": jnp.asarray(rng.integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)),
        "fp8": jnp.asarray(payloads.view(np.uint8).view(jnp.float8_e4m3fn)),
        "key": jax.random.key(3),
        "rbg keys": jax.random.split(jax.random.key(3, impl="rbg"), 4),
        "raw key": jax.random.PRNGKey(5),
        "bool": jnp.array([True, False]),
        "int8": jnp.int8([-128, 127]),
        "complex": jnp.complex64([1 + 2j]),
        "double": np.array([np.pi]),
        "none at all": jnp.zeros((0, 3)),
        "no keys": jax.random.split(jax.random.key(3), 2)[:0],
        "scalar": jnp.int32(-4),
        "nested": (optax.adam(1e-3).init({"a": jnp.ones(2)}), [jnp.ones(1)]),
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, position={})
        back = checkpoints.restore(state).state
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        assert (type(old), old.dtype, old.shape) == (type(new), new.dtype, new.shape)
        assert bits(old) == bits(new)


def test_a_folder_may_have_any_name(tmp_path):
    name = r"run [3, a] {b} *? \d 'e' ü"
    saved(tmp_path / name)
    with Checkpoints(tmp_path / name) as checkpoints:
        assert weight(checkpoints.restore(small_state())) == 2
        assert checkpoints.steps() == [1, 2]


def test_plain_numbers_position_and_metrics_come_back(tmp_path):
    state = {"n": 2**40, "x": 0.1, "on": True}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(
            0,
            state,
            position={"update": np.int64(9), "file": "a", "sums": {"loss": [np.inf, 0.1]}},
            metrics={"loss": jnp.float32(0.5), "bad": np.nan},
        )
        back = checkpoints.restore(state)
    assert back.state == state
    assert type(back.state["on"]) is bool
    assert back.position == {"update": 9, "file": "a", "sums": {"loss": [math.inf, 0.1]}}
    assert back.metrics == {"loss": 0.5, "bad": None}


def test_a_state_donated_right_after_save_is_saved_as_it_was(tmp_path):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    w = jnp.arange(1_000_000, dtype=jnp.float32)
    address = w.unsafe_buffer_pointer()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": w}, position={})
        after = overwrite(w)
        back = checkpoints.restore({"w": after})
    assert after.unsafe_buffer_pointer() == address, "the snapshot kept the buffer from being donated"
    np.testing.assert_array_equal(back.state["w"], np.arange(1_000_000, dtype=np.float32))


def test_a_restored_state_may_be_donated(steps):
    state = Checkpoints(steps).restore(small_state()).state
    bumped = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert float(bumped["params"]["dense"]["w"][0, 0]) == 3.0


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_leaves_take_the_sharding_of_their_example(tmp_path):
    sharding = jax.NamedSharding(jax.make_mesh((4,), ("replica",)), jax.P("replica"))
    value = np.arange(8, dtype=np.float32)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jax.device_put(value, sharding), "y": jnp.ones(2)}, position={})
        like = {"x": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding), "y": jnp.ones(2)}
        state = checkpoints.restore(like).state
    assert state["x"].sharding == sharding
    assert not state["y"].committed
    np.testing.assert_array_equal(state["x"], value)


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    optimiser = optax.adamw(1e-2)

    @jax.jit
    def update(state):
        key = jax.random.fold_in(state["key"], state["step"])
        x = jax.random.normal(key, (16, 3))
        gradient = jax.grad(lambda w: jnp.mean((x @ w.astype(jnp.float32) - 1) ** 2))(state["w"])
        change, opt = optimiser.update(gradient, state["opt"], state["w"])
        return {
            "w": optax.apply_updates(state["w"], change),
            "opt": opt,
            "key": state["key"],
            "step": state["step"] + 1,
        }

    w = jnp.ones((3, 2), jnp.bfloat16)
    start = {"w": w, "opt": optimiser.init(w), "key": jax.random.key(0), "step": jnp.int32(0)}
    state = start
    with Checkpoints(tmp_path) as checkpoints:
        for _ in range(5):
            state = update(state)
        checkpoints.save(5, state, position={"update": 5})
        for _ in range(5):
            state = update(state)
    resumed = Checkpoints(tmp_path).restore(start).state
    for _ in range(5):
        resumed = update(resumed)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(resumed), strict=True):
        assert bits(old) == bits(new)


def files_of_a_step(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_one_flipped_byte_in_any_file_is_found_and_the_step_before_is_used(steps):
    checkpoints = Checkpoints(steps)
    step = steps / "00000002"
    names = files_of_a_step(step)
    assert len(names) > 5
    for name in names:
        data = bytearray((step / name).read_bytes())
        whole = bytes(data)
        data[len(data) // 2] ^= 0x10
        (step / name).write_bytes(data)
        back = checkpoints.restore(small_state())
        (step / name).write_bytes(whole)
        assert (back.step, weight(back)) == (1, 1.0), name
        assert len(back.skipped) == 1
        assert name in back.skipped[0]
        assert "\n" not in back.skipped[0]
        assert len(back.skipped[0]) < 400
    assert checkpoints.restore(small_state()).step == 2


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_missing_or_truncated_file_is_named_and_skipped(steps, damage):
    checkpoints = Checkpoints(steps)
    path = max(
        (steps / "00000002" / "state").rglob("*"), key=lambda path: path.stat().st_size * path.is_file()
    )
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    assert checkpoints.steps() == [1]
    back = checkpoints.restore(small_state())
    assert back.step == 1
    assert path.name in back.skipped[0]
    assert damage in back.skipped[0]


def test_an_empty_step_folder_is_never_the_latest_step(steps):
    checkpoints = Checkpoints(steps)
    (steps / "00000009").mkdir()
    assert checkpoints.steps() == [1, 2]
    back = checkpoints.restore(small_state())
    assert back.step == 2
    assert back.skipped == [f"skipped step 9: {steps / '00000009'} is empty"]
    assert checkpoints.damaged() == back.skipped


def test_who_keeps_no_records_is_told_of_skipped_steps(steps, capsys):
    (steps / "00000009").mkdir()
    assert Checkpoints(steps).restore(small_state()).warn().step == 2
    assert capsys.readouterr().err == f"warning: skipped step 9: {steps / '00000009'} is empty\n"


def test_a_missing_manifest_means_incomplete(steps):
    checkpoints = Checkpoints(steps)
    (steps / "00000002" / "manifest.json").unlink()
    back = checkpoints.restore(small_state())
    assert back.step == 1
    assert "has no manifest.json" in back.skipped[0]


def test_a_plain_orbax_checkpoint_is_foreign(tmp_path):
    import orbax.checkpoint as orbax

    with orbax.StandardCheckpointer() as plain:
        plain.save(tmp_path / "5", {"w": np.ones(3)})
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint in .*: skipped step 5: .*another program"
    ):
        Checkpoints(tmp_path).restore({"w": jnp.ones(3)})


def test_a_folder_of_other_things_holds_no_checkpoint(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "not there"):
        with pytest.raises(CheckpointError, match="nothing there is named like a step"):
            Checkpoints(folder).restore(small_state())


def test_when_every_step_is_damaged_the_error_says_why_for_each(steps):
    checkpoints = Checkpoints(steps)
    (steps / "00000001" / "manifest.json").unlink()
    (steps / "00000002" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step 2: .*damaged; skipped step 1: .*incomplete") as caught:
        checkpoints.restore(small_state())
    assert "\n" not in str(caught.value)


def _without_bias(state):
    del state["params"]["dense"]["b"]
    return state


def _with(path_value):
    return lambda state: {**state, **path_value}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_with({"step": jnp.float32(7)}), r"leaf step is int32\[\] in the checkpoint but float32\[\] here"),
        (
            _with({"step": jnp.zeros(2, jnp.int32)}),
            r"leaf step is int32\[\] in the checkpoint but int32\[2\] here",
        ),
        (_with({"step": 7}), r"leaf step is int32\[\] in the checkpoint but python int\[\] here"),
        (_with({"extra": jnp.ones(2)}), r"leaf extra is float32\[2\] here but not in the checkpoint"),
        (_without_bias, r"leaf params/dense/b \(bfloat16\[4\]\) of the checkpoint is not in this state"),
    ],
)
def test_another_model_is_an_error_that_names_the_leaf_and_never_an_older_step(steps, change, reason):
    checkpoints = Checkpoints(steps)
    with pytest.raises(CheckpointError, match=reason) as caught:
        checkpoints.restore(change(small_state()))
    assert "00000002" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_family_is_refused_and_another_config_is_mentioned(tmp_path):
    saved(tmp_path, family="kernels", config={"size": 4})
    with pytest.raises(CheckpointError, match="belongs to kernels, not cnn"):
        Checkpoints(tmp_path, family="cnn").restore(small_state())
    with pytest.raises(CheckpointError, match="saved with another config"):
        Checkpoints(tmp_path, family="kernels", config={"size": 5}).restore({"w": jnp.ones(5)})
    assert Checkpoints(tmp_path, family="kernels", config={"size": 5}).restore(small_state()).step == 2


def test_a_step_asked_for_by_number_is_that_step_or_an_error(steps):
    checkpoints = Checkpoints(steps)
    assert checkpoints.restore(small_state(), step=1).step == 1
    with pytest.raises(CheckpointError, match=r"no step 5 .*complete steps: \[1, 2\]"):
        checkpoints.restore(small_state(), step=5)
    (steps / "00000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"skipped step 2"):
        checkpoints.restore(small_state(), step=2)


def test_the_best_step_outlives_keep_last(tmp_path):
    with Checkpoints(tmp_path, KeepLast(1) | KeepBest("accuracy")) as checkpoints:
        for step, accuracy in enumerate([0.1, 0.9, float("nan"), 0.5]):
            checkpoints.save(step, {"w": jnp.ones(1)}, position={}, metrics={"accuracy": accuracy})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]
        assert checkpoints.best() == 1


def test_the_newest_step_stays_though_it_is_not_the_best(tmp_path):
    with Checkpoints(tmp_path, KeepBest("accuracy")) as checkpoints:
        for step, accuracy in enumerate([0.9, 0.1, 0.5]):
            checkpoints.save(step, {"w": jnp.ones(1)}, position={}, metrics={"accuracy": accuracy})
        checkpoints.wait()
        assert checkpoints.steps() == [0, 2]


def test_a_leaf_that_comes_back_with_other_bits_is_named(steps, monkeypatch):
    import orbax.checkpoint as orbax

    read = orbax.Checkpointer.restore

    def wrong(self, folder, **options):
        arrays = read(self, folder, **options)
        if "00000002" in str(folder):
            arrays["params/dense/w"] = np.nextafter(arrays["params/dense/w"], 9, dtype=np.float32)
        return arrays

    monkeypatch.setattr(orbax.Checkpointer, "restore", wrong)
    back = Checkpoints(steps).restore(small_state())
    assert back.step == 1
    assert "leaf params/dense/w of" in back.skipped[0]


def forge(folder, **changes):
    """Change a manifest so that its checksum is right."""
    body = json.loads((folder / "manifest.json").read_text())
    body = {**{key: value for key, value in body.items() if key != "checksum"}, **changes}
    text = json.dumps({**body, "checksum": manifests._self_checksum(body)})
    (folder / "manifest.json").write_text(text)
    return body


@pytest.mark.parametrize(
    "what", ["none", "another shape", "another type", "another name", "no elements", "one less"]
)
def test_a_manifest_that_does_not_fit_its_own_folder_is_damage_and_the_older_step_is_used(steps, what):
    leaves = forge(steps / "00000002")["leaves"]
    w = leaves.pop("params/dense/w")
    changed = {
        "none": {},
        "another shape": {**leaves, "params/dense/w": {**w, "shape": [4, 3]}},
        "another type": {**leaves, "params/dense/w": {**w, "dtype": "int32"}},
        "another name": {**leaves, "params/dense/x": w},
        "no elements": {**leaves, "params/dense/w": {**w, "shape": [0, 4]}},
        "one less": leaves,
    }
    forge(steps / "00000002", leaves=changed[what])
    back = Checkpoints(steps).restore(small_state())
    assert (back.step, weight(back)) == (1, 1.0)
    assert "skipped step 2" in back.skipped[0]


def test_a_position_that_nobody_can_go_on_from_is_damage_and_the_older_step_is_used(steps):
    back = Checkpoints(steps).restore(small_state(), check=lambda position: {1: "ok"}[position["update"]])
    assert (back.step, len(back.skipped)) == (1, 1)
    assert "its position is none" in back.skipped[0]


def test_nothing_that_is_not_ours_is_deleted(tmp_path):
    saved(tmp_path, steps=(1,))
    (tmp_path / "00000001" / "my notes.txt").write_text("mine")
    (tmp_path / "00000000").mkdir()
    (tmp_path / "00000000" / "x").write_text("foreign")
    (tmp_path / ".hotloop-tmp-mine").mkdir()
    (tmp_path / ".hotloop-tmp-mine" / "letter.txt").write_text("mine")
    (tmp_path / "readme").write_text("mine")
    checkpoints = saved(tmp_path, steps=(2, 3), keep=KeepLast(1))
    assert (tmp_path / "00000001" / "my notes.txt").read_text() == "mine"
    assert (tmp_path / "00000000" / "x").exists()
    assert (tmp_path / ".hotloop-tmp-mine" / "letter.txt").exists()
    assert checkpoints.steps() == [1, 3]


def test_steps_of_another_family_are_not_counted_or_deleted(steps):
    saved(steps, steps=(5, 6), keep=KeepLast(1), family="kernels")
    assert Checkpoints(steps).steps() == [1, 2, 6]


def test_a_program_that_ends_before_its_save_says_so(tmp_path):
    script = """
        import sys
        import numpy as np
        from hotloop.engine.checkpoint import Checkpoints
        Checkpoints(sys.argv[1]).save(1, {"w": np.ones(1_000_000)}, position={})
    """
    _, errors = run_script(script, tmp_path).communicate(timeout=60)
    written = Checkpoints(tmp_path).steps() == [1]
    assert written or "close the checkpoints before the program ends" in errors


def test_a_damaged_step_in_the_way_is_set_aside_not_deleted(steps):
    (steps / "00000002" / "manifest.json").write_text("broken")
    checkpoints = saved(steps, steps=(2,))
    assert checkpoints.restore(small_state()).step == 2
    (aside,) = steps.glob("00000002.set-aside-*")
    assert (aside / "manifest.json").read_text() == "broken"


def test_saving_a_step_again_replaces_it(steps):
    with Checkpoints(steps) as checkpoints:
        checkpoints.save(2, small_state(50.0), position={})
    assert weight(checkpoints.restore(small_state())) == 50.0
    assert sorted(path.name for path in steps.iterdir()) == ["00000001", "00000002"]


def test_a_temporary_folder_left_by_a_kill_is_ignored_then_cleaned(tmp_path):
    left = tmp_path / ".hotloop-tmp-9-0badcafe"
    (left / "state.orbax-checkpoint-tmp-1" / "d").mkdir(parents=True)
    assert Checkpoints(tmp_path).steps() == []
    assert left.exists(), "a reader must not clean"
    saved(tmp_path)
    assert not left.exists()


def test_a_temporary_folder_that_is_being_written_is_not_cleaned(tmp_path):
    from hotloop.engine.checkpoint_folder import hold_lock

    left = tmp_path / ".hotloop-tmp-9-0badcafe"
    left.mkdir()
    with hold_lock(left):
        saved(tmp_path)
        assert left.exists()


def test_a_folder_that_cannot_be_written_is_one_line_at_the_next_call(tmp_path):
    (tmp_path / "file").write_text("in the way")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints")
    checkpoints.save(1, small_state(), position={})
    with pytest.raises(CheckpointError, match=r"cannot write step 1 in .*: Not a directory") as caught:
        checkpoints.save(2, small_state(), position={})
    assert "\n" not in str(caught.value)
    checkpoints.close()


def run_script(text, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_the_earlier_steps(tmp_path):
    script = """
        import resource, signal, sys
        import numpy as np
        from hotloop.engine.checkpoint import Checkpoints
        from hotloop.errors import CheckpointError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        checkpoints = Checkpoints(sys.argv[1])
        checkpoints.save(1, {"w": np.ones(10)}, position={})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        checkpoints.save(2, {"w": np.random.default_rng(0).normal(size=100_000)}, position={})
        try:
            checkpoints.wait()
        except CheckpointError as error:
            print(error)
        print(checkpoints.steps())
        checkpoints.close()
    """
    output, errors = run_script(script, tmp_path).communicate(timeout=60)
    line, steps = output.splitlines()[-2:]
    assert line.startswith("cannot write step 2 in"), errors
    assert "File too large" in line
    assert "Traceback" not in errors
    assert steps == "[1]"
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


KILLED = """
    import sys
    import numpy as np
    from hotloop.engine.checkpoint import Checkpoints
    from hotloop.engine.checkpoint_folder import KeepAll
    checkpoints = Checkpoints(sys.argv[1], KeepAll())
    for step in range(1, 1000):
        checkpoints.save(step, {"w": np.full(1_000_000, step, np.float32)}, position={"update": step})
        print(step, flush=True)
"""


@pytest.mark.parametrize("moment", [0.0, 0.03])
def test_a_kill_at_any_moment_leaves_only_whole_steps(tmp_path, moment):
    child = run_script(KILLED, tmp_path)
    for _ in range(3):
        child.stdout.readline()
    time.sleep(moment)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    checkpoints = Checkpoints(tmp_path, KeepAll())
    like = {"w": np.zeros(1_000_000, np.float32)}
    steps = checkpoints.steps()
    assert len(steps) >= 2
    for step in steps:
        back = checkpoints.restore(like, step)
        assert (back.state["w"] == step).all()
        assert back.position == {"update": step}
    assert checkpoints.restore(like).skipped == []
    with checkpoints:
        checkpoints.save(5000, like, position={})
    assert all(path.name.isdigit() for path in tmp_path.iterdir())


def test_save_returns_long_before_a_big_state_is_durable(tmp_path):
    state = {
        f"layer{i}": jnp.asarray(np.random.default_rng(i).normal(size=2**22), jnp.float32) for i in range(4)
    }
    jax.block_until_ready(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(1)}, position={})  # imports orbax
        checkpoints.wait()
        began = time.perf_counter()
        checkpoints.save(2, state, position={})
        returned = time.perf_counter() - began
        checkpoints.wait()
        durable = time.perf_counter() - began
    print(f"64 MiB: returned after {returned * 1e3:.0f} ms, durable after {durable * 1e3:.0f} ms")
    assert returned < durable / 2


def test_writes_that_nobody_waits_for_after_a_first_error_print_nothing(tmp_path, caplog):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small_state(1), position={})
    log = logging.getLogger("asyncio")
    log.error(
        "Task exception was never retrieved\nfuture: <Task coro=<w() defined at /x/orbax/checkpoint/a.py:1>>"
    )
    assert caplog.records == []
    log.error("Task exception was never retrieved\nfuture: <Task coro=<mine() defined at /x/mine.py:1>>")
    assert len(caplog.records) == 1


def test_what_a_late_write_leaves_of_a_failed_step_is_removed_too(tmp_path, monkeypatch):
    late = []

    def write(folder, note, arrays):
        late.append(threading.Timer(0.2, (folder / "state" / "d").mkdir, kwargs={"parents": True}))
        late[0].start()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hotloop.engine.checkpoint_folder.write_step", write)
    with pytest.raises(CheckpointError, match="cannot write step 1"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small_state(1), position={})
    late[0].join()
    assert not [each for each in tmp_path.iterdir() if "tmp" in each.name]


W, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)
LAYERS = {"dense": {"w": W, "b": B}}
FORMAT_1 = {
    "cnn": (
        {"optimiser": {"velocity": LAYERS, "mean_square": LAYERS}},
        optim.make("rmsprop", {"momentum": 0.9, "base_decay_exponent": -3, "epsilon": 0}),
    ),
    "recommender": (
        {"optimiser": (optax.EmptyState(), optax.EmptyState(), optax.TraceState(LAYERS))},
        optim.make("momentum", {"momentum": 0.9}, l2=1e-4, clip=1.0),
    ),
    "cifar": (
        {"optimizer": optax.adam(lambda count: 0.1).init(LAYERS)},
        optim.at_rate(optim.make("adam", {}), lambda count: 0.1),
    ),
}


@pytest.mark.parametrize("family", FORMAT_1)
def test_a_checkpoint_of_format_1_has_the_optimisers_state_under_other_names(tmp_path, family):
    old, now = FORMAT_1[family]
    old = jax.tree.map(lambda leaf: leaf + 7, {"params": LAYERS, **old})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints._blank = replace(checkpoints._blank, format=1)
        checkpoints.save(3, old, position={})
    (name,) = set(old) - {"params"}
    like = {"params": LAYERS, name: now.init(LAYERS)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.check_fits(like)
        state = checkpoints.restore(like).state
        # A format that is no longer 1 has no such names.
        checkpoints._blank = replace(checkpoints._blank, format=2)
        checkpoints.save(4, old, position={})
        with pytest.raises(CheckpointError, match=r"does not fit this model: leaf optimi[sz]er/"):
            checkpoints.restore(like)
    arrays = [leaf for leaf in jax.tree.leaves(old[name]) if np.ndim(leaf)]
    found = [leaf for leaf in jax.tree.leaves(state[name]) if leaf.ndim]
    assert sorted(map(str, found)) == sorted(map(str, map(jnp.asarray, arrays)))
    assert all(leaf == 7 for leaf in jax.tree.leaves(state[name]) if leaf.ndim == 0)


def test_the_count_of_updates_of_a_vcd_run_of_format_1_is_found_in_its_slots(tmp_path):
    old = {"slots": {"mean_square": LAYERS, "updates": np.int32(41)}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints._blank = replace(checkpoints._blank, format=1)
        checkpoints.save(3, old, position={})
        slots = optim.make("rmsprop_outside", {"decay": 0.9, "epsilon": 1.0, "first_square": True}).init(
            LAYERS
        )
        state = checkpoints.restore({"slots": slots, "update": jnp.int32(0)}).state
    assert state["update"] == state["slots"]["rmsprop_outside"].updates == 41
    np.testing.assert_array_equal(state["slots"]["rmsprop_outside"].nu["dense"]["w"], W)
