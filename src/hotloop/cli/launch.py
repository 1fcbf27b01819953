"""`hotloop launch`: one command as several processes, here or, by the commands that it prints, on several machines.

Everything that can be wrong is found here, before a process starts: the command's own options, replicas, hosts, and
how many devices there are. `hotloop.engine.launcher` starts and watches. No jax.
"""

import os
import random
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from platform import node
from typing import Any

from hotloop import rehearsal
from hotloop.cli.command import Command, Context, Result, print_json
from hotloop.cli.parser import Resolved, resolve, scan
from hotloop.engine.device_shares import can_share, check_instances, find_devices
from hotloop.errors import DeviceError, HotloopError, OptionError
from hotloop.options import argument, at_least, between, option, positive, values_of

EPILOG = """Examples:
  hotloop launch --num-instances 4 --num-replicas 8 -- cnn train --config cifar_resnet20
  hotloop launch --num-instances 2 --max-restarts 3 -- vcd train
  hotloop launch --num-instances 8 --hosts a,b -- cnn train --config resnet50_8k_bn_pipeline

Options of launch itself stand before the command. Process 0 speaks; the others' lines are kept in the run's folder and
shown when they fail. docs/processes.md tells what happens when a process is lost, and how Slurm, Open MPI and
Kubernetes start the same commands."""
TRAININGS = ("cnn train", "vcd train", "recommender train", "estimator")
OTHERS = ("cnn validate", "cnn data-benchmark", "vcd evaluate", "recommender evaluate", "devices")
"""What may run in several processes beside trainings."""
KNOW_STAGES_LATER = ("cnn validate",)
"""What reads a run for its stages, and compares them with the launch's then."""
REPLICAS = ("num_replicas", "replicas")
STOPS_EARLY = ("plan", "print_config")
FIRST_PORT, PORTS = 20000, 10000  # below the ports that systems give out by themselves
LONGEST_HEARTBEAT = 999_999  # seconds; jax has whole ones
ADDRESS = re.compile(r"(.+):(\d{1,5})")
_host = partial(option, group="On one of several machines (--hosts prints them)")


@dataclass(frozen=True)
class LaunchConfig:
    command: tuple[str, ...] = argument("The command, as it stands after `hotloop`.", metavar="COMMAND")
    num_instances: int = option(
        1, "Processes, each with devices of its own; with --hosts over all of them.", check=positive
    )
    num_replicas: int | None = option(
        None,
        "Copies of the model over all processes; replaces the command's own. Left out, the command's, or one each.",
        check=positive,
    )
    ipus_per_replica: int | None = option(
        None, "Devices that the stages of a replica take, checked against the command's.", check=positive
    )
    hosts: tuple[str, ...] = option(
        (), "Start nothing, but print the command for each of these machines.", metavar="A,B"
    )
    max_restarts: int = option(
        0,
        "How often all start again from the last checkpoint when a process is lost.",
        check=at_least(0),
    )
    heartbeat: float = option(
        30.0,
        "Seconds without a sign after which a process counts as lost.",
        check=between(1, LONGEST_HEARTBEAT),
    )
    stall: float = option(
        600.0,
        "Seconds without progress, compiling apart, after which a process that is alive counts as lost.",
        check=positive,
    )
    strict_devices: bool = option(
        False, "Refuse where devices are fewer than processes, instead of accumulating in fewer processes."
    )
    coordinator: str | None = _host(
        None, "Where process 0 listens; left out, a free port of this machine.", metavar="HOST:PORT"
    )
    first_process: int = _host(0, "The number of the first process here.", check=at_least(0))
    total_instances: int | None = _host(
        None, "Processes on all machines; --num-instances are those of this one.", check=positive
    )


