"""The pages in headless Chromium, wide and on a phone, light and dark: charts drawn, tables sorted, no text cut off or
covered by another, no column out of sight without a hint, no console error."""

import json
from pathlib import Path

import pytest

from bench_logs import log_folder, record, repeats
from browser import Browser, needs_browser
from demo_results import RESULTS, kernel
from hotloop.bench.demo_page import build_demo_page
from hotloop.bench.report import build_report, gather_sources

RESULTS_FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
WIDE, PHONE = 1400, 400
BOTH = pytest.mark.parametrize("width", [WIDE, PHONE])

pytestmark = needs_browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The report of everything at once, and the demo's page."""
    folder = tmp_path_factory.mktemp("pages")
    for day in (1, 2):
        runs = [
            run | {"start": 86400.0 * day}
            for size in (1, 8, 64)
            for run in repeats(
                f"a_rather_long_name_of_a_benchmark_batch_size_{size}",
                [100 * size * (1 + 0.01 * place) for place in range(4)],
                params={"batch_size": str(size)},
            )
        ]
        runs.append(record("broken", 1, status="failed", reason="status 3", metrics={}))
        log_folder(folder / str(day), runs, commit=f"{day}abcdef012")
    names = ("rnn", "gru", "lstm", "dense", "grouped-conv")  # some of them at the same place
    kernels = {
        f"{name} {mode}": kernel(10 ** (5 + n / 2), 1e5 * (1 + place), 0.004 * (1 + n // 2)) | {"mode": mode}
        for n, name in enumerate(names)
        for place, mode in enumerate(("inference", "training"))
    }
    (folder / "kernels.json").write_text(json.dumps({"results": kernels}))
    sources = gather_sources([folder / "1", folder / "2", folder / "kernels.json", RESULTS_FOLDER])
    return {
        "report": build_report(sources).write(folder / "report.html"),
        "demo": build_demo_page(RESULTS).write(folder / "demo.html"),
    }


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


def look(browser, page, width, dark=False):
    browser.show(width, dark=dark)
    browser.open(f"{page.as_uri()}#selfcheck")
    return json.loads(browser.run("document.getElementById('selfcheck').textContent"))


@pytest.mark.parametrize(("name", "charts"), [("report", 30), ("demo", 8)])
@BOTH
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_cut_off_covered_or_unsorted(pages, browser, name, charts, width, dark):
    found = look(browser, pages[name], width, dark)
    assert found["problems"] == [] and browser.problems == []
    assert found["charts"] >= charts
    assert found["tables"] >= charts
    assert found["width"] <= width


@BOTH
def test_a_command_is_seen_to_its_end(pages, browser, width):
    look(browser, pages["report"], width)
    assert (
        browser.run("[...document.querySelectorAll('pre')].filter(e => e.scrollWidth > e.clientWidth).length")
        == 0
    )


LONELY = """[...document.querySelectorAll(".charts")].flatMap(grid => [...grid.children].filter(card => {
  const at = each => each.getBoundingClientRect();
  const beside = [...grid.children].some(other => other !== card && Math.abs(at(other).top - at(card).top) < 1);
  return at(card).width < at(grid).width - 2 && !beside; })).map(card => card.textContent.slice(0, 60))"""


@pytest.mark.parametrize("name", ["report", "demo"])
@pytest.mark.parametrize("width", [WIDE, 900, PHONE])
def test_no_card_stands_alone_in_half_of_the_page(pages, browser, name, width):
    browser.show(width)
    browser.open(pages[name].as_uri())
    assert browser.run(LONELY) == []


def test_verdicts_are_a_word_and_a_colour_that_can_be_read(pages, browser):
    seen = """["FAST", "SLOW", "SAME", "AMBIGUOUS"].map(word => {
      const badge = document.querySelector("td .word." + word.toLowerCase()), style = badge && getComputedStyle(badge);
      return badge && [badge.textContent, style.color, style.backgroundColor]; })"""

    def luminance(colour):
        parts = [int(each) / 255 for each in colour[4:-1].split(",")]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
        return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for dark in (False, True):
        browser.show(WIDE, dark=dark)
        browser.open(pages["report"].as_uri())
        found = browser.run(seen)
        assert [word for word, *_ in found] == ["FAST", "SLOW", "SAME", "AMBIGUOUS"]
        assert len({colour for _, colour, _ in found}) == 4
        for _, colour, behind in found:
            light, less = sorted((luminance(colour), luminance(behind)), reverse=True)
            assert (light + 0.05) / (less + 0.05) >= 4.5  # what WCAG asks for


def test_the_opening_chart_of_the_demo_has_error_bars(pages, browser):
    browser.show(WIDE)
    browser.open(pages["demo"].as_uri())
    assert (
        browser.run("document.querySelector('figure .for-wide svg').querySelectorAll('line.whisker').length")
        == 6
    )


def test_the_self_check_finds_what_is_wrong(pages, browser, tmp_path):
    broken = pages["demo"].read_text()
    for right, wrong in (
        ("compare(key(a.cells[column])", "-compare(key(a.cells[column])"),
        (">900/s</text>", f">{'x' * 199}</text>"),
        (">loss</text>", f">{'loss' * 20}</text><text y='14'>over it</text>"),
        ("wrap.classList.toggle('scrolls'", "wrap.classList.toggle('nothing'"),
        ("<script>", "<script>setTimeout(() => nothing());"),
    ):
        assert right in broken
        broken = broken.replace(right, wrong)
    (tmp_path / "broken.html").write_text(broken)
    problems = " ".join(look(browser, tmp_path / "broken.html", PHONE)["problems"])
    for word in ("not sorted", "text cut off", "texts overprint", "columns cut off without a hint"):
        assert word in problems, word
    browser.wait("true")
    assert any("nothing is not defined" in each for each in browser.problems)
