"""Persistent recurrences: their formulas and kernels against float64, and when a program takes them.

Pallas' interpreter runs one block after the other and knows no semaphores, so kernels run in it where a block has all
units and exchanges with nobody; the exchange is counted in test_persistent_exchange.py and tested on a card
(test_persistent_card.py). From end to end they run in test_persistent_layers.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.layers import native, paths, persistent, persistent_tiles, recurrence, recurrent
from hotloop.layers.persistent_tiles import Tile

T, B, H = 3, 16, 64
CELLS = ["rnn", "gru", "gru_reset_after", "lstm"]
SIZES = {"rnn": 1, "gru": 3, "gru_reset_after": 3, "lstm": 4}
needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < paths.CARD_JAX, reason="kernels are built with jax 0.11.2 or later"
)


def case(cell):
    """Input sums, recurrent weights, state and cotangents in float64, all of them numbers that float16 has."""
    rng = np.random.default_rng(0)

    def draw(*shape, scale=1.0):
        return (rng.standard_normal(shape) * scale).astype(np.float16).astype(np.float64)

    z, kernel = draw(T, B, SIZES[cell] * H), draw(H, SIZES[cell] * H, scale=0.1)
    weights = (kernel, draw(H)) if cell == "gru_reset_after" else kernel
    state = tuple(draw(B, H, scale=0.5) for _ in range(2 if cell == "lstm" else 1))
    return z, weights, state, draw(T, B, H), tuple(draw(B, H) for _ in state)


def exact(cell):
    """Outputs, states, sums and the gradient of the input sums, by the plain path in float64."""
    z, weights, state, dy, d_last = case(cell)
    with jax.enable_x64(True), paths.force_path("cpu loop"):
        formulas = recurrence.CELLS[cell]
        outputs, back = jax.vjp(
            lambda z, state: recurrence.recur(
                formulas, jnp.asarray(z), jax.tree.map(jnp.asarray, weights), state
            ),
            jnp.asarray(z),
            tuple(map(jnp.asarray, state)),
        )
        states, _, sums = recurrence._run_forward(
            jnp.asarray(z),
            jax.tree.map(jnp.asarray, weights),
            tuple(map(jnp.asarray, state)),
            formulas,
            "cpu",
        )
        dz, d_state = back((jnp.asarray(dy), tuple(map(jnp.asarray, d_last))))
        return jax.tree.map(np.asarray, (outputs[0], states, sums, dz, d_state))


def half(array):
    return jnp.asarray(array, jnp.float16)


def interpreted():
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def differ(ours, theirs):
    return np.linalg.norm(np.asarray(ours, np.float64) - theirs) / np.linalg.norm(theirs)


@needs_mosaic
@pytest.mark.parametrize("cell", CELLS)
def test_a_block_that_has_all_units_gives_the_states_and_sums_of_float64(cell):
    from hotloop.layers import persistent_forward

    z, weights, state, *_ = case(cell)
    kernel, bias = weights if cell == "gru_reset_after" else (weights, None)
    job = persistent_forward.Job(cell, Tile(H, B, 1, 64, 2), T, B, H, jnp.float16, True, True)
    start = [half(state[0]), *(jnp.asarray(part, jnp.float32) for part in state[1:])]
    found = persistent_forward.run(
        job, half(z), half(kernel), None if bias is None else half(bias), start, interpret=interpreted()
    )
    outputs, states, sums, *_ = exact(cell)
    assert np.abs(np.asarray(found["h"], np.float64) - outputs).max() < 2e-3
    assert differ(found["sums"], sums) < 2e-3
    if cell == "lstm":
        assert np.abs(np.asarray(found["c"], np.float64) - states[1]).max() < 2e-3


@needs_mosaic
@pytest.mark.parametrize("cell", CELLS)
def test_a_block_that_has_all_units_gives_the_gradients_of_float64(cell):
    from hotloop.layers import persistent_backward

    _, weights, state, dy, d_last = case(cell)
    _, states, sums, dz, d_state = exact(cell)
    kernel = weights[0] if cell == "gru_reset_after" else weights
    wide = [jnp.asarray(part, jnp.float32) for part in (*state, *d_last)]
    operands = {
        "recurrent": half(kernel),
        "sums": half(sums),
        "d_outputs": half(dy),
        "d_last_h": wide[len(state)],
    }
    if cell == "lstm":
        c = jnp.asarray(states[1], jnp.float32)
        operands |= {"c": c, "start_c": wide[1], "d_last_c": wide[3]}
    elif cell != "rnn":
        operands |= {"h": half(states[0]), "start_h": half(state[0])}
    job = persistent_backward.Job(cell, Tile(H, B, 1, 64, 2), T, B, H, jnp.float16, True)
    found = persistent_backward.run(job, operands, interpret=interpreted())
    assert differ(found["dz"], dz) < 1e-2
    given = persistent._start_gradient(cell, half(kernel), found, [half(state[0]), *wide[1 : len(state)]])
    for ours, theirs in zip(given, d_state, strict=True):
        assert differ(ours, theirs) < 1e-2


@needs_mosaic
def test_the_rnn_without_exchange_gives_the_outputs_and_gradients_of_float64():
    from hotloop.layers.persistent_alone import Job, run

    z, kernel, state, dy, d_last = case("rnn")
    outputs, _, sums, dz, _ = exact("rnn")
    forward = Job(8, T, B, H, jnp.float16, ("z",), ("h", "sums"), "start")
    found = run(forward, half(kernel.T), [half(z), half(state[0])], interpret=interpreted())
    assert np.abs(np.asarray(found["h"], np.float64) - outputs).max() < 2e-3
    assert differ(found["sums"], sums) < 2e-3
    backward = Job(8, T, B, H, jnp.float16, ("sums", "d_outputs"), ("dz",), "d_last_h")
    last = jnp.asarray(d_last[0], jnp.float32)
    found = run(backward, half(kernel), [half(sums), half(dy), last], interpret=interpreted())
    assert differ(found["dz"], dz) < 1e-2


@pytest.fixture(autouse=True)
def not_switched_off(monkeypatch):
    for name in (paths.CARD_SWITCH, *paths.SHARING):
        monkeypatch.delenv(name, raising=False)


class Card:
    def __init__(self, capability=paths.CARD, multiprocessors=132):
        self.compute_capability, self.core_count = capability, multiprocessors


def lowered(monkeypatch, card, batch=64, hidden=512, dtype=jnp.float16, timesteps=25, state=None):
    """The text of an LSTM's program for a machine with this card, its state of these types."""
    monkeypatch.setattr(paths, "_local_cards", lambda: [] if card is None else [card])
    jax.clear_caches()  # of what was lowered for other cards
    params = jax.eval_shape(lambda: recurrent.init_lstm(jax.random.key(0), 32, hidden, dtype))
    x = jax.ShapeDtypeStruct((timesteps, batch, 32), dtype)
    start = state and tuple(jax.ShapeDtypeStruct((batch, hidden), of_part) for of_part in state)
    return jax.jit(recurrent.lstm).trace(params, x, start).lower(lowering_platforms=("cuda",)).as_text()


