"""`hotloop bench run`: the variants of benchmark files, each a process of its own, and their results in a folder.

With --list, --dry-run or --validate nothing is started: what the files hold, what can run here, and why not.
"""

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hotloop.cli.command import Command, Context, Result, print_error, print_json
from hotloop.engine.interrupt import Stopped
from hotloop.errors import OptionError
from hotloop.options import Params, non_negative, option, option_table, options_of, positive, table_option

if TYPE_CHECKING:
    from hotloop.bench.benchmark import Benchmark, Selected
    from hotloop.bench.launch import Launch, RunnerOptions

EPILOG = """Files of the older runner (examples_utils) load unchanged, and commands of its scripts run as the hotloop
commands that replace them. A missing number, a crash or a timeout fails its variant alone; the status is 1 when any
failed. docs/benchmarks.md has the format and the files that a run leaves."""
_more = partial(option, group="What else to do")
_old = partial(option, group="Options of the older runner")
_hidden = partial(table_option, help="Refused, or without effect.", hidden=True)
STATUSES = ("passed", "failed", "timeout", "skipped")
REFUSED = {
    "upload_checkpoints": "uploading is not supported; copy the checkpoints yourself after the run",
    "custom_metrics_files": "files of Python code are not run; print the number as a JSON line, or use a regexp",
    **dict.fromkeys(
        ("submit_on_slurm", "slurm_machine_type", "slurm_resource_reservation"),
        "SLURM is not supported; put `hotloop bench run` itself into the job script",
    ),
}
WITHOUT_EFFECT = ("requirements_file", "no_code_sync", "remove_dirs_after", "ignore_errors")
OLDER = (
    *(_hidden(name, tuple[str, ...], ()) for name in ("upload_checkpoints", "custom_metrics_files")),
    *(_hidden(name, bool, False) for name in ("submit_on_slurm", *WITHOUT_EFFECT[1:])),
    *(_hidden(name, str | None, None) for name in ("slurm_machine_type", "slurm_resource_reservation")),
    _hidden("requirements_file", str | None, None),
)


@dataclass(frozen=True)
class BenchRun:
    spec: tuple[Path, ...] = option((Path("benchmarks.yml"),), "Benchmark files (YAML).", metavar="FILE")
    benchmark: tuple[str, ...] = option(
        (),
        "Names or globs of benchmarks or variants, run in this order; all of them by default.",
        metavar="NAME",
    )
    tag: tuple[str, ...] = option((), "Only benchmarks with one of these tags.")
    include_convergence: bool = option(
        False, "Run those that train to convergence, too; otherwise they must be named."
    )
    log_dir: Path | None = option(None, "Folder for results and logs; log_<time> by default.", metavar="DIR")
    repeats: int = option(1, "Runs of each variant; 5 or more to compare with another run.", check=positive)
    warm_up: int = option(0, "Runs of each variant before those that count.", check=non_negative)
    interleave: bool = option(
        False, "Round after round over all variants, so that a machine that drifts favours none."
    )
    resume: bool = option(False, "Go on in --log-dir: what has a result there is not run again.")
    fail_fast: bool = option(
        False, "Stop at the first failure; results so far are kept.", aliases=("--stop-on-error",)
    )
    timeout: float | None = option(
        None, "Seconds for each run; a shorter one of the entry wins.", check=positive
    )
    install: bool = option(
        False, "Install requirements_file in an environment of its own, and run pre_run_commands before."
    )
    monitor: bool = option(
        False, "Watch GPUs, processor and memory once a second.", aliases=("--gc-monitor",)
    )
    max_log_bytes: int = option(
        1 << 30, "Output kept of each stream; beyond it only the head and the tail.", check=positive
    )
    list: bool = _more(False, "List the chosen variants, then stop.")
    dry_run: bool = _more(False, "Show what would be run, then stop.")
    validate: bool = _more(False, "Check the files, then stop.")
    additional_metrics: bool = _old(False, "More CSV columns: duration, loss, result, cmd, env, commit.")
    csv_metrics: tuple[str, ...] = _old((), "More CSV columns: metrics or parameters.")
    compile_only: bool = _old(
        False, "Add --compile-only to the commands that know it, and skip the others; no metrics."
    )
    allow_wandb: bool = _old(False, "Leave wandb options in the commands.")
    profile: bool = _old(False, "Ask hotloop for a report and a profile of each run.")
    logging: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = _old(
        "INFO", "How much is said while it runs; from WARNING on only what went wrong."
    )
    progress_trace_period: float = _old(1.0, "Seconds between signs of life on a terminal.", check=positive)
    older: Params = option_table(*OLDER)

    def __post_init__(self) -> None:
        for name, reason in REFUSED.items():
            if self.older.get(name):
                raise OptionError(f"--{name.replace('_', '-')}: {reason}")
        if sum((self.list, self.dry_run, self.validate)) > 1:
            raise OptionError("--list, --dry-run and --validate: keep one")
        if self.resume and self.log_dir is None:
            raise OptionError("--resume needs --log-dir, the folder of the run to go on with")


