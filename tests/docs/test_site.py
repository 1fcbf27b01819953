"""The checks of the built site find what they are for, and the pages of the API name what people may import."""

import importlib.util
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check_site = load(ROOT / "docs" / "check_site.py")
field_comments = load(ROOT / "docs" / "_ext" / "field_comments.py")
short_signatures = load(ROOT / "docs" / "_ext" / "short_signatures.py")

HEAD = b"# Sphinx inventory version 2\n# Project: x\n# Version: x\n# zlib\n"


def write_site(folder, body, names):
    lines = "".join(f"{name} py:function 1 api.html#$ -\n" for name in names)
    (folder / "objects.inv").write_bytes(HEAD + zlib.compress(lines.encode()))
    (folder / "index.html").write_text(f'<html><body><h1 id="top-title">x</h1>{body}</body></html>')
    (folder / "other.html").write_text('<html><body><p id="there">y</p></body></html>')
    return [fault.removeprefix("index.html: ") for fault in check_site.faults(folder)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="other.html#there">a</a><a href="#top-title">b</a><a href="https://x.org">c</a>', None),
        ('<a href="gone.html">a</a>', "leads to gone.html, which is not there"),
        ('<a href="other.html#gone">a</a>', "leads to other.html#gone, where nothing has this name"),
        ('<a href="#gone">a</a>', "leads to #gone, where nothing has this name"),
        ('<img src="gone.png">', "leads to gone.png, which is not there"),
        ('<script src="https://x.org/a.js"></script>', "fetches https://x.org/a.js"),
        ('<link rel="stylesheet" href="//x.org/a.css">', "fetches //x.org/a.css"),
    ],
)
def test_a_link_that_leads_nowhere_and_a_file_from_the_network_are_found(tmp_path, body, said):
    assert write_site(tmp_path, body, check_site.public_names()) == ([said] if said else [])


def test_a_public_name_that_the_reference_has_not_is_found(tmp_path):
    names = set(check_site.public_names())
    assert {
        "hotloop.Program",
        "hotloop.Estimator",
        "hotloop.layers.max_pool",
        "hotloop.mcmc.hmc.sample",
    } <= names
    assert write_site(tmp_path, "", names - {"hotloop.Program"}) == [
        "api: hotloop.Program is not in the reference"
    ]


def test_comments_beside_fields_are_read_wherever_the_formatter_puts_them():
    source = '''
class Config:
    """Text."""

    first: int = 1  # what it is
    second: str = (
        "x"  # behind a bracket
    )
    third: int = 3
    fourth: int = 4
    """Said below,
    on two lines."""
'''
    found = field_comments.field_comments(source)
    assert found == {
        "first": "what it is",
        "second": "behind a bracket",
    }  # what is said below a field is its own entry: here it would be there twice


def test_signatures_have_the_names_that_people_write():
    said = "(where: str | ~pathlib.Path | None = None, x: jaxlib._jax.Array, say: ~typing.Callable = <function show>)"
    shown, returned = short_signatures.shorten(None, "function", "f", None, None, said, "numpy.ndarray")
    assert shown == "(where: str | ~Path | None = None, x: Array, say: ~Callable = show)"
    assert returned == "numpy.ndarray"


def test_no_default_keeps_a_signature_from_being_read():
    said = "(a=<factory>, b=<function Context.<lambda>>, c=<class 'jax.numpy.float32'>, d=<function f at 0x7f1e>)"
    shown, _ = short_signatures.shorten(None, "class", "C", None, None, said, None)
    assert shown == "(a=..., b=..., c=float32, d=f)"


@pytest.mark.parametrize(
    "said",
    [
        "(x: numpy.ndarray[tuple[Any, ...], numpy.dtype[numpy.uint8]])",
        "(x: ~numpy.ndarray[tuple[~typing.Any, ...], ~numpy.dtype[~numpy.uint8]])",
        "(x: ndarray[tuple[Any, ...], dtype[uint8]])",
    ],
)
def test_arrays_of_numpy_are_written_as_people_do(said):
    assert short_signatures.shorten(None, "function", "f", None, None, said, None) == (
        "(x: NDArray[uint8])",
        None,
    )
