"""`hotloop launch`: its options, what it refuses before anything starts, and what it hands to the processes."""

import json
import os
import platform
import socket

import pytest

from hotloop.cli import launch as module
from hotloop.cli.main import main
from hotloop.engine import device_shares, launcher
from hotloop.engine.device_shares import LocalDevices, find_devices, list_visible_gpus
from hotloop.rehearsal import rehearse

TRAIN = ("cnn", "train", "--model", "cifar_resnet8")


@pytest.fixture
def launches(monkeypatch):
    """What would be started, on a machine with four cores."""
    found = []
    monkeypatch.setattr(launcher, "run_processes", lambda launch, say: found.append(launch))
    monkeypatch.setattr(device_shares, "usable_cores", lambda: 4)
    monkeypatch.setenv("XLA_FLAGS", "")
    return found


def status_of(*words):
    try:
        return main(["launch", *words])
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-instances 3 --num-replicas 4 -- cnn train", "--num-replicas 4: 3 instances do not divide them"),
        ("--num-instances 2 -- cnn train --num-replicas 3", "--num-replicas 3: 2 instances do not divide them"),
        ("--num-instances 2 --num-replicas 1 -- cnn train", "--num-instances 2: more than replicas (1) x devices"),
        ("--num-instances 2 -- cnn train --num-replicas 1", "--num-instances 2: more than replicas (1) x devices"),
        (
            "--num-instances 2 --num-replicas 1 -- cnn validate --random-weights",
            "--num-instances 2: more than replicas (1) x devices",
        ),
        (
            "--num-instances 3 --num-replicas 4 -- cnn validate --random-weights",
            "--num-replicas 4: 3 instances do not divide them",
        ),
        ("--num-instances 3 -- vcd train", "--replicas 3: 100 images an update cannot be shared evenly"),
        (
            "--num-instances 2 --num-replicas 4 -- cnn train --dbn-replica-group-size 3",
            "--dbn-replica-group-size 3: does not divide --num-replicas 4",
        ),
        (
            "--num-instances 2 -- cnn train --num-replicas 2 --dbn-replica-group-size 4",
            "--dbn-replica-group-size 4: does not divide --num-replicas 2",
        ),
        ("--num-instances 0 -- cnn train", "--num-instances 0: must be at least 1"),
        ("--num-replicas 0 -- cnn train", "--num-replicas 0: must be at least 1"),
        ("--max-restarts -1 -- cnn train", "--max-restarts -1: must be at least 0"),
        ("--heartbeat 0 -- cnn train", "--heartbeat 0: must be between 1 and 999999"),
        ("--heartbeat inf -- cnn train", "--heartbeat inf: must be between 1 and 999999"),
        ("--heartbeat nan -- devices", "--heartbeat nan: must be between 1 and 999999"),
        ("--ipus-per-replica 2 -- devices", "--ipus-per-replica 2: the stages of devices take 1 device a replica"),
        ("--ipus-per-replica 2 -- vcd train", "--ipus-per-replica 2: the stages of vcd train take 1 device a replica"),
        ("--stall 0 -- cnn train", "--stall 0: must be greater than 0"),
        ("--ipus-per-replica 2 -- cnn train", "--ipus-per-replica 2: the stages of cnn train take 1 device a replica"),
        ("--hosts a.invalid,localhost -- cnn train", "--hosts a.invalid: no machine has this name"),
        ("--num-instances 2 --hosts localhost,localhost -- cnn train", "--hosts localhost: is there twice"),
        ("--num-instances 2 --hosts localhost,127.0.0.1 -- cnn train", "--hosts 127.0.0.1: is there twice"),
        ("--num-instances 3 --hosts localhost,127.0.0.2 -- cnn train", "--num-instances 3: does not divide over 2"),
        ("--num-instances 2 -- cnn trian", "did you mean train"),
        ("--num-instances 2 -- cn train", "unknown command 'cn'; did you mean cnn"),
        ("--num-instances 2 -- cnn train --no-such-option", "unknown option --no-such-option"),
        ("--num-instances 2 -- cnn train --plan", "--plan: shows something and stops"),
        ("--num-instances 2 -- cnn train --print-config", "--print-config: shows something and stops"),
        ("--num-instances 2", "COMMAND is needed"),
        ("--instances 2 -- cnn train", "unknown option --instances; did you mean --num-instances"),
        ("--num-replicas 2 -- devices", "--num-replicas 2: devices has no replicas"),
        ("--first-process 1 -- cnn train", "--first-process 1: needs --total-instances"),
        ("--total-instances 2 -- cnn train", "--total-instances: needs --coordinator"),
        ("--total-instances 2 --first-process 2 -- cnn train", "--total-instances 2: --first-process"),
        ("--coordinator localhost -- cnn train", "--coordinator localhost: must be HOST:PORT"),
        ("--coordinator localhost:99999 -- cnn train", "--coordinator localhost:99999: must be HOST:PORT"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line_that_names_the_option(words, said, launches, capsys):
    assert status_of(*words.split()) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert launches == []


@pytest.mark.parametrize(
    "words",
    ["help", "plan", "data list", "bench run", "cache", "demo", "launch cnn train", "compat x", "kernel dense",
     "cnn describe", "cnn import x", "recommender sweep", "vcd samples x"],
)  # fmt: skip
def test_commands_that_make_no_sense_in_several_processes_say_so(words, launches, capsys):
    assert status_of("--num-instances", "2", "--", *words.split()) == 2
    err = capsys.readouterr().err
    assert "makes no sense in several processes; launch takes cnn train, " in err
    assert launches == []


def test_every_process_gets_the_command_with_the_replicas_of_the_launch(launches, capsys):
    words = [*TRAIN, "--num-replicas", "8"]
    assert (
        status_of("--num-instance", "2", "--num-replica", "4", "--max-r", "3", "--stall", "9", "--", *words)
        == 0
    )
    (launch,) = launches
    assert launch.words == (*words, "--num-replicas", "4", "--strict-devices", "False")
    assert (launch.first, launch.total, launch.coordinator) == (0, 2, None)
    assert (launch.max_restarts, launch.heartbeat, launch.stall) == (3, 30, 9)
    assert launch.environments == ({}, {})
    assert capsys.readouterr().err == "warning: --num-replicas 4 replaces 8 of cnn train\n"


@pytest.mark.parametrize("replicas", [["--num-replicas", "4"], []])
def test_options_need_fit_only_the_replicas_that_there_will_be(launches, replicas, capsys):
    grouped = [*TRAIN, "--dbn-replica-group-size", "4"]
    assert status_of("--num-instances", "4", *replicas, "--", *grouped) == 0
    assert launches[0].words == (*grouped, "--num-replicas", "4", "--strict-devices", "False")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("separator", [["--"], []])
def test_without_replicas_there_is_one_for_each_process(launches, separator, capsys):
    assert status_of("--num-instances=2", *separator, "estimator", "--epochs", "1") == 0
    assert launches[0].words == ("estimator", "--epochs", "1", "--replicas", "2")
    assert status_of("--num-instances=2", *separator, "estimator", "--ipus", "4") == 0
    assert launches[1].words == ("estimator", "--ipus", "4")  # which are four
    assert capsys.readouterr().err == ""


def test_an_evaluation_has_the_replicas_of_its_run_unless_it_is_told_otherwise(launches, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"images": 3, "method": "vcd", "data": "digits"}))
    command = ("vcd", "evaluate", str(tmp_path))
    assert status_of("--num-instances", "2", "--", *command) == 0
    assert launches[-1].words == command
    assert status_of("--num-instances", "2", "--num-replicas", "2", "--", *command) == 0
    assert launches[-1].words == (*command, "--replicas", "2")


