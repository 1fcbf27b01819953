"""Several processes train as one: the same numbers, one word, one stop, one checkpoint, one line for an error."""

import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import toy_program
import two_processes as together
import weight_toys

from hotloop.engine import processes
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.launcher import FailedProcess
from hotloop.engine.process_group import PeerFailed
from hotloop.engine.run import read_events

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


def train_here(folder: Path, **options: Any) -> Path:
    toy_program.train(toy_program.Config(run=str(folder), **options))
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of one process on one device that every other must equal."""
    return train_here(tmp_path_factory.mktemp("alone") / "run")


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Path:
    """The same in one process on four devices."""
    return train_here(tmp_path_factory.mktemp("four") / "run", replicas=4)


def differences(one: Path, other: Path) -> tuple[float, float]:
    """The largest of the losses, and of all numbers of the state; all are finite, and not all zero."""
    found = []
    for read in (together.losses, together.weights):
        sides = read(one), read(other)
        assert all(np.isfinite(side).all() and np.any(side) for side in sides)  # `max` passes over NaN
        found.append(float(np.abs(sides[0] - sides[1]).max()))
    return found[0], found[1]


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory) -> Path:
    """The same in two processes of two devices, by the launcher."""
    folder = tmp_path_factory.mktemp("pairs") / "run"
    together.launch("--run", str(folder), "--replicas", "4", "--streamed")
    return folder


def test_two_processes_of_two_devices_equal_one_of_four_and_one_device(two_by_two, four, alone):
    assert max(differences(two_by_two, four)) < 1e-6
    assert max(differences(two_by_two, alone)) < 1e-6
    assert len(together.losses(two_by_two)) == 4
    # One writes: each record and each checkpoint is there once, and the other's lines are in its file.
    events = [record["event"] for record in read_events(two_by_two)]
    assert (events.count("start"), events.count("end"), events.count("checkpoint")) == (1, 1, 2)
    assert "this is process 1" in (two_by_two / "processes" / "1.log").read_text()


@pytest.mark.slow
def test_processes_wait_for_each_other_where_a_thread_compiles_what_blocks_leave_over(tmp_path):
    """Calls of 7 in blocks of 2: whoever has compiled the rest's program first must not call it alone."""
    numbers = {"updates": 14, "log_every": 7, "checkpoint_every": 14}
    words = [word for name, value in numbers.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    together.launch("--run", str(tmp_path / "two"), "--replicas", "4", "--block", "2", *words)
    alone = train_here(tmp_path / "alone", **numbers)
    assert max(differences(tmp_path / "two", alone)) < 1e-6
    compiled = [record for record in read_events(tmp_path / "two") if record["event"] == "compile"]
    assert [(each["updates_per_call"], each.get("ahead")) for each in compiled] == [(2, None), (1, True)]


@pytest.mark.parametrize("change", [{"label": 3}, {"moved": 1e-3}])
def test_one_label_or_weight_that_differs_is_seen(change, two_by_two, tmp_path):
    changed = train_here(tmp_path / "run", **change)
    assert max(differences(two_by_two, changed)) > 1e-5


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Where the processes of `checks` save."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def checks(saved) -> dict[str, Any]:
    return together.check(saved)


def test_the_first_process_has_the_word_for_text_and_numbers_of_any_size(checks):
    said = {"text": "naïve\n", "large": 2**40, "zero": 0, "none": None, "list": [1, 2.5, "a"]}
    assert checks["words"] == [[said, True, 0], [said, True, 1]]


def test_processes_that_do_not_do_the_same_are_told(checks):
    said = "the processes do not do the same: one is at "
    assert checks["disagreement"][0] == [f"{said}place 0, another at place 1"]
    by_name, by_place = checks["disagreement"][1]
    assert by_name == checks["disagreement"][0][0]
    where = "ask_for_one of process_checks.py", "disagreement of process_checks.py"
    assert by_place == f"{said}{where[0]}, another at {where[1]}"


def test_sums_of_4_mib_chunks_are_right(checks):
    assert checks["sums"] == [True, True]


def test_keys_and_counters_go_to_all_devices(checks):
    assert checks["keys"] == [[True, 7, [0, 1, 2]]] * 2


def test_a_weight_moves_as_by_hand_in_several_processes(checks):
    for found in checks["toys"]:
        for name, toy in weight_toys.TOYS.items():
            controls = [other.step(data) for other, data in toy.changed]
            assert found[name] == [pytest.approx([toy.result, *controls], abs=1e-6)] * 2
            assert f"{toy.result:.7}" == name and min(abs(each - toy.result) for each in controls) > 1e-2


def test_stages_that_lie_in_several_processes_have_the_gradients_of_the_undivided_model(checks):
    assert len(checks["staged_gradients"]) == 2
    for differences in checks["staged_gradients"]:
        for same, with_another_label, with_a_moved_weight in differences:
            assert same < 1e-6 and with_another_label > 1e-3 and with_a_moved_weight > 1e-3


def test_each_sample_is_read_by_one_process_once_a_pass(checks):
    read = [numbers for numbers, alike in checks["rows"] if alike]
    assert len(read) == 2
    for first in (0, 12):
        assert sorted(read[0][first : first + 12] + read[1][first : first + 12]) == list(range(24))


def test_an_input_that_ends_in_one_process_ends_for_all(checks):
    assert checks["end_of_input"] == [1, 1]


def test_a_step_has_the_same_leaves_whichever_stages_and_processes_wrote_it(checks, saved):
    assert checks["stages"] == [[9, True], [9, True]]
    tree = weight_toys.stage_tree()
    like = {"params": jax.tree.map(np.zeros_like, tree), "update": 0}
    for number in range(3):
        restored = Checkpoints(saved / str(number)).restore(like)
        assert restored.state["update"] == 3 and restored.position == {"n": number}
        jax.tree.map(np.testing.assert_array_equal, restored.state["params"], tree)


def test_processes_with_steps_of_their_own_go_on_from_the_newest_that_all_have(checks, saved):
    found, other = checks["own_steps"]
    assert found == other
    whole, best, none_common, none_asked, *rest = found
    damage = f"process 1: {saved}/own/rank1/00000008/manifest.json cannot be read"
    assert whole[:4] == [True, [2, 4, 6], 6, [6.0] * 3]
    assert whole[4][0] == "skipped step 10: process 1 has none" and damage in whole[4][1]
    assert best == [6, {"score": 2}]  # by process 0's figures: by process 1's it would be step 2
    said = "/own: no checkpoint that every process has: skipped step 10: process 1 has none; skipped step 8: "
    assert none_common.startswith(said) and none_common.endswith("; and 2 more")
    assert none_asked == "/own: no step 4 that every process has: skipped step 4: process 1 has none"
    saved_by_one = (
        "/whole: step 3 was saved for all processes, and now each has its own: copy it into rank0 to"
    )
    assert rest[:2] == [True, False] and rest[2].startswith(saved_by_one)


def test_all_processes_wait_after_a_compilation_and_after_no_other_call(checks):
    assert checks["compilations"] == [[[["compiled"], True], [[], True]] * 2] * 2


def test_a_stop_of_one_process_stops_all_after_the_same_update_saved_once(tmp_path, signals_heard):
    folder = tmp_path / "run"
    words = ("--run", str(folder), "--replicas", "2", "--updates", "60", "--checkpoint-every", "60")
    with together.start(*words, "--streamed", "--seconds", "0.05", devices=1) as started:
        events = folder / "events.jsonl"
        started.wait_for(lambda: events.exists() and '"update": 5' in events.read_text())
        started.children[1].send_signal(signal.SIGTERM)
        ended = started.finish()
    assert [each.status for each in ended] == [143, 143]
    (step,) = Checkpoints(folder / "checkpoints").steps()
    assert 5 <= step < 60 and f"interrupted after update {step} of 60, saved" in ended[0].errors
    assert f"interrupted after update {step} of 60" in (folder / "processes" / "1.log").read_text()
    # And the run goes on from there, alone, to where it would have been.
    train_here(folder, resume=True, updates=60, checkpoint_every=60)
    undisturbed = train_here(tmp_path / "undisturbed", updates=60, checkpoint_every=60)
    assert np.abs(together.weights(folder) - together.weights(undisturbed)).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["loading", "compiling", "evaluation"])