@dataclass(frozen=True)
class Launched:
    """The command that each process runs, understood."""

    path: str  # `cnn train`
    rest: tuple[str, ...]  # the words after it
    command: Command
    given: Mapping[str, Any]
    resolved: Resolved
    own_replicas: int | None = None  # the command's; None where it has none, or its options do not fit them
    replicas: int | None = None  # how many there will be; None for a command without

    @property
    def replica_option(self) -> str | None:
        return next((name for name in REPLICAS if name in self.command.option_names), None)

    @property
    def devices_per_replica(self) -> int:
        return int(getattr(self.resolved.config, "devices_per_replica", 1))

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.path.split(), *self.rest)

    def with_words(self, *added: str) -> "Launched":
        """With options added, which win over what stands there."""
        at = self.rest.index("--") if "--" in self.rest else len(self.rest)
        return replace(self, rest=(*self.rest[:at], *added, *self.rest[at:]))


def understand(words: Sequence[str], context: Context, replicas: int | None, instances: int) -> Launched:
    """The command with its options checked; an OptionError where it is none, or none for several processes.

    Options that do not fit the command's own replicas are checked with the launch's.
    """
    from hotloop.cli.main import COMMANDS, find_command

    taken = (*TRAININGS, *OTHERS)
    no_sense = f"makes no sense in several processes; launch takes {', '.join(taken)}"
    if words[0] == "help" or (words[0] in COMMANDS and words[0] not in {each.split()[0] for each in taken}):
        raise OptionError(f"{words[0]}: {no_sense}")
    command, path, rest = find_command(list(words))
    path = path.removeprefix("hotloop ")
    if path not in taken:
        raise OptionError(f"{path}: {no_sense}")
    rest = context.hand_on(rest)
    given = scan(rest, command.options)
    resolved, own = _resolve_replicas(command, given, replicas, instances)
    for name in STOPS_EARLY:
        if getattr(resolved.config, name, False) or getattr(resolved.common, name, False):
            raise OptionError(f"--{name.replace('_', '-')}: shows something and stops; leave out launch")
    return Launched(path, tuple(rest), command, given, resolved, own)


def _resolve_replicas(
    command: Command, given: Mapping[str, Any], replicas: int | None, instances: int
) -> tuple[Resolved, int | None]:
    """The options and the command's own replicas, None where it has none or where only the launch's fit the others."""
    name = next((each for each in REPLICAS if each in command.option_names), None)
    try:
        resolved = resolve(command, given)
    except HotloopError:
        if name is None or (replicas is None and name in given):
            raise
        resolved = resolve(command, {**given, name: str(replicas or instances)})
        if replicas is None and name in resolved.configured:
            raise
        return resolved, None
    chosen = resolved.config
    # --ipus of the estimator means some, too.
    return resolved, None if name is None else getattr(chosen, "asked_replicas", values_of(chosen)[name])


def check_devices_per_replica(launched: Launched, wanted: int | None) -> None:
    """OptionError where the launch says another number of devices a replica than the command's stages take."""
    taken = launched.devices_per_replica
    if wanted not in (None, taken):
        stages = f"{taken} device{'s' * (taken > 1)}"
        raise OptionError(
            f"--ipus-per-replica {wanted}: the stages of {launched.path} take {stages} a replica"
        )


def settle_replicas(launched: Launched, config: LaunchConfig, context: Context) -> Launched:
    """The command with as many replicas as the launch says; OptionError where instances and they do not go together."""
    name, wanted = launched.replica_option, config.num_replicas
    instances = config.total_instances or config.num_instances
    if launched.path not in KNOW_STAGES_LATER:
        check_devices_per_replica(launched, config.ipus_per_replica)
    if name is None:
        if wanted is not None:
            raise OptionError(f"--num-replicas {wanted}: {launched.path} has no replicas")
        return launched
    own = launched.own_replicas
    is_own = not {name, "ipus"}.isdisjoint(launched.given.keys() | launched.resolved.configured)
    is_training = launched.path in TRAININGS
    replicas = wanted or own  # None: those of the run that it reads
    if is_training:
        replicas = wanted or (own if own and is_own else instances)
    elif wanted is None and own is not None and name not in launched.given:
        # A run's weights are the same on any number: where its own do not fit, each process has one.
        replicas = own if can_share(instances, own, launched.devices_per_replica) else instances
    if replicas is not None and (is_training or wanted is not None):
        check_instances(instances, replicas, launched.devices_per_replica)
    if wanted is not None and is_own and own != wanted:
        context.warn(f"--num-replicas {wanted} replaces {own or 'that'} of {launched.path}")
    launched = replace(launched, replicas=replicas)
    if replicas != own:
        launched = launched.with_words(f"--{name.replace('_', '-')}", str(replicas))
    if "strict_devices" in launched.command.option_names and "strict_devices" not in launched.given:
        launched = launched.with_words("--strict-devices", str(is_strict(launched, config)))
    # What does not fit is refused here.
    resolve(launched.command, scan(launched.rest, launched.command.options))
    return launched


