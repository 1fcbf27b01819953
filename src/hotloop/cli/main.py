"""The command `hotloop`: finds the command, resolves its options, runs it, and turns errors into one line.

Only the chosen command's module is imported, and no jax here: help and a bad option must answer at once. To
add a command, add a line to COMMANDS; its module declares `COMMAND`.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from hotloop import startup
from hotloop.cli.command import Command, Context, Result, print_error, print_json, spell_options
from hotloop.engine.interrupt import Stopped, leave_at_once, leave_if_due, raise_stops
from hotloop.errors import DISK_ERRORS, HotloopError, OptionError, did_you_mean
from hotloop.options import (
    options_of,
)
from hotloop.version import VERSION

SUMMARY = "Train, evaluate, benchmark and serve models as whole programs compiled for the device."
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("hotloop.cli.demo", "See everything work in a few minutes, with a page of results at the end."),
    "kernel": ("hotloop.cli.kernel", "Time single layers and samplers: dense, convolutions, recurrent, HMC."),
    "vcd": (
        "hotloop.cli.vcd",
        "Train, evaluate and sample a VAE with the Variational Contrastive Divergence.",
    ),
    "recommender": ("hotloop.cli.recommender", "Train and use the deep autoencoder for ratings."),
    "cnn": ("hotloop.cli.cnn", "Train, validate and use ResNets on ImageNet, CIFAR and MNIST."),
    "estimator": ("hotloop.cli.estimator", "Train and test a small CNN on CIFAR-10 with the Estimator."),
    "export": ("hotloop.cli.export", "Make a trained model a folder that can be served without its code."),
    "serve": ("hotloop.cli.serve", "Answer requests from exported models, over HTTP."),
    "request": ("hotloop.cli.request", "Send requests to a server; say how fast and how right it answers."),
    "launch": ("hotloop.cli.launch", "Run a command as several processes, here or on several machines."),
    "compat": ("hotloop.cli.compat", "Run a command line of the older scripts."),
    "bench": ("hotloop.cli.bench", "Run benchmark files, compare results, show them on a page."),
    "plan": ("hotloop.cli.plan", "Work out batch sizes, updates a call and host events before a run."),
    "data": ("hotloop.cli.data", "List, fetch and verify data sets."),
    "devices": ("hotloop.cli.devices", "Show devices, their memory and their measured speed limits."),
    "cache": ("hotloop.cli.cache", "Show, limit or clear the cache of compiled programs."),
}

USAGE_ERROR, DEFECT, BROKEN_PIPE = 2, 1, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; its exit status: 0, 2 for a user's error, 1 for a defect, 128 + N for signal N."""
    status = _exit_status(dispatch, list(sys.argv[1:] if argv is None else argv))
    leave_if_due(status)
    return status


def run_program(command: Command, argv: Sequence[str] | None = None) -> int:
    """`main` for a program of one command of its own: the options of its config, help, one line for an error."""

    def act(words: list[str]) -> int:
        with raise_stops():  # from the start, where no handler is there yet
            return execute(command, command.name, words)

    return _exit_status(act, list(sys.argv[1:] if argv is None else argv))


def _exit_status(act: Callable[[list[str]], int], words: list[str]) -> int:
    try:
        status = act(list(words))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of our output has gone; the interpreter's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if processes := sys.modules.get("hotloop.engine.processes"):
            processes.end(BROKEN_PIPE, "nobody reads what it prints any more")
        return BROKEN_PIPE
    except (KeyboardInterrupt, Exception) as raised:
        processes = sys.modules.get("hotloop.engine.processes")
        error = (processes and processes.explain_loss(raised)) or raised
        text, status = str(error), getattr(error, "exit_status", USAGE_ERROR)
        if isinstance(error, KeyboardInterrupt):
            stop = Stopped.because_of(error, text or "interrupted")
            text, status = str(stop), stop.exit_status
        elif isinstance(error, OSError) and error.errno in DISK_ERRORS:
            text = f"{error.filename or 'a file or standard output'}: {error.strerror}"
        elif not isinstance(error, HotloopError):
            said = (text.strip().splitlines() or [""])[0][:300]
            text = f"unexpected {type(error).__name__}: {said}; run again with --debug for the traceback"
            status = DEFECT
        if _has_flag(words, "--debug"):
            import traceback

            traceback.print_exc()
        print_error(text)
        if _has_flag(words, "--json"):
            print_json({**getattr(error, "result", {}), "error": text})
        if processes:
            processes.end(status, text)
        return status


def _has_flag(words: list[str], *flags: str) -> bool:
    """Whether one of the flags stands on the command line, which may not even have been understood."""
    return not set(flags).isdisjoint(words[: words.index("--")] if "--" in words else words)


