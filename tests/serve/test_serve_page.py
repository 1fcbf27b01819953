"""The page at / in headless Chromium, of a real server: digits drawn, images dropped, items rated, JSON sent, figures
live; no console error, nothing cut off on a phone, errors in words."""

import json
import re

import numpy as np
import pytest
import trial_models
from PIL import Image
from served_process import ServedProcess
from small_models import write_uncompared

from browser import Browser, needs_browser

pytestmark = needs_browser
WIDE, PHONE = 1400, 400


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial")
    write_uncompared(folder / "models", *trial_models.all_of_them(), ladder=(1,))
    titles = folder / "u.item"
    titles.write_text("".join(f"{item}|{title}\n" for item, title in trial_models.TITLES.items()))
    with ServedProcess(folder / "models", "--titles", titles) as served:
        yield f"http://127.0.0.1:{served.port}/"


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture
def page(browser, address):
    browser.show(WIDE)
    browser.open(address)
    browser.wait("document.querySelectorAll('section').length === 6")
    yield browser
    assert browser.problems == []


def of(model, rest=""):
    return f"section[aria-label={model}] {rest}"


def said(page, model):
    return page.run(f"document.querySelector('{of(model, '.answer')}').innerText")


def wait_for_answer(page, model):
    page.wait(f"document.querySelector('{of(model, '.took')}')")
    return said(page, model)


def draw_one(page, model):
    page.draw(of(model, ".pad"), (0.5, 0.1), (0.5, 0.5), (0.5, 0.9))


def test_a_drawn_digit_is_classified_with_bars_by_class(page):
    draw_one(page, "digits")
    found = wait_for_answer(page, "digits")
    assert "It is tall" in found and float(re.search(r"tall\s+([\d.]+) %", found)[1]) > 90
    page.click(of("digits", ".buttons button"))
    page.wait(f"document.querySelector('{of('digits', '.answer')}').innerText.includes('Nothing is drawn')")
    page.draw(of("digits", ".pad"), (0.1, 0.5), (0.9, 0.5))
    page.wait(f"document.querySelector('{of('digits', '.best .what')}')?.textContent === 'wide'")


def test_a_digit_can_be_drawn_by_keys_alone(page):
    page.run(f"document.querySelector('{of('digits', '.pad')}').focus()")
    for _ in range(8):
        page.press("ArrowDown", shift=True)
    page.press("Shift")
    assert "It is tall" in wait_for_answer(page, "digits")


def test_what_is_drawn_is_rebuilt_with_its_bound_and_another_sample_has_another_seed(page):
    page.draw(of("vcd", ".pad"), (0.2, 0.2), (0.8, 0.2), (0.5, 0.9))
    wait_for_answer(page, "vcd")
    white = """[...document.querySelectorAll("section[aria-label=vcd] figure canvas")].map(canvas => {
      const {data} = canvas.getContext("2d").getImageData(0, 0, 28, 28);
      return Array.from({length: 784}, (_, i) => +(data[4 * i] > 127)); })"""
    sent, rebuilt = (np.array(each).reshape(28, 28) for each in page.run(white))
    rows, columns = np.nonzero(sent)
    assert 17 <= np.ptp(rows) <= 21  # as MNIST has them: 20 pixels high, the centre of mass in the middle
    assert abs(rows.mean() - 13.5) < 1.5 and abs(columns.mean() - 13.5) < 1.5
    np.testing.assert_array_equal(rebuilt, sent[::-1])
    bound = f"document.querySelector('{of('vcd', '.elbo')}').textContent"
    assert page.run(bound) == f"{-sent.sum():.1f} nats"
    page.click(of("vcd", ".buttons button:last-child"))
    page.wait(f"{bound} === '{-sent.sum() - 1000:.1f} nats'")


def test_an_image_that_is_dropped_is_classified_and_what_is_none_is_told(page, tmp_path):
    Image.new("RGB", (60, 40), (255, 255, 204)).save(tmp_path / "light.png")
    page.drop(of("shade", ".drop"), tmp_path / "light.png")
    found = wait_for_answer(page, "shade")
    assert "It is light, with 93.3 %" in found
    (tmp_path / "notes.png").write_text("no image")
    page.drop(of("shade", ".drop"), tmp_path / "notes.png")
    page.wait(f"document.querySelector('{of('shade', '.error')}')")
    assert "notes.png is no image that this browser can read" in said(page, "shade")


