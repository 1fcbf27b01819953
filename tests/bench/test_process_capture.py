"""Logs with a bound, and reading them back: by whole lines, in little memory, whatever the bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.bench.process import Capture, last_lines, read_output_lines


def captured(path, chunks, keep):
    log = Capture(path, keep)
    for chunk in chunks:
        log.write(chunk)
    log.close()
    return path.read_bytes(), log


def test_what_fits_is_kept_byte_for_byte(tmp_path):
    whole = bytes(range(256)) * 10
    assert captured(tmp_path / "log", [whole[:7], whole[7:1500], whole[1500:]], len(whole))[0] == whole


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    keep=st.integers(20, 400),
    cut=st.integers(1, 90),
)
def test_head_and_tail_are_whole_lines_of_what_was_written(tmp_path_factory, sizes, keep, cut):
    whole = b"".join(b"%d:%s\n" % (number, b"y" * size) for number, size in enumerate(sizes))
    chunks = [whole[at : at + cut] for at in range(0, len(whole), cut)]
    kept, log = captured(tmp_path_factory.mktemp("logs") / "log", chunks, keep)
    if log.left_out == 0:
        assert kept == whole
        return
    head, tail = kept.split(b"[hotloop: %d bytes left out here]\n" % log.left_out)
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert len(head) + len(tail) + log.left_out == len(whole)
    assert len(head) + len(tail) <= keep
    if keep >= 200:  # both halves have room for a line
        assert set(head.splitlines()) | set(tail.splitlines()) <= set(whole.splitlines())


def test_no_number_is_cut_in_two_by_the_bound(tmp_path):
    chunks = [b"rate %d\n" % (1000 + number) for number in range(200)]
    captured(tmp_path / "log", chunks, 301)
    rates = [line for line in read_output_lines(tmp_path / "log") if not line.startswith("[hotloop")]
    assert {len(rate) for rate in rates} == {len("rate 1000")}


def test_lines_end_at_carriage_returns_too_and_any_bytes_are_text(tmp_path):
    (tmp_path / "log").write_bytes(b"10%\r50%\r\nrate 5\n\xff\xfe\x00 rate 6\n\nlast")
    assert list(read_output_lines(tmp_path / "log")) == [
        "10%",
        "50%",
        "rate 5",
        "\ufffd\ufffd\x00 rate 6",
        "",
        "last",
    ]


def test_a_line_without_end_is_cut_and_the_next_one_is_whole(tmp_path):
    (tmp_path / "log").write_bytes(b"a" * 1000 + b"\nrate 7\n")
    assert list(read_output_lines(tmp_path / "log", longest=100)) == ["a" * 100, "rate 7"]


@pytest.mark.parametrize("length", [99, 100, 101])
def test_a_line_about_as_long_as_the_limit_swallows_no_other(tmp_path, length):
    (tmp_path / "log").write_bytes(b"a" * length + b"\nrate 7\n")
    assert list(read_output_lines(tmp_path / "log", longest=100)) == ["a" * min(length, 100), "rate 7"]


def test_the_last_lines_are_few_clean_and_read_from_the_end(tmp_path):
    (tmp_path / "log").write_bytes(b"old\n" * 100_000 + b"\x1b[31mred\x1b[0m\x07\n\n\xffend\n")
    assert last_lines(tmp_path / "log", 2) == ["red", "\ufffdend"]
    assert last_lines(tmp_path / "none", 2) == []
