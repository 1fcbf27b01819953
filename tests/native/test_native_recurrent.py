"""hotloop-native's whole recurrences, and their gradients, against float64, over shapes that layers may have."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.layers import recurrence, recurrent
from hotloop.layers.paths import force_path
from native_calls import child, draw

CELLS = (recurrence.RNN, recurrence.GRU, recurrence.GRU_RESET_AFTER, recurrence.LSTM)
GATES, SUMS = (1, 3, 3, 4), (1, 3, 4, 4)
RESET_AFTER, LSTM = 2, 3
EMPTY = np.zeros(0, np.float32)


def call(target, shapes, *arrays, **attributes):
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.ffi.ffi_call(f"hotloop_{target}", results)(*arrays, **attributes)


class Sequence:
    """A recurrence with everything that its handlers are given, drawn at random."""

    def __init__(self, cell, steps, batch, hidden, has_state=True, has_outputs=True, inputs=9):
        self.cell, self.has_state, self.has_outputs = cell, has_state, has_outputs
        gates, state, self.h_shape = GATES[cell], (batch, hidden), (steps, batch, hidden)
        states = [state] * (2 if cell == LSTM else 1)
        self.x, self.input_kernel, self.input_bias, self.kernel, self.bias, self.dy, *rest = draw(
            0,
            (steps, batch, inputs),
            (inputs, gates * hidden),
            (gates * hidden,),
            (hidden, gates * hidden),
            (hidden,),
            self.h_shape,
            *states,
            *states,
        )
        self.input_kernel *= inputs**-0.5
        self.kernel *= hidden**-0.5
        self.state, self.d_last = tuple(rest[: len(states)]), tuple(rest[len(states) :])

    @property
    def recurrent(self):
        return (self.kernel, self.bias) if self.cell == RESET_AFTER else self.kernel

    def of(self, states):
        """h and c of a state, or what stands for them."""
        h, c = (*states, EMPTY)[:2]
        return h, c

    def packed(self):
        size = (
            (self.input_kernel.shape[0] + self.h_shape[2]) * GATES[self.cell] * -(-self.h_shape[2] // 32) * 32
        )
        return call("recurrent_pack", [(size,)], self.input_kernel, self.kernel, cell=np.int64(self.cell))[0]

    def run(self, target, *more_shapes, c_shape, more_arrays=()):
        state = self.of(self.state) if self.has_state else (EMPTY, EMPTY)
        bias = self.bias if self.cell == RESET_AFTER else EMPTY
        shapes = [self.h_shape, c_shape if self.cell == LSTM else (0,), *more_shapes]
        inputs = (self.x, self.input_kernel, self.input_bias)
        return call(
            target, shapes, *inputs, self.kernel, bias, *state, *more_arrays, cell=np.int64(self.cell)
        )

    def infer(self):
        """Every output, and the last c."""
        return self.run("recurrent_infer_packed", c_shape=self.h_shape[1:], more_arrays=(self.packed(),))

    def gradients(self):
        """Outputs, and the gradients of the input sums, the weights and the first state."""
        steps, batch, hidden = self.h_shape
        h, c, sums = self.run(
            "recurrent_forward", (steps, batch, SUMS[self.cell] * hidden), c_shape=self.h_shape
        )
        state = self.of(self.state) if self.has_state else (EMPTY, EMPTY)
        is_lstm = self.cell == LSTM
        dz, d_input, d_input_bias, d_kernel, d_bias, *d_state = call(
            "recurrent_backward",
            [
                (steps, batch, GATES[self.cell] * hidden),
                self.input_kernel.shape,
                self.input_bias.shape,
                self.kernel.shape,
                (hidden,) if self.cell == RESET_AFTER else (0,),
                (batch, hidden),
                (batch, hidden) if is_lstm else (0,),
            ],
            self.dy if self.has_outputs else EMPTY,
            self.x,
            self.kernel,
            sums,
            h,
            c,
            *state,
            *self.of(self.d_last),
            cell=np.int64(self.cell),
            wants_start=self.has_state,
        )
        d_recurrent = (d_kernel, d_bias) if self.cell == RESET_AFTER else d_kernel
        d_first = tuple(d_state[: 1 + is_lstm]) if self.has_state else None
        return h, dz, d_input, d_input_bias, d_recurrent, d_first

    def expected(self):
        """The same in float64, by the plain path and JAX's differentiation of its layout."""
        with jax.enable_x64(True), force_path("cpu loop"):
            exact = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)  # noqa: E731
            x, recurrent, d_last = exact((self.x, self.recurrent, self.d_last))
            kernel, bias = exact((self.input_kernel, self.input_bias))
            state = exact(self.state) if self.has_state else None
            dy = exact(self.dy) if self.has_outputs else jnp.zeros(self.h_shape, jnp.float64)

            def run(more, kernel, bias, recurrent, state):
                return recurrence.recur(CELLS[self.cell], x @ kernel + bias + more, recurrent, state)

            more = jnp.zeros((*x.shape[:2], kernel.shape[1]), jnp.float64)
            (h, _), back = jax.vjp(run, more, kernel, bias, recurrent, state)
            return h, *back((dy, d_last))