def test_a_stop_at_any_time_ends_all(phase, tmp_path, signals_heard):
    folder, notes = tmp_path / "run", tmp_path / "notes"
    notes.mkdir()
    words = ("--run", str(folder), "--replicas", "2", "--loading", "3", "--evaluations", "400")
    with together.start(*words, "--seconds", "0.05", devices=1, HOTLOOP_NOTES=str(notes)) as started:
        events, note = folder / "events.jsonl", notes / "1.json"

        def is_there() -> bool:
            if phase == "evaluation":
                return events.exists() and events.read_text().count('"evaluation"') > 5
            return note.exists() and f'"phase": "{phase}"' in note.read_text()

        started.wait_for(is_there)
        began = time.monotonic()
        started.children[1].send_signal(signal.SIGTERM)
        ended = started.finish()
    assert [each.status for each in ended] == [143, 143], ended
    assert time.monotonic() - began < 15
    if phase == "loading":
        assert not folder.exists()
    elif phase == "evaluation":
        assert Checkpoints(folder / "checkpoints").steps() == [2, 4]
        assert [*read_events(folder)][-1]["status"] == "interrupted"
        train_here(folder, resume=True)
        assert [*read_events(folder)][-1]["status"] == "finished"


def test_an_error_in_one_process_is_one_line_and_the_end_of_all(tmp_path, capfd):
    folder = tmp_path / "run"
    words = ("--run", str(folder), "--replicas", "2", "--streamed", "--failing", "1")
    with pytest.raises(FailedProcess) as failed:
        together.launch(*words, devices=1)
    lines = [line for line in capfd.readouterr().err.splitlines() if "broken" in line]
    assert lines == ["hotloop: error: process 1: image 17 is broken"] and failed.value.exit_status == 2
    assert [*read_events(folder)][-1]["error"] == "process 1: image 17 is broken"


