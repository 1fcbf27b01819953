"""The page at the end of `hotloop demo`, of plain results as `--json` prints them."""

import math
from collections.abc import Mapping
from typing import Any

from hotloop.bench.page import Axis, Chart, Page, Strip, Strips, format_cell, line_chart
from hotloop.bench.roofline import roofline_chart

Result = Mapping[str, Any]
KERNEL_COLUMNS = (
    *("kernel", "items/s", "µs an iteration", "p10–p90 µs", "TFLOP/s", "GB/s"),
    *("% of roofline", "bound by", "error"),
)


def build_demo_page(results: Mapping[str, Any]) -> Page:
    environment = results["environment"]
    lead = f"jax {environment['jax']} · hotloop {environment['hotloop']} · {results['date']}"
    page = Page("hotloop demo", f"{results['device']} · {lead}")
    _add_hot_loop(page, results)
    _add_kernels(page, results["kernels"])
    _add_hmc(page, results["hmc"], results["histogram"])
    _add_vae(page, results["vcd"])
    _add_recommender(page, results["recommender"])
    _add_resnet(page, results["cnn"])
    _add_estimator(page, results["estimator"])
    page.heading("Environment")
    page.code("\n".join(f"{name}: {value}" for name, value in environment.items()))
    return page


def _add_hot_loop(page: Page, results: Result) -> None:
    page.heading("One compiled call, many weight updates")
    page.text(
        "An RNN layer is trained with SGD. The computation is the same at every point; only the number of weight "
        "updates inside one compiled call changes. The host appears between calls."
    )
    points = results["hot_loop"]
    x, y = Axis("weight updates per call", log=True), Axis("updates/s", low=0)
    buys = Chart("What the hot loop buys", x, y)
    buys.add("dotted line", points)
    for point in (points[0], points[-1]):
        buys.note(point, f"{point[1]:,.0f}/s")
    losses = list(enumerate(results["losses"]))
    trains = line_chart(
        "Training really trains", Axis("round of four batches"), Axis("loss", low=0), {"": losses}
    )
    page.charts(
        [
            (buys, "Median of the timed calls; compilation is not in it."),
            (trains, "The loss of one such run, one point a round of its four batches."),
        ]
    )


def _add_kernels(page: Page, kernels: Mapping[str, Result]) -> None:
    page.heading("Kernels")
    page.text(
        "Each layer was first compared with a float64 reference (last column: the largest relative error), then timed "
        "inside a compiled loop whose every iteration depends on the one before."
    )
    page.table(KERNEL_COLUMNS, [_kernel_row(name, result) for name, result in kernels.items()])
    strips = []
    for name, result in kernels.items():  # every timed step, relative to the kernel's median
        middle, seconds = result["seconds_per_step"], result["seconds"]
        low, high = (seconds[key] / middle for key in ("p10", "p90"))
        strips.append(Strip(name, low, 1.0, high, [each / middle for each in seconds["all"]]))
    spread = Strips("Spread of the timed steps", Axis("time / median"), strips, at=1.0)
    page.charts(
        [
            (roofline_chart(kernels), "Lines: this device's own measured matrix product and memory copy."),
            (spread, "One dot a timed call; boxes are p10 to p90."),
        ]
    )


def _kernel_row(name: str, result: Result) -> list[str | float | None]:
    scale = result["microseconds_per_iteration"] / result["seconds_per_step"]
    low, high = (format_cell(result["seconds"][key] * scale) for key in ("p10", "p90"))
    return [
        name,
        result["items_per_second"],
        result["microseconds_per_iteration"],
        f"{low}–{high}",
        result["tflops"],
        result["gbps"],
        100 * result["roofline"],
        result["limits"]["bound"],
        max(result["checked"]["errors"].values()),
    ]


def _add_hmc(page: Page, hmc: Result, histogram: Result) -> None:
    page.heading("Hamiltonian Monte Carlo")
    moments = ", ".join(
        f"{name} {found['value']:.4f} ± {found['error']:.4f}" for name, found in hmc["statistics"].items()
    )
    page.text(
        f"{hmc['items_per_second']:,.0f} HMC steps per second in one chain on the density exp(-x - x²): {moments}. "
        "The exact values are 0.7837, -0.5 and 0.5."
    )
    counts, edges = histogram["counts"], histogram["edges"]
    heights = [count / sum(counts) / (edges[1] - edges[0]) for count in counts]
    chart = Chart("HMC samples and the exact density", Axis("x"), Axis("density", low=0))
    chart.add("steps", [*zip(edges, heights, strict=False), (edges[-1], 0.0)], "samples")
    grid = [edges[0] + (edges[-1] - edges[0]) * i / 160 for i in range(161)]
    # The density that the samples must have, N(-1/2, 1/2).
    chart.add("line", [(x, math.exp(-((x + 0.5) ** 2)) / math.sqrt(math.pi)) for x in grid], "exact")
    page.charts([(chart, f"{sum(counts):,} chains, 20 steps each.")])


