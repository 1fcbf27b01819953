"""`hotloop bench run` with --list, --dry-run or --validate: what the files hold, what can run here, and why not.

Nothing is started.
"""

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hotloop.cli.command import Context, print_error, print_json
from hotloop.errors import OptionError
from hotloop.options import options_of

if TYPE_CHECKING:
    from hotloop.bench.benchmark import Selected
    from hotloop.bench.launch import Launch, RunnerOptions

COMPILE_ONLY = re.compile(rb"compile[-_]only")


def mark_skipped(selected: Sequence["Selected"], options: "RunnerOptions") -> list["Selected"]:
    """The same variants; those that lack something say so in `skip`."""
    return [replace(one, skip=one.skip or _find_missing(one, options)) for one in selected]


def _find_missing(one: "Selected", options: "RunnerOptions") -> str | None:
    from hotloop.bench.launch import LaunchError, build_environment, find_missing, prepare

    if why := find_missing(one.benchmark, build_environment(one.variant.env, Path(), options)):
        return why
    if not options.compile_only:
        return None
    try:
        launch = prepare(one, Path(), replace(options, compile_only=False))
    except LaunchError:
        return None  # it fails with that reason
    words = hotloop_words(launch)
    if knows_compile_only(words, launch):
        return None
    name = shlex.split(launch.command)[:2] if words is None else ["hotloop", *words[:2]]
    return f"--compile-only: `{' '.join(name)}` does not know that option"


def find_refusal(one: "Selected", launch: "Launch", options: "RunnerOptions") -> str | None:
    """Why the command would fail before it does anything, as far as can be seen from here; None if it would not."""
    if not launch.folder.is_dir():
        return f"{launch.folder}: no such folder to run in"
    if one.benchmark.pre_run and options.install:
        return None  # those commands may make what is not there yet
    name = launch.argv[0]
    if shutil.which(str(launch.folder / name) if "/" in name else name, path=launch.env["PATH"]) is None:
        return f"{name}: no such program"
    words = hotloop_words(launch)
    if words is None:
        script = launch.argv[1] if launch.argv[1:] and launch.argv[1].endswith(".py") else None
        absent = script is not None and not (launch.folder / script).is_file()
        return f"{script}: no such script in {launch.folder}" if absent else None
    from hotloop.cli.command import Common
    from hotloop.cli.main import find_command
    from hotloop.cli.parser import resolve, scan

    try:  # to read the options as the command would itself, in the folder where it would: its files are there
        command, _, rest = find_command(words)
        with chdir(launch.folder):
            resolve(command, scan(rest, (*options_of(command.config), *options_of(Common))))
    except OptionError as error:
        return str(error)
    return None


def hotloop_words(launch: "Launch") -> list[str] | None:
    """The words after `hotloop` or `python -m hotloop` where the command is one of ours."""
    from hotloop.bench.launch import PYTHON

    words = shlex.split(launch.hotloop_command or launch.command)
    if words[1:3] == ["-m", "hotloop"] and PYTHON.fullmatch(Path(words[0]).name):
        return words[3:]
    return words[1:] if words[:1] == ["hotloop"] else None


def knows_compile_only(words: Sequence[str] | None, launch: "Launch") -> bool:
    """Whether a hotloop command has the option; of a script, whether its text speaks of it."""
    if words is None:
        scripts = [launch.folder / word for word in launch.argv if word.endswith(".py")]
        texts = [script.read_bytes() for script in scripts if os.access(script, os.R_OK)]
        return any(map(COMPILE_ONLY.search, texts))
    from hotloop.cli.main import find_command

    try:
        command, _, _ = find_command(list(words))
    except OptionError:
        return False
    # A command that works on what a run made has the option from the run's command, and no use for it.
    known = any(option.name == "compile_only" for option in options_of(command.config))
    return known and command.run_values is None


