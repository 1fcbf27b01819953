"""Exported models, loaded: the same answers for every batch size, in every type, with or without a symbolic batch."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from small_models import LADDER, classify, small, write_uncompared

from hotloop.engine import model_folder
from hotloop.engine.exportable import Tensor
from hotloop.engine.model_folder import write_model
from hotloop.errors import HotloopError, ModelError
from hotloop.serve.artefact import Artefact, find_disagreement, in_rungs


def wanted(model, inputs):
    return {name: np.asarray(value) for name, value in jax.jit(model.function)(model.weights, inputs).items()}


def exported(model, tmp_path, ladder=LADDER):
    return Artefact.open(write_uncompared(tmp_path, model, ladder=ladder)[0])


def rows(count):
    return {"x": np.random.default_rng(count).normal(size=(count, 4)).astype(np.float32)}


def needs_a_number(weights, inputs):
    return classify(weights, {"x": inputs["x"] * len(inputs["x"]) / inputs["x"].shape[0]})


@pytest.mark.parametrize("function", [classify, needs_a_number])
def test_any_number_of_rows_is_answered_as_by_the_function(function, tmp_path):
    model = small(function)
    artefact = exported(model, tmp_path)
    assert len(artefact.about["programs"]) == (1 if function is classify else len(LADDER))
    assert bool(artefact.about["notices"]) is (function is not classify)
    call = artefact.load()
    most = 2 * LADDER[-1]
    given, answers = rows(most), wanted(model, rows(most))
    for count in range(1, most + 1):
        found = in_rungs(call, artefact.ladder, {"x": given["x"][:count]})
        assert (
            find_disagreement({name: value[:count] for name, value in answers.items()}, found, 1e-6) is None
        )


def test_a_program_for_each_rung_takes_no_other_number_of_rows(tmp_path):
    call = exported(small(needs_a_number), tmp_path, (1, 4)).load()
    with pytest.raises(ValueError, match="3 rows: there are programs for 1, 4 alone"):
        call(rows(3))


def test_each_rung_is_compiled_once(tmp_path):
    call = exported(small(), tmp_path).load()
    for count in (1, 2, 3, 4, 8, 7, 1):
        in_rungs(call, LADDER, rows(count))
    (program,) = call._calls.values()
    assert program._cache_size() == len(LADDER)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_weights_of_16_bits_come_back_with_the_same_bits(dtype, tmp_path):
    model = small(dtype=dtype, tolerance=1e-2)
    artefact = exported(model, tmp_path)
    call = artefact.load()
    assert call._weights["w"].dtype == dtype
    np.testing.assert_array_equal(np.asarray(call._weights["b/0"]), np.asarray(model.weights["b"][0]))
    inputs, answers = artefact.examples()
    assert find_disagreement(answers, in_rungs(call, LADDER, inputs), artefact.tolerance) is None


def half(weights, inputs):
    return {"y": (inputs["x"] @ weights["w"]).astype(jnp.bfloat16)}


def test_examples_of_16_bits_come_back_with_their_type(tmp_path):
    given = small().signature
    signature = type(given)(given.inputs, (Tensor.of("y", ml_dtypes.bfloat16, 3),))
    artefact = exported(small(half, signature=signature, tolerance=1e-2), tmp_path)
    assert artefact.signature.outputs[0].datatype == "BF16"
    inputs, answers = artefact.examples()
    assert answers["y"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(answers["y"], artefact.load()(inputs)["y"])


def test_what_a_function_gives_must_be_what_its_signature_says(tmp_path):
    with pytest.raises(ModelError, match="its signature says"):
        exported(small(half), tmp_path)


def test_a_function_that_cannot_be_traced_is_one_line(tmp_path):
    def broken(weights, inputs):
        if isinstance(inputs["x"].shape[0], int) and inputs["x"].shape[0] == 1:
            return classify(weights, inputs)
        raise RuntimeError("no\nsuch thing")

    given = {"x": small().examples["x"][:1]}
    with pytest.raises(ModelError, match="small cannot be exported: no") as caught:
        exported(small(broken, examples=given), tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_calls_that_are_no_part_of_stablehlo_are_named_and_nothing_is_left(tmp_path, monkeypatch):
    def calls(weights, inputs):
        found = classify(weights, inputs)
        form = jax.ShapeDtypeStruct(found["shares"].shape, jnp.float32)
        return found | {"shares": jax.ffi.ffi_call("our_kernel", form)(found["shares"])}

    monkeypatch.setattr(model_folder, "answer_examples", lambda model: {})
    with pytest.raises(
        ModelError, match="small cannot be exported: it calls our_kernel, which is no part of"
    ):
        write_model(small(calls), tmp_path, ladder=LADDER)
    assert list(tmp_path.iterdir()) == []


def test_types_that_the_protocol_has_not_are_refused():
    with pytest.raises(HotloopError, match=r"complex64 has no name in the Open Inference Protocol"):
        Tensor.of("z", np.complex64)


def test_a_fresh_process_finds_the_answers(tmp_path):
    folder, _ = write_model(small(), tmp_path, ladder=LADDER)
    assert [path.name for path in folder.parent.iterdir()] == ["1"]


def test_a_fresh_process_finds_wrong_answers_and_nothing_is_left(tmp_path, monkeypatch):
    """Checksums are right here: it is the answers that are not."""
    whole = model_folder._examples_bytes

    def wrong(inputs, answers):
        return whole(inputs, answers | {"shares": answers["shares"] + np.float32(2e-5)})

    monkeypatch.setattr(model_folder, "_examples_bytes", wrong)
    with pytest.raises(ModelError, match=r"not exported: .*shares: .* \(more than 1e-05 apart\)"):
        write_model(small(), tmp_path, ladder=LADDER)
    assert list(tmp_path.iterdir()) == []


ANSWER = {
    "scores": np.array([[0.5, 0.3, 0.2]]),
    "classes": np.array([[4, 7, 1]], np.int32),
    "elbo": np.array([-2000.0]),
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"scores": ANSWER["scores"] + 0.9e-5}, None),
        ({"scores": ANSWER["scores"] + 1.1e-5}, "scores: "),
        ({"elbo": np.array([-2000.01])}, None),  # relative above 1
        ({"elbo": np.array([-2000.03])}, "elbo: "),
        ({"elbo": np.array([np.nan])}, "elbo: nan"),
        ({"classes": np.array([[7, 4, 1]], np.int32)}, "classes: 7, not 4"),
        ({"classes": np.array([[4, 7, 9]], np.int32)}, None),  # the last may tie with one that was left out
        ({"classes": np.array([[4, 7]], np.int32)}, "classes: shape (1, 2), not (1, 3)"),
    ],
)
def test_answers_agree_within_the_tolerance(changes, said):
    found = find_disagreement(ANSWER, ANSWER | changes, 1e-5)
    assert (found is None) if said is None else found.startswith(said)


def test_classes_whose_scores_tie_may_change_places():
    tied = ANSWER | {"scores": np.array([[0.5, 0.5, 0.2]])}
    swapped = tied | {"classes": np.array([[7, 4, 1]], np.int32)}
    assert find_disagreement(tied, swapped, 1e-5) is None
    assert find_disagreement(ANSWER, ANSWER, 1e-5) is None
