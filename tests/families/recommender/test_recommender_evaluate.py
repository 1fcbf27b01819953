"""Ratings and rankings measured on the device, against loops; the command, its file and its errors."""

import json
import math

import jax
import numpy as np
import pytest
import recommender_runs as runs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from recommender_small import quick

from hotloop.errors import DataError
from hotloop.families.recommender import evaluate, saved_run
from hotloop.families.recommender.commands_config import EvaluateOptions
from hotloop.families.recommender.measures import ScoringRules, make_measures, ranking_values

KS = (1, 3, 10, 100)  # 100: more than there are items


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        runs.small_layers(patch)
        yield runs.make_run(tmp_path_factory.mktemp("evaluation") / "here", steps=(3, 8))


def by_table(state, batch):
    """A scorer whose state holds every score."""
    return state[batch["users"]]


def scores_with_ties(seed=1):
    return np.random.default_rng(seed).integers(1, 6, (runs.USERS, runs.ITEMS)).astype(np.float32)


def assert_same(figures, expected, rel=1e-6):
    """Standard errors are differences of float32 sums, so what is lost of them is measured by the values."""
    errors = [name for name in expected if name.endswith("_se")]
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, **({"abs": rel} if name in errors else {"rel": rel})), (
            name
        )


def test_ranking_of_a_list_worked_out_by_hand():
    scores = np.float32([[0.9, 0.8, 0.7, 0.6, 0.5]])
    rated = np.array([[False, True, False, False, False]])
    relevant = np.array([[False, True, True, False, True]])  # the second is rated: it cannot be recommended
    found = jax.jit(lambda *args: ranking_values(*args, (1, 2, 4)))(scores, rated, relevant)
    best = 1 + 1 / math.log2(3)
    dcg = [0, 1 / math.log2(3), 1 / math.log2(3) + 1 / math.log2(5)]
    np.testing.assert_allclose(found["ndcg"], [[0, dcg[1] / best, dcg[2] / best]], rtol=1e-6)
    np.testing.assert_allclose(found["recall"], [[0, 0.5, 1]], rtol=1e-6)
    assert found["ranked"].tolist() == [True]


@pytest.mark.parametrize("size", [5, 100])
def test_every_figure_equals_the_loops_for_any_batch_size(size):
    train, _, test = runs.draw()
    scores = scores_with_ties()
    rules = ScoringRules(ks=KS)
    figures = make_measures(by_table, runs.matrix(train), runs.matrix(test), size, rules)(scores)
    expected = runs.naive(scores, train, test, KS)
    assert 0 < expected["ranked_users"] < expected["users"] < runs.USERS
    assert_same(figures, expected)
    whole = min(size, expected["users"])
    mean = runs.naive_mean_of_batches(scores, test, whole)
    assert figures["rmse_mean_of_batches"] == pytest.approx(mean, rel=1e-6)
    assert set(figures) == {*expected, "rmse_mean_of_batches"}


def test_clipping_and_rounding_change_ratings_but_not_the_order():
    train, _, test = runs.draw()
    scores = np.float32(np.random.default_rng(4).normal(3, 3, (runs.USERS, runs.ITEMS)))
    rules = {"low": 0.5, "high": 5.0, "round": True}
    figures = make_measures(by_table, runs.matrix(train), runs.matrix(test), 6, ScoringRules(**rules, ks=KS))(
        scores
    )
    assert_same(figures, runs.naive(scores, train, test, KS, **rules))
    plain = runs.naive(scores, train, test, KS)
    assert figures["ndcg@3"] == pytest.approx(plain["ndcg@3"], rel=1e-6)
    assert figures["rmse"] < plain["rmse"] - 0.1
    mean = runs.naive_mean_of_batches(scores, test, 6)  # the old program never clipped
    assert figures["rmse_mean_of_batches"] == pytest.approx(mean, rel=1e-6)


def test_where_nothing_is_relevant_there_is_no_ranking():
    train, _, test = runs.draw()
    measures = make_measures(
        by_table, runs.matrix(train), runs.matrix(test), 50, ScoringRules(ks=(3,), relevant=9)
    )
    figures = measures(scores_with_ties())
    assert figures["ranked_users"] == 0
    assert not [name for name in figures if "@" in name]


def test_ratings_without_a_known_user_are_refused():
    train = runs.draw()[0]
    with pytest.raises(DataError, match="no ratings to evaluate"):
        make_measures(by_table, runs.matrix(train), runs.matrix(np.zeros_like(train)), 5, ScoringRules())


def test_without_lists_only_ratings_are_measured(run):
    train, validation, _ = runs.draw()
    found = saved_run.load_run(run)
    measure = make_measures(
        found.score,
        runs.matrix(train),
        runs.matrix(validation),
        7,
        ScoringRules(1.5, 4.0),
    )
    scores = runs.network(found.state["params"], train)
    expected = runs.naive(scores, train, validation, low=1.5, high=4.0)
    figures = measure(found.state)
    assert_same(figures, expected, 1e-5)
    assert set(figures) == {*expected, "rmse_mean_of_batches"}