def test_a_validation_keeps_replicas_that_the_processes_divide_and_else_has_one_each(launches, capsys):
    words, preset = ("cnn", "validate", "--random-weights"), ("--config", "resnet50_8k_bn_pipeline")
    for more, instances, added in (
        ((), "3", ("--num-replicas", "3")),
        (preset, "3", ("--num-replicas", "3")),  # of its 4
        (preset, "2", ()),
    ):
        assert status_of("--num-instances", instances, "--", *words, *more) == 0
        assert launches[-1].words == (*words, *more, *added, "--strict-devices", "False")
    assert capsys.readouterr().err == ""


def test_options_of_the_launch_that_are_the_commands_are_handed_on(launches):
    assert status_of("--json", "--device", "cpu", "--debug", "--", *TRAIN) == 0
    assert launches[0].words[4:9] == ("--device", "cpu", "--json", "--debug", "--strict-devices")


def test_the_commands_own_word_stays_in_whichever_way_it_is_spelled(launches):
    assert status_of("--json", "--device", "gpu", "--", *TRAIN, "--device=cpu", "--json") == 0
    assert [word for word in launches[0].words if "--device" in word or word == "--json"] == [
        "--device=cpu",
        "--json",
    ]


def test_devices_a_replica_are_handed_on(launches):
    split = ("--pipeline-splits", "conv2_block1_post_addition_relu")
    assert status_of("--num-instances", "2", "--ipus-per-replica", "2", "--", *TRAIN, *split) == 0
    assert launches[0].environments == ({"HOTLOOP_DEVICES_PER_REPLICA": "2"},) * 2
    assert (
        status_of("--num-instances", "2", "--num-replicas", "1", "--", *TRAIN, *split) == 0
    )  # a process a stage
    assert launches[1].total == 2


