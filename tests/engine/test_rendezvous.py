import pytest

from hotloop.engine import rendezvous
from hotloop.engine.rendezvous import Place, check_same_program, describe_program, find_place
from hotloop.errors import DeviceError, OptionError

LAUNCHED = {"HOTLOOP_PROCESSES": "4", "HOTLOOP_PROCESS": "2", "HOTLOOP_COORDINATOR": "node7:1234"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"HOTLOOP_PROCESSES": "1", **SLURM},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {name: value for name, value in SLURM.items() if "STEP" not in name},  # a shell in an allocation
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # any pod
    ],
)
def test_one_process_is_alone(environment):
    assert find_place(environment) is None


def test_the_launchers_word_goes_before_the_clusters():
    assert find_place({**SLURM, **LAUNCHED}) == Place("node7:1234", 4, 2)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("HOTLOOP_PROCESSES", "two", "HOTLOOP_PROCESSES two"),
        ("HOTLOOP_PROCESS", "4", "HOTLOOP_PROCESS 4: the processes are 0 to 3"),
        ("HOTLOOP_PROCESS", "-1", "HOTLOOP_PROCESS -1"),
        ("HOTLOOP_COORDINATOR", "node7", "HOTLOOP_COORDINATOR node7: must be host:port"),
    ],
)
def test_what_makes_no_sense_is_named(name, value, named):
    with pytest.raises(OptionError, match=named):
        find_place({**LAUNCHED, name: value})


def test_slurm_is_jaxs_to_detect_but_two_steps_of_a_job_have_ports_of_their_own():
    ports = set()
    for step in ("0", "1", "2"):
        place = find_place({**SLURM, "SLURM_STEP_ID": step})
        assert place is not None and (place.method, place.count, place.index) == ("slurm", 8, 5)
        ports.add(dict(place.environment)["JAX_COORDINATOR_PORT"])
    assert len(ports) == 3 and all(61440 <= int(port) <= 65535 for port in ports)


def test_jax_finds_the_coordinator_of_a_slurm_job_at_our_port(monkeypatch):
    from jax._src.clusters import SlurmCluster

    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    place = find_place()
    assert place is not None and SlurmCluster.name == place.method and SlurmCluster.is_env_present()
    port = dict(place.environment)["JAX_COORDINATOR_PORT"]
    assert SlurmCluster.get_coordinator_address(None, port) == f"node001:{port}"


def test_open_mpi_before_5_is_jaxs_to_detect():
    old = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}
    assert find_place(old) == Place(method="ompi")


@pytest.mark.parametrize(
    ("more", "coordinator"),
    [
        ({"PMIX_NAMESPACE": "prterun-my-node-1234@1"}, "my-node:62674"),
        (
            {"PMIX_NAMESPACE": "prterun-my-node-1234@1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            "localhost:62674",
        ),
        ({"HOTLOOP_COORDINATOR": "first:99"}, "first:99"),
    ],
)
def test_open_mpi_5_is_read_here(more, coordinator):
    assert find_place({**OPEN_MPI, **more}) == Place(coordinator, 4, 3, (1,))


def test_open_mpi_5_on_several_machines_that_does_not_say_where_is_refused():
    with pytest.raises(OptionError, match="HOTLOOP_COORDINATOR"):
        find_place({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


@pytest.mark.parametrize(
    ("given", "times"),
    [
        ({}, (100, 120)),
        ({"HOTLOOP_HEARTBEAT": "30"}, (30, 120)),
        ({"HOTLOOP_HEARTBEAT": "600"}, (600, 600)),
        ({"HOTLOOP_HEARTBEAT": "600", "HOTLOOP_MEETING": "9.5"}, (600, 9)),
    ],
)
def test_processes_have_as_long_to_come_as_for_a_sign(given, times, monkeypatch):
    for name in ("HOTLOOP_HEARTBEAT", "HOTLOOP_MEETING"):
        monkeypatch.delenv(name, raising=False)
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    assert rendezvous.find_times() == times


def test_a_pod_of_an_indexed_job_without_the_package_is_refused_unless_told_to_work_alone(monkeypatch):
    monkeypatch.setattr(rendezvous, "find_spec", lambda name: None)
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    with pytest.raises(DeviceError, match=r"JOB_COMPLETION_INDEX: .* 'jax\[k8s\]'; .* HOTLOOP_PROCESSES=1"):
        find_place(pod)
    assert find_place({**pod, "HOTLOOP_PROCESSES": "1"}) is None
    assert find_place({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None  # a pod of no such Job
    monkeypatch.setattr(rendezvous, "find_spec", lambda name: object())
    assert find_place(pod) == Place(method="k8s")


def test_other_versions_and_options_are_named_with_their_process():
    ours = describe_program() | {"options": "train --epochs 2 --seed 1"}
    check_same_program([ours, dict(ours)])
    with pytest.raises(DeviceError, match=f"process 2 has jax 9.9, process 0 has {ours['jax']}"):
        check_same_program([ours, ours, {**ours, "jax": "9.9"}])
    for theirs, said in (
        ("train --epochs 3 --seed 1", "--epochs 3 in place of --epochs 2"),
        ("train --epochs 2 --seed 1 --fast", "--fast in place of nothing"),
        ("train --epochs 2", "nothing in place of --seed 1"),
    ):
        with pytest.raises(OptionError, match=f"process 1 has other options than process 0: {said}$"):
            check_same_program([ours, {**ours, "options": theirs}])
