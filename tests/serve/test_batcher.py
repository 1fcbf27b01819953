"""Batching semantics, by a fake runner of one second a batch and a fake clock."""

import asyncio
import gc
import weakref
from contextlib import suppress

import numpy as np
import pytest
from fake_clock import run
from hypothesis import given
from hypothesis import strategies as st

from hotloop.serve.batcher import DOUBT, Batcher, Ran, describe_not_finite, join_rows
from hotloop.serve.refusal import BadRequest, DeviceFailure, QueueFull, Unready

LADDER = (1, 2, 4, 8, 16, 32, 64)


class FakeRunner:
    """Doubles every number in `seconds`; keeps when each batch began, its rows, its rung, and how many requests."""

    def __init__(self, seconds=1.0, fails=()):
        self.seconds, self.fails, self.batches, self.given = seconds, fails, [], []

    async def __call__(self, parts, rung):
        rows = sum(len(part["x"]) for part in parts)
        self.given.append([number for part in parts for number in part["x"].ravel().tolist()])
        self.batches.append((asyncio.get_running_loop().time(), rows, rung, len(parts)))
        await asyncio.sleep(self.seconds)
        if len(self.batches) in self.fails:
            raise RuntimeError("out of memory")
        return Ran({"y": join_rows(parts, rung)["x"] * 2}, 0.0, self.seconds)


def make_batcher(runner, ladder, **settings):
    return Batcher(runner, ladder, clock=asyncio.get_running_loop().time, **settings)


def numbers(count, first=0):
    return {"x": np.arange(first, first + count, dtype=np.float32)[:, None]}


async def ask(batcher, inputs, after=0.0):
    """The answer, and when it came."""
    await asyncio.sleep(after)
    with batcher.enter() as ticket:
        answer = await ticket.answer(inputs)
    np.testing.assert_array_equal(answer.outputs["y"], inputs["x"] * 2)
    return answer, asyncio.get_running_loop().time()


def test_rows_are_taken_in_order_and_large_requests_are_cut():
    async def main():
        runner = FakeRunner()
        batcher = make_batcher(runner, LADDER)
        busy = asyncio.create_task(ask(batcher, numbers(1)))
        others = [ask(batcher, numbers(101, 1000), 0.1), ask(batcher, numbers(39, 5000), 0.2)]
        (_, (_, first), (_, second)) = await asyncio.gather(busy, *others)
        return runner.batches, first, second

    batches, first, second = run(main())
    assert [rows for _, rows, _, _ in batches] == [1, 64, 64, 12]
    assert [rung for _, _, rung, _ in batches] == [1, 64, 64, 16]
    assert (first, second) == (4.0, 2.0)  # who fits in a batch is in the first one


@pytest.mark.parametrize(
    ("seconds", "rungs", "last"),
    [
        ({rung: rung / 64 for rung in LADDER}, [1, 32, 8], 41 / 64),  # filled up it would be 65 / 64
        (dict.fromkeys(LADDER, 1.0), [1, 64], 2.0),
        ({1: 0.1, 8: 0.4, 64: 1.0}, [1, 64], 1.1),  # nobody knows how long 32 take
    ],
    ids=["in proportion", "the same for any", "not known"],
)
def test_rows_between_two_rungs_are_two_batches_where_that_takes_no_longer(seconds, rungs, last):
    class Timed(FakeRunner):
        async def __call__(self, parts, rung):
            self.seconds = seconds[rung]
            return await super().__call__(parts, rung)

    async def main():
        runner = Timed()
        batcher = make_batcher(runner, LADDER, seconds=seconds)
        asked = [ask(batcher, numbers(1, each), 0.001 if each else 0.0) for each in range(41)]
        found = await asyncio.gather(*asked)
        return [rung for _, _, rung, _ in runner.batches], max(came for _, came in found)

    found, came = run(main())
    assert found == rungs
    assert came == pytest.approx(last)


