import copy
import re

from demo_results import RESULTS, kernel
from hotloop.bench.demo_page import build_demo_page
from hotloop.bench.roofline import roofline_chart


def test_the_page_tells_every_kernel_and_every_part_in_words_and_charts():
    html = build_demo_page(RESULTS).render()
    kernels = html.partition('id="kernels"')[2].partition("</table>")[0]
    assert re.findall(r'<tr><td class="words">([^<]*)', kernels) == list(RESULTS["kernels"])
    assert "a &lt;device&gt;" in html
    assert "87 % right at the end" in html
    assert "41 % of the objects" in html
    assert "4,000,000 HMC steps per second" in html
    titles = re.findall(r"<svg[^>]*>\s*<title>([^<]*)", html)
    assert {"What the hot loop buys", "Roofline", "HMC samples and the exact density"} < set(titles)
    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    assert all("The numbers" in figure for figure in figures if "<svg" in figure)


def test_the_numbers_behind_the_charts_are_those_of_the_results():
    html = build_demo_page(RESULTS).render()
    numbers = set(map(float, re.findall(r'data-value="([^"]*)"', html)))
    assert {12.5, 37.5, 62.5} <= numbers  # the middles of calls of 25 updates
    assert {25, 50, 75} <= numbers  # their ends, where it is validated
    assert {20, 60, 100} <= numbers  # the middles of thirds of 120 updates
    assert 15 in numbers  # updates between two values of the ELBO


def test_the_histogram_is_a_share_of_all_chains_also_of_those_outside_of_it():
    html = build_demo_page(RESULTS).render()
    assert "8 chains, 20 steps each." in html
    numbers = set(map(float, re.findall(r'data-value="([^"]*)"', html)))
    assert {1 / 8, 3 / 8, 2 / 8} <= numbers


def test_the_environment_is_said_in_words_without_what_is_not_known():
    said = build_demo_page(RESULTS).render().partition('id="environment"')[2]
    assert "device kinds: cpu" in said
    assert "None" not in said and "driver" not in said and "xla" not in said


def test_a_kernel_that_moves_no_bytes_has_no_place_on_the_roofline():
    kernels = copy.deepcopy(RESULTS["kernels"]) | {"free": kernel(1e6, 0, 0.01)}
    assert roofline_chart(kernels).table() == roofline_chart(RESULTS["kernels"]).table()
    assert "free" in build_demo_page(RESULTS | {"kernels": kernels}).render()


def test_a_kernel_above_its_limits_is_told_as_what_it_is_and_not_as_a_share_of_the_device():
    kernels = copy.deepcopy(RESULTS["kernels"])
    assert "The best kernel reaches" in build_demo_page(RESULTS | {"kernels": kernels}).headline
    next(iter(kernels.values()))["roofline"] = 2.3
    headline = build_demo_page(RESULTS | {"kernels": kernels}).headline
    assert "faster than the limits that were measured" in headline and "230 % of them" in headline
