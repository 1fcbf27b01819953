"""How the cost of an update grows: python benchmarks/growth.py [--json FILE] [--svg FILE] [--bodies NAME ...].

Four bodies, each from a usual shape along one axis at a time (batch, width, length): a dense layer and an LSTM as
`hotloop kernel --train` has them, the cifar_resnet8 update of `hotloop cnn train`, and the autoencoder's of `hotloop
recommender train`. Ours in its compiled loop and torch's eager update (the same as in benchmarks/peers) take turns at
every point. Printed are milliseconds with the range of the rounds, and the exponent of each axis: 1 where twice the
size takes twice as long, 2 where it takes four times. `--svg` draws all of it, a row for each body.
"""

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent / "peers"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import cnn
import cnn_checks
import jax
import recommender
import torch
from common import load_before, ratios, save, take_turns
from kernels_torch import torch_iterations

from hotloop.bench.axes import PHONE, Axis
from hotloop.bench.charts import Chart
from hotloop.engine.device import setup
from hotloop.families.kernels import config as kernels
from hotloop.families.kernels.bench import make_job, prepare

PACE, CALL_SECONDS = 5e10, 0.03  # operations a second, roughly, and seconds that a call of ours shall take
SPARSITY = 0.0025  # ratings given, of all that users could give
USERS = 2_000
TIME = "ms an update"
Shape = Mapping[str, int]
Run = Callable[[int], None]


class Sides(NamedTuple):
    """Both sides at one shape, warm: how to make so many updates, ours in whole calls of `least`."""

    ours: Run
    least: int
    torch: Run


@dataclass(frozen=True)
class Body:
    """`grid` has the values of every axis; all others stay at the `usual` shape meanwhile."""

    name: str
    usual: Shape
    grid: Mapping[str, tuple[int, ...]]
    sides: Callable[[Shape], Sides]

    def points(self) -> list[tuple[str, int]]:
        return [(axis, value) for axis, values in self.grid.items() for value in values]