def assert_close(ours, expected):
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for found, right in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        error = np.max(np.abs(np.asarray(found) - np.asarray(right))) / max(1, np.max(np.abs(right)))
        assert error < 1e-5


def check(sequence):
    ours = jax.jit(sequence.gradients)()
    assert_close(ours, sequence.expected())
    np.testing.assert_array_equal(jax.jit(sequence.infer)()[0], ours[0])


sequences = st.builds(
    Sequence,
    st.sampled_from(range(4)),
    st.integers(1, 6),
    st.sampled_from((1, 2, 3, 5, 14, 29, 40)),
    st.sampled_from((1, 7, 16, 33, 64, 100)),
    st.booleans(),
    st.booleans(),
    st.sampled_from((1, 5, 16, 70)),
)


@pytest.mark.slow
@settings(max_examples=40)
@given(sequences)
def test_every_cell_is_its_mathematics_over_many_shapes(sequence):
    check(sequence)


@pytest.mark.parametrize("cell", range(4))
@pytest.mark.parametrize(
    "sizes",
    [(2, 2, 33), (30, 29, 20), (1, 1, 5), (5, 1, 64)],
    ids=["units shared", "rows shared", "one step", "weights as they lie"],
)
def test_every_cell_is_its_mathematics(cell, sizes):
    check(Sequence(cell, *sizes, has_state=sizes[0] > 1))


LAYERS = {
    "rnn": (recurrent.rnn, recurrent.init_rnn),
    "gru": (recurrent.gru, recurrent.init_gru),
    "gru_reset_after": (recurrent.gru_reset_after, recurrent.init_gru_reset_after),
    "lstm": (recurrent.lstm, recurrent.init_lstm),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_this_path_has_the_plain_path_s_gradients(name):
    apply, init = LAYERS[name]
    params, (x,) = init(jax.random.key(0), 5, 24), draw(0, (4, 3, 5))
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # no bias is zero

    def loss(params, x):
        outputs, state = apply(params, x)
        return jnp.sum(outputs**2) + sum(map(jnp.sum, jax.tree.leaves(state)))

    found = {}
    for path in ("native", "cpu loop"):
        with force_path(path):
            program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
            assert ("hotloop_recurrent" in program.lower(params, x).as_text()) == (path == "native")
            found[path] = program(params, x)
    assert_close(found["native"], found["cpu loop"])


def test_a_kernel_larger_than_a_block_is_summed_whole():
    check(Sequence(LSTM, 2, 3, 530, has_state=False))
    check(Sequence(LSTM, 2, 3, 20, has_state=False, inputs=530))


@pytest.mark.parametrize("cell", range(4))
def test_more_steps_and_rows_than_are_multiplied_at_once_are_all_of_them(cell):
    check(Sequence(cell, 300, 2, 8, inputs=3))
    check(Sequence(cell, 2, 600, 8, inputs=3))


def test_a_last_state_alone_may_have_a_gradient():
    check(Sequence(LSTM, 3, 2, 16, has_outputs=False))


def test_what_is_no_number_stays_none():
    sequence = Sequence(LSTM, 2, 2, 40, has_state=False)
    sequence.x[0, 1, 3] = np.nan
    h = np.asarray(sequence.infer()[0])
    assert np.isnan(h[:, 1]).all() and np.isfinite(h[:, 0]).all()


def test_gates_far_from_zero_are_shut_or_open():
    sequence = Sequence(LSTM, 1, 1, 8, has_state=False)
    for large in (50, 1000, 3e38):
        sequence.input_bias = np.float32(large) * np.sign(sequence.input_bias)
        assert_close(sequence.infer()[0], sequence.expected()[0])


def refused(match, function, *arguments):
    with pytest.raises(jax.errors.JaxRuntimeError, match=match) as caught:
        jax.block_until_ready(function(*arguments))
    assert len(str(caught.value).splitlines()) == 1


def test_sizes_that_do_not_fit_are_refused():
    sequence = Sequence(LSTM, 2, 2, 8)
    sequence.kernel = sequence.kernel[:, :8].copy()
    refused("sizes of a sequence", sequence.infer)
    sequence = Sequence(LSTM, 2, 2, 8)
    sequence.input_kernel = sequence.input_kernel[:3].copy()
    refused("sizes of a sequence", sequence.infer)
    sequence = Sequence(LSTM, 2, 2, 8)
    sequence.input_bias = sequence.input_bias[:3].copy()
    refused("a bias of another size", sequence.infer)
    sequence = Sequence(LSTM, 2, 2, 8)
    sequence.state = (sequence.state[0][:1].copy(), sequence.state[1])
    refused("a first state of another size", sequence.infer)
    sequence = Sequence(RESET_AFTER, 2, 2, 8)
    sequence.bias = sequence.bias[:3].copy()
    refused("a bias of another size", sequence.infer)
    sequence = Sequence(RESET_AFTER, 2, 2, 8)
    sequence.cell = 9
    refused(
        "no such cell",
        lambda: call(
            "recurrent_infer_packed", [(2, 2, 8), (0,)], *infer_operands(sequence), cell=np.int64(9)
        ),
    )
    refused(
        "no such cell", lambda: call("recurrent_pack", [(9,)], *draw(0, (2, 2), (2, 2)), cell=np.int64(-1))
    )
    refused(
        "packed weights", lambda: call("recurrent_pack", [(9,)], *draw(0, (2, 2), (2, 2)), cell=np.int64(0))
    )
    refused(
        "sizes of a sequence",
        lambda: call("recurrent_pack", [(999,)], *draw(0, (2, 3), (2, 2)), cell=np.int64(0)),
    )
    sequence.cell = RESET_AFTER
    refused(
        "packed weights",
        lambda: call(
            "recurrent_infer_packed", [(2, 2, 8), (0,)], *infer_operands(sequence), cell=np.int64(RESET_AFTER)
        ),
    )


def infer_operands(sequence):
    inputs = (sequence.x, sequence.input_kernel, sequence.input_bias)
    return *inputs, sequence.kernel, sequence.bias, EMPTY, EMPTY, EMPTY


def test_threads_at_once_have_the_numbers_of_one_after_another():
    cases = [Sequence(cell, 5, batch, 64) for cell in range(4) for batch in (1, 40)]
    programs = [jax.jit(case.gradients) for case in cases]
    alone = [jax.block_until_ready(program()) for program in programs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda program: jax.block_until_ready(program()), 3 * programs))
    for ours, expected in zip(together, 3 * alone, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, expected)


