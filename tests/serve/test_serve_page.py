"""The page at / in headless Chromium: models and figures, no console error, nothing cut off on a phone."""

import re
import shutil
import subprocess
import threading
import time

import fake_models
import numpy as np
import pytest
import uvicorn
from PIL import Image
from starlette.responses import HTMLResponse

from hotloop.serve.app import Application, Limits

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = 360
MORE = 1_000_000
FRAME = f"""<!doctype html><iframe width="{PHONE}" height="700" style="border:0" src="/"></iframe><pre id="width"></pre>
<script>setInterval(() => {{ const inside = document.querySelector("iframe").contentDocument;
document.getElementById("width").textContent = "width " + inside.documentElement.scrollWidth +
", sections " + inside.querySelectorAll("section").length }}, 500)</script>"""

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH"
)


@pytest.fixture(scope="module")
def address():
    models, _ = fake_models.make_models()
    app = Application(models, models.figures, Limits()).build()
    models.figures.of("rows", 1).rows = 12345

    async def framed(scope, receive, send):
        if scope["path"] == "/frame":
            await HTMLResponse(FRAME)(scope, receive, send)
            return
        if scope["path"] == "/v2/models/stats":  # more each time that the page asks
            models.figures.of("rows", 1).rows += MORE
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(framed, port=0, lifespan="off", log_config=None, loop="asyncio"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def browse(url, *options):
    """The page's final text and the lines of its console."""
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
         "--virtual-time-budget=3000", *options, url],
        capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_models_and_figures_are_shown_without_a_console_error(address):
    html, console = browse(address, "--dump-dom")
    assert console == []
    assert '<span id="state" class="state good" role="status">ready</span>' in html
    for text in ("<h2>rows</h2>", "<h2>image</h2>", "versions 1, 2", "x: FP32 [n, 3]"):
        assert text in html, text
    rows, a_second = map(int, re.search(r"<td>(\d+)12345</td><td>(\d+)</td>", html).groups())
    assert rows >= 2  # it has asked again by itself
    assert 0 < a_second <= MORE


def test_nothing_is_cut_off_on_a_phone(address):
    html, _ = browse(f"{address}/frame", "--dump-dom")
    (width, sections) = map(int, re.search(r">width (\d+), sections (\d+)<", html).groups())
    assert sections == 3  # it was drawn when it was measured
    assert width <= PHONE


@pytest.mark.slow
def test_a_light_page_is_light_and_a_dark_one_dark(address, tmp_path):
    greys = []
    for option in ((), ("--blink-settings=preferredColorScheme=0",)):
        path = tmp_path / f"{len(greys)}.png"
        browse(address, f"--screenshot={path}", "--window-size=800,600", *option)
        with Image.open(path) as picture:
            greys.append(np.asarray(picture.convert("L")).mean())
    assert greys[0] > 200 and greys[1] < 60
