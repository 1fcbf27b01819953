"""How many updates one compiled program makes, and how a call of any length is made of few programs.

Where a loop asks after every update whether another one follows, an accelerator waits for the host to hear it: 16 us on
an H200, more than half of a tiny network's update. So a block of updates has its number built in, and only the number
of blocks is a run-time argument; what a call leaves over is made one update after the other, by a second program. It is
arithmetic, and a look at a traced update: nothing is compiled here.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

LARGE_UPDATE = 1.6e12
"""Operations of an update that take longer than a hundred trips to the host on any device: blocks would gain nothing,
and a block would be long for whoever waits for it to end."""
LONGEST_BLOCK = 128
"""Updates in a block of several: at 16 us a block, half a per cent of the shortest updates."""
LONGEST_SINGLE = 512
"""Updates in a block that is a whole call."""
LARGE_CALL = 3e12
"""Operations of a call from which on it is cut into blocks where it has more updates than those may have, so that a run
knows its first ones soon: a call of cifar_resnet8's 390 takes 0.33 s on an H200, the trips of five blocks 0.4 ms."""
MOST_UPDATES = 2**15
"""Updates for whose metrics a program has room; more take another call of it."""
SENDING, SECOND_PROGRAM = 20, 2000
"""What it costs, in trips to the host, to send work only when the last is done, and to compile another program."""


class Form(NamedTuple):
    """A program of up to `capacity` updates, in blocks of `block`: a single block is a loop of fixed length, blocks of
    one update are a loop of any number of them."""

    block: int
    capacity: int


def choose_form(lengths: Mapping[int, int], operations: float) -> Form:
    """The program that makes calls of these lengths (how many there are of each) with the fewest trips to the host, for
    an update of so many operations."""
    longest = max(lengths)
    sizes = [1]
    if operations < LARGE_UPDATE:
        sizes += range(2, min(longest, LONGEST_BLOCK) + 1)
        sizes += [longest] if longest <= LONGEST_SINGLE and longest * operations < LARGE_CALL else []
    block = min(sizes, key=lambda size: (count_trips(lengths, size), -size))
    return Form(block, block * max(1, min(longest, MOST_UPDATES) // block))


def count_trips(lengths: Mapping[int, int], block: int) -> int:
    """How often calls of these lengths wait for the host, where their programs have blocks of this size."""
    single, trips, rests = block == max(lengths), 0, 0
    for length, calls in lengths.items():
        blocks, rest = divmod(length, block)
        if blocks and not single:  # a single block is sent while the one before it runs
            trips += calls * (blocks + SENDING)
        if rest:
            rests += calls * (rest + SENDING)
    return trips + rests + (SECOND_PROGRAM if rests else 0)


def split_call(form: Form, count: int) -> list[tuple[Form, int]]:
    """The programs that make a call of `count` updates, in their order, with how many each makes."""
    parts = []
    while count >= form.block:
        part = min(count // form.block * form.block, form.capacity)
        parts.append((form, part))
        count -= part
    return [*parts, (Form(1, form.block - 1), count)] if count else parts


def count_operations(traced: Jaxpr) -> float:
    """Multiplications and additions of a program's products and convolutions; a loop's count as often as it turns, if
    that is known."""
    total = 0.0
    for equation in traced.eqns:
        given: list[Any] = [atom.aval for atom in equation.invars]
        results: list[Any] = [atom.aval for atom in equation.outvars]
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            total += 2.0 * results[0].size * math.prod(given[0].shape[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            outputs = given[1].shape[equation.params["dimension_numbers"].rhs_spec[0]]
            total += 2.0 * results[0].size * given[1].size / outputs
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += turns * sum(map(count_operations, inner_programs(equation)))
    return total


def inner_programs(equation: Any) -> Iterator[Jaxpr]:
    """The programs that one step of a traced program calls: a loop's body, the branches of a condition."""
    for value in jax.tree.leaves([*equation.params.values()], is_leaf=_is_program):
        if _is_program(value):
            yield value.jaxpr if isinstance(value, ClosedJaxpr) else value


def _is_program(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)