def _add_vae(page: Page, vae: Result) -> None:
    page.heading("A variational autoencoder refined by HMC")
    page.text(
        f"Trained here for a few seconds on drawn digits (not handwriting), {vae['batch_size']} images an update. An "
        f"update of the contrastive divergence is 41 gradients of the decoder in a row: "
        f"{vae['updates_per_second']:,.0f} updates a second in one compiled call."
    )
    elbo = {"": [(15 * place, value) for place, value in enumerate(vae["elbo"])]}
    refined = {
        "after HMC": list(enumerate(vae["log_joint_zt"])),
        "encoder's samples": list(enumerate(vae["log_joint_z0"])),
    }
    update, joint = Axis("update"), Axis("log p(x, z), nats")
    page.charts(
        [
            (
                line_chart("The usual bound first", update, Axis("ELBO, nats"), elbo),
                "1,500 updates of the ELBO.",
            ),
            (
                line_chart("Then the contrastive divergence", update, joint, refined),
                "60 updates, 8 HMC iterations each.",
            ),
            (
                f'<img alt="Reconstructions" src="data:image/png;base64,{vae["picture"]}">',
                "Each digit as it is, from the encoder's sample, and after HMC.",
            ),
        ]
    )


def _add_recommender(page: Page, found: Result) -> None:
    page.heading("An autoencoder that recommends")
    page.text(
        f"Trained here on ratings of {found['users']:,} users for {found['items']:,} items, drawn from hidden tastes: "
        f"{found['users_per_second']:,.0f} users a second, ratings sparse on the device and made dense inside the "
        "compiled loop. The error is that of ratings it has not seen."
    )
    epochs = list(enumerate(found["rmse"]))
    shown = [
        (epoch, value) for epoch, value in epochs if value < 1.5
    ] or epochs  # what came before hides the rest
    biases = [(shown[0][0], found["biases"]), (shown[-1][0], found["biases"])]
    series = {"autoencoder": shown, "user and item biases": biases}
    chart = line_chart("Ratings it has not seen", Axis("epoch"), Axis("RMSE, stars"), series)
    page.charts([(chart, "One point an epoch.")])


def _add_resnet(page: Page, found: Result) -> None:
    page.heading("A ResNet, validated as it learns")
    page.text(
        f"{found['model']} trained here on {found['images']:,} drawn digits, {found['updates_per_call']} updates with "
        f"batch norm and momentum a call: {found['images_per_second']:,.0f} images a second. After each call all "
        f"digits that it has not seen are told by the moving statistics, "
        f"{100 * found['validation'][-1]:.0f} % right at the end."
    )
    per_call = found["updates_per_call"]
    series = {  # a call's mean stands in its middle, a validation at its end
        "training": [((call + 0.5) * per_call, 100 * value) for call, value in enumerate(found["training"])],
        "validation": [
            ((call + 1) * per_call, 100 * value) for call, value in enumerate(found["validation"])
        ],
    }
    chart = line_chart("Digits told apart", Axis("update"), Axis("accuracy, %", low=0), series)
    page.charts([(chart, "Training: the mean of a call. Validation: every digit once.")])


def _add_estimator(page: Page, found: Result) -> None:
    page.heading("An estimator for any model")
    page.text(
        f"A small CNN trained here by Estimator.train on {found['images']:,} drawn objects of ten shapes: "
        f"{found['images_per_second']:,.0f} images a second, and {100 * found['test_accuracy']:.0f} % of the objects "
        "that it has not seen told right after a few seconds. The curve is what a hook saw."
    )
    part = found["updates"] / len(found["accuracy"])
    points = [((place + 0.5) * part, 100 * value) for place, value in enumerate(found["accuracy"])]
    chart = line_chart("Objects told apart", Axis("update"), Axis("accuracy, %", low=0), {"": points})
    page.charts([(chart, "Means over a few updates.")])
