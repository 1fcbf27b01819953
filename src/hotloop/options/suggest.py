""" "Did you mean": the nearest known names to one that is not known. What they stand for it does not know."""

from collections.abc import Iterable

CUTOFF, MARGIN = 0.6, 0.15  # how like a name must be to be offered, and how close to the best one


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known names, else all of them where they are few."""
    from difflib import SequenceMatcher

    names = sorted(set(known))
    ratios = {name: SequenceMatcher(None, _bare(word), _bare(name)).ratio() for name in names}
    best = max(ratios.values(), default=0.0)
    near = [name for name in names if ratios[name] >= max(CUTOFF, best - MARGIN)]
    near = sorted(near, key=lambda name: -ratios[name])[:3]
    if near:
        return f"; did you mean {either(near)}?"
    if not names:
        return ""
    return f"; known: {', '.join(names)}" if len(names) <= 12 else ""


def either(names: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _bare(name: str) -> str:
    """The letters that matter: two option names must not look alike for their hyphens."""
    return name.lower().lstrip("-").replace("_", "-")
