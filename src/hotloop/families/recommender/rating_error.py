"""RMSE and MAE of predictions over a set of ratings, in one pass on the device, exact for any batch size."""

from typing import Any

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.evaluate import Evaluation
from hotloop.families.recommender import batches, model


class RatingError:
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
        found = batches.pair_users(train, truth, batch_size)
        self.evaluation = Evaluation(
            model.evaluate(job, *bounds), found.data, batch_size, samples=found.users, gather=found.gather
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
