"""The recommender as it is exported: the lists of `recommend`, for users it knows and for users it does not."""

import shutil

import numpy as np
import pytest
import recommender_runs as runs
from recommender_small import quick

from hotloop.errors import CheckpointError, OptionError
from hotloop.families.recommender import export, recommend
from hotloop.families.recommender.commands_config import RecommendOptions


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        runs.small_layers(patch)
        patch.setattr(runs, "item_id", lambda column: 900 - 3 * np.asarray(column))  # falling, and of 32 bits
        yield runs.make_run(tmp_path_factory.mktemp("exported") / "here")


@pytest.fixture(scope="module")
def lists(run):
    """Of every user with a rating, by `hotloop recommender recommend`."""
    found = recommend.run(RecommendOptions(run=run, all=True, top=4), runs.Listener())
    return {each["user"]: each for each in found["recommendations"]}


def answers(model, **inputs):
    return {name: np.asarray(value) for name, value in quick(model.function)(model.weights, inputs).items()}


def sent(model, rated):
    """Rows of {item: rating} as the model takes them."""
    width = model.signature.inputs[0].row[0]
    items, ratings = np.full((len(rated), width), -1, np.int32), np.zeros((len(rated), width), np.float32)
    for row, own in enumerate(rated):
        items[row, : len(own)], ratings[row, : len(own)] = list(own), list(own.values())
    return {"items": items, "ratings": ratings}


def training_ratings():
    dense = runs.draw()[0]
    return [{900 - 3 * column: row[column] for column in np.nonzero(row)[0]} for row in dense]


def test_ratings_that_are_sent_give_the_lists_of_recommend(run, lists):
    model = export.from_run(run, top=4, max_ratings=17)
    rated = training_ratings()
    found = answers(model, **sent(model, rated))
    for row in range(len(rated)):
        own = lists.get(
            int(runs.user_id(row)), {"items": [], "predictions": []}
        )  # who has rated all has none
        count = len(own["items"])
        assert found["items"][row, :count].tolist() == own["items"]
        np.testing.assert_allclose(found["predictions"][row, :count], own["predictions"], atol=1e-5)
        assert found["items"][row, count:].tolist() == [-1] * (4 - count)
        assert not set(found["items"][row]) & set(rated[row])


def test_a_user_stands_for_the_training_ratings_and_sent_ones_come_on_top(run, lists):
    model = export.from_run(run, top=4, max_ratings=17, with_users=True)
    rated = training_ratings()
    users = runs.user_id(np.arange(len(rated))).astype(np.int32)
    found = answers(model, **sent(model, [{}] * len(rated)), user=users)
    for row, user in enumerate(users):
        own = lists.get(int(user), {"items": []})
        assert found["items"][row, : len(own["items"])].tolist() == own["items"]
    # The same as sending all of it; what is sent counts more than what is inside.
    first = found["items"][2, 0]
    both = answers(model, **sent(model, [{first: 5.0}]), user=users[2:3])
    alone = answers(model, **sent(model, [rated[2] | {first: 5.0}]), user=np.array([export.NOBODY], np.int32))
    assert both["items"].tolist() == alone["items"].tolist() and first not in both["items"]


def test_rows_that_make_no_sense_are_not_numbers_and_harm_no_neighbour(run):
    model = export.from_run(run, top=4, max_ratings=17, with_users=True)
    given = sent(model, [{900: 3.0}, {900: 0.0}, {900: 3.0}, {900: np.nan}, {900: 3.0, 1: 4.0}])
    users = np.array([-1, -1, 12345, -1, -1], np.int32)
    found = answers(model, **given, user=users)
    finite = np.isfinite(found["predictions"]).all(1)
    assert finite.tolist() == [True, False, False, False, True]
    # Item 1 is in no training rating: it is passed over.
    np.testing.assert_array_equal(found["items"][0], found["items"][4])
    np.testing.assert_allclose(found["predictions"][0], found["predictions"][4], atol=1e-6)


def test_of_an_item_that_is_sent_twice_the_last_rating_counts(run):
    model = export.from_run(run, top=4, max_ratings=17)
    given = sent(model, [{900: 2.0, 897: 4.0, 894: 3.0}, {900: 5.0, 897: 4.0, 894: 3.0}, {897: 4.0}])
    given["items"][0, 3:5], given["ratings"][0, 3:5] = (
        900,
        (1.0, 5.0),
    )  # 2, 1, 5: neither first nor highest alone
    given["items"][2, 1:17], given["ratings"][2, 1:17] = 900, range(16, 0, -1)  # the last is the lowest
    found = answers(model, **given)
    np.testing.assert_array_equal(found["items"][0], found["items"][1])
    np.testing.assert_allclose(found["predictions"][0], found["predictions"][1], atol=1e-6)
    once = answers(model, **sent(model, [{897: 4.0, 900: 1.0}]))
    np.testing.assert_allclose(found["predictions"][2], once["predictions"][0], atol=1e-6)
    columns = np.array([[3, 1, 3, 9, 3, 1, 9]])
    assert export._keep_last(columns, 9).tolist() == [[9, 9, 9, 9, 3, 1, 9]]


def test_what_cannot_be_exported_is_refused(run, tmp_path, monkeypatch):
    with pytest.raises(OptionError, match="top=18: there are only 17 items"):
        export.from_run(run, top=18)
    shutil.copy(run / "config.json", tmp_path)  # a run that has saved nothing yet
    with pytest.raises(CheckpointError, match="best=True: no validation of a checkpoint"):
        export.from_run(tmp_path, best=True)
    runs.small_layers(monkeypatch)
    monkeypatch.setattr(runs, "item_id", lambda column: 5_000_000_000 + np.asarray(column))
    large = runs.make_run(tmp_path / "large")
    with pytest.raises(
        CheckpointError, match=r"item ids from 5000000000 to .*: a served model takes those from 0"
    ):
        export.from_run(large)


def test_a_model_is_made_again_from_what_its_folder_says(run):
    model = export.from_run(run, top=4, max_ratings=5, with_users=True)
    params = {
        side: {str(number): layer for number, layer in enumerate(layers)}
        for side, layers in model.weights["params"].items()
    }
    about = {"config": dict(model.config), "source": {}}
    again = export.rebuild(about, {**model.weights, "params": params}, model.examples)
    assert again.signature == model.signature
    both = [answers(each, **model.examples) for each in (model, again)]
    np.testing.assert_array_equal(both[0]["predictions"], both[1]["predictions"])
