"""Choosing: names, globs, tags, convergence, and the order of runs."""

from pathlib import Path

import pytest

from hotloop.bench.benchmark import Benchmark, Variant, select
from hotloop.errors import OptionError


def benchmark(name, *values, **more):
    variants = tuple(Variant(f"{name}{value}", {}, "c") for value in values or ("",))
    return Benchmark(name, Path("f.yml"), 1, "c", variants=variants, **more)


ALL = {
    one.name: one
    for one in (
        benchmark("rnn", "_1", "_2", tags=("quick", "kernels")),
        benchmark("gru", tags=("kernels",)),
        benchmark("train_conv", kind="convergence"),
        benchmark("notes", skip="a notebook"),
    )
}


def names(*patterns, **more):
    return [one.variant.name for one in select(ALL, patterns, **more) if one.skip is None]


def test_everything_is_chosen_in_the_order_of_the_file_and_named_things_in_the_order_named():
    assert names() == ["rnn_1", "rnn_2", "gru"]
    assert names("gru", "rnn") == ["gru", "rnn_1", "rnn_2"]
    assert names("gru", "*") == ["gru", "rnn_1", "rnn_2"]


def test_globs_choose_benchmarks_else_variants():
    assert names("r*") == ["rnn_1", "rnn_2"]
    assert names("*_2") == ["rnn_2"]
    assert names("rnn_1") == ["rnn_1"]


def test_tags_choose_within_the_names():
    assert names(tags=["quick"]) == ["rnn_1", "rnn_2"]
    assert names("g*", tags=["kernels"]) == ["gru"]


def test_convergence_runs_only_when_named_or_included():
    assert "train_conv" in names("train_conv")
    assert "train_conv" in names(include_convergence=True)
    assert "train_conv" not in names("train*")
    assert "train_conv" in names("*", "train_conv")


def test_what_cannot_run_keeps_its_reason_even_when_named():
    (one,) = select(ALL, ["notes"])
    assert one.skip == "a notebook"


@pytest.mark.parametrize(
    ("patterns", "tags", "said"),
    [
        (["rnm"], (), "did you mean rnn"),
        ([], ["quik"], "--tag quik: .* did you mean quick"),
        (["x*"], (), "nothing"),
    ],
)
def test_what_matches_nothing_is_an_error_with_the_nearest_name(patterns, tags, said):
    with pytest.raises(OptionError, match=said):
        select(ALL, patterns, tags)
