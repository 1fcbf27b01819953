""" "Did you mean": the nearest known names to one that is not known. What they stand for it does not know."""

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known names, else all of them where they are few."""
    from difflib import get_close_matches

    names = sorted(set(known))
    lowered = {name.lower(): name for name in names}
    near = [lowered[match] for match in get_close_matches(word.lower(), lowered, n=3, cutoff=0.55)]
    if near:
        return f"; did you mean {either(near)}?"
    if not names:
        return ""
    return f"; known: {', '.join(names)}" if len(names) <= 12 else ""


def either(names: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