def test_a_failure_that_ends_the_block_closes_in_the_other_processes_words():
    failure, closed = PeerFailed(1, "image 17 is broken", 2), []
    with pytest.raises(PeerFailed), processes.close_on_failure(closed.append):
        raise failure
    assert closed == [failure]


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_refused_unless_each_saves_in_its_own(tmp_path):
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    words = ("--run", "run", "--replicas", "2")
    with together.start(*words, devices=1, folders=folders) as started:
        ended = started.finish()
    assert [each.status for each in ended] == [2, 2]
    assert (
        "run is not shared: process 1 on" in ended[0].errors and "ckpt_all_instances=True" in ended[0].errors
    )
    assert not (folders[0] / "run" / "checkpoints").exists()
    with together.start("--run", "own", *words[2:], "--each-saves", devices=1, folders=folders) as started:
        ended = started.finish()
    assert [each.status for each in ended] == [0, 0], ended
    saved = [folder / "own" / "checkpoints" / f"rank{rank}" for rank, folder in enumerate(folders)]
    states = [jax.tree.leaves(together.restore(folder, 4).state) for folder in saved]
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isfinite(states[0][0]).all() and not (folders[1] / "own" / "events.jsonl").exists()


@pytest.mark.slow
def test_processes_that_save_on_their_own_go_on_together_or_not_at_all(tmp_path):
    folder = tmp_path / "run"
    words = ("--run", str(folder), "--replicas", "2", "--each-saves")
    rank0, rank1 = (folder / "checkpoints" / f"rank{rank}" for rank in range(2))
    together.launch(*words, devices=1)
    shutil.rmtree(rank1 / "00000004")  # as a kill between the two saves leaves them
    together.launch(*words, "--resume", "--updates", "6", devices=1)
    assert [each["update"] for each in read_events(folder) if each["event"] == "resume"] == [2]
    undisturbed = train_here(tmp_path / "undisturbed", updates=6)
    wanted = together.restore(undisturbed / "checkpoints", 6).state
    for rank in (rank0, rank1):
        state = together.restore(rank, 6).state
        for one, right in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, right, rtol=0, atol=1e-6)
    assert all(np.any(leaf) and np.isfinite(leaf).all() for leaf in jax.tree.leaves(wanted["params"]))
    for step in (rank0 / "00000006", rank1 / "00000004", rank1 / "00000002"):
        shutil.rmtree(step)
    with together.start(*words, "--resume", "--updates", "8", devices=1) as started:
        ended = started.finish()
    said = [line for line in ended[0].errors.splitlines() if line.startswith("hotloop: error:")]
    assert [each.status for each in ended] == [2, 2] and len(said) == 1
    assert "checkpoints: no checkpoint that every process has: skipped step 6: process 0 has none" in said[0]


