"""The built site in headless Chromium, every page wide and on a phone: nothing is wider than the window, and no error.

It is there after `make docs`, which the CI runs before the slow tests.
"""

from pathlib import Path

import pytest

from browser import Browser, needs_browser

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = sorted(
    str(page.relative_to(SITE))
    for page in SITE.rglob("*.html")
    if page.relative_to(SITE).parts[0] not in ("_static", "_modules")
)
CUT = """[...document.querySelectorAll(".bd-sidebar-secondary a")].filter(each => {
  const box = each.getBoundingClientRect();
  const isShown = box.width && getComputedStyle(each).visibility === "visible";
  return isShown && box.left < innerWidth && box.right > innerWidth;
}).map(each => each.textContent.trim())"""
"""Entries of the list of contents that stand out of the window."""

BROKEN = """[...document.querySelectorAll(".bd-article table.table :is(th, td) > p:not(:has(code))")].filter(each => {
  const range = document.createRange(), text = each.textContent.trim();
  range.selectNodeContents(each);
  const tops = [...range.getClientRects()].map(box => box.top);
  return text.length < 15 && !/[\\s-]/.test(text) && Math.max(...tops) - Math.min(...tops) > 12;
}).map(each => each.textContent.trim())"""
"""Cells of one word that has more than one line; code may be broken."""

UNHINTED = """[...document.querySelectorAll(".bd-article :is(pre, .pst-scrollable-table-container)")].filter(each =>
  each.scrollWidth > each.clientWidth + 1 && !getComputedStyle(each).backgroundImage.includes("gradient")
).map(each => each.textContent.trim().slice(0, 40))"""
"""Tables and lines that go on out of sight, without a shadow that says so."""

NARROW = """[...document.querySelectorAll(".bd-article table.table td:has(code)")].filter(each =>
  each.getBoundingClientRect().width < 120).map(each => each.textContent.trim())"""
"""Cells where a command has a word a line, and their rows are as tall."""

pytestmark = [
    needs_browser,
    pytest.mark.slow,
    pytest.mark.skipif(not PAGES, reason="the site is not built: make docs"),
]


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 400])
def test_no_page_is_wider_than_its_window(browser, width, dark):
    browser.show(width, dark=dark)
    wrong = {}
    for page in PAGES:
        browser.open((SITE / page).as_uri())
        seen = browser.run("document.documentElement.scrollWidth")
        cut = browser.run(CUT) if width == 1400 else []
        others = [browser.run(script) for script in (BROKEN, UNHINTED, *([NARROW] if width == 400 else []))]
        if seen > width or cut or any(others) or browser.problems:
            wrong[page] = (seen, cut, others, list(browser.problems))
    assert wrong == {}
    assert (browser.run("document.documentElement.dataset.theme") == "dark") == dark
