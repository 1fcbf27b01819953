"""Whether an optimiser may work on each stage of a model alone: a step that needs all gradients at once may not."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var

from hotloop.engine.blocks import inner_programs
from hotloop.engine.optim import with_global_norm
from hotloop.engine.precision import FLOAT32, cast
from hotloop.engine.stage_rows import Layout
from hotloop.errors import OptionError

Stages = frozenset[int]
DRAWS = {"random_bits", "random_gamma", "threefry2x32"}  # primitives that draw for all leaves at once


def refuse_mixing(optimiser: Any, params: Layout, slots: Layout, extra: Any) -> None:
    """OptionError where the step of one stage would depend on another's weights, gradients or slots, or draws.

    `extra` is what the optimiser's update takes besides. Found by following every value of the undivided step.
    """
    assert params.whole is not None and slots.whole is not None
    draws = OptionError(
        "optimizer: it draws random numbers, which for each stage alone would be others than for the whole model; take "
        "one that draws none, or map all stages to one device"
    )
    if any(kind.startswith("key<") for kind in slots.whole.types):
        raise draws
    weights, state = (
        jax.eval_shape(lambda tree: cast(tree, FLOAT32), form.blank()) for form in (params.whole, slots.whole)
    )
    owners, slot_owners = _owners(params), _owners(slots)

    def update(gradients: Any, state: Any, weights: Any, extra: Any) -> Any:
        besides = with_global_norm(optimiser, extra, jnp.float32(1), gradients)
        return optimiser.update(gradients, state, weights, **besides)

    traced = jax.make_jaxpr(update)(weights, state, weights, extra).jaxpr
    if DRAWS & {*_primitives(traced)}:
        raise draws
    none = [frozenset[int]()] * len(jax.tree.leaves(extra))
    reached = follow(traced, [*owners, *slot_owners, *owners, *none])
    for own, found in zip([*owners, *slot_owners], reached, strict=True):
        if found - own:
            raise OptionError(
                "optimizer: its step for one stage depends on the gradients or weights of others, as a norm over all "
                "of them does; take one that goes leaf by leaf, or clip by hotloop.engine.optim.clip_by_global_norm"
            )


def _primitives(traced: Jaxpr) -> Iterator[str]:
    """The names of all steps of a program, those of inner ones included."""
    for equation in traced.eqns:
        yield equation.primitive.name
        for inner in inner_programs(equation):
            yield from _primitives(inner)


def _owners(layout: Layout) -> list[Stages]:
    """Of each leaf of the undivided tree the stage that has it; nothing for one that several have, a counter."""
    assert layout.whole is not None
    count = Counter(name for tree in layout.trees for name in tree.names)
    single = {
        name: frozenset((stage,))
        for stage, tree in enumerate(layout.trees)
        for name in tree.names
        if count[name] == 1
    }
    return [single.get(name, frozenset()) for name in layout.whole.names]


def follow(traced: Jaxpr, inputs: Sequence[Stages]) -> list[Stages]:
    """The stages that each output depends on, given those of each input."""
    known: dict[Var, Stages] = dict(zip(traced.invars, inputs, strict=True))

    def of(atom: Any) -> Stages:
        return frozenset() if isinstance(atom, Literal) else known.get(atom, frozenset())

    for equation in traced.eqns:
        given = [of(atom) for atom in equation.invars]
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        # A function that is called takes and gives what the equation does; a loop counts as one step.
        if equation.primitive.name == "cond":
            branches = [follow(branch.jaxpr, given[1:]) for branch in equation.params["branches"]]
            found = [given[0].union(*each) for each in zip(*branches, strict=True)]
        elif (
            inner is not None
            and (len(inner.invars), len(inner.outvars))
            == (
                len(given),
                len(equation.outvars),
            )
            and equation.primitive.name != "scan"
        ):
            found = follow(inner, given)
        else:
            found = [frozenset().union(*given)] * len(equation.outvars)
        known.update(zip(equation.outvars, found, strict=True))
    return [of(atom) for atom in traced.outvars]
