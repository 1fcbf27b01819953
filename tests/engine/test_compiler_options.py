"""The compiler's options of one program: which programs get them, and that they change what they are meant to."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop import compiler_options
from hotloop.compiler_options import (
    LOOPS_ON_THE_CARD,
    WITHOUT_CONVOLUTIONS,
    choose_options,
    keep_loops_on_the_card,
)
from hotloop.engine.drive import drive
from hotloop.engine.feed import Resident
from hotloop.engine.loop import Evaluation, Program
from hotloop.engine.plan import Plan
from hotloop.engine.run import Run, read_events

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a matter of XLA:CPU")
IMAGES, KERNEL = np.ones((4, 8, 8, 32), np.float32), np.ones((3, 3, 32, 32), np.float32)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_options, "usable_cores", lambda: 2)
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def convolved(x, kernel, groups=1):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=groups
    )


def classify(x, kernel):
    """A convolution, a product and a reduction, all large enough for YNNPACK. A sum that alone reads a convolution
    takes it along, so another value reads it too."""
    features = convolved(x, kernel)
    return (features.reshape(-1, 32) @ kernel[0, 0]).sum(0) + features[0, 0, 0]


def library_calls(text: str) -> list[str]:
    """The kinds of operations that YNNPACK was given."""
    fused = re.findall(r"calls=(%\S+?),.*__ynn_fusion", text)
    bodies = [text.split(f"\n{name} (")[1].split("\n}")[0] for name in fused]
    return sorted({word for body in bodies for word in re.findall(r"\b(convolution|dot|reduce)\(", body)})


def test_a_program_with_convolutions_computes_them_without_ynnpack_and_the_rest_with_it():
    lowered = jax.jit(classify).lower(IMAGES, KERNEL)
    assert library_calls(lowered.compile().as_text()) == ["convolution", "dot", "reduce"]
    text = lowered.compile(compiler_options=choose_options(lowered, "cpu")).as_text()
    assert library_calls(text) == ["dot", "reduce"]


def test_what_is_left_to_ynnpack_is_all_that_the_compiler_gives_it_by_default():
    """Else a program would lose more than its convolutions: then the options' list needs the new kind."""
    lowered = jax.jit(lambda x, kernel: (x @ kernel).sum(0)).lower(IMAGES.reshape(-1, 32), KERNEL[0, 0])
    assert choose_options(lowered, "cpu") == {}
    chosen = lowered.compile(compiler_options=WITHOUT_CONVOLUTIONS).as_text()
    assert library_calls(chosen) == ["dot", "reduce"]
    assert chosen == lowered.compile().as_text()


def test_groups_and_float64_keep_the_compilers_choice():
    in_groups = jax.jit(lambda x, kernel: convolved(x, kernel, 2)).lower(IMAGES, KERNEL[:, :, :16])
    assert choose_options(in_groups, "cpu") == {}
    with jax.enable_x64(True):
        wide = jax.jit(convolved).lower(IMAGES.astype(np.float64), KERNEL.astype(np.float64))
    assert choose_options(wide, "cpu") == {}


def test_one_core_and_a_users_own_flag_keep_the_compilers_choice(monkeypatch: pytest.MonkeyPatch):
    lowered = jax.jit(convolved).lower(IMAGES, KERNEL)
    assert choose_options(lowered, "cpu") == WITHOUT_CONVOLUTIONS
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    assert choose_options(lowered, "cpu") == {}
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(compiler_options, "usable_cores", lambda: 1)
    assert choose_options(lowered, "cpu") == {}


def test_loops_stay_on_a_card_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    assert keep_loops_on_the_card("cpu") == keep_loops_on_the_card("tpu") == {}
    assert keep_loops_on_the_card("gpu") == LOOPS_ON_THE_CARD
    # The compiler knows every name of it: an unknown one is refused on a CPU, too.
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=LOOPS_ON_THE_CARD)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert keep_loops_on_the_card("gpu") == {}


def test_training_says_with_what_options_it_was_compiled(tmp_path: Path):
    def update(kernel, batch, key):
        loss = classify(batch["x"], kernel).mean()
        return kernel * 0.5, {"loss": loss}

    plan = Plan.for_updates(2, log_every=2)
    program = Program(update, Resident({"x": IMAGES}, batch_size=2), 2, jax.random.key(0))
    with Run(tmp_path / "run", {}, command="test", environment={}) as run:
        drive(program, plan, jnp.asarray(KERNEL), run)
    (compiled,) = [event for event in read_events(run.path) if event["event"] == "compile"]
    assert compiled["compiler_options"] == WITHOUT_CONVOLUTIONS
    assert "convolution" not in library_calls(program.compiled.as_text())


def test_an_evaluation_has_them_too():
    evaluation = Evaluation(
        lambda kernel, batch: {"logits": classify(batch["x"], kernel)[None] + batch["x"][:, 0, 0]},
        {"x": IMAGES},
        4,
    )
    evaluation.compile(KERNEL)
    assert "convolution" not in library_calls(evaluation.compiled.as_text())