def list_variants(selected: Sequence["Selected"], context: Context) -> Mapping[str, Any]:
    rows = []
    for one in selected:
        said = one.benchmark
        names = [*(metric.name for metric in said.metrics), *(metric.name for metric in said.derived)]
        needs = (",".join(said.tags) or "-", said.devices or "-", "yes" if said.needs_dataset else "-")
        rows.append((one.variant.name, said.kind, ",".join(names), *needs, one.skip or ""))
    context.table(("variant", "kind", "metrics", "tags", "devices", "data", "skipped because"), rows)
    return {"variants": [variant_record(one) for one in selected]}


def variant_record(one: "Selected") -> dict[str, Any]:
    said = one.benchmark
    return {
        "benchmark": said.name,
        "variant": one.variant.name,
        "params": dict(one.variant.params),
        "kind": said.kind,
        "tags": said.tags,
        "file": said.file,
        "line": said.line,
        "skip": one.skip,
    }


def show_commands(
    selected: Sequence["Selected"], options: "RunnerOptions", context: Context
) -> Mapping[str, Any]:
    """What would be started; status 1 if a cmd cannot be, an error if the results would have no place."""
    from hotloop.bench.runner import check_run_folder

    check_run_folder(options)
    found = [command_record(one, options) for one in selected]
    for record in found:
        context.say(f"{record['variant']}")
        context.say(f"  {record['command']}")
        if record.get("hotloop_command"):
            context.say(f"  -> {record['hotloop_command']}")
        for notice in record.get("notices", ()):
            context.say(f"  {notice}")
        if record["problem"]:
            context.say(f"  {'skipped' if record['skip'] else 'cannot run'}: {record['problem']}")
    return conclude(found, context)


def validate_variants(
    selected: Sequence["Selected"], options: "RunnerOptions", context: Context
) -> Mapping[str, Any]:
    """The same verdicts, with the places of commands that cannot be started, as mistakes: status 2."""
    from hotloop.bench.spec import SpecError

    found, problems = [command_record(one, options) for one in selected], []
    for record in found:
        if record["skip"]:
            context.say(f"{record['variant']}  skipped: {record['skip']}")
        place = f"{record['file']}:{record['line']}: {record['variant']}"
        for notice in record.get("notices", ()):
            context.warn(f"{place}: {notice}")
        if record["problem"] and not record["skip"]:
            problems.append(f"{place}: {record['problem']}")
    for line in problems[:-1]:
        print_error(line)
    if problems:
        raise SpecError(problems[-1])
    return conclude(found, context)


def command_record(one: "Selected", options: "RunnerOptions") -> dict[str, Any]:
    """A variant with its commands, or with what is wrong about them."""
    from hotloop.bench.launch import LaunchError, prepare

    record = {**variant_record(one), "command": one.variant.cmd, "folder": one.variant.folder}
    try:
        launch = prepare(one, options.log_dir / one.variant.name, options)
        commands = {"command": launch.command, "hotloop_command": launch.hotloop_command}
        problem = one.skip or find_refusal(one, launch, options)
        return {**record, **commands, "notices": launch.notices, "problem": problem}
    except LaunchError as error:
        return {**record, "problem": one.skip or str(error)}


def conclude(found: Sequence[Mapping[str, Any]], context: Context) -> Mapping[str, Any]:
    """The last line, and status 1 where something is wrong."""
    count = sum(bool(record["problem"]) and not record["skip"] for record in found)
    files = {str(record["file"]) for record in found}
    skipped = sum(bool(record["skip"]) for record in found)
    context.say(f"variants: {len(found)} (files: {len(files)}, skipped: {skipped}, cannot run: {count})")
    result = {"variants": found, "cannot_run": count}
    if count:
        leave(result, context)
    return result


def leave(result: Mapping[str, Any], context: Context) -> NoReturn:
    """End with status 1 after the result: something failed, and it was not the command line."""
    if context.json:
        print_json(result)
    raise SystemExit(1)
