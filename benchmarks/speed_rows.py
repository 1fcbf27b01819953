"""Comparisons in the files of benchmarks/results, whatever program wrote them, as rows of one kind.

A row is one case on one machine, ours beside one peer. A file of another form gives no rows; nothing is computed here
but medians over rounds where a file has the rounds and not the median. speed_tables.py makes the page of them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from speed_sources import Source, age, family_of, fault_of, read_document, read_source, what_is_newer

FAMILIES = ("cnn", "estimator", "vcd", "recommender", "kernels", "hmc", "serving")
NAMES = {
    "resnet8": "CIFAR ResNet-8, training",
    "resnet50": "ResNet-50 at 224 x 224, training",
    "resnet50-infer": "ResNet-50 at 224 x 224, inference",
    "cifar": "the CIFAR-10 CNN by the Estimator, training",
}
PEERS = {"keras": "Keras on JAX", "nnx": "flax.nnx by hand", "by hand": "the same loop by hand"}
EPOCHS = {"resnet8": 50_000, "resnet50": 1_281_167, "cifar": 50_000, "vcd": 50_000}
"""Samples of an epoch; of the recommender's shapes the users, as benchmarks/peers/netflix_shape.py draws them."""
MOVIELENS_USERS = 943
RANDOM_USERS = 480_000
"""Of `hotloop recommender train --data random`, as data/stand_ins.py draws them; they have 13 million ratings."""
EAGER, GRAPHS = "torch, eager", "torch"
"""How torch makes a kernel's update on a GPU: benchmarks/peers/kernels.py has replayed CUDA graphs since GRAPHS_SINCE,
as it had for inference before."""
GRAPHS_SINCE = "2026-11-17"
OLDER = "older than the other rows of this case, whose file has no such peer"
USERS = {"3m": 311_315, "full": 477_412, "small": 20_000}


@dataclass(frozen=True)
class Row:
    """One case on one machine, ours beside one peer (None: nothing was beside it)."""

    source: Source
    family: str
    case: str
    unit: str
    ours: float
    peer: str | None = None
    theirs: float | None = None
    ratio: tuple[float, float, float] | None = None  # more is better for us; lowest and highest round
    memory: int | None = None
    their_memory: int | None = None
    samples: int | None = None  # of an epoch, where `unit` is samples a second
    note: str = ""  # what a reader of an old row should know

    def __post_init__(self) -> None:
        if not self.ours > 0:
            raise ValueError(f"{self.case}: {self.ours} {self.unit}")

    @property
    def measured(self) -> tuple[str, str, str]:
        """What is measured where, whoever is beside it."""
        return self.family, self.case, self.source.machine

    @property
    def epoch_seconds(self) -> float | None:
        """How long all samples take at this rate."""
        return self.samples / self.ours if self.samples else None


def rows_of(path: Path) -> Iterator[Row]:
    """All comparisons of a file, in its order; none for a file of another form."""
    with fault_of(path):
        yield from _rows_in(path, read_document(path))


def _rows_in(path: Path, document: Mapping[str, Any]) -> Iterator[Row]:
    source, results = read_source(path, document), document.get("results", [])
    if isinstance(results, dict) and "sides" in results.get("peers", {}):
        yield from _serving(source, results["peers"]["sides"])
    elif family_of(path) == "vcd" and "runs" in document:
        yield from _whole_vcd(source, document["runs"])
    elif isinstance(results, list) and all(isinstance(each, dict) for each in results):
        own = {_case(each): each for each in results if each.get("side") == "ours"}
        for each in results:
            family = each.get("family", family_of(path))
            if "time" in each:
                yield from _ranking(source, each["time"])
            elif str(each.get("data")).startswith("random "):
                yield _whole_recommender(source, each)
            elif "served" in each:
                yield _served(source, each)
            elif {"ours_us", "dtype"} <= each.keys():
                yield _kernel(source, each)
            elif "shape" in each:
                yield _recommender(source, each)
            elif each.get("side") not in (None, "ours") and "ess_per_second" in each:
                yield from _sampler(source, own[_case(each)], each)
            elif each.get("side") not in (None, "ours") and "ratio" in each:
                yield _side(source, family, own[_case(each)], each)


def newest(rows: Iterable[Row]) -> list[Row]:
    """Of each case beside each peer the row of the newest file, and the last that this has; families in their order.

    Where that file is not the newest of the case, since this one has another peer, the row says so.
    """
    kept: dict[Any, dict[str | None, Row]] = {}
    latest: dict[Any, Source] = {}
    for row in sorted(rows, key=lambda row: age(row.source)):
        kept.setdefault(row.measured, {})[row.peer] = row
        latest[row.measured] = row.source
    for measured, peers in kept.items():
        if EAGER in peers and peers.get(GRAPHS, peers[EAGER]).source.date > peers[EAGER].source.date:
            del peers[EAGER]
        for peer, row in peers.items():
            if row.source != latest[measured]:
                peers[peer] = replace(row, note="; ".join(filter(None, (row.note, OLDER))))
    found = [row for peers in kept.values() for row in peers.values()]
    return [row for family in FAMILIES for row in found if row.family == family]


def _case(each: Mapping[str, Any]) -> Any:
    return each.get("family"), each.get("case", each.get("batch_size"))


def _ratio(each: Mapping[str, Any], name: str = "ratio") -> tuple[float, float, float]:
    return each[name], each[f"{name}_low"], each[f"{name}_high"]