def of_layer(config: kernels.LayerOptions) -> Sides:
    """A layer's training, in calls of a few hundredths of a second, so that calling costs nothing."""
    job = make_job(config, jax.devices()[0])
    least = min(1000, max(2, round(CALL_SECONDS * PACE / job.kernel.cost(4).flops)))
    config = replace(config, batches_per_step=least)
    bench = prepare(make_job(config, jax.devices()[0]))

    def run(count: int) -> None:
        for _ in range(count // least):
            bench.step()

    _, theirs = torch_iterations(config, "float32", "cpu")
    return warm(Sides(run, least, theirs))


def dense(shape: Shape) -> Sides:
    return of_layer(kernels.Dense(batch_size=shape["batch"], size=shape["width"], train=True))


def lstm(shape: Shape) -> Sides:
    sizes = {"batch_size": shape["batch"], "hidden_size": shape["width"], "timesteps": shape["length"]}
    return of_layer(kernels.Lstm(**sizes, fused=True, train=True))


def resnet(shape: Shape) -> Sides:
    name = f"cifar_resnet{shape['layers']}"
    case = cnn_checks.Case(name, name, shape["batch"], True, "32.32", 2, side=shape["image side"])
    state = cnn_checks.started(case)
    run, _ = cnn.our_updates(case, state)
    return warm(Sides(run, case.per_call, cnn_checks.peer(case, state, "cpu").update))


def autoencoder(shape: Shape) -> Sides:
    matrix = recommender.made_up(USERS, shape["items"], round(SPARSITY * USERS * shape["items"]))
    job = recommender.job_of(matrix, shape["width"], shape["batch"])
    ours = recommender.Ours(matrix, job, shape["batch"], per_call=2)
    peer = recommender.Torch(matrix, job.layers, job.dropout, job.rates[0], "cpu")
    return warm(Sides(ours.advance, ours.per_call, partial(peer.advance, shape["batch"])))


def warm(sides: Sides) -> Sides:
    sides.ours(sides.least)
    sides.torch(2)
    return sides


BODIES = (
    Body(
        "dense layer",
        {"batch": 32, "width": 1024},
        {"batch": (8, 32, 128, 512), "width": (256, 512, 1024, 2048)},
        dense,
    ),
    Body(
        "LSTM",
        {"batch": 64, "width": 256, "length": 25},
        {"batch": (4, 16, 64, 256), "width": (64, 128, 256, 512), "length": (5, 10, 25, 100)},
        lstm,
    ),
    Body(
        "CIFAR ResNet",
        {"batch": 32, "image side": 32, "layers": 8},
        {"batch": (8, 32, 128), "image side": (16, 32, 64), "layers": (8, 14, 20)},
        resnet,
    ),
    Body(
        "recommender",
        {"batch": 64, "width": 128, "items": 17_736},
        {"batch": (16, 64, 256), "width": (128, 256, 512), "items": (2_000, 6_000, 17_736)},
        autoencoder,
    ),
)


def measure(body: Body, rounds: int, target: float) -> list[dict[str, Any]]:
    """A row for each axis and value; a shape that several axes share is measured once."""
    rows, known = [], {}
    for axis, value in body.points():
        shape = {**body.usual, axis: value}
        key = tuple(shape.values())
        if key not in known:
            known[key] = measure_shape(body.sides(shape), rounds, target)
        rows.append(
            {"family": body.name, "case": f"{axis} {value}", "axis": axis, "value": value, "at": shape}
            | known[key]
        )
        show(rows[-1])
    return rows


def measure_shape(sides: Sides, rounds: int, target: float) -> dict[str, Any]:
    runs = {"ours": (sides.ours, sides.least), "torch": (sides.torch, 1)}
    _, times = take_turns(runs, rounds, target)
    row: dict[str, Any] = {}
    for name, values in times.items():
        low, middle, high = (1e6 * found(values) for found in (min, statistics.median, max))
        row |= {f"{name}_low_us": low, f"{name}_us": middle, f"{name}_high_us": high}
    return row | ratios(times["ours"], times["torch"])


def exponent(values: Sequence[float], times: Sequence[float]) -> float:
    """The slope of the straight line through the logarithms: times grow as values to this power."""
    x, y = ([math.log(each) for each in some] for some in (values, times))
    return statistics.linear_regression(x, y).slope


def exponents(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of every body and axis, for both sides."""
    return [
        {"family": family, "axis": axis}
        | {
            side: exponent([row["value"] for row in some], [row[f"{side}_us"] for row in some])
            for side in ("ours", "torch")
        }
        for (family, axis), some in by_axis(rows).items()
    ]


def by_axis(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["family"], row["axis"]), []).append(row)
    return found


STYLE = """svg{font-family:system-ui,sans-serif}.chart text{fill:#626b75;font-size:13px}
.chart .note,.body{fill:#1d2126}.body{font-size:18px;font-weight:600}.axis{stroke:#626b75}.grid{stroke:#d9d6d0}
.line{fill:none;stroke-width:2}.line.c0,.whisker.c0{stroke:#2563a8}.line.c1,.whisker.c1{stroke:#c2541b}
.dot.c0,.key.c0{fill:#2563a8}.dot.c1,.key.c1{fill:#c2541b}.whisker{stroke-width:1.5}"""
GAP, HEAD, HEIGHT = 20, 34, 270  # of a chart as wide as a phone, with a line for its legend


def draw(rows: Sequence[Mapping[str, Any]]) -> str:
    """A picture that stands by itself: a row of charts for each body, a chart for each axis."""
    bodies: dict[str, list[str]] = {}
    for (family, axis), some in by_axis(rows).items():
        bodies.setdefault(family, []).append(draw_axis(family, axis, some))
    cell, row_height = PHONE + GAP, HEAD + HEIGHT + GAP
    width, height = GAP + cell * max(map(len, bodies.values())), row_height * len(bodies)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, (family, charts) in enumerate(bodies.items()):
        top = row_height * number
        parts.append(f'<text class="body" x="{GAP}" y="{top + 22}">{escape(family)}</text>')
        for column, chart in enumerate(charts):
            place = f'<svg x="{GAP + column * cell}" y="{top + HEAD}" width="{PHONE}" height="{HEIGHT}"'
            parts.append(chart.replace("<svg", place, 1))
    return "\n".join([*parts, "</svg>\n"])


def draw_axis(family: str, axis: str, rows: Sequence[Mapping[str, Any]]) -> str:
    chart = Chart(f"{family}: {TIME} against {axis}", Axis(axis, log=True), Axis(TIME, log=True))
    for colour, (side, label) in enumerate((("ours", "hotloop"), ("torch", "torch"))):
        chart.add("dotted line", [(row["value"], row[f"{side}_us"] / 1e3) for row in rows], label, colour)
        for row in rows:
            ends = [(row["value"], row[f"{side}_{end}_us"] / 1e3) for end in ("low", "high")]
            chart.add("range", ends, colour=colour)
    return chart.render(PHONE)


def show(row: Mapping[str, Any]) -> None:
    ranges = [f"{row[f'{side}_low_us'] / 1e3:.3g} to {row[f'{side}_high_us'] / 1e3:.3g}" for side in SIDES]
    ours, theirs = (
        f"{row[f'{side}_us'] / 1e3:9.3f} ({text})" for side, text in zip(SIDES, ranges, strict=True)
    )
    spread = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
    print(
        f"{row['family']:14} {row['case']:18} {ours:32} {theirs:32} {row['ratio']:6.2f} ({spread})",
        flush=True,
    )


SIDES = ("ours", "torch")


def main(arguments: list[str]) -> int:
    options, load = parsed(arguments), load_before()
    setup("cpu")
    print(f"{'body':14} {'at':18} {'ours, ms':32} {'torch, ms':32} {'ratio':>6}")
    rows = []
    for body in BODIES:
        if options.bodies is None or body.name in options.bodies:
            rows += measure(body, options.rounds, options.seconds)
    powers = exponents(rows)
    for each in powers:
        print(
            f"{each['family']}, {each['axis']}: time grows as its power {each['ours']:.2f}, torch's {each['torch']:.2f}"
        )
    if options.json:
        save(
            options.json,
            {"torch": torch.__version__, "load_before": f"{load:.2f}", "exponents": powers},
            rows,
        )
    if options.svg:
        options.svg.write_text(draw(rows), "utf-8")
    return 0


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [body.name for body in BODIES]
    parser.add_argument("--bodies", nargs="+", choices=names, metavar="NAME", help=f"only these: {names}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=0.15, help="length of a turn")
    parser.add_argument("--quick", action="store_true", help="one short round: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw them")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.seconds = 1, 0.01
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
