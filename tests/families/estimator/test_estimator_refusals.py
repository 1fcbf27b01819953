"""What an Estimator refuses, each in one clear line, and what it does with a choice that could be read two ways."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import X, Y, data, model_fn, right, small

from hotloop import ModelSpec
from hotloop.errors import HotloopError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> Any:
    return small(tmp_path_factory.mktemp("trained")).train(data, steps=10)


def refused(act: Callable[[], Any]) -> str:
    """The one line that an act is refused with."""
    with pytest.raises(HotloopError) as caught:
        act()
    line = str(caught.value)
    assert "\n" not in line
    return line


def with_metrics(**metrics: Any) -> Callable[..., ModelSpec]:
    """The small model, measured otherwise."""
    good = model_fn(None, None, "train", {})
    return lambda: ModelSpec(good.init, good.apply, metrics=metrics, optimizer=good.optimizer)


@pytest.mark.parametrize("name", ["loss", "samples", "global_step", "update", "epoch"])
def test_a_metric_cannot_take_the_name_of_another_figure(name: str, tmp_path: Path) -> None:
    line = refused(lambda: small(tmp_path, with_metrics(**{name: right})).train(data, steps=1))
    assert line.startswith(f"model_fn: a metric cannot be called {name}: ")


def later(features: Any, labels: Any) -> Callable[[], Any]:
    """Two batches like any, and then another."""
    return lambda: iter([(X[:16], Y[:16]), (X[:9], Y[:9]), (features, labels)])


OTHER_BATCHES = {
    "batch 2: features is float32[16, 4], the first batch had float32[16, 5]": later(X[:16, :4], Y[:16]),
    "batch 2: features is float64[16, 5], the first": later(X[:16].astype(np.float64), Y[:16]),
    "batch 2: features is float32[17, 5], the first": later(X[:17], Y[:17]),
    "batch 2: features is float32[0, 5], the first": later(X[:0], Y[:0]),
    "batch 2 is made of PyTreeDef({'features': *}), the first one of": later(X[:16], None),
}


@pytest.mark.parametrize("words", OTHER_BATCHES)
def test_later_batches_of_another_form_are_named_by_evaluate_and_predict(words: str, trained: Any) -> None:
    assert refused(lambda: trained.evaluate(OTHER_BATCHES[words])).startswith(words)
    assert refused(lambda: list(trained.predict(OTHER_BATCHES[words]))).startswith(words)


def test_later_batches_may_be_smaller(trained: Any) -> None:
    batches = later(X[:16], Y[:16])
    assert trained.evaluate(batches)["samples"] == len(list(trained.predict(batches))) == 41