def test_a_time_that_was_wrong_at_first_is_found_out():
    async def main():
        runner = FakeRunner()  # any batch takes a second, and 4 rows were believed to take ten
        batcher = make_batcher(runner, (1, 2, 4), seconds={1: 1.0, 2: 1.0, 4: 10.0})
        for _ in range(40 * DOUBT):
            await ask(batcher, numbers(3))
        return [rung for _, _, rung, _ in runner.batches]

    rungs = run(main())
    assert rungs[: 2 * DOUBT] == [2, 1] * (DOUBT - 1) + [4, 2] and rungs[-DOUBT:] == [4] * DOUBT


def test_a_huge_request_holds_up_a_small_one_by_the_batch_that_runs():
    async def main():
        runner = FakeRunner()
        batcher = make_batcher(runner, LADDER)
        huge = asyncio.create_task(ask(batcher, numbers(640)))
        _, small = await ask(batcher, numbers(1), after=0.5)
        await huge
        return small, [rows for _, rows, _, _ in runner.batches]

    small, batches = run(main())
    assert small == 2.0  # and not after the ten of the huge one
    assert batches == [64] * 10 + [1]


def test_two_calls_run_at_once_where_as_many_rows_wait_as_run():
    async def main():
        runner = FakeRunner()
        batcher = make_batcher(runner, LADDER, calls=2)
        first = asyncio.create_task(ask(batcher, numbers(8)))
        others = [
            ask(batcher, numbers(7), 0.1),
            ask(batcher, numbers(1), 0.2),
            ask(batcher, numbers(30), 0.3),
        ]
        found = [at for _, at in await asyncio.gather(first, *others)]
        return runner.batches, found

    batches, found = run(main())
    # 7 rows alone wait, with one more they run beside the 8; there is no third call until one of both has ended.
    assert [(at, rows) for at, rows, *_ in batches] == [(0.0, 8), (pytest.approx(0.2), 8), (1.0, 30)]
    assert found == pytest.approx([1.0, 1.2, 1.2, 2.0])


def test_a_request_in_two_calls_has_its_rows_in_order_whichever_ends_first():
    class Slower(FakeRunner):
        async def __call__(self, parts, rung):
            self.seconds = 3.0 if not self.batches else 1.0
            return await super().__call__(parts, rung)

    async def main():
        runner = Slower()
        _, at = await ask(make_batcher(runner, (1, 2, 4), calls=2), numbers(8))  # compares the numbers
        return at, [rows for _, rows, *_ in runner.batches]

    assert run(main()) == (3.0, [4, 4])


def test_times_of_batches_that_ran_beside_another_are_not_taken_for_their_own():
    async def main():
        batcher = make_batcher(FakeRunner(seconds=5.0), (1, 2), calls=2, seconds={1: 1.0, 2: 1.5})
        await ask(batcher, numbers(4))
        beside = dict(batcher._seconds)
        await ask(batcher, numbers(2))
        return beside, batcher._seconds[2]

    beside, alone = run(main())
    assert beside == {1: 1.0, 2: 1.5} and alone > 1.5


def test_a_lone_request_does_not_wait_for_company():
    async def main():
        runner = FakeRunner()
        _, at = await ask(make_batcher(runner, LADDER), numbers(3), after=5.0)
        return runner.batches, at

    batches, at = run(main())
    assert batches == [(5.0, 3, 4, 1)] and at == 6.0


def test_with_a_delay_the_first_one_waits_so_long_and_no_longer():
    async def main():
        runner = FakeRunner()
        batcher = make_batcher(runner, LADDER, delay=0.5)
        await asyncio.gather(*(ask(batcher, numbers(1), after) for after in (0.0, 0.3, 0.49, 0.6)))
        return runner.batches

    assert run(main()) == [(0.5, 3, 4, 3), (1.5, 1, 1, 1)]


def test_a_full_rung_ends_the_delay():
    async def main():
        runner = FakeRunner()
        batcher = make_batcher(runner, (1, 2, 4), delay=10.0)
        await asyncio.gather(*(ask(batcher, numbers(2), after) for after in (0.0, 1.0)))
        return runner.batches

    assert run(main()) == [(1.0, 4, 4, 2)]


