"""The plot of a learning-rate sweep: loss and RMSE of each trial against its exponent, as one SVG file.

The file opens by itself in a browser, light or dark. It knows the result of a sweep and nothing of trials.
"""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from hotloop.bench.page import Axis, Chart, write_text

LINES = {"loss": "final loss", "rmse": "final RMSE", "validation_rmse": "validation RMSE"}


def write_plot(result: Mapping[str, Any]) -> Path:
    """Draw into the sweep's folder; the path of the file."""
    path = Path(result["folder"]) / "sweep.svg"
    write_text(path, stand_alone(draw_plot(result).render()))
    return path


def draw_plot(result: Mapping[str, Any]) -> Chart:
    """A line for each figure there is; trials that did not finish are not on it."""
    finished = sorted(
        (trial for trial in result["trials"] if trial["status"] == "finished"),
        key=lambda trial: float(trial["exponent"]),
    )
    chart = Chart(
        "Learning-rate sweep", Axis("exponent: the rate is 2^exponent times the batch"), Axis("error")
    )
    for colour, (name, label) in enumerate(LINES.items()):
        points = [(trial["exponent"], trial[name]) for trial in finished if trial[name] is not None]
        if points:
            chart.add("dotted line", points, label, colour)
    return chart


def stand_alone(svg: str) -> str:
    """An `<svg>` of a page as a file of its own: with its namespace and the page's styles."""
    style = files("hotloop.bench").joinpath("page.css").read_text("utf-8")
    head, rest = svg.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{rest}\n'