def is_plain(text):
    return "stablehlo.while" in text and "mosaic" not in text


def holds(monkeypatch, card, cell="lstm", **types):
    """Whether the kernel would be taken for a shape of the table, whatever jax this is; of arrays with these types."""
    monkeypatch.setattr(paths, "CARD_JAX", (0, 0))
    monkeypatch.setattr(paths, "_local_cards", lambda: [card])
    shapes = {"x": (25, 64, 32), "kernel": (32, 2048), "bias": (2048,), "recurrent": (512, 2048)}
    arrays = {
        name: jax.ShapeDtypeStruct(shape, types.get(name, jnp.float16)) for name, shape in shapes.items()
    }
    inputs = recurrence.Inputs(arrays["x"], arrays["kernel"], (arrays["bias"],))
    leaves, form = jax.tree.flatten((inputs, arrays["recurrent"], None))
    return paths.does_card_hold(recurrence._infer_inputs, {"form": form, "cell": cell}, leaves)


def test_a_kernel_is_taken_where_its_blocks_fit_nothing_runs_beside_it_and_nobody_switched_it_off(
    monkeypatch,
):
    assert holds(monkeypatch, Card())
    assert not holds(monkeypatch, Card(multiprocessors=127))
    assert not holds(monkeypatch, Card(capability="8.0"))
    for flags in ("--xla_gpu_graph_enable_concurrent_region=true", "/etc/flags", "--a=CONCURRENT"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert not holds(monkeypatch, Card())
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv(paths.CARD_SWITCH, "0")
    assert not holds(monkeypatch, Card())


@pytest.mark.parametrize("wide", ["x", "kernel", "bias", "recurrent"])
def test_arrays_of_several_types_keep_the_plain_path(monkeypatch, wide):
    assert not holds(monkeypatch, Card(), **{wide: jnp.float32})


def test_beside_other_devices_the_plain_path_is_kept(monkeypatch):
    monkeypatch.setattr(paths, "CARD_JAX", (0, 0))
    seen = []
    monkeypatch.setattr(paths, "does_card_hold", lambda *choice: seen.append(1))
    params = jax.eval_shape(lambda: recurrent.init_lstm(jax.random.key(0), 32, 512, jnp.float16))
    for count in (1, 2):
        mesh = jax.sharding.AbstractMesh((count,), ("rows",), (jax.sharding.AxisType.Auto,))
        rows = jax.sharding.PartitionSpec(None, "rows")
        mapped = jax.shard_map(
            lambda params, x: recurrent.lstm(params, x)[0],
            mesh=mesh,
            in_specs=(None, rows),
            out_specs=rows,
            check_vma=False,
        )
        x = jax.ShapeDtypeStruct((25, 64 * count, 32), jnp.float16)
        jax.jit(mapped).trace(params, x).lower(lowering_platforms=("cuda",))
        assert seen == [1]


@needs_mosaic
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_a_shape_of_the_table_is_one_kernel_on_a_hopper_card(monkeypatch, dtype):
    text = lowered(monkeypatch, Card(), dtype=dtype)
    assert text.count("@mosaic_gpu") == 1
    assert "stablehlo.while" not in text


@pytest.mark.parametrize(
    "card",
    [None, Card(multiprocessors=127), Card(capability="8.0"), Card(capability="10.0")],
    ids=["none", "too few multiprocessors", "Ampere", "Blackwell"],
)
def test_a_card_that_cannot_hold_all_blocks_at_once_gets_the_plain_path(monkeypatch, card):
    assert is_plain(lowered(monkeypatch, card))


@pytest.mark.parametrize(
    "other", [{"batch": 65}, {"hidden": 384}, {"dtype": jnp.float32}, {"timesteps": 4}, {"batch": 1}]
)
def test_other_shapes_and_types_get_the_plain_path(monkeypatch, other):
    text = lowered(monkeypatch, Card(), **other)
    assert "mosaic" not in text


def test_an_older_jax_keeps_the_plain_path_and_says_what_would_be_faster(monkeypatch, caplog):
    monkeypatch.setattr(paths, "CARD_JAX", (99, 0))
    native.warn_once.cache_clear()
    assert is_plain(lowered(monkeypatch, Card()))
    assert "jax 0.11" in caplog.text


def test_no_kernel_waits_for_its_blocks_where_xla_may_run_others_beside_it(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT")
    assert is_plain(lowered(monkeypatch, Card()))


def test_no_kernel_waits_for_its_blocks_where_other_programs_may_hold_their_multiprocessors(monkeypatch):
    for name in paths.SHARING:
        with monkeypatch.context() as patch:
            patch.setenv(name, "50")
            assert not holds(patch, Card())
            assert name in paths.find_card_obstacle(1)
        assert holds(monkeypatch, Card())


@needs_mosaic
def test_an_lstms_c_is_float32_or_the_plain_path_is_taken(monkeypatch):
    with jax.enable_x64(True):
        assert "@mosaic_gpu" in lowered(monkeypatch, Card(), state=(jnp.float16, jnp.float32))
        assert is_plain(lowered(monkeypatch, Card(), state=(jnp.float16, jnp.float64)))


def test_the_way_back_of_an_lstm_is_a_kernel_where_its_c_is_float32_alone():
    def count_blocks(dtype):
        shapes = (64, 512), (25, 64, 512), (25, 64, 2048), (512, 2048)
        h, x, sums, kernel = (jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes)
        c = jax.ShapeDtypeStruct(h.shape, dtype)
        arrays, form = jax.tree.flatten((x, x, kernel, (h, c), (x, x), sums, (h, c)))
        return persistent.BACKWARD.blocks(*arrays, form=form, cell="lstm")

    assert count_blocks(jnp.float32) == 64
    assert count_blocks(jnp.float16) is count_blocks(jnp.float64) is None


def test_an_exported_program_has_the_plain_path(monkeypatch):
    monkeypatch.setattr(paths, "_local_cards", lambda: [Card()])
    jax.clear_caches()
    params = jax.eval_shape(lambda: recurrent.init_lstm(jax.random.key(0), 32, 512, jnp.float16))
    x = jax.ShapeDtypeStruct((25, 64, 32), jnp.float16)
    exported = jax.export.export(jax.jit(recurrent.lstm), platforms=["cuda"])(params, x)
    assert is_plain(exported.mlir_module())


def test_several_rows_of_sequences_take_the_plain_path(monkeypatch):
    monkeypatch.setattr(paths, "_local_cards", lambda: [Card()])
    jax.clear_caches()
    params = jax.eval_shape(lambda: recurrent.init_lstm(jax.random.key(0), 32, 512, jnp.float16))
    x = jax.ShapeDtypeStruct((2, 25, 64, 32), jnp.float16)
    mapped = jax.jit(jax.vmap(recurrent.lstm, (None, 0)))
    assert is_plain(mapped.trace(params, x).lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize("table", ["INFER", "FORWARD", "BACKWARD"])
def test_every_tile_divides_its_shape_and_its_blocks_fit_on_an_h200(table):
    for (cell, batch, hidden), tile in getattr(persistent_tiles, table).items():
        groups, slices = tile.grid(batch, hidden)
        assert (groups * tile.rows * tile.chains, slices * tile.units) == (batch, hidden)
        assert tile.blocks(batch, hidden) <= 132
        parts = hidden // tile.part // tile.split
        assert parts * tile.part * tile.split == hidden
        assert tile.stages >= min(2, parts)
        assert tile.units % 8 == tile.part % 64 == 0
        assert tile.split == 1 or (tile.chains, tile.rows) == (tile.split, 64)
        # Clusters of two lie in one pair of multiprocessors; of larger ones not all need to find room.
        assert tile.split <= 2
        assert cell in SIZES


def test_rnns_without_exchange_have_whole_warpgroups_and_blocks():
    for batch, hidden in persistent_tiles.ALONE:
        assert batch % persistent_tiles.ROWS_ALONE == hidden % 64 == 0


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize(
    "key", [*persistent_tiles.INFER, *(("rnn", *shape) for shape in persistent_tiles.ALONE)], ids=str
)
def test_every_tile_of_the_table_is_lowered_within_a_cards_shared_memory(monkeypatch, key):
    cell, batch, hidden = key
    monkeypatch.setattr(paths, "_local_cards", lambda: [Card()])
    jax.clear_caches()
    init, layer = getattr(recurrent, f"init_{cell}"), getattr(recurrent, cell)
    params = jax.eval_shape(lambda: init(jax.random.key(0), 64, hidden, jnp.float16))
    x = jax.ShapeDtypeStruct((6, batch, 64), jnp.float16)

    def train(params, x):
        return jax.grad(lambda params: layer(params, x)[0].astype(jnp.float32).sum())(params)

    assert "@mosaic_gpu" in jax.jit(layer).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    text = jax.jit(train).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    has_way_back = persistent.is_alone(*key) or key in persistent_tiles.BACKWARD
    assert text.count("@mosaic_gpu") == 1 + has_way_back
