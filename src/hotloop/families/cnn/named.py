"""The named configurations of `hotloop cnn`: `configs.yml` as a mapping from name to option values.

The file is read when the first name is asked for, so that a command without `--config` does not wait for it. Values
stay as they are written there; the options read them, as they read a file of the user's. No jax.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from hotloop.errors import OptionError
from hotloop.options import did_you_mean
from hotloop.options.document import parse_document

FILE = "configs.yml"


@cache
def _contents() -> Mapping[str, Mapping[str, Any]]:
    text = files("hotloop.families.cnn").joinpath(FILE).read_text(encoding="utf-8")
    contents: Mapping[str, Mapping[str, Any]] = parse_document(text, FILE)
    return contents


class Named(Mapping[str, Mapping[str, Any]]):
    """Every named configuration; what one takes over from another is in its values already."""

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return _contents()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_contents())

    def __len__(self) -> int:
        return len(_contents())


PRESETS = Named()


def expectation(name: str) -> str:
    """What to expect of a configuration, in its own words."""
    if name not in PRESETS:
        raise OptionError(f"--config {name}: no such configuration{did_you_mean(name, PRESETS)}")
    return str(PRESETS[name].get("expect", ""))
