"""Parameters: what they fill in, the variants that follow from them, and variables of the environment.

Filling in is plain replacement of known names, never `str.format`, whose fields can reach into objects. It knows
texts alone; `spec.py` takes them out of a file.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

Row = Mapping[str, str]

MOST_VARIANTS = 10_000
LONGEST_NAME = 200  # bytes: it names a folder, and file systems stop at 255 of them
TAKEN = {f"benchmark_results.{ending}" for ending in ("json", "csv", "xml")}
TAKEN |= {"results.jsonl", "provenance.json", "environments"}  # what a run itself has in its log folder
BRACES = re.compile(r"\{\{|\}\}|\{([\w-]+)\}")
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def fill(text: str, params: Row) -> str:
    """The text with `{name}` replaced for each parameter.

    Doubled braces become single ones, as the old runner demanded. A text with other single braces, such as plain
    JSON, cannot have been written for that rule, so there doubled braces stay.
    """
    doubled = not re.search(r"[{}]", BRACES.sub("", text))

    def put(found: re.Match[str]) -> str:
        if found[1] is not None:
            return params.get(found[1], found[0])
        return found[0][0] if doubled else found[0]

    return BRACES.sub(put, text)


def unfilled(text: str, params: Iterable[str]) -> list[str]:
    """Names in braces that are no parameters; most often a typing error."""
    names = [found[1] for found in BRACES.finditer(text) if found[1] is not None]
    return [name for name in dict.fromkeys(names) if name not in set(params)]


def listed(text: str) -> list[str]:
    """The values of a comma string: `3, 4`, `[3, 4]` or `{3, 4}`."""
    text = text.strip()
    if text[:1] + text[-1:] in ("[]", "{}"):
        text = text[1:-1]
    return [part.strip() for part in text.split(",")]


def every(choices: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """The Cartesian product, the last name changing fastest."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def folder_name(text: str) -> str:
    """The text as the name of a folder that is inside the log folder and takes no other file's place."""
    plain = re.sub(r"[^\w.+=,-]+", "-", text).encode()[:LONGEST_NAME].decode(errors="ignore")
    return f"{plain}_" if not plain.strip(".") or plain.casefold() in TAKEN else plain


def named(benchmark: str, rows: Sequence[Row]) -> dict[str, Row]:
    """Variant names and their parameters: the names sorted, and _2, _3 where two would be equal."""
    variants: dict[str, Row] = {}
    for row in rows:
        parts = "".join(f"_{key}_{row[key]}" for key in sorted(row))
        plain = folder_name(benchmark + parts)
        name, count = plain, 1
        while name in variants:
            count += 1
            name = f"{plain}_{count}"
        variants[name] = row
    return variants


def expand_environment(text: str, environment: Mapping[str, str]) -> str:
    """The text with $NAME and ${NAME} replaced; a variable that is not set stays as written."""
    return VARIABLE.sub(lambda found: environment.get(found[1] or found[2], found[0]), text)


def unset_variables(text: str, environment: Mapping[str, str]) -> list[str]:
    """The variables that the text needs and the environment lacks."""
    names = [found[1] or found[2] for found in VARIABLE.finditer(text)]
    return [name for name in dict.fromkeys(names) if name not in environment]
