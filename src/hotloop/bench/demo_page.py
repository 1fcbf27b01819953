"""The page at the end of `hotloop demo`, of plain results as `--json` prints them."""

import math
from collections.abc import Mapping
from typing import Any

from hotloop.bench.axes import Axis
from hotloop.bench.charts import Chart, line_chart
from hotloop.bench.page import Cell, Page, format_cell
from hotloop.bench.roofline import roofline_chart
from hotloop.bench.strips import Strip, Strips

Result = Mapping[str, Any]
HIGHEST_SHARE = 100.5  # percent; above, rounded, a share of what a device can do would be none
KERNEL_COLUMNS = (
    *("kernel", "items/s", "µs an iteration", "p10–p90 µs", "TFLOP/s", "GB/s"),
    *("% of roofline", "bound by", "error"),
)


def build_demo_page(results: Mapping[str, Any]) -> Page:
    environment = results["environment"]
    lead = f"jax {environment['jax']} · hotloop {environment['hotloop']} · {results['date']}"
    page = Page("hotloop demo", f"{results['device']} · {lead}", headline=_write_headline(results))
    points = [(point[0], point[1]) for point in results["hot_loop"]]
    x, y = Axis("weight updates per call", log=True), Axis("updates/s", low=0)
    buys = Chart("What the hot loop buys", x, y)
    buys.add("dotted line", points, colour=0)
    for updates, _, *ends in results["hot_loop"]:  # results of an older demo have no ends
        buys.add("range", [(updates, end) for end in ends], colour=0)
    for point in (points[0], points[-1]):
        buys.note(point, f"{point[1]:,.0f}/s")
    x, y = Axis("round of four batches"), Axis("loss", low=0)
    trains = line_chart("Training really trains", x, y, {"": list(enumerate(results["losses"]))})
    page.section(
        "One compiled call, many weight updates",
        "An RNN layer is trained with SGD. The computation is the same at every point; only the number of weight "
        "updates inside one compiled call changes. The host appears between calls.",
        [
            (
                buys,
                "Median of the timed calls, with bars from p10 to p90; compilation is not in it.",
            ),
            (trains, "The loss of one such run, one point a round of its four batches."),
        ],
    )
    _add_kernels(page, results["kernels"])
    _add_sampling(page, results["hmc"], results["histogram"], results["vcd"])
    _add_trainings(page, results["recommender"], results["cnn"], results["estimator"])
    page.section("Environment")
    known = {name: value for name, value in environment.items() if value not in (None, "")}
    words = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in known.items()
    }
    page.code("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in words.items()))
    return page


def _write_headline(results: Mapping[str, Any]) -> str:
    """What came out, in a sentence."""
    first, last = results["hot_loop"][0], results["hot_loop"][-1]
    share = max(100 * result["roofline"] for result in results["kernels"].values())
    right = 100 * results["cnn"]["validation"][-1]
    reaches = f"reaches {share:.0f} % of what {results['device']} can do"
    if share > HIGHEST_SHARE:
        reaches = (
            f"is faster than the limits that were measured for {results['device']} ({share:.0f} % of them: other work "
            "was in that measurement, or what it computes with stays in the caches)"
        )
    return (
        f"{last[0]:,.0f} weight updates in one compiled call run {last[1] / first[1]:.1f} times as fast as one a call. "
        f"The best kernel {reaches}, and a ResNet trained here for a few seconds gets {right:.0f} % of the digits "
        "right that it has not seen."
    )


def _add_kernels(page: Page, kernels: Mapping[str, Result]) -> None:
    page.section(
        "Kernels",
        "Each layer was first compared with a float64 reference (last column: the largest relative error), then timed "
        "inside a compiled loop whose every iteration depends on the one before.",
    )
    rows: list[list[Cell]] = []
    strips = []
    for name, result in kernels.items():
        middle, seconds = result["seconds_per_step"], result["seconds"]
        microseconds = result["microseconds_per_iteration"]
        low, high = (seconds[key] / middle for key in ("p10", "p90"))  # as every timed step, of the median
        strips.append(Strip(name, low, 1.0, high, [each / middle for each in seconds["all"]]))
        ends = f"{format_cell(low * microseconds)}–{format_cell(high * microseconds)}"
        speeds = (result["tflops"], result["gbps"], 100 * result["roofline"], result["limits"]["bound"])
        error = max(result["checked"]["errors"].values())
        rows.append([name, result["items_per_second"], microseconds, ends, *speeds, error])
    page.table(KERNEL_COLUMNS, rows)
    spread = Strips("Spread of the timed steps", Axis("time / median"), strips, at=1.0)
    page.charts(
        [
            (roofline_chart(kernels), "Lines: this device's own measured matrix product and memory copy."),
            (spread, "One dot a timed call; boxes are p10 to p90."),
        ]
    )


def _add_sampling(page: Page, hmc: Result, histogram: Result, vae: Result) -> None:
    found = hmc["statistics"].items()
    moments = ", ".join(f"{name} {one['value']:.4f} ± {one['error']:.4f}" for name, one in found)
    counts, edges, chains = histogram["counts"], histogram["edges"], histogram["chains"]
    heights = [count / chains / (edges[1] - edges[0]) for count in counts]
    chart = Chart("HMC samples and the exact density", Axis("x"), Axis("density", low=0))
    chart.add("steps", [*zip(edges, heights, strict=False), (edges[-1], 0.0)], "samples")
    grid = [edges[0] + (edges[-1] - edges[0]) * i / 160 for i in range(161)]
    # The density that the samples must have, N(-1/2, 1/2).
    chart.add("line", [(x, math.exp(-((x + 0.5) ** 2)) / math.sqrt(math.pi)) for x in grid], "exact")
    page.section(
        "Hamiltonian Monte Carlo",
        f"{hmc['items_per_second']:,.0f} HMC steps per second in one chain on the density exp(-x - x²): {moments}. "
        "The exact values are 0.7837, -0.5 and 0.5.",
        [(chart, f"{chains:,} chains, 20 steps each.")],
    )
    elbo = {"": [(15 * place, value) for place, value in enumerate(vae["elbo"])]}
    bound = line_chart("The usual bound first", Axis("update"), Axis("ELBO, nats"), elbo)
    series = {"after HMC": "log_joint_zt", "encoder's samples": "log_joint_z0"}
    joint = {label: list(enumerate(vae[name])) for label, name in series.items()}
    y = Axis("log p(x, z), nats")
    divergence = line_chart("Then the contrastive divergence", Axis("update"), y, joint)
    picture = f'<img alt="Reconstructions" src="data:image/png;base64,{vae["picture"]}">'
    page.section(
        "A variational autoencoder refined by HMC",
        f"Trained here for a few seconds on drawn digits (not handwriting), {vae['batch_size']} images an update. An "
        f"update of the contrastive divergence is 41 gradients of the decoder in a row: "
        f"{vae['updates_per_second']:,.0f} updates a second in one compiled call.",
        [
            (bound, "1,500 updates of the ELBO."),
            (divergence, "60 updates, 8 HMC iterations each."),
            (picture, "Each digit as it is, from the encoder's sample, and after HMC."),
        ],
    )


def _add_trainings(page: Page, recommender: Result, cnn: Result, estimator: Result) -> None:
    epochs = list(enumerate(recommender["rmse"]))
    shown = [(epoch, value) for epoch, value in epochs if value < 1.5] or epochs  # the first hide the rest
    biases = [(epoch, recommender["biases"]) for epoch, _ in (shown[0], shown[-1])]
    series = {"autoencoder": shown, "user and item biases": biases}
    chart = line_chart("Ratings it has not seen", Axis("epoch"), Axis("RMSE, stars"), series)
    page.section(
        "An autoencoder that recommends",
        f"Trained here on ratings of {recommender['users']:,} users for {recommender['items']:,} items, drawn from "
        f"hidden tastes: {recommender['users_per_second']:,.0f} users a second, ratings sparse on the device and made "
        "dense inside the compiled loop. The error is that of ratings it has not seen.",
        [(chart, "One point an epoch.")],
    )
    accuracy = Axis("accuracy, %", low=0)
    calls, right = cnn["updates_per_call"], 100 * cnn["validation"][-1]
    series = {  # a call's mean stands in its middle, a validation at its end
        "training": [((call + 0.5) * calls, 100 * value) for call, value in enumerate(cnn["training"])],
        "validation": [((call + 1) * calls, 100 * value) for call, value in enumerate(cnn["validation"])],
    }
    chart = line_chart("Digits recognised", Axis("update"), accuracy, series)
    page.section(
        "A ResNet, validated as it learns",
        f"{cnn['model']} trained here on {cnn['images']:,} drawn digits, {calls} updates with batch norm and momentum "
        f"a call: {cnn['images_per_second']:,.0f} images a second. After each call all digits that it has not seen "
        f"are classified by the moving statistics, {right:.0f} % right at the end.",
        [(chart, "Training: the mean of a call. Validation: every digit once.")],
    )
    part, right = estimator["updates"] / len(estimator["accuracy"]), 100 * estimator["test_accuracy"]
    points = [((place + 0.5) * part, 100 * value) for place, value in enumerate(estimator["accuracy"])]
    chart = line_chart("Objects recognised", Axis("update"), accuracy, {"": points})
    page.section(
        "An estimator for any model",
        f"A small CNN trained here by Estimator.train on {estimator['images']:,} drawn objects of ten shapes: "
        f"{estimator['images_per_second']:,.0f} images a second, and {right:.0f} % of the objects that it has not "
        "seen classified right after a few seconds. The curve is what a hook saw.",
        [(chart, "Means over a few updates.")],
    )
