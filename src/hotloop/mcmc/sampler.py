"""Sampling a log density over a pytree: the host's part. `sample` is what most programs want.

Warm-up and draws are two compiled loops (loops.py), each called in pieces of a quarter of a second, between which a
progress bar moves and Ctrl-C is heard; where pieces end does not change the result. Each call has a cost of its own,
so what is known to take less than a quarter of a second is one. With a folder what there is is saved there between
pieces (saved_chains.py).
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.compiler_options import keep_loops_on_the_card
from hotloop.engine import progress
from hotloop.engine.device import platform
from hotloop.errors import OptionError
from hotloop.mcmc import kernel, random_bits, target
from hotloop.mcmc.loops import Drawing, Draws, Programs, WarmUp, unpack
from hotloop.mcmc.result import Result, Seconds
from hotloop.mcmc.saved_chains import SavedChains, check_folder, open_saved_chains
from hotloop.mcmc.saved_state import check_density, describe_key
from hotloop.mcmc.settings import Options, read_settings
from hotloop.mcmc.spread import put, spread_chains

PyTree = Any
LogDensity = Callable[[PyTree], Array]
State = TypeVar("State")

FIRST_PIECE, PIECE_SECONDS = 16, 0.25
BLOCK_ON_A_CARD = 8
"""Leapfrogs in one turn of the loop on a GPU, where a turn costs as much as some of them (docs/results.md)."""
INT, WORDS = target.abstract((), jnp.int32), target.abstract((2,), jnp.uint32)


class Sampler:
    """Compiled for one log density, one shape of position and one number of chains; `run(key)` samples.

    It takes what `sample` takes, but for the key, and compiles at once, so that many keys need one compilation.
    """

    def __init__(
        self,
        log_density: LogDensity,
        initial: PyTree | Callable[[Array], PyTree],
        *,
        quiet: bool = False,
        **options: Unpack[Options],
    ):
        self.settings, self._initial, one = read_settings(options), initial, initial
        target.check_callable(log_density)
        if callable(initial):
            one = target.trace("initial", lambda: jax.eval_shape(initial, jax.random.key(0)))
        elif self.settings.chains is None:
            chains, one = target.separate_chains(initial)
            self.settings = replace(self.settings, chains=chains)
        if self.settings.chains is None:
            raise OptionError("chains must be given where initial is a function of a key")
        self._chains = self.settings.chains
        self._spread = spread_chains(self._chains, self.settings.devices)
        self._shared = one is initial
        self._show = progress.hide if quiet else progress.show
        self._first_piece: int | None = None
        self._layout = target.layout_of(one)
        target.check_density(log_density, self._layout)
        stack = target.stack_on_a_card if platform() == "gpu" else jnp.concatenate
        self._gradient = target.over_columns(log_density, self._layout, stack)
        with self._show("hmc", None) as bar, bar.compiling(recorded=False):
            self.compile_seconds = _seconds(self._compile_start)
            if not callable(initial):
                target.check_start(self._start(self._positions(None)))
            self.compile_seconds += _seconds(self._compile_loops)

    def _compile_start(self) -> None:
        columns = target.abstract((self._layout.size, self._chains), self._layout.dtype)
        places = self._spread
        start = places.compile_for(
            lambda columns: kernel.init(columns, self._gradient), places.second, places.state()
        )
        self._start = target.trace("the gradient of log_density", lambda: start.lower(columns)).compile()
        (self._place_of_columns,), _ = self._start.input_shardings
        self._place_of_words = places.everywhere or self._place_of_columns

    def _compile_loops(self) -> None:
        """All that runs later, so that nothing compiles while it is timed."""
        block = BLOCK_ON_A_CARD if platform() == "gpu" else 1
        programs = Programs(self.settings, self._gradient, block, self._spread.numbers())
        chains = self._start.out_info
        options = keep_loops_on_the_card(platform())
        compile_for, (everywhere, *_, room_place) = self._spread.compile_for, self._spread
        state, warming = self._spread.state(), self._spread.warm_up()
        drawn, numbers = (state, room_place), (everywhere,) * 3
        begin = compile_for(programs.begin, (state, everywhere), warming).lower(chains, WORDS)
        prepare = compile_for(programs.prepare, (warming,), (everywhere, everywhere, room_place))
        prepare = prepare.lower(begin.out_info)
        _, plan, room = prepare.out_info
        warm = compile_for(programs.warm, (warming, *numbers), warming, donate_argnums=0)
        warm = warm.lower(begin.out_info, WORDS, INT, INT)
        draw = compile_for(programs.draw, (drawn, everywhere, *numbers), drawn, donate_argnums=0)
        draw = draw.lower((chains, room), plan, WORDS, INT, INT)
        arrange = compile_for(self._arrange, (room_place,), self._spread.arranged()).lower(room)
        self._begin, self._warm = begin.compile(), warm.compile(compiler_options=options)
        self._prepare, self._arranged = prepare.compile(), arrange.compile()
        self._draw = draw.compile(compiler_options=options)
        tuning, plan, _ = _forms(self._prepare)
        self._form_of_warmup, (chains, room) = _forms(self._warm), _forms(self._draw)
        self._form_of_drawing = Drawing(tuning, plan, chains, room)

    def _arrange(self, packed: Array) -> tuple[PyTree, Draws]:
        """Draws as the user wants them: chains first, positions as pytrees."""
        draws = unpack(packed)
        samples = self._layout.unravel(draws.position.transpose(2, 0, 1))
        return samples, Draws(draws.position[:0], *(each.T for each in draws[1:]))

    def run(self, key: Array, *, folder: str | Path | None = None, resume: bool = False) -> Result:
        """Warm-up and draws with the randomness of `key`; see `sample` for `folder` and `resume`."""
        target.check_key(key)
        check_folder(folder, resume)
        starts, *keys = jax.random.split(key, 4)
        state = self._start(self._positions(starts))
        target.check_start(state)
        words = [put(random_bits.words_of(key), self._place_of_words) for key in keys]
        if folder is None:
            return self._sample(state, words, None)
        total = self.settings.warmup + self.settings.samples
        config = {**asdict(self.settings), **describe_key(key), "position": self._layout.describe()}
        forms = {"warmup": self._form_of_warmup, "draws": self._form_of_drawing}
        with open_saved_chains(
            folder, config, state, total=total, resume=resume, forms=forms, check=self._check_saved
        ) as saved:
            return self._sample(state, words, saved)

    def _check_saved(self, folder: Path, found: WarmUp | Drawing) -> None:
        check_density(folder, found.chains, self._start(found.chains.position), found.step)

    def _sample(self, state: kernel.State, words: list[Array], saved: SavedChains | None) -> Result:
        began, warmup = time.perf_counter(), self.settings.warmup
        first, warm, kept = words
        found = saved.found if saved else None
        if found is not None and found.phase == "draws":
            drawing, done = found.state, found.iteration - warmup
            between, piece = began, FIRST_PIECE
        else:
            begun = (found.state, found.iteration) if found else (self._begin(state, first), 0)
            warmed, piece = self._warm_up(*begun, warm, saved)
            tuning, plan, room = _wait(self._prepare(warmed))
            drawing, done = Drawing(tuning, plan, warmed.chains, room), 0
            between = time.perf_counter()
            if found is None and warmup > 0 and between - began < PIECE_SECONDS:
                self._first_piece = warmup
        tuning, plan, draws = drawing.tuning, drawing.plan, self._draw_all(drawing, kept, saved, done, piece)
        samples, others = _wait(self._arranged(draws))
        seconds = Seconds(self.compile_seconds, between - began, time.perf_counter() - between)
        return Result(
            samples=samples,
            log_density=others.log_density,
            acceptance=others.acceptance,
            diverging=others.diverging,
            leapfrogs=plan.leapfrogs,
            step_size=float(tuning.step_size),
            trajectory=float(tuning.step_size) * float(np.mean(plan.leapfrogs)),
            mass=self._layout.unravel(1 / jnp.square(tuning.scale)),
            names=self._layout.names,
            seconds=seconds,
        )

    def _warm_up(
        self, warmed: WarmUp, done: int, words: Array, saved: SavedChains | None
    ) -> tuple[WarmUp, int]:
        total = self.settings.warmup

        def after(state: WarmUp, done: int) -> None:
            if saved is not None:
                saved.after_piece("warmup", done, state)

        with self._show(f"warm-up of {self._chains} chains", total) as bar:
            return _in_pieces(
                total,
                lambda state, *at: self._warm(state, words, *at),
                warmed,
                bar,
                self._first_piece or FIRST_PIECE,
                done,
                after,
            )

    def _draw_all(
        self, drawing: Drawing, words: Array, saved: SavedChains | None, done: int, piece: int
    ) -> Array:
        total, warmup, plan = self.settings.samples, self.settings.warmup, drawing.plan

        def after(state: tuple[kernel.State, Array], done: int) -> None:
            if saved is not None:
                saved.after_piece("draws", warmup + done, Drawing(drawing.tuning, plan, *state))

        with self._show(f"draws of {self._chains} chains", total) as bar:
            (_, draws), _ = _in_pieces(
                total,
                lambda state, *at: self._draw(state, plan, words, *at),
                (drawing.chains, drawing.draws),
                bar,
                piece,
                done,
                after,
            )
        return draws

    def _positions(self, key: Array | None) -> Array:
        """Where the chains start, as columns."""
        chains = self._chains
        if callable(self._initial):
            assert key is not None
            positions = jax.vmap(self._initial)(jax.random.split(key, chains))
        elif self._shared:
            row = self._layout.ravel(self._initial, leading=0)
            return put(jnp.tile(row[:, None], (1, chains)), self._place_of_columns)
        else:
            positions = self._initial
        return put(self._layout.ravel(positions).T, self._place_of_columns)


def sample(
    log_density: LogDensity,
    initial: PyTree | Callable[[Array], PyTree],
    *,
    key: Array,
    quiet: bool = False,
    folder: str | Path | None = None,
    resume: bool = False,
    **options: Unpack[Options],
) -> Result:
    """Draw from the density whose logarithm, up to a constant, is `log_density(position)`, by HMC.

    A position is any pytree of floats. `initial` is one position, where all of `chains` start; or a function of a key
    that draws one for each chain; or, without `chains`, positions whose leaves begin with an axis of chains.

    `warmup` iterations find step size (toward `target_acceptance`), diagonal mass and length of trajectories, shared
    by all chains; then `samples` draws of each chain are kept. `leapfrogs` fixes their number instead of the
    length, of which a trajectory has at most `max_leapfrogs`; each draw's number differs from the mean by a share of
    up to `jitter`. `step_size` is where its search begins, and the one that is used where `warmup` is 0. On a
    terminal a bar shows how far it is, unless `quiet`.

    With a `folder` what there is is saved there every half minute, at the end, and when Ctrl-C or SIGTERM stops it,
    which is raised as `Interrupted`; `resume` goes on there, with the same arguments, and ends with the bits of a
    sampling that was never stopped. `devices` spreads the chains evenly over so many of this process's devices.

    >>> import jax
    >>> from hotloop import hmc
    >>> found = hmc.sample(lambda x: -abs(x), 1.0, key=jax.random.key(0), chains=500, warmup=200, samples=50)
    >>> found.samples.shape, bool(abs(found.samples.var() - 2) < 0.2)
    ((500, 50), True)
    """
    target.check_key(key)  # before anything is compiled
    check_folder(folder, resume)
    sampler = Sampler(log_density, initial, quiet=quiet, **options)
    return sampler.run(key, folder=folder, resume=resume)


def _in_pieces(
    total: int,
    call: Callable[..., State],
    state: State,
    bar: progress.Progress,
    piece: int,
    done: int,
    after: Callable[[State, int], None],
) -> tuple[State, int]:
    """`call(state, start, stop)` over all iterations from `done` on, in calls of about a quarter of a second, of which
    the first has `piece` iterations; and how many the next one would have."""
    if done:
        bar.advance(done)
    while done < total:
        stop = min(done + piece, total)
        began = time.perf_counter()
        state = _wait(call(state, np.int32(done), np.int32(stop)))
        took = time.perf_counter() - began
        bar.advance(stop - done)
        piece = max(1, min(16 * piece, round((stop - done) * PIECE_SECONDS / took)))
        done = stop
        after(state, done)
    return state, piece


def _forms(compiled: Any) -> Any:
    """What a program gives, by shape, type and place."""

    def form(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    return jax.tree.map(form, compiled.out_info, compiled.output_shardings)


def _wait(found: State) -> State:
    return cast(State, jax.block_until_ready(found))  # type: ignore[no-untyped-call]


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
