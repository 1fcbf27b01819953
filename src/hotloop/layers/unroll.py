"""How many steps of a recurrence are written out in one turn of its loop.

The measurements behind the rule are in docs/layers.md. It knows sizes and platforms, no cell.
"""

SHORT = 8


def unroll_for(timesteps: int, batch: int, hidden: int, platform: str) -> int:
    """Steps a turn: a short sequence is written out whole; longer ones in pieces only where a step is small."""
    if timesteps <= SHORT:
        return timesteps
    if platform == "cpu":
        return 1
    return 5