def test_command_measures_the_test_part_and_writes_it_down(run):
    console = runs.Listener()
    result = evaluate.run(EvaluateOptions(run=run, k=(3, 10), relevant=3.5), console)
    train, _, test = runs.draw()
    scores = runs.network(saved_run.load_run(run, best=True).state["params"], train)
    expected = runs.naive(scores, train, test, (3, 10), relevant=3.5, low=0.5, high=5.0)
    assert_same(result, expected, 1e-5)
    assert (result["step"], result["batch_size"], result["skipped_ratings"]) == (3, 4, 0)
    written = json.loads((run / "evaluations" / "test-3.json").read_text())
    assert written["rmse"] == result["rmse"]
    ((columns, rows),) = console.tables
    assert columns == ["model", "RMSE", "MAE", "NDCG@3", "NDCG@10", "Recall@3", "Recall@10", "coverage@3"]
    assert rows[0][1] == f"{expected['rmse']:.4f} +- {expected['rmse_se']:.4f}"
    assert rows[0][4] == f"{expected['ndcg@10']:.4f} +- {expected['ndcg@10_se']:.4f}"
    assert rows[0][-1] == f"{expected['coverage@3']:.4f}"
    assert result["data"] == "test ratings of test.txt"
    assert any(line.startswith("test ratings of test.txt: ") for line in console.said)
    old = runs.naive_mean_of_batches(scores, test, 4)
    assert any(f"{old:.4f}, the mean of RMSEs over whole batches of 4 users" in line for line in console.said)


def test_command_takes_another_file_step_and_rules(run, tmp_path):
    train, validation, _ = runs.draw()
    path = runs.write_text(tmp_path / "other.txt", validation, extra=["77777\t5000000000\t3.0\n"])
    console = runs.Listener()
    wishes = {"data_file": path, "clip": False, "round": True, "batch_size": 50, "k": (5,)}
    result = evaluate.run(EvaluateOptions(run=run, **wishes), console)
    assert (result["step"], result["skipped_ratings"]) == (3, 1)  # the best, which is not the newest
    newest = max(saved_run.load_run(run, best=False).step, 3)
    assert (
        newest > 3 and evaluate.run(EvaluateOptions(run=run, **wishes, best=False), console)["step"] == newest
    )
    assert evaluate.run(EvaluateOptions(run=run, **wishes, step=newest), console)["step"] == newest
    assert "1 of" in console.warned[0]
    scores = runs.network(saved_run.load_run(run, 3).state["params"], train)
    assert_same(result, runs.naive(scores, train, validation, (5,), round=True), 1e-5)
    assert result["path"].endswith("other-3-unclipped-rounded.json")


def test_command_refuses_what_it_cannot_measure(run, tmp_path):
    stranger = tmp_path / "strangers.txt"
    stranger.write_text("1\t2\t3.0\n")
    with pytest.raises(
        DataError, match=r"strangers\.txt: no rating has a user and an item that the run knows"
    ):
        evaluate.run(EvaluateOptions(run=run, data_file=stranger), runs.Listener())


def test_changed_training_files_and_missing_parts_are_refused(tmp_path, monkeypatch):
    runs.small_layers(monkeypatch)
    run = runs.make_run(tmp_path / "changed", test_data_file=None)
    with pytest.raises(DataError, match=r"--split test: train\.txt has no such ratings"):
        evaluate.run(EvaluateOptions(run=run, split="test"), runs.Listener())
    training = run.parent / "train.txt"
    lines = training.read_text().splitlines(keepends=True)
    training.write_text("".join(lines[:-1]))  # the same users and items: another split, say
    with pytest.raises(DataError, match="other training ratings than the run was trained on"):
        evaluate.run(EvaluateOptions(run=run), runs.Listener())


SMALL = st.sampled_from([0, 0, 0, 2, 4, 5])


@settings(max_examples=20, deadline=None)
@given(
    arrays.arrays(np.float32, (6, 7), elements=st.integers(-3, 3).map(float)),
    arrays.arrays(np.float32, (6, 7), elements=SMALL),
    arrays.arrays(np.float32, (6, 7), elements=SMALL),
)
def test_orders_of_small_matrices_are_worth_what_loops_say(scores, train, truth):
    """Many ties, users without a held-out item, users who have rated all."""
    truth = np.where(train > 0, 0, truth)
    found = jax.tree.map(np.asarray, SMALL_VALUES(scores, train > 0, truth >= 4))
    for user in range(len(truth)):
        expected = runs.naive(
            *(each[user : user + 1] for each in (scores, train, np.where(truth > 0, truth, 1e-9))), (2, 3)
        )
        assert found["ranked"][user] == bool(expected["ranked_users"])
        for name in ("ndcg", "recall"):
            for place, k in enumerate((2, 3)):
                assert found[name][user, place] == pytest.approx(expected.get(f"{name}@{k}", 0), abs=1e-6)
        assert found["listed"][user].mean() == pytest.approx(expected.get("coverage@2", 0))


SMALL_VALUES = quick(lambda scores, rated, relevant: ranking_values(scores, rated, relevant, (2, 3)))
