"""Replicas: updates, errors, files of predictions and lists are those of one device, however a batch is shared."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recommender_runs as runs
from recommender_small import Small
from test_recommender_batches import matrix

from hotloop.engine.device import mesh_of_replicas
from hotloop.engine.feed import place_everywhere
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program, copy_state
from hotloop.errors import DeviceError, OptionError
from hotloop.families.recommender import batches, evaluate, model, recommend, train
from hotloop.families.recommender.commands_config import EvaluateOptions, PredictOptions, RecommendOptions
from hotloop.families.recommender.config import TrainOptions
from hotloop.families.recommender.measures import ScoringRules, make_measures
from same_numbers import assert_same_numbers, assert_seen

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
ITEMS, BATCH, UPDATES = 30, 8, 4
# The first users of a batch may have rated ten times as much as the last: the replicas' means are far apart.
SIZES = [30, 1, 2, 28, 0, 3, 25, 1, 2, 4, 30, 1, 2]
RATINGS = matrix(SIZES, ITEMS, "half stars")
CONFIG = TrainOptions(
    size=128, batch_size=BATCH, data="procedural", base_learning_rate=-12, precision="32.32", dropout=0.4
).resolve()
WAYS = {
    "joint": {},
    "sparse": {},
    "alternate": {"refeed": "alternate", "aug_steps": 2},
    "none": {"refeed": "none", "gradient_clipping": True},
    "ranking": {"objective": "ranking", "optimizer": "Adam"},
    "random code": {"objective": "ranking", "kl": 0.5, "kl_epochs": 1.0},
}


def fresh(job, mesh=None):
    return place_everywhere(copy_state(model.init(job, jax.random.key(3))), mesh)


def make_program(way, replicas, **options):
    """A job, and for ratings and a start the metrics of each update and the state after the last."""
    job = Small(replace(CONFIG, **WAYS[way], **options), ITEMS, replicas=replicas, widths=(5, 4))

    def feed(ratings):
        rows = model.choose_training(job, ratings)
        return batches.make_feed(rows, BATCH, 0, job.policy.compute, sparse=way == "sparse", mesh=job.mesh)

    program = Program(model.update(job), feed(RATINGS), UPDATES, seed_key(1))

    def run(ratings=RATINGS, change=lambda state: state):
        program.feed = feed(ratings)
        assert program.feed.batch_size == BATCH  # which speeds are made of: the users of all replicas
        start = place_everywhere(change(fresh(replace(job, replicas=1))), job.mesh)
        state, metrics = program(start, 0, UPDATES)
        assert len(program.executables) == 1
        return jax.tree.map(np.asarray, (dict(metrics), state))

    return run


def trained(way, replicas, **options):
    return make_program(way, replicas, **options)()


alone = cache(lambda way: trained(way, 1))


def assert_same_training(found, wanted):
    first = [{name: values[:2] for name, values in metrics.items()} for metrics, _ in (found, wanted)]
    assert_same_numbers(*first, 1e-6)
    assert_same_numbers(found[0], wanted[0], 1e-5)
    assert_same_numbers(found[1], wanted[1], 1e-5)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "replicas"),
    [
        ("joint", 2),
        ("sparse", 4),
        ("ranking", 4),
        pytest.param("random code", 2, marks=SLOW),
        pytest.param("random code", 4, marks=SLOW),
        pytest.param("alternate", 2, marks=SLOW),
        pytest.param("none", 4, marks=SLOW),
        pytest.param("joint", 4, marks=SLOW),
        pytest.param("sparse", 2, marks=SLOW),
        pytest.param("alternate", 4, marks=SLOW),
        pytest.param("none", 2, marks=SLOW),
    ],
)
def test_updates_are_those_of_one_device(way, replicas):
    run, compare = make_program(way, replicas), partial(assert_same_training, wanted=alone(way))
    compare(run())
    other = one_item_other() if "objective" in WAYS[way] else one_rating_other()
    assert_seen(compare, run(other), run(change=one_weight_moved))


def one_rating_other(ratings=RATINGS):
    other = replace(ratings, codes=ratings.codes.copy())
    other.codes[-1] = (int(other.codes[-1]) + 3) % len(ratings.levels)
    return other


def one_item_other(ratings=RATINGS):
    """The last user who likes anything likes another item instead: as many as before."""
    place = int(np.flatnonzero(ratings.values() >= 4)[-1])
    row = int(np.searchsorted(ratings.starts, place, "right")) - 1
    free = np.setdiff1d(np.arange(ratings.n_items), ratings.row(row)[0])
    other = replace(ratings, items=ratings.items.copy())
    other.items[place] = free[0]
    return other


def one_weight_moved(state):
    state["params"]["encoder"][1]["b"] = state["params"]["encoder"][1]["b"].at[2].add(1e-3)
    return state


def mean_of_own(predictions, ratings, axis=None):
    """What must not be done: each replica divides by its own number of ratings, and the means are averaged."""
    there = ratings > 0
    mean = jnp.square(jnp.where(there, predictions - ratings, 0)).sum() / jnp.maximum(there.sum(), 1)
    return mean / model.count_replicas(axis)


def mean_square_of_own(differences, axis=None):
    """Nor this: each replica divides by its own places, and the shares are added."""
    return jnp.square(differences).mean()


@pytest.mark.parametrize(
    ("name", "wrong", "figure"),
    [("masked_error", mean_of_own, "loss"), ("mean_square", mean_square_of_own, "refeed_loss")],
)
def test_the_comparison_sees_a_mean_of_the_replicas_own_means(monkeypatch, name, wrong, figure):
    wanted = alone("alternate")
    monkeypatch.setattr(model, name, wrong)
    found = trained("alternate", 2)
    assert_seen(partial(assert_same_training, wanted=wanted), found)
    assert np.abs(found[0][figure] / wanted[0][figure] - 1).min() > 1e-3


@pytest.mark.parametrize(
    ("options", "within"),
    [
        pytest.param({"precision": "16.32", "half": "float16"}, 2e-3, marks=SLOW),
        pytest.param({"precision": "16.16", "half": "float16"}, 4e-3, marks=SLOW),
        pytest.param({"precision": "16.16", "half": "bfloat16", "no_prng": True}, 2e-2, marks=SLOW),
    ],
)
def test_sixteen_bits_and_the_loss_scale_are_within_their_rounding(options, within):
    """A share's gradient is rounded to 16 bits before the sum, which is float32; stochastic rounding draws the same."""
    one, two = (trained("joint", replicas, loss_scaling=4096.0, **options) for replicas in (1, 2))
    assert one[1]["params"]["encoder"][0]["w"].dtype == two[1]["params"]["encoder"][0]["w"].dtype
    assert_same_numbers(two[0]["loss"], one[0]["loss"], within)
    assert_same_numbers(two[0]["gradient_norm"], one[0]["gradient_norm"], 4 * within)
    assert_same_numbers(two[1]["params"], one[1]["params"], within)


