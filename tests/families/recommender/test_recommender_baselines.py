"""Biases against normal equations, EASE against its own optimum, and the table beside a trained run."""

import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import recommender_runs as runs

from hotloop.data.catalogue import known_set
from hotloop.data.local_files import find_set
from hotloop.errors import DataError
from hotloop.families.recommender import baselines, measures, rating_sets, saved_run
from hotloop.families.recommender.commands_config import BaselineOptions
from hotloop.families.recommender.config import TrainOptions

ROOT = Path(
    os.environ.get("HOTLOOP_DATA") or Path(__file__).resolve().parents[3] / "../shared/data"
).resolve()


def test_damped_means_are_those_of_loops_however_the_ratings_are_cut(monkeypatch):
    train = runs.draw()[0]
    mean = train[train > 0].astype(np.float64).mean()
    item = [(column[column > 0] - mean).sum() / (4 + (column > 0).sum()) for column in train.T]
    user = [
        sum(row[i] - mean - item[i] for i in np.flatnonzero(row)) / (3 + np.count_nonzero(row))
        for row in train
    ]
    for length in (baselines.BLOCK, 10):  # 10: a user has more than that, another fewer
        monkeypatch.setattr(baselines, "BLOCK", length)
        found = baselines.fit_damped_means(runs.matrix(train), 4, 3)
        assert found.mean == pytest.approx(mean, rel=1e-6)
        np.testing.assert_allclose(found.item, item, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(found.user, user, rtol=1e-5, atol=1e-7)


def solve_ridge(train, item_damping, user_damping):
    """Users and items by the normal equations."""
    users, items = train.shape
    rows, columns = np.nonzero(train)
    design = np.zeros((len(rows), users + items))
    design[np.arange(len(rows)), rows] = design[np.arange(len(rows)), users + columns] = 1
    values = train[rows, columns].astype(np.float64)
    penalty = np.diag(np.r_[np.full(users, user_damping), np.full(items, item_damping)])
    return np.linalg.solve(design.T @ design + penalty, design.T @ (values - values.mean()))


def test_ridge_solves_the_normal_equations(monkeypatch):
    monkeypatch.setattr(baselines, "CONVERGED", 1e-12)
    monkeypatch.setattr(baselines, "MAX_TURNS", 200)
    train = runs.draw()[0]
    found = baselines.fit_ridge(runs.matrix(train), 2, 3)
    np.testing.assert_allclose(np.r_[found.user, found.item], solve_ridge(train, 2.0, 3.0), atol=1e-9)


def test_what_users_and_items_share_is_balanced_in_the_first_turns(monkeypatch):
    """No rating tells a shift of all users from one of all items; only the dampings do, and very slowly in turns."""
    monkeypatch.setattr(baselines, "MAX_TURNS", 3)
    train = np.random.default_rng(0).integers(1, 6, (runs.USERS, runs.ITEMS)).astype(np.float32)
    matrix = runs.matrix(train)
    mean = baselines.fit_mean(matrix)
    shifted = baselines.Biases(mean.mean, mean.user - 2, mean.item + 2)
    found = baselines.fit_ridge(matrix, 0.5, 0.2, start=shifted)
    np.testing.assert_allclose(np.r_[found.user, found.item], solve_ridge(train, 0.5, 0.2), atol=1e-4)


def test_ridge_needs_few_turns():
    train = runs.matrix(runs.draw()[0])
    close = baselines.fit_ridge(train, 2, 3)
    again = baselines.fit_ridge(train, 2, 3, start=close)
    assert np.abs(again.user - close.user).max() < 1e-3


def test_biases_are_chosen_on_the_validation_part():
    parts = [runs.matrix(part) for part in runs.draw(seed=3)]
    train, validation = parts[0], parts[1]
    found = baselines.choose_biases(train, validation, 0.5, 5.0)
    errors = [
        baselines.biases_rmse(fit(train, *dampings), validation, 0.5, 5.0)
        for fit in (baselines.fit_damped_means, baselines.fit_ridge)
        for dampings in product(baselines.ITEM_GRID, baselines.USER_GRID)
    ]
    assert baselines.biases_rmse(found, validation, 0.5, 5.0) == pytest.approx(min(errors), abs=1e-4)
    assert max(errors) > min(errors) + 0.005
    assert baselines.choose_biases(train, None, 0.5, 5.0).how == "damped means, 25 and 10"


def test_error_of_biases_is_that_of_their_predictions():
    train, _, test = runs.draw()
    fit = baselines.fit_damped_means(runs.matrix(train), 2, 2)
    scores = fit.mean + fit.user[:, None] + fit.item
    expected = runs.naive(scores, train, test, low=3.0, high=4.0)["rmse"]
    assert baselines.biases_rmse(fit, runs.matrix(test), 3.0, 4.0) == pytest.approx(expected, rel=1e-9)


def test_products_of_ease_are_exact_counts(monkeypatch):
    monkeypatch.setattr(baselines, "USERS_AT_ONCE", 5)  # the last batch is not whole
    train = runs.draw()[0]
    x = (train >= 3.5).astype(np.int64)
    assert (np.asarray(baselines.count_pairs(runs.matrix(train), 3.5)) == x.T @ x).all()


def test_weights_of_ease_are_the_best_without_a_diagonal():
    x = (runs.draw()[0] >= 3).astype(np.float64)
    weights = np.asarray(baselines.ease_weights(np.float32(x.T @ x), 2.0), np.float64)
    assert (np.diagonal(weights) == 0).all()
    gradient = x.T @ (x @ weights - x) + 2.0 * weights  # of half |X - XB|^2 + lambda |B|^2
    np.fill_diagonal(gradient, 0)  # what the constraint takes up
    assert np.abs(gradient).max() < 1e-4 * (x.T @ x).max()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        runs.small_layers(patch)
        yield runs.make_run(tmp_path_factory.mktemp("baselines") / "here", steps=(3, 8))


def naive_ease(parts, penalty):
    """Figures on the validation and the test part, in float64."""
    train, validation, test = parts
    x = (train >= 3.5).astype(np.float64)
    inverse = np.linalg.inv(x.T @ x + penalty * np.eye(runs.ITEMS))
    scores = x @ (-inverse / np.diagonal(inverse) * (1 - np.eye(runs.ITEMS)))
    return [runs.naive(scores, train, part, (2, 3), 3.5) for part in (validation, test)]


def test_lambda_is_the_usual_one_where_nobody_is_ranked_to_choose_it_by(run, monkeypatch):
    # As where training ratings reach the bound and held-out ones do not.
    monkeypatch.setattr(measures, "check_reachable", lambda relevant, high: None)
    result = baselines.run(BaselineOptions(run=run, k=(2,), relevant=9.0), runs.Listener())
    assert f"EASE (lambda {baselines.USUAL_LAMBDA:g})" in result["models"]


@pytest.mark.slow
def test_table_has_every_model_on_the_ratings_of_the_run(run, monkeypatch):
    monkeypatch.setattr(baselines, "LAMBDA_GRID", (0.1, 1.0, 30.0))
    console = runs.Listener()
    result = baselines.run(BaselineOptions(run=run, k=(2, 3), relevant=3.5), console)
    ((columns, rows),) = console.tables
    assert columns == ["model", "RMSE", "MAE", "NDCG@2", "NDCG@3", "Recall@2", "Recall@3", "coverage@2"]
    names = [row[0].split(" (")[0] for row in rows]
    assert names == ["overall mean", "user + item bias", "popularity", "EASE", "autoencoder"]
    dashes = [[cell == "-" for cell in row[1:]] for row in rows]
    rated, ranked = [False] * 2 + [True] * 5, [True] * 2 + [False] * 5
    assert dashes == [rated, [False] * 7, ranked, ranked, [False] * 7]
    models = dict(zip(names, result["models"].values(), strict=True))
    train, validation, test = parts = runs.draw()
    found = {penalty: naive_ease(parts, penalty) for penalty in baselines.LAMBDA_GRID}
    best = max(found, key=lambda penalty: found[penalty][0]["ndcg@2"])
    assert rows[3][0] == f"EASE (lambda {best:g})"
    fit = baselines.choose_biases(runs.matrix(train), runs.matrix(validation), 0.5, 5.0)
    scores = {
        "overall mean": np.full(test.shape, fit.mean),
        "user + item bias": np.float32(fit.mean + fit.user[:, None] + fit.item),
        "popularity": np.broadcast_to((train >= 3.5).sum(0), test.shape),
        "autoencoder": runs.network(saved_run.load_run(run, best=True).state["params"], train),
    }
    expected = {n: runs.naive(s, train, test, (2, 3), 3.5, 0.5, 5.0) for n, s in scores.items()}
    for name, values in {**expected, "EASE": found[best][1]}.items():
        shown = models[name].keys() - {"rmse_mean_of_batches"}
        assert {key: models[name][key] for key in shown} == pytest.approx(
            {key: values[key] for key in shown}, rel=1e-5, abs=1e-6
        )
    assert console.warned == []


def test_ease_that_costs_too_much_is_left_out_unless_asked_for(run, monkeypatch):
    monkeypatch.setattr(baselines, "CPU_FLOPS", 10.0)
    monkeypatch.setattr(baselines, "memory_of_device", lambda device: 10)
    console = runs.Listener()
    options = TrainOptions(
        training_data_file=run.parent / "train.txt",
        validation_data_file=run.parent / "validation.txt",
    )
    train = rating_sets.load_sets(options, console).train
    assert not baselines.can_afford_ease(train, console)
    assert console.warned[-1].startswith("EASE left out: 17 items would take")
    assert "--ease yes" in console.warned[-1]
    files = {"training_data_file": options.training_data_file}
    files["validation_data_file"] = options.validation_data_file
    for ease, is_there in (("auto", False), ("yes", True), ("no", False)):
        console.warned.clear()
        models = baselines.run(BaselineOptions(ease=ease, **files), console)["models"]
        assert any(name.startswith("EASE") for name in models) == is_there
        assert "chosen on this same part" in console.warned[0]


def test_baselines_refuse_other_data_than_the_run_has(run, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("1\t2\t3.0\n1\t3\t4.0\n")
    with pytest.raises(DataError, match=r"--run .*: was trained on other ratings than those of other\.txt"):
        baselines.run(
            BaselineOptions(run=run, training_data_file=other, test_data_file=other), runs.Listener()
        )


@pytest.mark.skipif(
    not ROOT.is_dir() or find_set(known_set("movielens-100k"), ROOT) is None,
    reason=f"no movielens-100k in {ROOT}",
)
def test_biases_on_movielens_are_as_good_as_they_are_known_to_be(monkeypatch):
    monkeypatch.setenv("HOTLOOP_DATA", str(ROOT))
    data = rating_sets.load_sets(TrainOptions(data="ml-100k"), runs.Listener())
    usual, best = (
        baselines.choose_biases(data.train, None, 1, 5),
        baselines.choose_biases(data.train, data.validation, 1, 5),
    )
    errors = [baselines.biases_rmse(fit, data.test, 1, 5) for fit in (usual, best)]
    # Biases on random splits of this set give 0.94 to 0.95; of 10,000 test ratings the standard error is 0.007.
    assert 0.935 < errors[0] < 0.955
    # Dampings chosen for this set, and a joint fit, gain about 0.01 (0.942, 0.944, 0.946 became 0.930, 0.934, 0.936).
    assert errors[0] - 0.015 < errors[1] < errors[0] - 0.005
    assert best.how.startswith("ridge")