def run(config: BenchRun, context: Context) -> Result:
    """Status 1 if any failed."""
    from hotloop.bench import runner
    from hotloop.bench.benchmark import select
    from hotloop.bench.record import RECORDS, read_lines
    from hotloop.bench.result_files import drop_replaced_skips

    refuse_empty(config, context)
    if unused := [f"--{name.replace('_', '-')}" for name in WITHOUT_EFFECT if config.older.get(name)]:
        context.warn(f"without effect: {', '.join(unused)}")
    selected = select(load_specs(config.spec), config.benchmark, config.tag, config.include_convergence)
    options = runner_options(config, context, "log")
    selected = mark_skipped(selected, options)
    if config.list:
        return list_variants(selected, context)
    if config.dry_run or config.validate:
        if config.dry_run:
            runner.check_run_folder(options)
        found = find_commands(selected, options)
        (show_commands if config.dry_run else tell_mistakes)(found, context)
        count = sum(bool(each["problem"]) and not each["skip"] for each in found)
        files, skipped = {str(each["file"]) for each in found}, sum(bool(each["skip"]) for each in found)
        context.say(f"variants: {len(found)} (files: {len(files)}, skipped: {skipped}, cannot run: {count})")
        return finish({"variants": found, "cannot_run": count}, context, failed=bool(count))
    try:
        is_quiet = config.logging in ("WARNING", "ERROR", "CRITICAL")
        status = runner.run(selected, options, WarningsConsole(context) if is_quiet else context)
    except KeyboardInterrupt as error:
        said = str(error) or "interrupted"
        raise Stopped.because_of(error, f"{said}; to go on: --resume --log-dir {options.log_dir}") from None
    records = drop_replaced_skips(read_lines(options.log_dir / RECORDS))
    counts = {word: sum(one["status"] == word for one in records) for word in STATUSES}
    kept = ("benchmark", "variant", "params", "repeat", "status", "reason", "seconds")
    brief = [
        {name: one[name] for name in kept}
        | {"metrics": {name: metric["value"] for name, metric in one["metrics"].items()}}
        for one in records
    ]
    return finish({"log": options.log_dir, **counts, "results": brief}, context, failed=bool(status))


def refuse_empty(config: Any, context: Context) -> None:
    """OptionError for an option that is given and names nothing, such as a variable of the shell that is not set."""
    values = {**vars(config), **getattr(config, "older", {})}
    for name in sorted(context.given):
        if values.get(name) == ():
            said = f"--{name.replace('_', '-')}"
            raise OptionError(f"{said} '': names nothing; give a name, or leave the option out")


def load_specs(files: Sequence[Path]) -> Mapping[str, "Benchmark"]:
    """The benchmarks of all files; several mistakes are reported one a line."""
    from hotloop.bench.spec import SpecError, load_benchmarks

    try:
        return load_benchmarks(files)
    except SpecError as error:
        mistakes = str(error).splitlines()
        if len(mistakes) < 2:
            raise
        for line in mistakes:
            print_error(line)
        raise SpecError(f"{len(mistakes)} mistakes in the benchmark files; nothing was run") from error


def runner_options(config: Any, context: Context, default_folder: str) -> "RunnerOptions":
    """By default the folder is a new one each second."""
    from hotloop.bench.launch import RunnerOptions

    names = {field.name for field in fields(RunnerOptions)} & vars(config).keys()
    values = {name: getattr(config, name) for name in names}
    values["log_dir"] = (
        config.log_dir or Path(f"{default_folder}_{datetime.now():%Y-%m-%d_%H-%M-%S}")
    ).absolute()
    platform = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}.get(context.device)
    return RunnerOptions(**values, variables={"JAX_PLATFORMS": platform} if platform else {})


class WarningsConsole:
    """A console that keeps everything but warnings, and the table at the end, to itself."""

    def __init__(self, context: Context):
        self.warn, self.table = context.warn, context.table

    def say(self, text: str) -> None:
        """Nothing, by the user's choice of --logging."""


def finish(result: Result, context: Context, failed: bool) -> Result:
    """The result, after which the status is 1 where something failed, and it was not the command line."""
    if failed and context.json:
        print_json(result)
    if failed:
        raise SystemExit(1)
    return result


