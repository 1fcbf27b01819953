"""RecBole's own MultiVAE on a split of ours: its data loader, its trainer, its model; scores in our columns.

`pip install recbole` beside torch; the `ray` that it imports for its own sweeps is not needed and may be missing.
"""

import contextlib
import importlib.util
import logging
import sys
import types
from pathlib import Path

import numpy as np

from hotloop.families.recommender.rating_sets import RatingSets

PARTS = ("train", "validation", "test")


def write_atomic_files(data: RatingSets, least: float, folder: Path) -> None:
    """RecBole's files of the three parts: what users like, as it takes implicit feedback."""
    for name in PARTS:
        matrix = getattr(data, name)
        rows = np.repeat(np.arange(matrix.users), np.diff(matrix.starts))
        liked = matrix.values() >= least
        pairs = zip(rows[liked], matrix.items[liked], strict=True)
        text = "".join(f"{user}\t{item}\n" for user, item in pairs)
        (folder / f"ml.{name}.inter").write_text(f"user_id:token\titem_id:token\n{text}")


def import_recbole() -> None:
    """What RecBole 1.2.1 asks of its libraries and newer ones do not have: names of numpy's, and ray's sweeps."""
    for old, new in {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}.items():
        if not hasattr(np, old):
            setattr(np, old, new)
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        sys.modules["ray"] = types.ModuleType("ray")
        sys.modules["ray.tune"] = sys.modules["ray"].tune = types.ModuleType("ray.tune")  # type: ignore[attr-defined]


class MultiVae:
    """A model in training; `epoch` makes one more, `scores` are those of all our users and items."""

    def __init__(self, data: RatingSets, least: float, folder: Path, seed: int, batch_size: int):
        import_recbole()
        from recbole.config import Config
        from recbole.data import create_dataset, data_preparation
        from recbole.model.general_recommender.multivae import MultiVAE
        from recbole.trainer import Trainer
        from recbole.utils import init_seed

        logging.disable(logging.WARNING)
        (folder / "ml").mkdir(exist_ok=True)
        write_atomic_files(data, least, folder / "ml")
        settings = {
            "data_path": str(folder),
            "benchmark_filename": list(PARTS),
            "load_col": {"inter": ["user_id", "item_id"]},
            "checkpoint_dir": str(folder / "saved"),
            "train_batch_size": batch_size,
            "seed": seed,
            "use_gpu": False,
            "show_progress": False,
            "metrics": ["NDCG"],
            "valid_metric": "NDCG@10",
            "topk": [10],
            "log_wandb": False,
        }
        with contextlib.chdir(folder), contextlib.redirect_stdout(None):
            words, sys.argv = sys.argv, sys.argv[:1]  # it reads the command line of whoever calls it
            config = Config(model="MultiVAE", dataset="ml", config_dict=settings)
            sys.argv = words
            init_seed(seed, reproducibility=True)
            dataset = create_dataset(config)
            self.loader, *_ = data_preparation(config, dataset)
            self.model = MultiVAE(config, self.loader.dataset).to(config["device"])
            self.trainer = Trainer(config, self.model)
        self.epochs = 0
        self.users = self._places(dataset, "user_id", data.train.users)
        self.items = self._places(dataset, "item_id", data.train.n_items)

    @staticmethod
    def _places(dataset: object, field: str, count: int) -> np.ndarray:
        """RecBole's number of each of ours; 0, which is nobody and nothing, where no part has it."""
        known = dataset.field2token_id[field]  # type: ignore[attr-defined]
        return np.array([known.get(str(each), 0) for each in range(count)])

    def epoch(self) -> float:
        loss = self.trainer._train_epoch(self.loader, self.epochs, show_progress=False)
        self.epochs += 1
        return float(loss)

    def scores(self) -> np.ndarray:
        import torch
        from recbole.data.interaction import Interaction

        self.model.eval()
        with torch.no_grad():
            users = Interaction({"user_id": torch.as_tensor(self.users)})
            found = self.model.full_sort_predict(users).reshape(len(self.users), -1).numpy()
        self.model.train()
        scores = found[:, self.items]
        return np.where(self.items > 0, scores, scores.min() - 1).astype(np.float32)
