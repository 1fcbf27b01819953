"""The SavedModel beside a program: TensorFlow answers the same, for any batch."""

import numpy as np
import pytest
from small_models import LADDER, classify, small, without_comparing

from hotloop.engine.model_folder import write_model
from hotloop.errors import MissingExtra, ModelError
from hotloop.serve import saved_model
from hotloop.serve.artefact import Artefact, find_disagreement, in_rungs


def test_without_tensorflow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorflow", None)
    with pytest.raises(MissingExtra, match=r"needs tensorflow: pip install 'hotloop\[tf\]'"):
        saved_model.import_tensorflow()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorflow_answers_as_the_program_does(tmp_path):
    pytest.importorskip("tensorflow", reason="the extra tf is not installed")
    folder, _ = write_model(small(), tmp_path, ladder=LADDER, extend=saved_model.write_saved_model)
    artefact = Artefact.open(folder)
    assert "saved_model.pb" in artefact.about["files"]
    for count in (1, 3, 7):
        given = {"x": np.random.default_rng(count).normal(size=(count, 4)).astype(np.float32)}
        expected = in_rungs(artefact.load(), LADDER, given)
        assert (
            find_disagreement(expected, saved_model.answer_by_tensorflow(folder, given), artefact.tolerance)
            is None
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_needs_the_number_of_rows_is_refused_and_nothing_left(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow", reason="the extra tf is not installed")

    def counts(weights, inputs):
        return classify(weights, {"x": inputs["x"] * len(inputs["x"])})

    without_comparing(monkeypatch)
    with pytest.raises(ModelError, match="small cannot be a SavedModel"):
        write_model(small(counts), tmp_path, ladder=LADDER, extend=saved_model.write_saved_model)
    assert list(tmp_path.iterdir()) == []
