"""Signatures of the API reference with the names that people write: `Array`, where Python has its place in jaxlib,
`NDArray[uint8]`, where it has all that this stands for, and `to_stderr` for a function that is a default, which Python
shows as `<function to_stderr>`; nothing could be read from a signature with that in it."""

import re
from typing import Any

PLACES = re.compile(
    r"\b(?:jaxlib\._jax|jax|numpy|pathlib|collections\.abc|typing|jaxtyping|numpy\.typing)\.(?=[A-Z])"
)

NDARRAY = re.compile(
    r"~?(?:numpy\.)?ndarray\[tuple\[~?(?:typing\.)?Any, \.\.\.\], ~?(?:numpy\.)?dtype\[~?(?:numpy\.|typing\.)?(\w+)\]\]"
)

FUNCTION = re.compile(r"<function (\w+)(?: at 0x[0-9a-f]+)?>")


def shorten(app: Any, what: str, name: str, thing: Any, options: Any, signature: str, returned: str) -> Any:
    """The same signature, without the modules in front of well-known types, and with functions by their names."""

    def write(text: str) -> str:
        return FUNCTION.sub(r"\1", PLACES.sub("", NDARRAY.sub(r"NDArray[\1]", text)))

    return tuple(text and write(text) for text in (signature, returned))


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
