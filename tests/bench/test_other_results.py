import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.bench.other_results import add_other, read_lines_of_results, read_other
from hotloop.bench.page import Page
from hotloop.bench.report import build_report, gather_sources
from hotloop.errors import DataError

WHERE = {"platform": "cpu", "cpu": "P", "cores": 2, "commit": "0123456789", "dirty": False}


@pytest.fixture
def page(tmp_path):
    def show(**parts):
        file = tmp_path / "2026-01-02_thing_cpu.json"
        file.write_text(json.dumps({"date": "2026-01-02", "environment": WHERE, **parts}))
        return build_report(gather_sources([file]))

    return show


def test_when_where_and_of_what_it_is_stand_at_its_head(page):
    found = page(results=[{"case": "a", "median_ms": 1.5}], command=["hotloop", "x"], note="by hand")
    html = found.render()
    assert "thing cpu of 2026-01-02" in found.headline and "P, 2 cores" in found.lead
    for text in ("thing cpu, 2026-01-02", "P, 2 cores · commit 0123456", "hotloop x", "by hand", "median ms"):
        assert text in html, text
    assert '<td data-value="1.5">1.5</td>' in html


def test_rows_with_many_figures_and_few_rows_stand_on_their_side(page):
    html = page(results={name: {f"f{i}": i for i in range(12)} for name in ("one", "two")}).render()
    assert '<th scope="col" class="words">figure</th><th scope="col">one</th><th scope="col">two</th>' in html
    assert html.count("<tr>") == 13


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([{"model": "m", "bits": 16, "rate": 2.5}, {"model": "m", "bits": 32, "rate": 1.5}], ["bits 16", "bits 32"]),
        ([{"case": "a", "data": "x", "s": 1.5}, {"case": "b", "data": "y", "s": 1.5}], ["a", "b"]),
        ([{"m": "a", "cache": "no", "s": 1.5}, {"m": "a", "cache": "yes", "s": 2.5},
          {"m": "b", "cache": "no", "s": 0.5}], ["a, no", "a, yes", "b, no"]),
        ([{"rate": 2.5, "bits": 16}, {"rate": 1.5, "bits": 32}], ["1", "2"]),
        ([{"case": "a", "s": 2.5}, {"case": "a", "s": 1.5}], ["1", "2"]),
        ([{"case": 50 * "a", "s": 2.5}, {"case": "b", "s": 1.5}], ["1", "2"]),
    ],
)  # fmt: skip
def test_rows_without_names_are_named_by_the_settings_that_tell_them_apart(page, rows, names):
    html = page(results=[row | {f"f{i}": i + 0.5 for i in range(12)} for row in rows]).render()
    assert "".join(f'<th scope="col">{name}</th>' for name in names) in html.replace(' class="words"', "")


def test_rows_of_several_kinds_are_several_tables(page):
    rows = [{"a": 1, "b": 2}, {"a": 3, "b": 4}, {"x": 5, "y": {"z": 6}}, {"x": 7, "y": {"z": 8}}]
    html = page(results=rows).render()
    assert html.count("<table>") == 2
    assert "y z" in html


def test_repeated_numbers_are_a_strip_each_and_seeds_are_none(page):
    html = page(accuracy={"32 bits": [0.1, 0.2, 0.3], "16 bits": [0.2, 0.2, 0.4]}, seeds=[1, 2, 3]).render()
    assert html.count("<figure") == 1
    assert html.count("<circle") == 2 * 6  # for a wide window and for a phone
    assert "0.1 0.2 0.3" in html


def test_rows_over_epochs_are_curves_without_a_beginning_that_hides_the_rest(page):
    rows = [{"epoch": n, "loss": 1e6 if n < 2 else 1 / n, "seed": 3} for n in range(30)]
    html = page(validations={"a": rows, "b": rows}).render()
    assert html.count("<figure") == 1
    assert html.count("<polyline") == 2 * 2
    assert "from 2.9 on: what was before would hide the rest" in html


def test_lines_of_results_are_rows_and_records_of_runs_are_none(tmp_path):
    file = tmp_path / "2026-01-02_lines_cpu.jsonl"
    file.write_text('{"run": "a", "test": {"rmse": 0.5}}\n{"run": "b", "test": {"rmse": 0.25}}\n')
    assert read_lines_of_results(file).name == "lines cpu"
    html = build_report(gather_sources([file])).render()
    assert "test rmse" in html and 'data-value="0.25"' in html
    file.write_text('{"variant": "a", "rmse": 0.5}\n')
    assert read_lines_of_results(file) is None
    with pytest.raises(DataError, match="it has no 'benchmark'"):
        gather_sources([file])
    file.write_text('{"run": 1}\n{"run"')
    assert read_lines_of_results(file) is None


@pytest.mark.parametrize(
    "document", [{}, {"name": "x", "version": 3}, {"date": "2026-01-01"}, {"commit": "a", "x": ["b"]}]
)
def test_any_other_json_is_no_result(document):
    assert read_other(document, "x") is None


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**400), 10**400), st.floats(), st.text(max_size=5),
    st.sampled_from([0, 1, -1e308, 1e308, 5e-324]),
)  # fmt: skip
KEYS = st.one_of(st.sampled_from(["epoch", "update", "seed", "runs", "a", "date"]), st.text(max_size=4))
DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=30,
)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(KEYS, DOCUMENTS, max_size=4))
def test_whatever_a_document_holds_the_page_is_whole(document):
    other = read_other({"date": "2026-01-01", **document}, "x")
    if other is not None:
        page = Page("t")
        add_other(page, other)
        assert page.render().endswith("</html>\n")


def test_names_and_texts_are_escaped(page):
    html = page(results={"<b>": {"x<y": 1, "said": "<i>"}, "two": {"x<y": 2, "said": "&"}}).render()
    assert "<b>" not in html and "<i>" not in html and "x&lt;y" in html


def test_pairs_of_numbers_inside_rows_are_a_curve_each(page):
    curves = [[[10, 0.5], [20, 0.75], [30, 0.8]], [[1, 9.0], [2, 7.0]]]
    html = page(
        results=[{"case": case, "curve": curve} for case, curve in zip("ab", curves, strict=True)]
    ).render()
    assert html.count("<figure") == 2
    back = [[[20, 0.5], [10, 0.75]], [[1, 9.0], [1, 7.0]]]
    html = page(
        results=[{"case": case, "curve": curve} for case, curve in zip("ab", back, strict=True)]
    ).render()
    assert "<figure" not in html


def test_a_part_with_nothing_but_seeds_is_left_out_with_its_heading(page):
    html = page(results=[{"rate": 2.5, "seeds": [0, 1], "rows": [{"seed": 0}, {"seed": 1}]}]).render()
    assert "2.5" in html and "seed" not in html and "results: rows" not in html