def test_more_instances_than_devices_are_fewer_processes_and_one_line(launches, capsys):
    assert status_of("--num-instances", "16", "--num-replicas", "16", "--", *TRAIN) == 0
    assert (launches[0].total, len(launches[0].environments)) == (4, 4)
    assert launches[0].words[-4:] == ("--num-replicas", "16", "--strict-devices", "False")
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    assert out.startswith(
        "16 instances, and there are 4 cores: 4 processes; what is missing of the replicas accum"
    )
    assert status_of("--num-instances", "6", "--", *TRAIN) == 0
    assert launches[1].total == 3  # which divides the replicas
    split = ("--pipeline-splits", "conv2_block1_post_addition_relu")
    assert status_of("--num-instances", "6", "--num-replicas", "3", "--", *TRAIN, *split) == 0
    assert launches[2].total == 3  # and not 2, which 3 replicas cannot share when their stages merge
    assert status_of("--num-instances", "8", "--num-replicas", "4", "--", *TRAIN, *split) == 0
    assert launches[3].total == 4


def test_strict_devices_refuses_them(launches, capsys):
    assert status_of("--num-instances", "16", "--strict-devices", "--", *TRAIN) == 2
    assert "--strict-devices: 16 instances, and there are 4 cores" in capsys.readouterr().err
    assert status_of("--num-instances", "4", "--strict-devices", "--", *TRAIN) == 0
    assert launches[0].words[-2:] == ("--strict-devices", "True")
    assert len(launches) == 1


def test_strict_devices_of_the_command_or_its_file_refuse_them_too(launches, tmp_path, capsys):
    file = tmp_path / "strict.yml"
    file.write_text("strict:\n  strict_devices: true\n")
    of_file = ("--config", "strict", "--config-path", str(file))
    for own in (("--strict-devices",), of_file):
        assert status_of("--num-instances", "16", "--", *TRAIN, *own) == 2
        assert "--strict-devices: 16 instances, and there are 4 cores" in capsys.readouterr().err
    assert status_of("--num-instances", "4", "--", *TRAIN, *of_file) == 0
    assert launches[0].words[-2:] == ("--strict-devices", "True") and len(launches) == 1
    assert status_of("--num-instances", "16", "--", *TRAIN, *of_file, "--strict-devices", "False") == 0


def test_who_cannot_accumulate_is_refused(launches, capsys):
    assert status_of("--num-instances", "16", "--", "estimator") == 2
    assert "--num-instances 16: there are 4 cores; ask for at most 4" in capsys.readouterr().err
    assert launches == []