def test_a_scale_that_overflows_16_bits_is_seen_on_every_replica():
    metrics, _ = trained("joint", 2, precision="16.32", half="float16", loss_scaling=1e8)
    assert not np.isfinite(metrics["gradient_norm"]).all()


# The first user has ratings to validate with: counted once too often, it would be seen.
TRAIN, VALIDATION, _ = (runs.matrix(np.roll(part, 3, axis=0)) for part in runs.draw())
assert VALIDATION.starts[1] > 0
RULES = ScoringRules(low=1, high=5, ks=(3, 10))


@cache
def measures(replicas, size, truth=VALIDATION):
    mesh, job = mesh_of_replicas(replicas), Small(CONFIG, TRAIN.n_items, widths=(5, 4))
    scorer = lambda state, batch: model.predict(job, state, batch["ratings"])  # noqa: E731
    return (
        batches.make_rating_error(model.evaluate(job), TRAIN, truth, size, mesh),
        make_measures(scorer, TRAIN, truth, size, RULES, mesh=mesh),
    )


def measured(replicas, size, truth=VALIDATION, change=lambda state: state):
    """Figures by both ways, of a model that has learnt nothing."""
    state = change(fresh(Small(CONFIG, TRAIN.n_items, widths=(5, 4))))
    found = [
        make(place_everywhere(state, mesh_of_replicas(replicas))) for make in measures(replicas, size, truth)
    ]
    assert all(np.isfinite(value) and value >= 0 for figures in found for value in figures.values())
    assert all(value > 0 for figures in found for name, value in figures.items() if not name.endswith("_se"))
    return found