def test_the_rest_of_a_cut_request_waits_for_company_no_longer_than_from_its_own_arrival():
    async def main():
        runner = FakeRunner()
        batcher = make_batcher(runner, (4,), delay=10.0)
        await asyncio.gather(*(ask(batcher, numbers(rows), at) for rows, at in ((4, 0), (5, 0.1), (1, 0.9))))
        return [(round(at, 6), rows) for at, rows, _, _ in runner.batches]

    assert run(main()) == [(0.0, 4), (1.0, 4), (10.1, 2)]


def test_a_request_that_is_cut_though_it_would_fit_goes_on_with_the_next_batch():
    async def main():
        batcher = make_batcher(FakeRunner(), (8,))
        arrivals = [(8, 0.0), (5, 0.1), (5, 0.2), *((8, 0.3 + each / 100) for each in range(5))]
        answers = await asyncio.gather(*(ask(batcher, numbers(rows), at) for rows, at in arrivals))
        return [at for _, at in answers]

    assert run(main()) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_large_request_goes_on_while_small_ones_fill_every_batch():
    """It has half of every second batch at least: 8 of 16 rows, where more small ones come than can be computed."""

    async def main():
        batcher = make_batcher(FakeRunner(), (8,), queue=1000)
        small = [asyncio.create_task(ask(batcher, numbers(3), 0.1 * each)) for each in range(200)]
        _, at = await ask(batcher, numbers(24), after=0.55)
        waiting = batcher.waiting
        await asyncio.gather(*small)
        return at, waiting

    at, waiting = run(main())
    assert at <= 13.0 and waiting > 50


ARRIVALS = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 20)), min_size=1, max_size=20)


