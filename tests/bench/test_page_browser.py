"""The pages in headless Chromium: no console error, every chart drawn, every table sorted, nothing cut off."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from bench_logs import log_folder, record, repeats
from demo_results import RESULTS, kernel
from hotloop.bench.demo_page import build_demo_page
from hotloop.bench.report import build_report, gather_sources

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RESULTS_FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
PHONE = 360

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH"
)


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
    kernels = {
        "results": {f"kernel {n}": kernel(10**n, 1e5, 0.02) | {"mode": "training"} for n in range(5, 9)}
    }
    (folder / "kernels.json").write_text(json.dumps(kernels))
    sources = gather_sources([folder / "1", folder / "2", folder / "kernels.json", RESULTS_FOLDER])
    return {
        "report": build_report(sources).write(folder / "report.html"),
        "demo": build_demo_page(RESULTS).write(folder / "demo.html"),
    }


def browse(url, *options):
    """The page's final text and the lines of its console."""
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
         "--virtual-time-budget=5000", "--allow-file-access-from-files", *options, url],
        capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def checked(html):
    (found,) = re.findall(r'<pre id="selfcheck">(.*?)</pre>', html)
    return json.loads(unescape(found))


@pytest.mark.parametrize(
    ("name", "charts"), [("report", 10), pytest.param("demo", 9, marks=pytest.mark.slow)]
)
def test_charts_are_drawn_and_tables_sort_without_a_console_error(pages, name, charts):
    html, console = browse(f"{pages[name].as_uri()}#selfcheck", "--dump-dom", "--window-size=1200,900")
    found = checked(html)
    assert found["problems"] == []
    assert console == []
    assert found["charts"] >= charts
    assert found["tables"] >= charts


@pytest.mark.parametrize("name", ["report", pytest.param("demo", marks=pytest.mark.slow)])
def test_nothing_is_cut_off_on_a_phone(pages, name, tmp_path):
    # A browser's window has a least width; a frame has none.
    url = f"{pages[name].as_uri()}#selfcheck"
    frame = f"""<!doctype html><iframe width="{PHONE}" height="700" style="border:0" src="{url}"
    onload="const found = document.createElement('pre'); found.id = 'selfcheck';
    found.textContent = this.contentDocument.getElementById('selfcheck').textContent; document.body.append(found)">
    </iframe>"""
    (tmp_path / "frame.html").write_text(frame)
    found = checked(browse((tmp_path / "frame.html").as_uri(), "--dump-dom")[0])
    assert found["problems"] == []
    assert found["width"] <= PHONE


@pytest.mark.slow
def test_the_self_check_finds_what_is_wrong(pages, tmp_path):
    broken = pages["demo"].read_text()
    broken = broken.replace("compare(key(a.cells[column])", "-compare(key(a.cells[column])")
    broken = broken.replace(">900/s</text>", f">{'x' * 99}</text>")
    (tmp_path / "broken.html").write_text(broken.replace("<script>", "<script>setTimeout(() => nothing());"))
    html, console = browse(f"{(tmp_path / 'broken.html').as_uri()}#selfcheck", "--dump-dom")
    problems = " ".join(checked(html)["problems"])
    assert "not sorted" in problems
    assert "text cut off" in problems
    assert any("nothing is not defined" in line for line in console)


@pytest.mark.slow
def test_a_light_and_a_dark_page_differ(pages, tmp_path):
    pictures = {}
    for scheme, option in {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}.items():
        path = tmp_path / f"{scheme}.png"
        browse(pages["report"].as_uri(), f"--screenshot={path}", "--window-size=800,600", *option)
        pictures[scheme] = path.read_bytes()
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())
    assert pictures["light"] != pictures["dark"]
