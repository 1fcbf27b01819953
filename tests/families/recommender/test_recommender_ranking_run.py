"""A run with --objective ranking from training to lists and an exported model, stopped and resumed; titles of items."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import recommender_runs as runs
from recommender_small import quick

from hotloop.engine.drive import Interrupted
from hotloop.engine.run import current_records, read_events
from hotloop.errors import DataError, OptionError
from hotloop.families.recommender import commands_config, evaluate, export, recommend, saved_run, train
from hotloop.families.recommender.commands_config import EvaluateOptions, PredictOptions, RecommendOptions
from hotloop.families.recommender.config import KL_EPOCHS, TrainOptions
from listener import Listener
from undisturbed import assert_same_run

pytestmark = pytest.mark.usefixtures("signals_heard")
TRAIN, VALIDATION, TEST = runs.draw()


def small_ids(column):
    return 900 - 3 * np.asarray(column)  # falling, and of 32 bits, as a served model takes them


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranking")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "item_id", small_ids)
        parts = {"training": TRAIN, "validation": VALIDATION, "test": TEST}
        files = {f"{n}_data_file": runs.write_text(folder / f"{n}.txt", p) for n, p in parts.items()}
        yield TrainOptions(
            **files,
            objective="ranking",
            layers=(6, 4),
            kl=0.2,
            kl_epochs=2.0,
            optimizer="Adam",
            base_learning_rate=-8.0,
            batch_size=6,
            epochs=5,
            precision="32.32",
            results_dir=folder,
            run_name="whole",
        )


@pytest.fixture(scope="module")
def whole(options):
    listener = Listener()
    return train.run(options, listener, "test"), listener


@pytest.fixture(scope="module")
def run(whole):
    return Path(whole[0]["run"])


def scores_of(run):
    """Log-probabilities of the best weights by numpy; the code is its mean."""
    from test_recommender_ranking import naive_network

    params = saved_run.load_run(run, best=True).state["params"]
    liked = (TRAIN >= 4).astype(np.float64)
    lengths = np.maximum(np.sqrt(liked.sum(1, keepdims=True)), 1)
    as_lists = {side: [dict(layer) for layer in params[side]] for side in ("encoder", "decoder")}
    logits = naive_network({**params, **as_lists}, liked / lengths)[0]
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def test_best_weights_by_ndcg_are_tested_beside_popularity(whole, run):
    result, listener = whole
    events = current_records(read_events(run))
    validations = [event for event in events if event["event"] == "validation"]
    values = {event["update"]: event["validation_ndcg@10"] for event in validations}
    assert len(set(values.values())) > 1 and values[result["best_step"]] == max(values.values())
    popular = np.broadcast_to((TRAIN >= 4).sum(0), TRAIN.shape)
    expected = runs.naive(scores_of(run), TRAIN, TEST, (10, 20))
    for name in ("ndcg@10", "recall@20", "ndcg@10_se", "coverage@10", "ranked_users"):
        assert result["test"][name] == pytest.approx(expected[name], abs=1e-5), name
    baseline = runs.naive(popular, TRAIN, TEST, (10,))["ndcg@10"]
    assert result["test"]["popularity_ndcg@10"] == pytest.approx(baseline, rel=1e-6)
    assert "rmse" not in result["test"] and "rmse" not in result["validation"]
    (line,) = [line for line in listener.lines if line.startswith("test NDCG@10")]
    assert f"{expected['ndcg@10']:.4f} +- {expected['ndcg@10_se']:.4f}" in line
    assert f"popularity NDCG@10 {baseline:.4f} (step {result['best_step']})" in line
    log = next(event for event in events if event["event"] == "log")
    assert log["kl"] > 0 and "rmse" not in log


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_bits(options, whole, run, tmp_path):
    stopped = replace(options, results_dir=tmp_path, run_name="stopped")

    def stop(text):
        if text.startswith("update 9,"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        train.run(stopped, Listener(stop), "test")
    assert saved_run.load_run(tmp_path / "stopped").step < whole[0]["updates"]
    result = train.run(replace(stopped, resume=True), Listener(), "test")
    assert {**result, "run": ""} == {**whole[0], "run": ""}
    assert_same_run(tmp_path / "stopped", run)


def test_evaluate_gives_an_order_and_no_ratings_and_predict_is_refused(run):
    console = runs.Listener()
    result = evaluate.run(EvaluateOptions(run=run, k=(3, 10)), console)
    expected = runs.naive(scores_of(run), TRAIN, TEST, (3, 10))
    assert result["ndcg@3"] == pytest.approx(expected["ndcg@3"], abs=1e-5) and "rmse" not in result
    ((_, (row,)),) = console.tables
    assert row[1:3] == ["-", "-"]
    with pytest.raises(OptionError, match="--objective ranking, which orders items and predicts no ratings"):
        evaluate.run_predict(PredictOptions(run=run), runs.Listener())
    for option, given in (("--round", {"round": True}), ("--no-clip", {"clip": False})):
        with pytest.raises(OptionError, match=rf"^{option}: .* predicts no ratings"):
            recommend.run(RecommendOptions(run=run, all=True, **given), runs.Listener())
        with pytest.raises(OptionError, match=rf"^{option}: .* predicts no ratings"):
            evaluate.run(EvaluateOptions(run=run, **given), runs.Listener())


def best_columns(scores, row, top):
    free = np.flatnonzero(TRAIN[row] == 0)
    return free[np.argsort(-scores[row, free], kind="stable")][:top]


@pytest.mark.slow
def test_lists_are_the_likeliest_items_with_their_titles(run, tmp_path):
    titles = tmp_path / "u.item"
    titles.write_text(
        "".join(f'{small_ids(c)}|"Film" {c}, The (1995)|01-Jan-1995\n' for c in range(1, runs.ITEMS))
    )
    console, path, scores = runs.Listener(), tmp_path / "lists.txt", scores_of(run)
    wish = {"run": run, "all": True, "top": 3, "titles": titles}
    lists = recommend.run(RecommendOptions(**wish), console)["recommendations"]
    step = saved_run.load_run(run, best=True).step
    ndcg = runs.naive(scores, TRAIN, TEST, (10,))["ndcg@10"]
    assert console.said[0].startswith(
        f"ranked by log-probability (--objective ranking): NDCG@10 {ndcg:.4f} on the test"
    )
    assert console.warned[0] == f"--titles {titles}: 1 of 17 items have no title there"
    assert console.tables[0][0] == ["user", "place", "item", "log-probability", "title"]
    by_user = {each["user"]: each for each in lists}
    for row in range(1, runs.USERS):
        own, columns = by_user[int(runs.user_id(row))], best_columns(scores, row, 3)
        assert own["items"] == small_ids(columns).tolist()
        assert own["titles"] == [f'"Film" {c}, The (1995)' if c else "" for c in columns]
        np.testing.assert_allclose(own["predictions"], scores[row, columns], atol=1e-4)
    result = recommend.run(RecommendOptions(**wish, output=path, batch_size=5), runs.Listener())
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    assert [line[1] for line in lines] == [str(item) for each in lists for item in each["items"]]
    assert [line[3] for line in lines] == [title for each in lists for title in each["titles"]]
    assert (
        result["users_per_second"] == pytest.approx(runs.USERS / result["seconds"]) and step == result["step"]
    )
    titles.write_text("5|A\n")
    with pytest.raises(DataError, match="none of its ids is an item of"):
        recommend.run(RecommendOptions(**wish), runs.Listener())


def test_a_model_of_ratings_says_that_it_ranks_by_them_and_how_it_compares(tmp_path, monkeypatch):
    runs.small_layers(monkeypatch)
    run = runs.make_run(tmp_path / "here")
    console = runs.Listener()
    recommend.run(RecommendOptions(run=run, users=(1000 - 7,)), console)
    advice = f"`hotloop recommender baselines --run {run}` compares that with popularity and EASE"
    assert console.said == [f"ranked by predicted rating: {advice}"]
    figures = {"update": 3, "split": "test", "ndcg@10": 0.0371, "popularity_ndcg@10": 0.1304}
    (run / "events.jsonl").write_text(json.dumps({"event": "evaluation", **figures}) + "\n")
    assert recommend.describe_order(saved_run.load_run(run)) == (
        "ranked by predicted rating: NDCG@10 0.0371 on the test part, where popularity has 0.1304; "
        "--objective ranking learns the order itself"
    )
    figures["update"] = 4  # of other weights
    (run / "events.jsonl").write_text(json.dumps({"event": "evaluation", **figures}) + "\n")
    assert "compares that with" in recommend.describe_order(saved_run.load_run(run))


def test_a_run_without_held_out_ratings_promises_no_comparison(options, tmp_path):
    wish = replace(options, results_dir=tmp_path, epochs=1, no_validation=True)
    wish = replace(wish, validation_data_file=None, test_data_file=None)
    train.run(wish, Listener(), "test")
    said = recommend.describe_order(saved_run.load_run(tmp_path / "whole"))
    assert said.endswith("no ratings were held out (--no-validation) that could say what that order is worth")


@pytest.mark.parametrize("with_users", [False, True])
def test_an_exported_model_gives_the_lists_of_recommend(run, with_users):
    from test_recommender_export import sent

    model = export.from_run(run, best=True, top=4, max_ratings=17, with_users=with_users)
    rated = [{int(small_ids(c)): row[c] for c in np.nonzero(row)[0]} for row in TRAIN]
    given = sent(model, [{}] * len(rated) if with_users else rated)
    if with_users:
        given["user"] = runs.user_id(np.arange(runs.USERS)).astype(np.int32)
    found = {name: np.asarray(v) for name, v in quick(model.function)(model.weights, given).items()}
    scores = scores_of(run)
    for row in range(1, runs.USERS):
        columns = best_columns(scores, row, 4)
        assert found["items"][row, : len(columns)].tolist() == small_ids(columns).tolist()
        np.testing.assert_allclose(found["predictions"][row, : len(columns)], scores[row, columns], atol=1e-4)
    assert "rates 4 or more" in model.preprocessing
    again = {
        side: {str(n): layer for n, layer in enumerate(model.weights["params"][side])}
        for side in ("encoder", "decoder")
    }
    again["spread"] = model.weights["params"]["spread"]
    about = {"config": dict(model.config), "source": {}}
    rebuilt = export.rebuild(about, {**model.weights, "params": again}, model.examples)
    both = [quick(each.function)(each.weights, model.examples)["predictions"] for each in (model, rebuilt)]
    np.testing.assert_array_equal(*both)


def test_nothing_to_like_is_refused_before_a_folder_is_made(options, tmp_path):
    wish = replace(options, results_dir=tmp_path / "new", relevant=5.5)
    with pytest.raises(
        DataError, match=r"^--relevant 5\.5: no training rating of .* is as high; take a lower one"
    ):
        train.run(wish, Listener(), "test")
    with pytest.raises(
        OptionError, match=r"^--relevant 5\.5: the training ratings go up to 5; take a lower one$"
    ):
        train.run(replace(wish, objective="ratings", kl=0.0, kl_epochs=KL_EPOCHS), Listener(), "test")
    assert not (tmp_path / "new").exists()


def test_an_evaluation_by_what_no_rating_reaches_is_refused_and_leaves_the_last_one(run):
    kept = {file: file.read_bytes() for file in (run / "evaluations").glob("*")}
    with pytest.raises(
        OptionError, match=r"^--relevant 6: the training ratings go up to 5; take a lower one$"
    ):
        evaluate.run(EvaluateOptions(run=run, relevant=6.0), Listener())
    assert {file: file.read_bytes() for file in (run / "evaluations").glob("*")} == kept


@pytest.mark.parametrize(
    ("rating", "reason"),
    [
        (2, r"^--relevant 4: no validation rating of held\.txt is as high; take a lower one$"),
        (
            5,
            r"^held\.txt: its users have rated every item that they like there \(--relevant 4\) in training, too",
        ),
    ],
)
def test_validation_ratings_without_anything_to_find_are_refused_by_their_name(
    options, tmp_path, rating, reason
):
    whole, held = tmp_path / "whole.txt", tmp_path / "held.txt"
    whole.write_text("".join(f"{user}\t{item}\t5\n" for user in range(8) for item in range(user, user + 4)))
    held.write_text("".join(f"{user}\t{user}\t{rating}\n" for user in range(8)))
    files = {"training_data_file": whole, "validation_data_file": held, "test_data_file": None}
    with pytest.raises(DataError, match=reason):
        train.run(replace(options, results_dir=tmp_path / "new", **files), Listener(), "test")
    assert not (tmp_path / "new").exists()


def test_a_run_that_was_given_options_of_ratings_when_they_were_taken_is_used_as_ever(run, tmp_path):
    """Earlier versions took --aug-steps and --no-clip beside --objective ranking, where they changed nothing."""
    old = tmp_path / "old"
    shutil.copytree(run, old)
    path = old / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "aug_steps": 3, "clip": False}))
    assert saved_run.load_run(old).job == saved_run.load_run(run).job
    for defaults in (commands_config.evaluation_defaults, commands_config.recommend_defaults):
        assert defaults(old) == {name: value for name, value in defaults(run).items() if name != "clip"}


def test_a_run_from_before_there_was_an_objective_is_one_of_ratings(tmp_path, monkeypatch):
    runs.small_layers(monkeypatch)
    run = runs.make_run(tmp_path / "here")
    path = run / "config.json"
    had = json.loads(path.read_text())
    for name in ("objective", "layers", "input_dropout", "kl", "kl_epochs", "relevant"):
        del had[name]
    path.write_text(json.dumps(had))
    found = saved_run.load_run(run, best=True)
    assert not found.job.is_ranking and found.job.layers == runs.LAYERS
    shutil.rmtree(run)