@pytest.mark.parametrize(
    ("replicas", "size"),
    [
        pytest.param(2, 4, marks=SLOW),
        (2, 5),
        pytest.param(3, 128, marks=SLOW),
        pytest.param(4, 1, marks=SLOW),
    ],
)
def test_errors_and_ranks_count_every_user_once(replicas, size):
    """Batches that the replicas do not divide are filled up, the old program's figure of whole batches among them."""
    one = measured(1, size)
    assert one[0]["users"] == 21 and one[0]["ratings"] == VALIDATION.ratings
    compare = partial(assert_same_numbers, wanted=one, within=1e-6)
    compare(measured(replicas, size))
    assert_seen(compare, measured(replicas, size, change=one_weight_moved))
    if size == 4:
        assert_seen(compare, measured(replicas, size, one_rating_other(VALIDATION)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        runs.small_layers(patch)
        yield runs.make_run(tmp_path_factory.mktemp("replicas") / "here", replicas=2)


@pytest.mark.slow
def test_predictions_and_lists_are_those_of_one_device(run, tmp_path):
    tables, lists = [], []
    for replicas in (1, None, 3):
        path = tmp_path / f"{replicas}.txt"
        wish = {"run": run, "batch_size": 5, "replicas": replicas}
        evaluate.run_predict(PredictOptions(output=path, **wish), runs.Listener())
        tables.append(np.loadtxt(path, delimiter="\t"))
        found = recommend.run(RecommendOptions(all=True, top=4, **wish), runs.Listener())
        lists.append(found["recommendations"])
    assert len(tables[0]) and all(np.ptp(column) > 0 for column in tables[0].T)
    for table in tables[1:]:
        np.testing.assert_allclose(table, tables[0], rtol=1e-6)
    for other in lists[1:]:
        assert [(each["user"], each["items"]) for each in other] == [
            (each["user"], each["items"]) for each in lists[0]
        ]
    figures = [
        evaluate.run(EvaluateOptions(run=run, batch_size=5, replicas=replicas), runs.Listener())
        for replicas in (1, None, 3)
    ]
    for found in figures[1:]:
        for name in ("rmse", "mae", "rmse_mean_of_batches", "ndcg@10", "users", "ratings", "ranked_users"):
            assert found[name] == pytest.approx(figures[0][name], rel=1e-6) and found[name] > 0


def test_a_run_of_more_replicas_than_there_are_devices_is_evaluated_on_these(run, monkeypatch):
    seen = []
    monkeypatch.setattr(evaluate, "make_measures", lambda *_, mesh, **__: seen.append(mesh) or (lambda _: {}))
    monkeypatch.setattr(evaluate, "replicas_that_fit", lambda wanted: min(wanted, 1))
    with pytest.raises(KeyError):
        evaluate.run(EvaluateOptions(run=run), runs.Listener())
    assert seen == [None]
    with pytest.raises(DeviceError, match="replicas=16: only 4 cpu devices here"):
        evaluate.run(EvaluateOptions(run=run, replicas=16), runs.Listener())


def test_the_plan_has_the_batch_of_all_and_the_memory_of_one(tmp_path):
    """Dense batches are a share of those of one device; weights and ratings are whole on each."""
    said = []
    for replicas in (1, 4):
        options = TrainOptions(data="procedural", batch_size=256, replicas=replicas, results_dir=tmp_path)
        setup = train.prepare(options, runs.Listener())
        assert setup.plan.batch.global_ == 256 and setup.plan.batch.replicas == replicas
        said.append(train.describe(setup).splitlines()[-1])
    assert said[0].startswith("memory on the device: about ")
    assert said[1].startswith("memory on each device: about ")
    one, several = (int(text.split("about ")[1].split()[0]) for text in said)
    dense = 6 * 4 * 256 * setup.job.items / 2**20
    assert one - several == pytest.approx(dense * 3 / 4, abs=1.1)


def test_what_cannot_be_shared_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"^--replicas 3: a batch of 64 users .* multiple of 3"):
        TrainOptions(batch_size=64, replicas=3)
    few = runs.write_text(tmp_path / "few.txt", runs.draw()[0])
    options = TrainOptions(training_data_file=few, batch_size=64, replicas=2, results_dir=tmp_path)
    with pytest.raises(OptionError, match="--replicas 2: a batch of 23 users"):
        train.prepare(options, runs.Listener())
    with pytest.raises(DeviceError, match="replicas=16: only 4 cpu devices"):
        train.prepare(replace(options, replicas=16), runs.Listener())
