"""Files of predictions and lists of recommendations, from a run's folder, against a float64 network and sorting."""

import shutil

import numpy as np
import pytest
import recommender_runs as runs

from hotloop.errors import DataError, HotloopError, OptionError
from hotloop.families.recommender import evaluate, recommend, saved_run
from hotloop.families.recommender.commands_config import EvaluateOptions, PredictOptions, RecommendOptions


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        runs.small_layers(patch)
        yield runs.make_run(tmp_path_factory.mktemp("predictions") / "here")


@pytest.fixture(scope="module")
def scores(run):
    return runs.network(saved_run.load_run(run).state["params"], runs.draw()[0])


def table(path):
    return np.loadtxt(path, delimiter="\t", ndmin=2)


def test_file_has_every_rating_with_its_ids_and_the_errors_of_evaluate(run, scores, tmp_path):
    path = tmp_path / "new" / "out.txt"
    result = evaluate.run_predict(PredictOptions(run=run, output=path), runs.Listener())
    test = runs.draw()[2]
    rows, columns = np.nonzero(test)
    found = table(path)
    assert found[:, 0].tolist() == runs.user_id(rows).tolist()
    assert found[:, 1].tolist() == runs.item_id(columns).tolist()
    assert found[:, 3].tolist() == test[rows, columns].tolist()
    np.testing.assert_allclose(found[:, 2], np.clip(scores[rows, columns], 0.5, 5), atol=1e-5)
    evaluated = evaluate.run(EvaluateOptions(run=run, k=()), runs.Listener())
    assert np.sqrt(np.mean((found[:, 2] - found[:, 3]) ** 2)) == pytest.approx(evaluated["rmse"], rel=1e-6)
    assert result["rmse"] == pytest.approx(evaluated["rmse"], rel=1e-6)
    assert result["mae"] == pytest.approx(evaluated["mae"], rel=1e-6)
    assert [each.name for each in path.parent.iterdir()] == ["out.txt"]


def test_predictions_may_be_unclipped_and_rounded(run, scores):
    wishes = {"split": "validation", "clip": False, "round": True, "batch_size": 50}
    result = evaluate.run_predict(PredictOptions(run=run, **wishes), runs.Listener())
    assert result["output"] == str(run / "predictions" / "validation-3.txt")
    validation = runs.draw()[1]
    expected = np.round(scores[np.nonzero(validation)])
    assert table(result["output"])[:, 2].tolist() == expected.tolist()
    assert expected.min() < 0.5


def test_users_of_a_ratings_file_need_not_be_in_the_training_data(run, scores, tmp_path):
    train, validation, _ = runs.draw()
    seen, asked = tmp_path / "seen.txt", tmp_path / "asked.txt"
    for path, dense in ((seen, train), (asked, validation)):
        runs.write_text(path, dense[:5])
        path.write_text("".join(f"9{line}" for line in path.read_text().splitlines(keepends=True)))
    result = evaluate.run_predict(
        PredictOptions(run=run, ratings_file=seen, data_file=asked), runs.Listener()
    )
    assert result["output"] == str(run / "predictions" / "asked-3.txt")
    found = table(result["output"])
    rows, columns = np.nonzero(validation[:5])
    assert found[:, 0].tolist() == [int(f"9{user}") for user in runs.user_id(rows)]
    np.testing.assert_allclose(found[:, 2], np.clip(scores[rows, columns], 0.5, 5), atol=1e-5)
    again = RecommendOptions(run=run, ratings_file=seen, users=(9986, 9993), top=3)
    lists = recommend.run(again, runs.Listener())["recommendations"]
    assert [each["items"] for each in lists] == [best_items(scores, train, row, 3) for row in (2, 1)]


def test_a_file_that_cannot_be_finished_leaves_the_old_one(run, tmp_path, monkeypatch):
    path = tmp_path / "out.txt"
    path.write_text("old\n")

    def one_block(*arguments):
        yield np.array([0]), np.array([0]), np.float32([3]), np.float32([4])
        raise HotloopError("broken off")

    monkeypatch.setattr(evaluate, "predict_blocks", one_block)
    with pytest.raises(HotloopError, match="broken off"):
        evaluate.run_predict(PredictOptions(run=run, output=path), runs.Listener())
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]


def best_items(scores, train, row, top):
    free = np.flatnonzero(train[row] == 0)
    order = free[np.argsort(-scores[row, free], kind="stable")][:top]
    return runs.item_id(order).tolist()


def test_recommendations_are_the_best_unrated_items_from_the_folder_alone(run, scores, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(run, moved)
    train = runs.draw()[0]
    rows = [4, 22, 0, 9, 11]  # the first user has rated everything
    users = tuple(runs.user_id(rows).tolist())
    console = runs.Listener()
    result = recommend.run(RecommendOptions(run=moved, users=(*users, users[0]), top=5), console)
    lists = result["recommendations"]
    assert [each["user"] for each in lists] == [runs.user_id(row) for row in rows if row]
    assert [each["items"] for each in lists] == [best_items(scores, train, row, 5) for row in rows if row]
    columns = [(np.array(each["items"]) - runs.item_id(0)) // 3 for each in lists]
    expected = [np.clip(scores[r][c], 0.5, 5) for r, c in zip([4, 22, 9, 11], columns, strict=True)]
    np.testing.assert_allclose(np.array([each["predictions"] for each in lists]), expected, atol=1e-5)
    ((names, table),) = console.tables
    assert names == ["user", "place", "item", "prediction"]
    assert console.warned == ["1 of these users have rated every item"]
    assert table[1][:3] == [users[0], 2, lists[0]["items"][1]]


def test_all_users_fill_a_file_with_as_many_items_as_are_left(run, scores, tmp_path):
    path = tmp_path / "lists.txt"
    result = recommend.run(RecommendOptions(run=run, all=True, top=1000, output=path), runs.Listener())
    train = runs.draw()[0]
    found = table(path)
    assert len(found) == (train == 0).sum()
    assert result["users"] == runs.USERS
    for row in (1, 7, runs.USERS - 1):
        assert found[found[:, 0] == runs.user_id(row), 1].tolist() == best_items(scores, train, row, 1000)


def test_wrong_wishes_are_refused_in_one_line(run, tmp_path):
    with pytest.raises(
        OptionError, match=r"--users 5 6: not in the training ratings of .*, which has 23 users"
    ):
        recommend.run(RecommendOptions(run=run, users=(1000, 5, 6)), runs.Listener())
    with pytest.raises(OptionError, match=r"--output .*: is a folder"):
        evaluate.run_predict(PredictOptions(run=run, output=tmp_path), runs.Listener())
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DataError, match=r"--output .*: cannot be written"):
        recommend.run(RecommendOptions(run=run, all=True, output=blocked / "out.txt"), runs.Listener())