@given(
    ARRIVALS, st.sampled_from([0.0, 0.25, 1.0, 2.0]), st.sampled_from([(1,), (4, 8), (7,)]), st.integers(1, 2)
)
def test_nobody_waits_longer_than_the_delay_plus_one_batch_unless_others_fill_it(
    arrivals, delay, ladder, calls
):
    """The promise at the top of the batcher; rows before it are counted here, from what came and what has run."""
    top = ladder[-1]

    async def main():
        runner = FakeRunner(seconds=1.0)
        batcher = make_batcher(runner, ladder, delay=delay, calls=calls)
        asking = [ask(batcher, numbers(rows, 100 * each), at) for each, (at, rows) in enumerate(arrivals)]
        answers = await asyncio.gather(*asking)
        return [answer for answer, _ in answers], runner

    answers, runner = run(main())
    began = {}  # of each row
    for (at, *_), inside in zip(runner.batches, runner.given, strict=True):
        began |= dict.fromkeys(inside, at)
    assert sum(map(len, runner.given)) == len(began) == sum(rows for _, rows in arrivals)
    ends = [at + 1.0 for at, *_ in runner.batches]
    larger = any(rows > top for _, rows in arrivals)
    for number, ((at, rows), answer) in enumerate(zip(arrivals, answers, strict=True)):
        before = sum(
            began[100 * other + row] >= at
            for other, (came, own) in enumerate(arrivals)
            for row in range(own if own <= top and came <= at and other != number else 0)
        )
        if rows <= top and before < (top // 2 if larger else top):
            free = max((end for end in ends if end - 1.0 <= at < end), default=at)
            assert at + answer.queue_seconds <= max(free, at + delay) + 1e-5
            assert answer.queue_seconds <= delay + 1 + 1e-5


def test_what_is_cancelled_takes_no_row_of_a_later_batch():
    async def main():
        runner = FakeRunner()
        batcher = make_batcher(runner, LADDER, queue=2)
        busy = asyncio.create_task(ask(batcher, numbers(1)))
        given_up = asyncio.create_task(ask(batcher, numbers(50), 0.1))
        stays = asyncio.create_task(ask(batcher, numbers(2), 0.2))
        await asyncio.sleep(0.5)
        assert batcher.waiting == 2
        given_up.cancel()
        await asyncio.sleep(0)
        assert batcher.waiting == 1
        await asyncio.gather(busy, stays)
        assert (batcher.waiting, batcher.held) == (0, 0)
        return runner.batches

    assert [rows for _, rows, _, _ in run(main())] == [1, 2]


def test_one_too_many_is_told_when_to_come_back_and_harms_nobody():
    async def main():
        batcher = make_batcher(FakeRunner(seconds=30.0), (1, 2), queue=2)
        first = asyncio.create_task(ask(batcher, numbers(2)))
        await first  # one batch is timed now
        running = asyncio.create_task(ask(batcher, numbers(2)))
        waiting = [asyncio.create_task(ask(batcher, numbers(2), 0.1)) for _ in range(2)]
        await asyncio.sleep(1.0)
        with pytest.raises(QueueFull, match="2 requests wait already") as refused:
            batcher.enter()
        await asyncio.gather(running, *waiting)
        return refused.value

    refused = run(main())
    assert refused.status == 429
    assert refused.headers == {"Retry-After": "60"}  # two batches of 30 s, the mean so far


def test_the_time_to_come_back_counts_batches_that_run_two_at_once():
    async def main():
        batcher = make_batcher(FakeRunner(seconds=10.0), (4,), calls=2, queue=8)
        asking = [asyncio.create_task(ask(batcher, numbers(4))) for _ in range(4)]
        await asyncio.sleep(10.5)  # two have ended, and two run
        asking += [asyncio.create_task(ask(batcher, numbers(4))) for _ in range(8)]
        await asyncio.sleep(0.1)
        told = batcher.retry_after()
        await asyncio.gather(*asking)
        return told, asyncio.get_running_loop().time()

    assert run(main()) == (40, 60.0)


def test_an_answer_that_nobody_has_any_more_is_not_kept_until_the_next_batch():
    async def main():
        batcher = make_batcher(FakeRunner(), (1, 2, 4), calls=2)
        answer, _ = await ask(batcher, numbers(8))
        alive = weakref.ref(answer.outputs["y"])
        del answer
        await asyncio.sleep(0.1)
        return alive()

    assert run(main()) is None


def test_a_failed_call_fails_its_batch_alone():
    async def main():
        batcher = make_batcher(FakeRunner(fails=(2,)), (1, 2))
        tasks = [asyncio.create_task(ask(batcher, numbers(1), after)) for after in (0.0, 0.1, 0.2, 0.3)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third, last = run(main())
    assert first[1] == 1.0 and last[1] == 3.0
    for failed in (second, third):
        assert isinstance(failed, DeviceFailure) and failed.status == 500
        assert str(failed) == "the model failed: out of memory"


def test_a_cut_request_whose_first_part_fails_is_answered_once_and_its_rest_dropped():
    async def main():
        runner = FakeRunner(fails=(1,))
        batcher = make_batcher(runner, (1, 2))
        results = await asyncio.gather(
            ask(batcher, numbers(3)), ask(batcher, numbers(1), 0.1), return_exceptions=True
        )
        return results, runner.batches

    (failed, other), batches = run(main())
    assert isinstance(failed, DeviceFailure)
    assert other[1] == 2.0 and [rows for _, rows, _, _ in batches] == [2, 1]


def test_a_batch_that_cannot_be_counted_or_delivered_fails_alone():
    async def main():
        records = []

        def count(record):
            records.append(record)
            if len(records) == 1:
                raise ValueError("no such label")

        batcher = make_batcher(FakeRunner(), (1,), on_batch=count)
        first, second = ask(batcher, numbers(1)), ask(batcher, numbers(1), 0.1)
        return await asyncio.gather(first, second, return_exceptions=True)

    first, second = run(main())
    assert isinstance(first, DeviceFailure) and second[1] == 2.0


def test_a_row_that_is_not_finite_is_a_fault_of_its_own_request():
    async def main():
        batcher = make_batcher(FakeRunner(), LADDER)
        good, bad = numbers(3), numbers(3)
        bad["x"][1] = np.nan
        busy = asyncio.create_task(ask(batcher, numbers(1)))
        await asyncio.sleep(0)
        results = await asyncio.gather(ask(batcher, good), ask(batcher, bad), return_exceptions=True)
        await busy
        return results

    good, bad = run(main())
    assert good[1] == 2.0
    assert isinstance(bad, BadRequest) and str(bad) == "y: row 1 is not finite"


def test_a_row_of_a_cut_request_goes_by_its_own_number_and_the_rest_is_not_computed():
    async def main():
        runner = FakeRunner()
        given = numbers(7)
        given["x"][3] = np.inf
        with pytest.raises(BadRequest, match="y: row 3 is not finite"):
            await ask(make_batcher(runner, (2,)), given)
        await asyncio.sleep(5.0)
        return [rows for _, rows, _, _ in runner.batches]

    assert run(main()) == [2, 2]


def test_a_failed_batch_leaves_no_array_for_the_collector():
    """Where many large ones fail, memory would grow until it comes round."""
    alive = []

    async def fail(parts, rung):
        joined = join_rows(parts, rung)["x"]
        alive.append(weakref.ref(joined))
        raise DeviceFailure("out of memory")

    async def main():
        batcher = make_batcher(fail, (4,))
        with suppress(DeviceFailure):
            await ask(batcher, numbers(3))
        await asyncio.sleep(1.0)
        return alive[0]()

    gc.disable()
    try:
        assert run(main()) is None
    finally:
        gc.enable()


def test_draining_answers_all_who_are_in_and_lets_nobody_else_in():
    async def main():
        batcher = make_batcher(FakeRunner(), (1,))
        inside = [asyncio.create_task(ask(batcher, numbers(1))) for _ in range(3)]
        await asyncio.sleep(0.5)
        draining = asyncio.create_task(batcher.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unready):
            batcher.enter()
        await draining
        assert asyncio.get_running_loop().time() == 3.0
        return await asyncio.gather(*inside)

    assert [at for _, at in run(main())] == [1.0, 2.0, 3.0]


def test_draining_waits_for_those_who_are_still_reading():
    async def main():
        batcher = make_batcher(FakeRunner(), (1,))

        async def slow():
            with batcher.enter() as ticket:
                await asyncio.sleep(5.0)  # its body is being read
                return await ticket.answer(numbers(1))

        reading = asyncio.create_task(slow())
        await asyncio.sleep(1.0)
        await batcher.drain()
        return asyncio.get_running_loop().time(), (await reading).outputs

    at, outputs = run(main())
    assert at == 6.0 and outputs["y"].shape == (1, 1)


def test_records_count_rows_padding_and_the_wait_of_each_request():
    records = []

    async def main():
        batcher = make_batcher(FakeRunner(), (2, 4), on_batch=records.append)
        await asyncio.gather(ask(batcher, numbers(1)), ask(batcher, numbers(5), 0.25))

    run(main())
    assert [(r.rows, r.rung, r.queue_seconds) for r in records] == [
        (1, 2, (0.0,)),
        (4, 4, (0.75,)),
        (1, 2, ()),
    ]


def test_joined_rows_are_aligned_and_filled_up_with_the_last_one():
    odd = np.frombuffer(b"\0" + np.arange(3, dtype=np.float32).tobytes(), np.float32, offset=1)
    assert not odd.flags.aligned
    assert join_rows([{"x": odd}], 3)["x"].flags.aligned
    joined = join_rows([{"x": odd}, {"x": odd[:1]}], 8)["x"]
    assert joined.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert join_rows([{"x": odd}], 4)["x"].tolist() == [0, 1, 2, 2]


def test_whole_numbers_are_always_finite():
    assert (
        describe_not_finite({"x": np.array([1, 2]), "y": np.array([[1.0, np.inf]])})
        == "y: row 0 is not finite"
    )
    assert describe_not_finite({"x": np.array([1, 2]), "z": np.zeros((0, 3), np.float16)}) is None
