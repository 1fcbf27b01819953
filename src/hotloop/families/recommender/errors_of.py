"""RMSE and MAE of predictions over a set of ratings, in one pass on the device, exact for any batch size."""

from typing import Any

import numpy as np
from jax import Array

from hotloop.data.matrix import RatingMatrix
from hotloop.engine.evaluate import Evaluation
from hotloop.errors import DataError
from hotloop.families.recommender import batches, model


class Errors:
    """Compiled once, called with state after state: from training ratings to the ratings of `truth`.

    Both matrices have the same rows and columns; users without a rating in `truth` are not looked at.
    """

    def __init__(
        self,
        job: model.Job,
        train: RatingMatrix,
        truth: RatingMatrix,
        batch_size: int,
        bounds: tuple[float, float],
    ):
        users = np.flatnonzero(np.diff(truth.starts)).astype(np.int32)
        if not len(users):
            raise DataError(
                "there are no ratings to evaluate: no user and item of them is in the training data"
            )
        capacities = [batches.largest(matrix, batch_size) for matrix in (train, truth)]

        def gather(data: Any, places: Array) -> dict[str, Array]:
            rows, wanted, users = data
            chosen = users[places]
            return {
                "ratings": batches.densify(rows, chosen, job.items, capacities[0]),
                "truth": batches.densify(wanted, chosen, job.items, capacities[1]),
            }

        data = batches.rows_of(train), batches.rows_of(truth), users
        self.evaluation = Evaluation(
            model.evaluate(job, *bounds), data, batch_size, samples=len(users), gather=gather
        )

    def __call__(self, state: Any) -> dict[str, float]:
        """RMSE and MAE over all ratings, and how many users and ratings there are."""
        sums = self.evaluation(state)
        count = sums["ratings"]
        return {
            "rmse": float((sums["squared_error"] / count) ** 0.5),
            "mae": float(sums["absolute_error"] / count),
            "users": sums["samples"],
            "ratings": count,
        }
