"""How a planned call is cut into pieces that are dispatched one after the other.

A run that is "one call" for its host events should still move a progress bar and hear Ctrl-C, so a call is
made in pieces of about a second. Results do not depend on it. Pure arithmetic: it must not know about
devices or clocks.
"""

from hotloop.engine.periods import closest_divisor

TARGET_SECONDS = 1.0
FIRST_PIECE = 16


class FreePieces:
    """For programs that run any number of updates without compiling again: pieces follow the pace."""

    def __init__(self, longest: int):
        self._longest = longest
        self._size = 1

    def next(self, remaining: int) -> int:
        """The updates to dispatch now, of `remaining` ones in the call."""
        return min(self._size, remaining)

    def took(self, count: int, seconds: float) -> None:
        """Learn from a piece that has run."""
        self._size = _fitting(count, seconds, self._longest)


class CompiledPieces:
    """For programs that compile each number of updates: few sizes, each a multiple of the one before.

    The first divides the usual call if a fitting divisor exists. A longer size is added only when pieces
    prove far too short, and what it leaves of a call is made in pieces of the sizes that are compiled
    already.
    """

    def __init__(self, longest: int, usual_call: int):
        self._longest = longest
        first = min(FIRST_PIECE, longest, usual_call)
        divisor = closest_divisor(usual_call, first)
        self._sizes = [divisor if first / 2 <= divisor <= min(2 * first, longest) else first]

    def next(self, remaining: int) -> int:
        """The updates to dispatch now, of `remaining` ones in the call."""
        return max((size for size in self._sizes if size <= remaining), default=remaining)

    def took(self, count: int, seconds: float) -> None:
        """Learn from a piece that has run."""
        longest = self._sizes[-1]
        if count != longest:
            return
        fitting = _fitting(count, seconds, self._longest)
        if fitting >= 4 * longest:
            self._sizes.append(fitting // longest * longest)
        elif 4 * fitting <= longest:
            self._sizes = [closest_divisor(longest, fitting)]


def _fitting(count: int, seconds: float, longest: int) -> int:
    return min(longest, max(1, round(count * TARGET_SECONDS / max(seconds, 1e-9))))