def _kernel(source: Source, each: Mapping[str, Any]) -> Row:
    name, times = each["case"], (each["ours_us"], each["torch_us"])
    if not name.endswith((" inference", " training")):  # as an older file calls it
        name += " inference"
    case, needed = f"{name}, {each['dtype']}", each.get("memory_bytes", {})
    is_eager = source.machine == "H200" and source.date < GRAPHS_SINCE and name.endswith(" training")
    return Row(
        source, "kernels", case, "us", times[0], EAGER if is_eager else GRAPHS, times[1], _ratio(each),
        needed.get("ours"), needed.get("torch"), note=what_is_newer(source.file, case),
    )  # fmt: skip


def _recommender(source: Source, each: Mapping[str, Any]) -> Row:
    users, how = USERS[each["shape"]], f"size {each['size']}, batch {each['batch_size']}"
    case = f"made-up ratings of {users:,} users, {how}, training"
    rates = [each[side]["users_per_second"] for side in ("ours", "torch")]
    # Older files have the most that the device gave out, with what an evaluation took.
    memory = each["ours"].get("memory_bytes", each.get("device_memory_bytes"))
    return Row(
        source, "recommender", case, "users/s", rates[0], "torch", rates[1], _ratio(each),
        memory, each["torch"].get("memory_bytes"), USERS[each["shape"]],
    )  # fmt: skip


def _ranking(source: Source, time: Mapping[str, Any]) -> Iterator[Row]:
    """benchmarks/ranking.py beside RecBole: seconds of one core's work, since other programs had the clock's."""
    found, head = time["cpu"], f"MovieLens-100K, orders of items, batch {time['batch_size']}, training"
    for side, network, ratio in (
        ("ours", "the preset", "ratio"),
        ("same_network", "RecBole's network", "same_network_ratio"),
    ):
        rates = tuple(MOVIELENS_USERS / found[f"{one}_epoch_s"] for one in (side, "recbole"))
        yield Row(
            source, "recommender", f"{head}, {network}, a core's own time", "users/s", rates[0], "RecBole", rates[1],
            _ratio(found, ratio), samples=MOVIELENS_USERS,
        )  # fmt: skip


def _side(source: Source, family: str, ours: Mapping[str, Any], each: Mapping[str, Any]) -> Row:
    """A peer's row of cnn, estimator and vcd, which has ours in a row of its own."""
    if family == "vcd":
        case, kind = f"vcd update, batch {ours['batch_size']}", "vcd"
        rates = tuple(one["updates_per_second"] * one["batch_size"] for one in (ours, each))
    else:
        kind, batch = each["case"].rsplit("-b", 1)
        case = f"{NAMES.get(kind, kind)}, batch {batch}"
        rates = tuple(one["images_per_second"] for one in (ours, each))
    peer = PEERS.get(each["side"], each["side"])
    return Row(
        source, family, case, "images/s", rates[0], peer, rates[1], _ratio(each),
        ours.get("memory_bytes"), each.get("memory_bytes"), EPOCHS.get(kind),
    )  # fmt: skip


def _sampler(source: Source, ours: Mapping[str, Any], each: Mapping[str, Any]) -> Iterator[Row]:
    """A peer of hmc: effective draws a second of the draws alone, and with the time to adapt before them."""
    for over, figure, ratio in (
        ("draws alone", "ess_per_second", "ratio"),
        ("draws and adaptation", "total_ess_per_second", "total_ratio"),
    ):
        name, rates = re.sub(r"\b1 chains", "1 chain", each["case"]), (ours[figure], each[figure])
        yield Row(
            source, "hmc", f"{name}, {over}", "ESS/s", rates[0], each["side"], rates[1], _ratio(each, ratio),
            ours.get("memory_bytes"), each.get("memory_bytes"),
        )  # fmt: skip


def _whole_vcd(source: Source, runs: Mapping[str, Any]) -> Iterator[Row]:
    for run in runs.values():
        if run["updates"] == 400_000:  # the paper's network; the other is another one
            rate = 100 * run["updates_per_second"]["median"]
            case = f"whole training by {run['method']}, batch 100"
            yield Row(source, "vcd", case, "images/s", rate, samples=EPOCHS["vcd"])


def _whole_recommender(source: Source, each: Mapping[str, Any]) -> Row:
    """Made-up ratings of which nothing can be learnt, so that there is a rate and no result."""
    words = each["command"].split()
    size, batch = (words[words.index(name) + 1] for name in ("--size", "--batch-size"))
    case = (
        f"whole training, made-up ratings of {RANDOM_USERS:,} users (13 million), size {size}, batch {batch}"
    )
    rate, memory = each["samples_per_second"], each["memory_bytes"]
    return Row(source, "recommender", case, each["unit"], rate, memory=memory, samples=RANDOM_USERS)


def _serving(source: Source, sides: Mapping[str, Any]) -> Iterator[Row]:
    """Requests a second over the clients' number: the median round, ratios of the same round."""
    (own, ours), *peers = sides.items()
    for clients, rounds in ours.items():
        for peer, theirs in peers:
            rates = [[one["rate"] for one in side] for side in (rounds, theirs[clients])]
            ratios = [a / b for a, b in zip(*rates, strict=True)]
            ratio = median(ratios), min(ratios), max(ratios)
            case = f"{own}, cifar_resnet8, clients: {clients}"
            yield Row(source, "serving", case, "requests/s", median(rates[0]), peer, median(rates[1]), ratio)


def _served(source: Source, each: Mapping[str, Any]) -> Row:
    """Of benchmarks/serving_load.py: images a second by clients' requests, beside the program called by itself."""
    served, alone, share = each["served"], each["alone"], each["share"]
    ratio = share["median"], share["low"], share["high"]
    how = f"{each['clients']} clients, {each['rows']} images a request"
    case = f"hotloop serve, {each['model']}, {each['bits']} bits, {how}"
    peer = f"no server: its program, {each['alone_rows']} images a call"
    return Row(source, "serving", case, "images/s", served["median"], peer, alone["median"], ratio)