def dispatch(words: list[str]) -> int:
    flags = []
    while words and words[0] in ("--json", "--debug"):
        flags.append(words.pop(0))
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        from hotloop.cli.helptext import root_help

        print(root_help({name: summary for name, (_, summary) in COMMANDS.items()}, SUMMARY), end="")
        return 0
    if words[0] == "--version":
        if "--json" in flags:
            print_json({"version": VERSION})
        else:
            print(f"hotloop {VERSION}")
        return 0
    return execute(*find_command(words), flags)


def find_command(words: list[str]) -> tuple[Command, str, list[str]]:
    name = words[0]
    if name.startswith("-"):
        raise OptionError(f"{name}: a command comes first; commands: {', '.join(COMMANDS)}")
    if name not in COMMANDS:
        raise OptionError(f"unknown command '{name}'{did_you_mean(name, COMMANDS)}")
    module, summary = COMMANDS[name]
    command: Command = replace(import_module(module).COMMAND, name=name, summary=summary)
    path, rest = f"hotloop {command.name}", words[1:]
    while rest and command.children and not rest[0].startswith("-"):
        children = {name: child for child in command.children for name in (child.name, *child.aliases)}
        if rest[0] not in children:
            if command.run is None or not any(option.positional for option in options_of(command.config)):
                raise OptionError(f"{path} has no command '{rest[0]}'{did_you_mean(rest[0], children)}")
            break
        command = children[rest[0]]
        path, rest = f"{path} {command.name}", rest[1:]
    if command.elsewhere and not _has_flag(rest, "-h", "--help"):
        from hotloop.cli.parser import find_elsewhere

        return find_elsewhere(command, rest) or (command, path, rest)
    return command, path, rest


def execute(command: Command, path: str, words: list[str], flags: Sequence[str] = ()) -> int:
    """Run one command with these words, or show its help; `flags` stood before its name."""
    if command.verbatim:
        from hotloop.cli.parser import count_own_words

        first = count_own_words(words, command.options)
        words = words if words[first:][:1] == ["--"] else [*words[:first], "--", *words[first:]]
    if _has_flag(words, "-h", "--help") or (command.run is None and not words):
        from hotloop.cli.helptext import command_help

        print(command_help(command, path), end="")
        return 0
    if command.run is None:
        known = ", ".join(child.name for child in command.children)
        raise OptionError(f"{path} needs a command before {words[0]}: {known}")
    from hotloop.cli.parser import print_config, resolve, scan

    names = command.option_names
    given = scan([*flags, *words], command.options)
    resolved = resolve(command, given)
    config, common = resolved.config, resolved.common
    if common.print_config:
        print_config(resolved, path)
        return 0
    context = Context(
        **vars(common),
        argv=(*path.split()[1:], *flags, *words),
        given=frozenset(given),
        options=names,
        configured=resolved.configured,
    )
    for notice in resolved.notices:
        context.warn(notice)
    for line in resolved.replacements:
        context.say(line)
    if not common.native:
        os.environ["HOTLOOP_NATIVE"] = "0"  # for processes that it starts, too
    for option, flag in command.xla_flags.items():
        if getattr(config, option):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    startup.end_part("options")
    try:
        if command.on_device:
            with leave_at_once():
                from hotloop.engine.device import setup

                setup(
                    common.device,
                    only_accelerator=common.only_accelerator,
                    warn=context.warn,
                    check=partial(check_before_devices, command, config, context.given),
                )
            startup.end_part("device")
        run = find_function(command.run) if isinstance(command.run, str) else command.run
        startup.end_part("imports")
        # Until now there was nothing to tidy up.
        with raise_stops():
            result: Result | None = run(config, context)
    except (HotloopError, KeyboardInterrupt) as error:
        error.args = (spell_options(str(error), names), *error.args[1:])
        raise
    if common.json:
        print_json(result or {})
    return 0


def find_function(name: str) -> Any:
    """A function of the families by `module:function`."""
    module, _, function = name.partition(":")
    return getattr(import_module(f"hotloop.families.{module}"), function)


def check_before_devices(command: Command, config: Any, given: frozenset[str]) -> None:
    """Refuse what no device could do, in processes that have met: replicas that they do not divide, and what the
    command's own `check` finds."""
    from hotloop.engine import processes
    from hotloop.engine.device_shares import check_instances

    if command.check:
        find_function(command.check)(config, given)
    elif (replicas := getattr(config, "asked_replicas", getattr(config, "replicas", None))) is not None:
        check_instances(processes.count(), replicas, getattr(config, "devices_per_replica", 1))