def is_strict(launched: Launched, config: LaunchConfig) -> bool:
    """Whether too few devices are refused: by the launch, by the command, or by its preset or configuration file."""
    return config.strict_devices or bool(getattr(launched.resolved.config, "strict_devices", False))


def run(config: LaunchConfig, context: Context) -> Result:
    """Check all, then print the hosts' commands, or start the processes and watch them; status as theirs."""
    from hotloop.cli.main import dispatch

    if {"-h", "--help"} & {*config.command}:
        dispatch(list(config.command))
        return {}
    if "HOTLOOP_PROCESS" in os.environ:
        raise OptionError("launch: this is a process of another launch already; leave out launch here")
    check_hosts(config)
    elsewhere = config.hosts not in ((), ("localhost",), (node(),))
    handing_on = replace(context, json=False) if elsewhere else context  # the object is then launch's own
    instances = config.total_instances or config.num_instances
    understood = understand(config.command, handing_on, config.num_replicas, instances)
    launched = settle_replicas(understood, config, context)
    if elsewhere:
        return print_host_commands(launched, config, context)
    # Standard output may belong to the JSON object of process 0.
    console = replace(context, json=launched.resolved.common.json)
    launch = plan_processes(launched, config, console)
    if rehearsal.is_on():
        if "jax" not in sys.modules:  # this process stands for all of them
            flags = os.environ.get("XLA_FLAGS", "")
            every = f"--xla_force_host_platform_device_count={len(launch.environments)}"
            os.environ["XLA_FLAGS"] = flags if "device_count" in flags else f"{flags} {every}".strip()
        dispatch(list(launch.words))
        return {}
    from hotloop.engine.launcher import FailedProcess, run_processes

    try:
        run_processes(launch, console.say)
    except FailedProcess as error:
        if error.number == 0:  # which has said so itself
            raise SystemExit(error.exit_status) from None
        _answer_in_json(error, console, context)
        raise
    except HotloopError as error:
        _answer_in_json(error, console, context)
        raise
    raise SystemExit(0)  # the result is process 0's


def _answer_in_json(error: HotloopError, console: Context, context: Context) -> None:
    """Whoever asked the command for JSON gets an object, as main gives one to who asked launch for it."""
    if console.json and not context.json:
        print_json({"error": str(error)})


def plan_processes(launched: Launched, config: LaunchConfig, console: Context) -> Any:
    """The `Launch` of this machine: as many processes as it has devices; DeviceError where fewer will not do."""
    from hotloop.engine.launcher import Launch

    asked = config.num_instances
    devices = find_devices(launched.resolved.common.device, os.environ)
    limit = asked if devices.limit is None else max(1, devices.limit)
    # Fewer processes must divide the replicas, too: where devices are missing, stages merge.
    replicas = launched.replicas or asked
    count = next(n for n in range(min(asked, limit), 0, -1) if n == asked or asked % n == replicas % n == 0)
    if count < asked:
        here = f"there {'is' if limit == 1 else 'are'} {devices.describe()}"
        if is_strict(launched, config):
            raise DeviceError(
                f"--strict-devices: {asked} instances, and {here}; leave it out to run on fewer processes"
            )
        if config.total_instances is not None or "strict_devices" not in launched.command.option_names:
            raise DeviceError(f"--num-instances {asked}: {here}; ask for at most {limit}")
        console.say(
            f"{asked} instances, and {here}: {count} process{'es' * (count > 1)}; what is missing of the replicas "
            "accumulates, and the global batch stays"
        )
    own = {"HOTLOOP_DEVICES_PER_REPLICA": str(config.ipus_per_replica)} if config.ipus_per_replica else {}
    return Launch(
        (sys.executable, "-m", "hotloop"),
        launched.words,
        tuple({**own, **share} for share in devices.share(count)),
        config.first_process,
        config.total_instances or count,
        config.coordinator,
        config.heartbeat,
        config.stall,
        config.max_restarts,
    )