def test_xla_flags_that_name_devices_are_no_bound(launches, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert status_of("--num-instances", "16", "--", *TRAIN) == 0
    assert launches[0].total == 16


def test_each_host_gets_its_share_of_the_processes(launches, capsys):
    words = (
        "--num-instances",
        "4",
        "--num-replicas",
        "8",
        "--hosts",
        "localhost,127.0.0.2",
        "--max-restarts",
        "1234567",
        "--stall",
        "1234567.5",
    )
    assert status_of(*words, "--json", "--", *TRAIN) == 0
    commands = json.loads(capsys.readouterr().out)["commands"]
    assert list(commands) == ["localhost", "127.0.0.2"]
    launched = {}
    for host, command in commands.items():
        assert status_of(*command.split()[2:]) == 0
        launched[host] = launches[-1]
    first, second = launched.values()
    assert first.coordinator == second.coordinator
    assert first.coordinator.startswith("localhost:")
    assert (first.first, second.first, first.total, second.total) == (0, 2, 4, 4)
    assert first.words == second.words
    assert first.words[4:6] == ("--num-replicas", "8")
    assert first.max_restarts == second.max_restarts == 1234567
    assert first.stall == second.stall == 1234567.5


def test_one_host_that_is_this_machine_starts_here(launches):
    for host in ("localhost", platform.node()):
        assert status_of("--num-instances", "2", "--hosts", host, "--", *TRAIN) == 0
    assert [launch.total for launch in launches] == [2, 2]


def test_a_host_with_too_few_devices_for_its_share_is_refused(launches, capsys):
    assert status_of("--num-instances", "8", "--total-instances", "16", "--coordinator", "localhost:29999",
                     "--first-process", "8", "--", *TRAIN) == 2  # fmt: skip
    assert "--num-instances 8: there are 4 cores; ask for at most 4" in capsys.readouterr().err


def test_a_port_in_use_is_refused_where_process_0_listens(launches, capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        address = f"localhost:{taken.getsockname()[1]}"
        words = ("--num-instances", "1", "--total-instances", "2", "--coordinator", address)
        assert status_of(*words, "--", *TRAIN) == 2
        assert f"--coordinator {address}: the port cannot be used here" in capsys.readouterr().err
        assert status_of(*words, "--first-process", "1", "--", *TRAIN) == 0


def test_a_launch_in_a_launch_is_refused(launches, monkeypatch, capsys):
    monkeypatch.setenv("HOTLOOP_PROCESS", "1")
    assert status_of("--", *TRAIN) == 2
    assert "a process of another launch already" in capsys.readouterr().err


def test_help_of_the_command_is_its_own(launches, capsys):
    assert status_of("--num-instances", "2", "--", "cnn", "train", "--help") == 0
    assert "--micro-batch-size" in capsys.readouterr().out
    assert status_of("--help") == 0
    assert "--num-instances" in capsys.readouterr().out
    assert launches == []


def test_a_rehearsal_is_the_commands(launches, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["launch", "--num-instances", "2", "--", *TRAIN, "--synthetic-data", "device", "--device", "cpu"]
    assert "run folder" in rehearse(lambda: main(words))
    assert (launches, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(
    ("error", "status", "out", "err"),
    [
        (launcher.FailedProcess(0, 2, "said"), 2, "", ""),
        (launcher.FailedProcess(1, 2, "x"), 2, '{"error": "x"}\n', "hotloop: error: x\n"),
        (launcher.LostProcess("gone"), 134, '{"error": "gone"}\n', "hotloop: error: gone\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", [["--json", "--", "devices"], ["--", "devices", "--json"]])
def test_status_line_and_object_of_what_went_wrong(monkeypatch, capsys, error, status, out, err, before):
    def fail(launch, say):
        raise error

    monkeypatch.setattr(launcher, "run_processes", fail)
    assert status_of(*before) == status
    assert capsys.readouterr() == (out, err)


def test_gpus_are_divided_and_never_shared():
    gpus = LocalDevices("gpu", ("0", "1", "2", "3", "4"))
    shares = [share["CUDA_VISIBLE_DEVICES"] for share in gpus.share(2)]
    assert shares == ["0,1", "2,3"]
    assert gpus.limit == 5
    assert gpus.describe() == "5 GPUs"
    assert LocalDevices("cpu", most=1).describe() == "1 core"
    assert LocalDevices("cpu", most=4).share(3) == ({}, {}, {})


@pytest.mark.parametrize(
    ("visible", "names"),
    [("2,5", ("2", "5")), ("", ()), ("-1", ()), ("1,-1,2", ("1",)), ("GPU-ab,GPU-cd", ("GPU-ab", "GPU-cd"))],
)
def test_an_outer_choice_of_gpus_is_respected(visible, names, monkeypatch):
    monkeypatch.setattr(device_shares, "run_query", lambda words: pytest.fail("asked"))
    assert list_visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) == names


def test_gpus_count_where_jax_can_use_them(monkeypatch):
    monkeypatch.setattr(device_shares, "run_query", lambda words: "0\n1\n")
    monkeypatch.setattr(device_shares, "usable_cores", lambda: 7)
    monkeypatch.setattr(device_shares, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    assert find_devices("auto", {}) == LocalDevices("gpu", ("0", "1"))
    assert find_devices("cpu", {}) == LocalDevices("cpu", most=7)
    assert find_devices("auto", {"JAX_PLATFORMS": "cpu"}) == LocalDevices("cpu", most=7)
    assert find_devices("auto", {"JAX_PLATFORMS": "cuda,cpu"}).platform == "gpu"
    assert find_devices("auto", {"CUDA_VISIBLE_DEVICES": ""}).platform == "cpu"
    monkeypatch.setattr(device_shares, "find_spec", lambda name: None)
    assert find_devices("auto", {}).platform == "cpu"
    assert find_devices("gpu", {}).platform == "gpu"
    assert find_devices("tpu", {}) == LocalDevices("tpu", most=1)


def test_launching_imports_no_jax():
    import subprocess
    import sys

    code = (
        "import sys; from hotloop.cli.main import main; import hotloop.engine.launcher as l;"
        "l.run_processes = lambda *_: None\n"
        "try: main(['launch', '--num-instances', '1', '--', 'cnn', 'train'])\n"
        "except SystemExit: pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0


def test_the_table_of_commands_names_only_commands():
    from hotloop.cli.main import find_command

    for path in (*module.TRAININGS, *module.OTHERS):
        command, found, rest = find_command(path.split())
        assert (found, rest) == (f"hotloop {path}", [])
        assert command.run is not None
