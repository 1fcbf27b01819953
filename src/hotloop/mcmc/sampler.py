"""Sampling a log density over a pytree: the host's part. `sample` is what most programs want.

Warm-up and draws are two compiled loops (loops.py), each called in pieces of a quarter of a second, between which a
progress bar moves and Ctrl-C is heard; where pieces end does not change the result.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.engine import progress
from hotloop.errors import OptionError
from hotloop.mcmc import kernel, random_bits, target
from hotloop.mcmc.loops import Draws, Programs, Settings, Tuning
from hotloop.mcmc.result import Result, Seconds

PyTree = Any
LogDensity = Callable[[PyTree], Array]
State = TypeVar("State")

FIRST_PIECE, PIECE_SECONDS = 8, 0.25
INT, WORDS = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32)


class Sampler:
    """Compiled for one log density, one shape of position and one number of chains; `run(key)` samples.

    It takes what `sample` takes, but for the key, and compiles at once, so that many keys need one compilation.
    """

    def __init__(
        self,
        log_density: LogDensity,
        initial: PyTree | Callable[[Array], PyTree],
        *,
        chains: int | None = None,
        warmup: int = 1000,
        samples: int = 1000,
        leapfrogs: int | None = None,
        jitter: float = 0.5,
        target_acceptance: float = 0.8,
        step_size: float | None = None,
        max_leapfrogs: int = 1000,
        quiet: bool = False,
    ):
        self._initial, one = initial, initial
        if callable(initial):
            one = jax.eval_shape(initial, jax.random.key(0))
        elif chains is None:
            chains, one = target.separate_chains(initial)
        if chains is None:
            raise OptionError("chains must be given where initial is a function of a key")
        self.settings = Settings(
            chains, warmup, samples, leapfrogs, jitter, target_acceptance, step_size, max_leapfrogs
        )
        self._shared = one is initial
        self._show = progress.hide if quiet else progress.show
        self._layout = target.layout_of(one)
        target.check_density(log_density, self._layout)
        self._gradient = target.over_columns(log_density, self._layout)
        with self._show("hmc", None) as bar, bar.compiling(recorded=False):
            self.compile_seconds = _seconds(self._compile)

    def _compile(self) -> None:
        """All that runs later, so that nothing compiles while it is timed."""
        columns = jax.ShapeDtypeStruct((self._layout.size, self.settings.chains), self._layout.dtype)
        programs = Programs(self.settings, self._gradient)
        start = jax.jit(lambda columns: kernel.init(columns, self._gradient)).lower(columns)
        chains = start.out_info
        begin = jax.jit(programs.begin).lower(chains, WORDS)
        tuning = jax.jit(programs.tuning).lower(begin.out_info)
        room = jax.jit(programs.empty).lower(chains)
        warm = jax.jit(programs.warm, donate_argnums=0).lower(begin.out_info, WORDS, INT, INT)
        draw = jax.jit(programs.draw, donate_argnums=0).lower(
            (chains, room.out_info), tuning.out_info, WORDS, INT, INT
        )
        arrange = jax.jit(self._arrange).lower(room.out_info)
        self._start, self._begin, self._warm = start.compile(), begin.compile(), warm.compile()
        self._tuning, self._empty = tuning.compile(), room.compile()
        self._draw, self._arranged = draw.compile(), arrange.compile()

    def _arrange(self, draws: Draws) -> tuple[PyTree, Draws]:
        """Draws as the user wants them: chains first, positions as pytrees."""
        samples = self._layout.unravel(draws.position.transpose(2, 0, 1))
        turned = [each.T for each in (draws.log_density, draws.acceptance, draws.diverging)]
        return samples, Draws(draws.position[:0], *turned, draws.leapfrogs)

    def run(self, key: Array) -> Result:
        """Warm-up and draws with the randomness of `key`."""
        settings = self.settings
        starts, first, warm, kept = jax.random.split(key, 4)
        state = self._start(self._positions(starts))
        target.check_start(state)
        began = time.perf_counter()
        warmed = self._begin(state, random_bits.words_of(first))
        with self._show(f"warm-up of {settings.chains} chains", settings.warmup) as bar:
            words = random_bits.words_of(warm)
            warmed = _in_pieces(settings.warmup, lambda s, *at: self._warm(s, words, *at), warmed, bar)
        tuning: Tuning = self._tuning(warmed)
        jax.block_until_ready(tuning)
        between = time.perf_counter()
        with self._show(f"draws of {settings.chains} chains", settings.samples) as bar:
            words = random_bits.words_of(kept)
            drawn = warmed.chains, self._empty(warmed.chains)
            _, draws = _in_pieces(
                settings.samples, lambda s, *at: self._draw(s, tuning, words, *at), drawn, bar
            )
        samples, others = jax.block_until_ready(self._arranged(draws))
        seconds = Seconds(self.compile_seconds, between - began, time.perf_counter() - between)
        return Result(
            samples=samples,
            log_density=others.log_density,
            acceptance=others.acceptance,
            diverging=others.diverging,
            leapfrogs=others.leapfrogs,
            step_size=float(tuning.step_size),
            trajectory=float(tuning.trajectory),
            mass=self._layout.unravel(1 / jnp.square(tuning.scale)),
            names=self._layout.names,
            seconds=seconds,
        )

    def _positions(self, key: Array) -> Array:
        """Where the chains start, as columns."""
        chains = self.settings.chains
        if callable(self._initial):
            positions = jax.vmap(self._initial)(jax.random.split(key, chains))
        elif self._shared:
            row = self._layout.ravel(self._initial, leading=0)
            return jnp.tile(row[:, None], (1, chains))
        else:
            positions = self._initial
        return self._layout.ravel(positions).T


def sample(
    log_density: LogDensity, initial: PyTree | Callable[[Array], PyTree], *, key: Array, **settings: Any
) -> Result:
    """Draw from the density whose logarithm, up to a constant, is `log_density(position)`, by HMC.

    See docs/hmc.md.

    >>> import jax, jax.numpy as jnp
    """
    return Sampler(log_density, initial, **settings).run(key)


def _in_pieces(total: int, call: Callable[..., State], state: State, bar: progress.Progress) -> State:
    """`call(state, start, stop)` over all iterations, in calls of about a quarter of a second."""
    done, piece = 0, FIRST_PIECE
    while done < total:
        stop = min(done + piece, total)
        began = time.perf_counter()
        state = jax.block_until_ready(call(state, jnp.int32(done), jnp.int32(stop)))
        took = time.perf_counter() - began
        bar.advance(stop - done)
        piece = max(1, min(2 * piece, round((stop - done) * PIECE_SECONDS / took)))
        done = stop
    return state


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
