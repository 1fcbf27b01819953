"""A small run in a folder, as training leaves it, its files of ratings, and naive oracles in float64."""

import math
from contextlib import contextmanager
from dataclasses import asdict

import jax
import numpy as np

from hotloop.data.rating_matrix import build_matrix
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.checkpoint_folder import KeepAll
from hotloop.engine.run import write_json
from hotloop.families.recommender import config, model, saved_run
from hotloop.families.recommender.commands_config import FAMILY
from hotloop.families.recommender.config import TrainOptions, make_schedule
from hotloop.options import to_jsonable

USERS, ITEMS = 23, 17
LAYERS = (6, 5, 4)


class Listener:
    """Keeps what is said."""

    def __init__(self):
        self.said, self.warned, self.tables = [], [], []

    def say(self, text):
        self.said.append(text)

    def warn(self, text):
        self.warned.append(text)

    def table(self, columns, rows):
        self.tables.append((list(columns), [list(row) for row in rows]))

    @contextmanager
    def progress(self, description, total=None):
        yield self

    def advance(self, amount=1):
        pass


def silent(text):
    raise AssertionError(f"nothing should be said: {text}")


def draw(seed=0, users=USERS, items=ITEMS):
    """Dense train, validation and test [users, items], zero where there is no rating; the last user has no truth."""
    rng = np.random.default_rng(seed)
    ratings = np.clip(np.round(2 * rng.normal(3.4, 1.1, (users, items))) / 2, 0.5, 5).astype(np.float32)
    parts = rng.choice(4, p=[0.4, 0.2, 0.2, 0.2], size=(users, items))
    parts[:, 0] = 0
    parts[0] = 0  # every item has a training rating
    parts[1, 1:3] = 1, 2
    parts[-1] = np.where(parts[-1] == 0, 0, 3)
    return [np.where(parts == part, ratings, 0) for part in range(3)]


def user_id(row):
    return 1000 - 7 * np.asarray(row)


def item_id(column):
    return 5_000_000_000 + 3 * np.asarray(column)  # beyond 32 bits


def matrix(dense, warn=silent):
    """Rows and columns in their order, whatever they hold."""
    rows, columns = np.nonzero(dense)
    ids = {"user_ids": user_id(np.arange(len(dense))), "item_ids": item_id(np.arange(dense.shape[1]))}
    return build_matrix(user_id(rows), item_id(columns), dense[rows, columns], **ids, warn=warn)


def write_text(path, dense, extra=()):
    rows, columns = np.nonzero(dense)
    lines = [f"{user_id(r)}\t{item_id(c)}\t{dense[r, c]}\n" for r, c in zip(rows, columns, strict=True)]
    path.write_text("".join([*lines, *extra]))
    return path


def small_layers(patch):
    patch.setitem(config.LAYERS, 128, LAYERS)


def make_run(folder, steps=(3,), seed=0, **options):
    """Files of ratings, and a run's folder with random weights at these steps; the first one validated best."""
    folder.mkdir()
    parts = draw(seed)
    names = ("train", "validation", "test")
    files = [write_text(folder / f"{name}.txt", part) for name, part in zip(names, parts, strict=True)]
    paths = {f"{'training' if n == 'train' else n}_data_file": f for n, f in zip(names, files, strict=True)}
    own = TrainOptions(**{"size": 128, "batch_size": 4, "precision": "32.32", **paths, **options}).resolve()
    train = matrix(parts[0])
    job = model.make_job(own, train.users, train.n_items, make_schedule(own, train.users).drops, 0.5, 5.0)
    extra = {"users": USERS, "items": ITEMS, "drops": job.drops, "low": 0.5, "high": 5.0}
    settings = to_jsonable({**asdict(own), **extra})
    run = folder / "run"
    run.mkdir()
    write_json(run / "config.json", settings)
    train.write(run / "ratings.npz")
    with Checkpoints(run / "checkpoints", KeepAll(), family=FAMILY, config=settings) as kept:
        for place, step in enumerate(steps):
            kept.save(step, state_of(job, train, step), position={}, metrics={"validation_rmse": 1.0 + place})
    return run


