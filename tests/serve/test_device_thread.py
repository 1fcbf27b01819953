"""The device thread of a real, small model: ready only when every rung answers rightly, and no compiling after that."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
from small_models import small, write_uncompared

from hotloop.errors import ModelError
from hotloop.serve.artefact import Artefact, find_disagreement
from hotloop.serve.batcher import Batcher
from hotloop.serve.figures import Figures
from hotloop.serve.models import Models
from hotloop.serve.refusal import DeviceFailure
from hotloop.serve.runner import DaemonThreads, DeviceThread, repeat_rows


@pytest.fixture
def artefact(tmp_path):
    return Artefact.open(write_uncompared(tmp_path, small())[0])


def rows(count):
    return {"x": np.random.default_rng(count).normal(size=(count, 4)).astype(np.float32)}


def test_every_rung_is_compiled_before_it_is_ready_and_none_after(artefact):
    late = []

    async def main():
        thread = DeviceThread(artefact, late.append)
        await thread.load()
        batcher = Batcher(thread, artefact.ladder)
        answers = []
        for count in (1, 2, 3, 4, 11):
            with batcher.enter() as ticket:
                answers.append((await ticket.answer(rows(count))).outputs)
        before = list(late)
        await thread([rows(3)], 3)  # no rung
        thread.close()
        return answers, before

    answers, before = asyncio.run(main())
    assert before == [] and late == [3]
    call = artefact.load()
    for count, found in zip((1, 2, 3, 4, 11), answers, strict=True):
        wanted = call(rows(count))
        assert find_disagreement(wanted, found, 1e-5) is None


def test_a_model_that_answers_its_examples_wrongly_is_never_ready(artefact, monkeypatch):
    inputs, answers = artefact.examples()
    wrong = {**answers, "shares": answers["shares"] + 1e-3}
    monkeypatch.setattr(Artefact, "examples", lambda self: (inputs, wrong))
    with pytest.raises(ModelError, match="a batch of 1 answers its examples wrongly: shares"):
        asyncio.run(DeviceThread(artefact).load())


def test_a_rung_that_fails_is_named(artefact):
    impossible = replace(artefact, ladder=(1, 0))
    with pytest.raises(ModelError, match=r"a batch of 0 fails: .* `hotloop export --refresh"):
        asyncio.run(DeviceThread(impossible).load())


def test_without_a_cache_every_rung_is_the_compilers(artefact):
    import jax

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        took = asyncio.run(DeviceThread(artefact).load())
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
    assert took.compiled >= len(artefact.ladder)


def test_a_load_that_is_given_up_ends_after_the_rung_that_it_is_at(artefact, monkeypatch):
    """A process that is asked to end while it loads would wait for every rung's compilation."""
    _, answers = artefact.examples()
    thread, called = DeviceThread(artefact), []

    def call(inputs):
        called.append(len(inputs["x"]))
        thread.close()
        return repeat_rows(answers, len(inputs["x"]))

    monkeypatch.setattr(Artefact, "load", lambda self: call)
    with pytest.raises(ModelError, match="loading was given up"):
        asyncio.run(thread.load())
    assert called == [1]


def test_what_is_compiled_after_ready_is_said_and_counted(artefact):
    said = []

    async def main():
        models = Models(Figures(), say=said.append)
        version, _ = await models.load(artefact.folder)
        models.put(version)
        await version.batcher._run([rows(3)], 3)  # no rung
        await models.end()
        return models.figures.as_text()

    assert b'hotloop_compilations_after_ready{model="small",version="1"} 1.0' in asyncio.run(main())
    assert said == ["ALARM: small version 1 compiled for 3 rows after it was ready"]


def test_a_call_that_raises_is_one_line(artefact):
    async def main():
        thread = DeviceThread(artefact, on_failure=said.append)
        await thread.load()
        try:
            await thread([{"x": np.zeros((1, 5), np.float32)}], 1)
        finally:
            thread.close()
            assert thread.has_ended(5.0)

    said = []
    with pytest.raises(DeviceFailure, match="the device call failed: ") as failed:
        asyncio.run(main())
    assert "\n" not in str(failed.value) and said == [str(failed.value)]


def test_a_call_that_hangs_does_not_keep_the_process():
    """A device thread is a daemon; whoever ends it can ask whether it has ended."""
    thread, hangs = DaemonThreads("hangs", 2), threading.Event()
    called = thread.submit(hangs.wait)
    thread.shutdown(wait=False)
    assert all(each.daemon for each in thread._threads) and not thread.has_ended(0.01)
    hangs.set()
    assert called.result(5.0) and thread.has_ended(5.0)


def test_rows_are_repeated_in_order():
    assert repeat_rows({"x": np.array([[1], [2], [3]])}, 5)["x"].ravel().tolist() == [1, 2, 3, 1, 2]
    assert repeat_rows({"x": np.array([[1], [2], [3]])}, 2)["x"].ravel().tolist() == [1, 2]
