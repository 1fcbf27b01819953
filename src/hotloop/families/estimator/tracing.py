"""What a user's functions give for the forms of a batch, and on what it depends: traced, nothing is computed."""

from collections.abc import Callable
from typing import Any

import jax

from hotloop.engine.stage_mixing import follow
from hotloop.errors import HotloopError


def trace(name: str, fn: Any, *forms: Any) -> Any:
    """The form of what a function of a ModelSpec gives; what it throws becomes one line that names it."""
    try:
        return jax.eval_shape(fn, *forms)
    except HotloopError:
        raise
    except Exception as error:  # whatever a user's function throws
        last = ", ".join(describe_form(leaf) for leaf in jax.tree.leaves(forms)[-3:])
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise HotloopError(f"ModelSpec: {name} failed on (..., {last}): {reason}") from error


def describe_form(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else f"a {type(leaf).__name__}"


def find_sources(fn: Callable[..., Any], *forms: Any) -> tuple[list[frozenset[int]], Any]:
    """For each leaf of what `fn` gives, the numbers of the leaves of its arguments that it may depend on; and the form
    of what it gives."""
    traced, form = jax.make_jaxpr(fn, return_shape=True)(*forms)
    given = [frozenset([number]) for number in range(len(traced.jaxpr.invars))]
    return follow(traced.jaxpr, given), form