def test_rated_items_give_recommendations_by_title_best_first(page):
    page.click(of("films", "input[type=search]"))
    page.type("toy sto")
    page.wait(f"document.querySelector('{of('films', '.found button')}')")
    page.press("Enter")
    wait_for_answer(page, "films")
    ranks = f"[...document.querySelectorAll('{of('films', '.ranks .what')}')].map(each => each.textContent)"
    assert page.run(ranks)[0] == "Jumanji (1995)" and "Toy Story (1995)" not in page.run(ranks)
    assert page.run(f"document.querySelector('{of('films', '.ranks .much')}').textContent") == "5.00"
    page.type("15")  # by its number; the field has kept the focus
    page.press("Enter")
    page.wait(f"{ranks}.includes('Sense & <b>Sensibility</b>')")  # as text
    rating = of("films", ".rated li:last-child input")
    page.run(
        f"(each => {{ each.value = 0; each.dispatchEvent(new Event('change')) }})(document.querySelector('{rating}'))"
    )
    page.wait(f"!{ranks}.slice(0, 2).includes('Sense & <b>Sensibility</b>')")
    page.type("no such film")
    page.wait(f"document.querySelector('{of('films', '.found')}').innerText.includes('No such title')")


def test_a_model_that_has_learnt_an_order_shows_how_likely_items_are_also_for_a_user_of_the_training(page):
    user = of("ranker", "input[type=number]")
    page.run(
        f"(each => {{ each.value = 7; each.dispatchEvent(new Event('change')) }})(document.querySelector('{user}'))"
    )
    found = wait_for_answer(page, "ranker")
    assert "How likely each is" in found
    rows = page.run(
        f"[...document.querySelectorAll('{of('ranker', '.ranks li')}')].map(each => each.innerText)"
    )
    assert [row.split("\n") for row in rows] == [
        ["Heat (1995)", "50.0 %"],
        ["Sudden Death (1995)", "0.125 %"],
    ]


def test_any_other_model_takes_json_beginning_with_an_example_and_errors_are_sentences(page):
    field = f"document.querySelector('{of('small', 'textarea')}')"
    example = json.loads(page.run(f"{field}.value"))
    assert example == {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 0, 0]}]}
    page.click(of("small", "button.main"))
    assert "shares [1, 3]" in wait_for_answer(page, "small")
    for text, sentence in (
        ("{", "this is no JSON"),
        ('{"inputs": []}', "input"),
        ('{"inputs": [{"name": "y"}]}', "y"),
    ):
        page.run(f"{field}.value = {json.dumps(text)}")
        page.click(of("small", "button.main"))
        page.wait(
            f"document.querySelector('{of('small', '.error')}')?.textContent.includes({json.dumps(sentence)})"
        )
    page.problems.clear()  # the console names each answer of status 400


def test_figures_change_while_what_was_drawn_stays(page):
    before = page.run(f"document.querySelector('{of('digits', 'td:nth-child(2)')}').textContent")
    draw_one(page, "digits")
    wait_for_answer(page, "digits")
    page.wait(
        f"document.querySelector('{of('digits', 'td:nth-child(2)')}').textContent === '{int(before) + 1}'"
    )
    assert "It is tall" in said(page, "digits")
    assert page.run(f"document.querySelector('{of('digits', '.head')}').innerText").endswith("version 1")
    assert page.run("document.getElementById('state').textContent") == "ready"


def test_the_page_takes_nothing_from_elsewhere_and_runs_nothing_inline(page, address):
    headers = page.run("fetch('/').then(each => each.headers.get('content-security-policy'))")
    assert "default-src 'none'" in headers and "unsafe" not in headers and "http" not in headers
    names = page.run("performance.getEntriesByType('resource').map(each => each.name)")
    assert names and all(name.startswith(address) for name in names)
    page.run(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    )
    assert page.run("window.ran") is None
    page.wait("true")
    page.problems.clear()  # it says that it has not run it


UNREACHABLE = """[...document.querySelectorAll("input, textarea, canvas.pad")].filter(each =>
  !(each.getAttribute("aria-label") || each.labels?.length)).map(each => each.outerHTML.slice(0, 80))"""
CUT = """[...document.querySelectorAll("section *")].filter(each => {
  const box = each.getBoundingClientRect(), scrolls = each.closest(".wrap, pre, .drop input");
  return box.width && !scrolls && box.right > innerWidth;
}).map(each => each.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("width", [WIDE, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_cut_off_every_field_has_a_name_and_a_dark_page_is_dark(
    browser, address, tmp_path, width, dark
):
    browser.show(width, dark=dark)
    browser.open(address)
    browser.wait("document.querySelectorAll('section').length === 6")
    draw_one(browser, "digits")
    wait_for_answer(browser, "digits")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(CUT) == [] and browser.run(UNREACHABLE) == []
    panel, answer = (browser.box(of("films", f".try > :nth-child({place})")) for place in (1, 2))
    assert (answer[0] > panel[0] + panel[2]) == (width == WIDE)  # beside it, or on a phone below
    hint = f"getComputedStyle(document.querySelector('{of('digits', '.hint')}')).display"
    assert browser.run(hint) == ("none" if width == WIDE else "block")
    with Image.open(browser.picture(tmp_path / "page.png")) as picture:
        grey = np.asarray(picture.convert("L")).mean()
    assert grey < 80 if dark else grey > 150
    assert browser.problems == []
