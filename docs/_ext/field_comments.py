"""Comments beside the fields of a dataclass, shown in the API reference: the code explains each field where it stands.

Sphinx reads `#:` comments alone; here the plain comment at the end of a field's line, or on the line below it where the
formatter has moved it, becomes an item of the class's text. A field with a docstring below it has an entry of its own.
"""

import ast
import inspect
import re
from dataclasses import is_dataclass
from typing import Any

COMMENT = re.compile(r"\s#\s+(.+)$")


def field_comments(source: str) -> dict[str, str]:
    """What stands beside each annotated field of the class whose source this is."""
    (tree,) = ast.parse(inspect.cleandoc(source)).body
    lines = inspect.cleandoc(source).splitlines()
    found: dict[str, str] = {}
    assert isinstance(tree, ast.ClassDef)
    for field, below in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            continue
        for line in lines[field.lineno - 1 : field.end_lineno]:
            if comment := COMMENT.search(line):
                found[field.target.id] = comment[1]
    return found


def add_fields(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Appends `field: comment` items to the text of a dataclass, in front of its examples nothing changes."""
    if what == "class" and is_dataclass(thing) and (comments := field_comments(inspect.getsource(thing))):
        lines += ["", *(f"* ``{field}``: {text}" for field, text in comments.items()), ""]


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", add_fields)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
