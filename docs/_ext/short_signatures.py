"""Signatures of the API reference with the names that people write: `Array`, where Python has its place in jaxlib."""

import re
from typing import Any

PLACES = re.compile(
    r"\b(?:jaxlib\._jax|jax|numpy|pathlib|collections\.abc|typing|jaxtyping|numpy\.typing)\.(?=[A-Z])"
)


def shorten(app: Any, what: str, name: str, thing: Any, options: Any, signature: str, returned: str) -> Any:
    """The same signature, without the modules in front of well-known types."""
    return tuple(text and PLACES.sub("", text) for text in (signature, returned))


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