MANY_CALLS = """
import resource
import jax
from test_native_recurrent import Sequence
sequence = Sequence(3, 3, 2, 32)
def step(_, kernel):
    sequence.input_kernel = kernel
    return kernel - 1e-6 * sequence.gradients()[2]
start = sequence.input_kernel
program = jax.jit(lambda kernel, count: jax.lax.fori_loop(0, count, step, kernel))
def memory_after(count):
    jax.block_until_ready(program(start, count))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
first = memory_after(2000)
grown = memory_after(50000) - first
assert grown < 4096, f"{grown} KB more after 50,000 calls"
"""

OLDER = """
import test_native_recurrent as t
for cell in range(4):
    t.check(t.Sequence(cell, 2, 3, 20))
"""


@pytest.mark.slow
def test_memory_does_not_grow_over_many_calls():
    child(MANY_CALLS)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_older_processors_have_the_same_mathematics(isa):
    child(OLDER, HOTLOOP_NATIVE_ISA=isa)


@pytest.mark.parametrize("cell", ["gru", "gru_reset_after", "lstm"])
def test_a_loop_packs_weights_that_it_does_not_change_once_before_it(cell):
    layer, init = getattr(recurrent, cell), getattr(recurrent, f"init_{cell}")
    params, x = init(jax.random.key(0), 16, 32), draw(0, (5, 1, 16))[0]

    def steps(params, x):
        return jax.lax.fori_loop(0, 7, lambda _, x: x + layer(params, x)[0][:, :, :16], x)

    with force_path("native"):
        lines = jax.jit(steps).lower(params, x).compile().as_text().splitlines()
    bodies = {line.split("body=%")[1].split(",")[0] for line in lines if " while(" in line}
    computation, calls = "", {}
    for line in lines:
        if line.endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
        for target in ("hotloop_recurrent_pack", "hotloop_recurrent_infer_packed"):
            if f'custom_call_target="{target}"' in line:
                calls[target] = computation in bodies
    assert calls == {"hotloop_recurrent_pack": False, "hotloop_recurrent_infer_packed": True}