def mark_skipped(selected: Sequence["Selected"], options: "RunnerOptions") -> list["Selected"]:
    """The same variants; those that lack something say so in `skip`."""
    return [replace(one, skip=one.skip or _find_missing(one, options)) for one in selected]


def _find_missing(one: "Selected", options: "RunnerOptions") -> str | None:
    from hotloop.bench.launch import LaunchError, build_environment, find_missing, prepare

    why = find_missing(one.benchmark, build_environment(one.variant.env, Path(), options))
    if why or not options.compile_only:
        return why
    try:
        launch = prepare(one, Path(), replace(options, compile_only=False))
    except LaunchError:
        return None  # it fails with that reason
    words = hotloop_words(launch)
    if words is None:
        # Of a script it is enough that its text has the option.
        scripts = [launch.folder / word for word in launch.argv if word.endswith(".py")]
        texts = [script.read_bytes() for script in scripts if os.access(script, os.R_OK)]
        known = any(re.search(rb"compile[-_]only", text) for text in texts)
        name = shlex.split(launch.command)[:2]
    else:
        from hotloop.cli.main import find_command

        name = ["hotloop", *words[:2]]
        try:
            command, _, _ = find_command(words)
            # A command that works on what a run made has the option from the run's command, and no use for it.
            has_option = any(each.name == "compile_only" for each in options_of(command.config))
            known = has_option and command.run_values is None
        except OptionError:
            known = False
    return None if known else f"--compile-only: `{' '.join(name)}` does not know that option"


def hotloop_words(launch: "Launch") -> list[str] | None:
    """The words after `hotloop` or `python -m hotloop` where the command is one of ours."""
    from hotloop.bench.launch import PYTHON

    words = shlex.split(launch.hotloop_command or launch.command)
    if words[1:3] == ["-m", "hotloop"] and PYTHON.fullmatch(Path(words[0]).name):
        return words[3:]
    return words[1:] if words[:1] == ["hotloop"] else None


def list_variants(selected: Sequence["Selected"], context: Context) -> Result:
    rows = []
    for one in selected:
        said = one.benchmark
        names = [*(metric.name for metric in said.metrics), *(metric.name for metric in said.derived)]
        needs = (",".join(said.tags) or "-", said.devices or "-", "yes" if said.needs_dataset else "-")
        rows.append((one.variant.name, said.kind, ",".join(names), *needs, one.skip or ""))
    context.table(("variant", "kind", "metrics", "tags", "devices", "data", "skipped because"), rows)
    return {"variants": [variant_record(one) for one in selected]}


def variant_record(one: "Selected") -> dict[str, Any]:
    said, variant = one.benchmark, one.variant
    named = {"benchmark": said.name, "variant": variant.name, "params": dict(variant.params)}
    place = {"kind": said.kind, "tags": said.tags, "file": said.file, "line": said.line}
    return {**named, **place, "skip": one.skip}


def find_commands(selected: Sequence["Selected"], options: "RunnerOptions") -> list[dict[str, Any]]:
    """The variants with what would be started, and what is wrong about it."""
    from hotloop.bench.launch import LaunchError, prepare

    found = []
    for one in selected:
        record = {**variant_record(one), "command": one.variant.cmd, "folder": one.variant.folder}
        try:
            launch = prepare(one, options.log_dir / one.variant.name, options)
            record |= {"command": launch.command, "hotloop_command": launch.hotloop_command}
            record |= {"notices": launch.notices, "problem": one.skip or find_refusal(one, launch, options)}
        except LaunchError as error:
            record["problem"] = one.skip or str(error)
        found.append(record)
    return found


def show_commands(found: list[dict[str, Any]], context: Context) -> None:
    for record in found:
        context.say(f"{record['variant']}")
        context.say(f"  {record['command']}")
        if record.get("hotloop_command"):
            context.say(f"  -> {record['hotloop_command']}")
        for notice in record.get("notices", ()):
            context.say(f"  {notice}")
        if record["problem"]:
            context.say(f"  {'skipped' if record['skip'] else 'cannot run'}: {record['problem']}")


def tell_mistakes(found: list[dict[str, Any]], context: Context) -> None:
    """The same verdicts, with the places of commands that cannot be started, as mistakes: status 2."""
    from hotloop.bench.spec import SpecError

    problems = []
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
    from hotloop.cli.main import find_command
    from hotloop.cli.parser import resolve, scan

    try:  # to read the options as the command would itself, in the folder where it would: its files are there
        command, _, rest = find_command(words)
        with chdir(launch.folder):
            resolve(command, scan(rest, command.options))
    except OptionError as error:
        return str(error)
    return None


COMMAND = Command(
    "run", "Run benchmark files; results and logs go to a folder.", BenchRun, run, epilog=EPILOG
)
