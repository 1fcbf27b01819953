"""Inputs for readers: what a seed becomes when bytes flip, pieces go, come twice or change places, and nasty words."""

import gzip
import json
import random

NASTY = [
    *(b"", b"\0", b"\n", b"\r\n", b"\t", b" ", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\x1f\x8b", b"PK\3\4"),
    *(b"-1", b"0", b"-0", b"1e400", b"-1e400", b"1e400/3", b"1e9_99999999", b"nan", b"inf", b"-inf", b"NaN"),
    *(
        b"Infinity",
        b"1/0",
        b"1_000",
        b"0x10",
        b"1e-400",
        b"9" * 30,
        b"9" * 5000,
        b"2147483648",
        b"4294967295",
    ),
    *(b"9223372036854775808", b"18446744073709551616", b"true", b"null", b"None", b"~", b"[]", b"{}", b'""'),
    *(
        "\u0661\u0662".encode(),
        "\u00e9".encode(),
        "\U0001f600".encode(),
        b'"\\ud800"',
        b'"\\u0000"',
        b"\xed\xa0\x80",
    ),
    *(
        b"~nouser",
        b"~nouser/x",
        b"..",
        b"../../x",
        b"/dev/zero",
        b"/dev/full",
        b"/proc/self/mem",
        b"a" * 300,
        b"/" * 5000,
    ),
    *(b"[" * 3000, b"{" * 3000, b'{"a":' * 3000, b"(" * 3000, b"- " * 3000, b"]" * 50, b"}" * 50, b"**" * 50),
    *(
        b"&a [*a]",
        b"*a",
        b"<<: *a",
        b"!!python/object/apply:os.system [x]",
        b"%YAML 9.9\n---\n",
        b"--- \n--- \n",
    ),
    *(
        b"--",
        b"-",
        b"--config-path",
        b"--config=",
        b"--no-",
        b"=",
        b"{a}",
        b"{{",
        b"$HOME",
        b"%s%n",
        b"\\",
        b"'",
        b'"',
    ),
    *(b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80" * 10, b"\xff" * 8, b"\0" * 64, b"\x01\0\0\0\0\0\0\0"),
]


def mutated(generator: random.Random, seeds: list[bytes]) -> bytes:
    """One input: a seed as it is, changed a few times, or made up."""
    data = generator.choice(seeds)
    kind = generator.random()
    if kind < 0.03:
        return bytes(generator.randrange(256) for _ in range(generator.randrange(200)))
    if kind < 0.35 and (changed := _document(generator, data)) is not None:
        return changed
    if data[:2] == b"\x1f\x8b" and kind < 0.6:  # else a checksum hides what is behind it
        return gzip.compress(_changed(generator, gzip.decompress(data), seeds), 1)
    return _changed(generator, data, seeds)


def _changed(generator: random.Random, data: bytes, seeds: list[bytes]) -> bytes:
    for _ in range(generator.choice([1, 1, 1, 2, 3, 8])):
        data = generator.choice(CHANGES)(generator, data, seeds)
    return data


def _place(generator: random.Random, data: bytes) -> tuple[int, int]:
    start = generator.randrange(len(data) + 1)
    return start, min(len(data), start + generator.choice([1, 2, 4, 8, 40, 1000]))


def _flip(generator: random.Random, data: bytes, _: list[bytes]) -> bytes:
    if not data:
        return data
    at = generator.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :]


def _put(generator: random.Random, data: bytes, _: list[bytes]) -> bytes:
    at = generator.randrange(len(data) + 1)
    return data[:at] + bytes([generator.randrange(256)]) + data[at + 1 :]


def _cut(generator: random.Random, data: bytes, _: list[bytes]) -> bytes:
    return data[: generator.randrange(len(data) + 1)]


def _remove(generator: random.Random, data: bytes, _: list[bytes]) -> bytes:
    start, end = _place(generator, data)
    return data[:start] + data[end:]


def _double(generator: random.Random, data: bytes, _: list[bytes]) -> bytes:
    start, end = _place(generator, data)
    return data[:start] + data[start:end] * generator.choice([2, 2, 3, 100]) + data[end:]


def _nasty(generator: random.Random, data: bytes, _: list[bytes]) -> bytes:
    """A word in the place of some bytes, or of a whole word."""
    start, end = _place(generator, data)
    if generator.random() < 0.5:
        while start and data[start - 1 : start] not in (b" ", b"\n", b",", b":", b"\t", b"="):
            start -= 1
        while end < len(data) and data[end : end + 1] not in (b" ", b"\n", b",", b":", b"\t"):
            end += 1
    return data[:start] + generator.choice(NASTY) + data[end:]


def _splice(generator: random.Random, data: bytes, seeds: list[bytes]) -> bytes:
    other = generator.choice(seeds)
    return data[: generator.randrange(len(data) + 1)] + other[generator.randrange(len(other) + 1) :]


CHANGES = [_flip, _flip, _put, _cut, _remove, _double, _nasty, _nasty, _nasty, _splice]
VALUES = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1.5,
        2**63,
        10**400,
        float("nan"),
        float("inf"),
        "",
        "x",
        "9" * 400,
        "\0",
        "../x",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        {"": None},
        {"a": []},
        [1, "x", None],
        [[1, 2], [3]],
        {"value": "x"},
        [[[[[[]]]]]],
    ),
]


def _document(generator: random.Random, data: bytes) -> bytes | None:
    """A JSON document (or a line of several) with one value changed for another kind; None where it is none."""
    lines = data.split(b"\n")
    at = generator.randrange(len(lines))
    for part in (data, lines[at]):
        try:
            value = json.loads(part)
        except ValueError:
            continue
        changed = json.dumps(_swapped(generator, value)).encode()
        return changed if part is data else b"\n".join([*lines[:at], changed, *lines[at + 1 :]])
    return None


def _swapped(generator: random.Random, value: object) -> object:
    if not isinstance(value, dict | list) or not value or generator.random() < 0.1:
        return generator.choice(VALUES)
    if isinstance(value, list):
        at = generator.randrange(len(value))
        return [*value[:at], _swapped(generator, value[at]), *value[at + 1 :]]
    key = generator.choice(list(value))
    if generator.random() < 0.2:
        return {name: each for name, each in value.items() if name != key}
    return {**value, key: _swapped(generator, value[key])}
