from html.parser import HTMLParser

import pytest

from hotloop.bench.page import Page, format_cell
from hotloop.errors import RunError


class _Outline(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def _page():
    page = Page("Results", "measured <here>")
    page.section("Kernels", "a & b")
    page.table(["name", "items/s", "share"], [["lstm", 12345.678, None], ["gru", float("nan"), 0.5]])
    page.charts([("<svg></svg>", "a caption")])
    page.code("hotloop demo")
    return page


def test_the_page_needs_nothing_from_outside():
    outline = _Outline()
    outline.feed(_page().render())
    links = [a.get("src") or a.get("href") for tag, a in outline.tags if "src" in a or "href" in a]
    assert links == ["data:,"]
    assert {"table", "svg", "style", "script"} <= {tag for tag, _ in outline.tags}


def test_text_is_escaped_and_numbers_keep_their_value_for_sorting():
    html = _page().render()
    assert "measured &lt;here&gt;" in html
    assert "a &amp; b" in html
    assert '<td data-value="12345.678">12,346</td>' in html


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.123456, "0.1235"), (7, "7"), ("x", "x"), (1e6, "1,000,000")]
)
def test_cells_read_well(value, text):
    assert format_cell(value) == text


def test_writing_is_whole_and_leaves_no_temporary_file(tmp_path):
    path = _page().write(tmp_path / "deep" / "page.html")
    assert path.read_text().endswith("</html>\n")
    assert [entry.name for entry in path.parent.iterdir()] == ["page.html"]


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        _page().write(tmp_path / "file" / "page.html")
