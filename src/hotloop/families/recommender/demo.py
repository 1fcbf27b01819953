"""A glimpse of the family for `hotloop demo`: a short training on drawn tastes, beside the biases.

The ratings follow hidden tastes, so that an autoencoder can do better than a mean per user and per item, and a few
seconds on a CPU show it.
"""

import time
from dataclasses import replace
from typing import Any

from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program, copy_state
from hotloop.engine.progress import Console
from hotloop.families.recommender import baseline_models, model, rating_sets, saved_run, train
from hotloop.families.recommender.config import TrainOptions
from hotloop.families.recommender.rating_error import RatingError

RECIPE = TrainOptions(
    data="procedural", epochs=150, refeed="none", base_learning_rate=-12, weight_decay=6e-3, precision="32.32"
)


def demo_run(console: Console, recipe: TrainOptions = RECIPE) -> dict[str, Any]:
    """Validation RMSE after each epoch, that of the biases, and users a second."""
    config = replace(recipe, batch_size=recipe.batch_size or 64).resolved()
    data = rating_sets.load_sets(config, console)
    assert data.validation is not None and config.batch_size is not None
    schedule = train.make_plan(config, data)[0]
    job = saved_run.make_job(config, data.train.n_items, schedule)
    updates = schedule.updates_per_call
    program = Program(model.update(job), train.make_feed(config, job, data), updates, seed_key(config.seed))
    state = copy_state(model.init(job, stream(seed_key(config.seed), "init", 0)))
    program.compile(state, updates)
    errors = RatingError(job, data.train, data.validation, data.train.users, data.scale)
    curve, seconds = [errors(state)["rmse"]], []
    for call in range(schedule.calls):
        began = time.perf_counter()
        state, metrics = program(state, call * updates, updates)
        metrics.wait()
        seconds.append(time.perf_counter() - began)
        curve.append(errors(state)["rmse"])
    best = baseline_models.choose_biases(data.train, data.validation, *data.scale)
    return {
        "rmse": curve,
        "biases": baseline_models.biases_rmse(best, data.validation, *data.scale),
        "users_per_second": updates * config.batch_size / min(seconds),
        "users": data.train.users,
        "items": data.train.n_items,
    }
