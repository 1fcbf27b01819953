"""Signatures of the API reference with the names that people write: `Array`, where Python has its place in jaxlib,
`NDArray[uint8]`, where it has all that this stands for, and `to_stderr` or `float32` for a function or a class that is
a default, which Python shows as `<function to_stderr>`, and `...` for one without a name; nothing could be read from a
signature with that in it."""

import re
from typing import Any

PLACES = re.compile(
    r"\b(?:jaxlib\._jax|jax|numpy|pathlib|collections\.abc|typing|jaxtyping|numpy\.typing)\.(?=[A-Z])"
)

NDARRAY = re.compile(
    r"~?(?:numpy\.)?ndarray\[tuple\[~?(?:typing\.)?Any, \.\.\.\], ~?(?:numpy\.)?dtype\[~?(?:numpy\.|typing\.)?(\w+)\]\]"
)

NAMED = re.compile(r"<function (\w+)(?: at 0x[0-9a-f]+)?>|<class '(?:\w+\.)*(\w+)'>")
UNNAMED = re.compile(r"<factory>|<function [\w.<>]*<lambda>(?: at 0x[0-9a-f]+)?>")


def shorten(app: Any, what: str, name: str, thing: Any, options: Any, signature: str, returned: str) -> Any:
    """The same signature, without the modules in front of well-known types, and with functions by their names."""

    def write(text: str) -> str:
        named = NAMED.sub(lambda found: found[1] or found[2], UNNAMED.sub("...", text))
        return PLACES.sub("", NDARRAY.sub(r"NDArray[\1]", named))

    return tuple(text and write(text) for text in (signature, returned))


def shorten_types(app: Any, domain: str, kind: str, content: Any) -> None:
    """The same of the types of attributes, which have no signature."""
    from docutils import nodes  # comes with Sphinx, which those who run the tests need not have

    for text in list(content.parent.findall(nodes.Text)) if kind == "attribute" else []:
        if (short := PLACES.sub("", text)) != text:
            text.parent.replace(text, nodes.Text(short))


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("object-description-transform", shorten_types)
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