def test_other_options_or_a_taken_port_or_a_process_that_never_comes_are_one_line(tmp_path):
    words = ("--run", str(tmp_path / "run"))
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with (
            together.start(*words, own={1: ["--updates", "5"]}) as unlike,
            together.start(*words, missing=1, HOTLOOP_MEETING="6") as early,
            together.start(*words, missing=0, HOTLOOP_MEETING="6") as late,
            together.start(*words, port=taken.getsockname()[1], missing=1) as refused,
        ):
            ended = [*unlike.finish(), *early.finish(), *late.finish(), *refused.finish()]
    assert [each.status for each in ended] == [2] * 5, ended
    said = [each.errors.strip() for each in ended]
    assert said[0].endswith("process 1 has other options than process 0: --updates 5 in place of nothing")
    assert said[1] == ""  # process 0 has said it
    assert "process 0 of 2: not all of the others came within 6 s" in said[2]
    assert "process 1 of 2: process 0 at localhost" in said[3]
    assert "process 0 of 2 cannot begin: its port at localhost" in said[4]
    assert not (tmp_path / "run").exists() and max(text.count("\n") for text in said) == 0


@pytest.mark.slow
def test_a_step_of_any_topology_is_gone_on_from_by_any_other(two_by_two, four, alone, tmp_path):
    longer = together.weights(train_here(tmp_path / "longer", updates=6))
    written = {"two_by_two": two_by_two, "four": four, "alone": alone}
    for name, source in written.items():
        shutil.copytree(source, tmp_path / name)
    train_here(tmp_path / "two_by_two", resume=True, updates=6)
    train_here(tmp_path / "alone", resume=True, updates=6, replicas=4)
    together.launch("--run", str(tmp_path / "four"), "--resume", "--updates", "6", "--replicas", "4")
    for number, change in enumerate(({"label": 3}, {"moved": 1e-3})):
        changed = train_here(tmp_path / f"changed{number}", updates=6, **change)
        assert np.abs(together.weights(changed) - longer).max() > 1e-5
    assert np.isfinite(longer).all() and np.any(longer)
    for name, source in written.items():
        assert np.abs(together.weights(tmp_path / name) - longer).max() < 1e-6
        steps = [together.restore(folder / "checkpoints", 4) for folder in (source, tmp_path / name)]
        for one, other in zip(*(jax.tree.leaves(step.state) for step in steps), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_where_not_all_are_started_with_the_words_that_resume_all_do_as_the_first(alone, tmp_path):
    """As launchers on two machines do that saw a run's folder at different times."""
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    words = ("--run", str(folder), "--replicas", "2", "--updates", "6")
    with together.start(*words, own={0: ["--resume"]}, devices=1, HOTLOOP_RESUME='["--resume"]') as started:
        ended = started.finish()
    assert [each.status for each in ended] == [0, 0], ended
    assert [each["resumed"] for each in read_events(folder) if each["event"] == "start"] == [False, True]
    longer = together.weights(train_here(tmp_path / "longer", updates=6))
    assert np.abs(together.weights(folder) - longer).max() < 1e-6


@pytest.mark.slow
def test_300_updates_of_one_call_with_a_process_that_is_slow_and_at_times_stopped(tmp_path):
    words = ("--replicas", "2", "--updates", "300", "--log-every", "300", "--checkpoint-every", "300")
    slow = ("--streamed", "--lazy", "1", "--laziness", "0.02")
    with together.start("--run", str(tmp_path / "slow"), *words, *slow, devices=1) as started:
        first, second = started.children
        events = tmp_path / "slow" / "events.jsonl"
        started.wait_for(lambda: events.exists() and '"compile"' in events.read_text())
        while first.poll() is None and second.poll() is None:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                second.send_signal(number)
                time.sleep(0.5)
        ended = started.finish()
    assert [each.status for each in ended] == [0, 0], ended
    together.launch("--run", str(tmp_path / "even"), *words, devices=1)
    np.testing.assert_array_equal(together.weights(tmp_path / "slow"), together.weights(tmp_path / "even"))
    whole = {"updates": 300, "log_every": 300, "checkpoint_every": 300}
    alone = train_here(tmp_path / "alone", **whole)
    assert np.abs(together.weights(tmp_path / "slow") - together.weights(alone)).max() < 1e-3
    for name, change in (("label", {"label": 3}), ("weight", {"moved": 0.1})):
        changed = train_here(tmp_path / name, **whole, **change)
        assert np.abs(together.weights(tmp_path / "slow") - together.weights(changed)).max() > 1e-2
