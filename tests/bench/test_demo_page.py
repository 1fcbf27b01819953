import copy

from demo_results import RESULTS, kernel
from hotloop.bench.demo_page import build_demo_page


def test_the_page_tells_every_kernel_and_draws_every_chart():
    html = build_demo_page(RESULTS).render()
    assert html.count("<svg") == 10
    assert html.partition('id="kernels"')[2].partition("</table>")[0].count("<tr>") == 3
    assert html.count("<details>") == 10  # the numbers of each chart
    assert "lstm training" in html
    assert "a &lt;device&gt;" in html
    assert "87 % right at the end" in html
    assert "41 % of the objects" in html
    assert "4,000,000 HMC steps per second" in html


def test_a_kernel_that_moves_no_bytes_has_no_place_on_the_roofline():
    results = copy.deepcopy(RESULTS)
    results["kernels"]["free"] = kernel(1e6, 0, 0.01)
    dots = build_demo_page(results).render().count("<circle")
    assert (
        dots == build_demo_page(RESULTS).render().count("<circle") + 3
    )  # its three timed steps, no roofline dot