def state_of(job, train, seed):
    """Weights and biases so large that predictions differ and some leave the scale; nothing is compiled for it."""
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), saved_run.state_shapes(job))
    params = jax.tree.map(
        lambda leaf: np.float32(0.3 * rng.normal(size=leaf.shape) + 0.5 * (leaf.ndim == 1)), state["params"]
    )
    halves = [each.view(np.uint32).reshape(-1, 2) for each in (train.user_ids, train.item_ids)]
    ids = dict(zip(("users", "items"), halves, strict=True))
    return {**state, "params": params, "ids": ids}


def network(params, x):
    """The tied autoencoder in float64."""

    def selu(h):
        return 1.0507009873554805 * np.where(h > 0, h, 1.6732632423543772 * np.expm1(np.minimum(h, 0)))

    encoder, decoder = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64), (params["encoder"], params["decoder"])
    )
    for layer in encoder:
        x = selu(x @ layer["w"] + layer["b"])
    for layer, mirrored in zip(decoder, reversed(encoder), strict=True):
        x = selu(x @ mirrored["w"].T + layer["b"])
    return x


def naive(scores, train, truth, ks=(), relevant=4.0, low=-math.inf, high=math.inf, round=False):
    """Every figure by loops over users and items."""
    errors, lists = [], {f"{name}@{k}": [] for name in ("ndcg", "recall") for k in ks}
    shown, ranked = set(), 0
    for user in range(len(truth)):
        own = []
        for item in np.flatnonzero(truth[user]):
            prediction = min(max(scores[user, item], low), high)
            own.append((np.round(prediction) if round else prediction) - truth[user, item])
        errors.append(own)
        free = [item for item in range(truth.shape[1]) if not train[user, item]]
        order = sorted(free, key=lambda item: (-scores[user, item], item))
        wanted = {item for item in free if truth[user, item] and truth[user, item] >= relevant}
        ranked += bool(wanted)
        for k in ks if wanted else ():
            gains = [1 / math.log2(place + 2) for place, item in enumerate(order[:k]) if item in wanted]
            ideal = [1 / math.log2(place + 2) for place in range(min(k, len(wanted)))]
            lists[f"ndcg@{k}"].append(sum(gains) / sum(ideal))
            lists[f"recall@{k}"].append(len(gains) / len(wanted))
        shown |= set(order[: ks[0]]) if ks and wanted else set()
    every = np.concatenate([own for own in errors if own])
    means = {name: np.mean(values) for name, values in lists.items() if values}
    spreads = {f"{name}_se": standard_error(values) for name, values in lists.items() if values}
    coverage = {f"coverage@{ks[0]}": len(shown) / truth.shape[1]} if ranked and ks else {}
    return {
        "rmse": math.sqrt(np.mean(every**2)),
        "rmse_se": rmse_standard_error([np.array(own) for own in errors if own]),
        "mae": np.mean(abs(every)),
        "ratings": len(every),
        "users": int(truth.any(1).sum()),
        **({"ranked_users": ranked} if ks else {}),
        **means,
        **spreads,
        **coverage,
    }


def standard_error(values):
    return np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def rmse_standard_error(errors):
    """Of a ratio of sums over users: what each user adds to squared error beyond its share of ratings."""
    squares, counts = np.array([(own**2).sum() for own in errors]), np.array([len(own) for own in errors])
    mean = squares.sum() / counts.sum()
    spread = standard_error(squares - mean * counts) / counts.mean()
    return spread / (2 * math.sqrt(mean)) if mean else 0.0


def naive_mean_of_batches(scores, truth, size):
    """Whole batches of users that have ratings; no clipping."""
    users = np.flatnonzero(truth.any(1))
    groups = [users[first : first + size] for first in range(0, len(users) - size + 1, size)]
    return np.mean([naive(scores[g], np.zeros_like(truth[g]), truth[g])["rmse"] for g in groups])