def check_hosts(config: LaunchConfig) -> None:
    """OptionError for machines that cannot be, and for numbers that do not fit on them."""
    if config.hosts:
        _check_host_names(config.hosts)
        if config.num_instances % len(config.hosts):
            raise OptionError(
                f"--num-instances {config.num_instances}: does not divide over {len(config.hosts)} hosts"
            )
        if config.first_process or config.total_instances:
            raise OptionError("--hosts: is for the command that prints those of the hosts; leave it out here")
        return
    total = config.total_instances
    if total is None:
        if config.first_process:
            raise OptionError(f"--first-process {config.first_process}: needs --total-instances")
    elif config.first_process + config.num_instances > total:
        last = config.first_process + config.num_instances - 1
        raise OptionError(f"--total-instances {total}: --first-process and --num-instances lead to {last}")
    elif config.coordinator is None and total > config.num_instances:
        raise OptionError("--total-instances: needs --coordinator, where process 0 listens")
    if config.coordinator is not None:
        _check_coordinator(config.coordinator, listens_here=config.first_process == 0)


def _check_host_names(hosts: Sequence[str]) -> None:
    seen: dict[Any, str] = {}
    for host in hosts:
        try:
            address = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)[0][4][0]
        except (OSError, UnicodeError):
            raise OptionError(f"--hosts {host}: no machine has this name") from None
        for key in (host, address):
            if seen.setdefault(key, host) != host or (key == host and hosts.count(host) > 1):
                raise OptionError(f"--hosts {host}: is there twice; name each machine once")


def _check_coordinator(coordinator: str, *, listens_here: bool) -> None:
    found = ADDRESS.fullmatch(coordinator)
    if not found or not 0 < int(found[2]) < 65536:
        raise OptionError(f"--coordinator {coordinator}: must be HOST:PORT")
    _check_host_names([found[1]])
    if listens_here:
        from hotloop.engine.rendezvous import probe_port

        try:
            probe_port(int(found[2]))
        except OSError as error:
            raise OptionError(
                f"--coordinator {coordinator}: the port cannot be used here ({error.strerror})"
            ) from None


def print_host_commands(launched: Launched, config: LaunchConfig, context: Context) -> Result:
    """Say what to type on each machine; nothing is started here."""
    each = config.num_instances // len(config.hosts)
    port = FIRST_PORT + random.randrange(PORTS)
    coordinator = config.coordinator or f"{config.hosts[0]}:{port}"
    kept = ("ipus_per_replica", "max_restarts", "heartbeat", "stall")
    commands = {}
    for at, host in enumerate(config.hosts):
        words = ["hotloop", "launch", "--num-instances", str(each)]
        words += ["--total-instances", str(config.num_instances), "--first-process", str(at * each)]
        words += ["--coordinator", coordinator]
        for name in kept:
            if name in context.given:
                words += [f"--{name.replace('_', '-')}", str(getattr(config, name)).removesuffix(".0")]
        words += ["--strict-devices"] * config.strict_devices
        commands[host] = shlex.join([*words, "--", *launched.words])
        context.say(f"{host}: {commands[host]}")
    return {"commands": commands}


COMMAND = Command(config=LaunchConfig, run=run, epilog=EPILOG, verbatim=True)
