"""A short training for `hotloop demo`, and what biases reach on the same ratings.

The ratings follow hidden tastes, so that an autoencoder can do better than a mean per user and per item, and a few
seconds on a CPU show it.
"""

import time
from typing import Any

from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Program, copy_state
from hotloop.engine.progress import Console
from hotloop.families.recommender import baselines, batches, model, train
from hotloop.families.recommender.batches import make_rating_error
from hotloop.families.recommender.config import TrainOptions

RECIPE = TrainOptions(
    data="procedural", epochs=150, refeed="none", base_learning_rate=-12, weight_decay=6e-3, precision="32.32"
)


def demo_run(console: Console, recipe: TrainOptions = RECIPE) -> dict[str, Any]:
    """Validation RMSE after each epoch, that of the biases, and users a second."""
    setup = train.prepare(recipe, console)
    config, data, job, key = setup.config, setup.data, setup.job, seed_key(setup.config.seed)
    assert data.validation is not None and config.batch_size is not None
    updates, sparse = setup.plan.updates_per_call, model.takes_sparse(job, data.train)
    feed = batches.make_feed(data.train, config.batch_size, config.seed, job.policy.compute, sparse=sparse)
    program = Program(model.update(job), feed, updates, key)
    state = copy_state(model.init(job, stream(key, "init", 0)))
    program.compile(state, updates)
    measure = make_rating_error(model.evaluate(job), data.train, data.validation, data.train.users)
    curve, seconds = [measure(state)["rmse"]], []
    for first in range(0, setup.plan.total_updates, updates):
        began = time.perf_counter()
        state, metrics = program(state, first, updates)
        metrics.wait()
        seconds.append(time.perf_counter() - began)
        curve.append(measure(state)["rmse"])
    best = baselines.choose_biases(data.train, data.validation, *data.scale)
    return {
        "rmse": curve,
        "biases": baselines.biases_rmse(best, data.validation, *data.scale),
        "users_per_second": updates * config.batch_size / min(seconds),
        "users": data.train.users,
        "items": data.train.n_items,
    }
