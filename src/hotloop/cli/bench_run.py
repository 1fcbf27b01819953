"""`hotloop bench run`: the variants of benchmark files, each a process of its own, and their results in a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hotloop.cli import bench_check
from hotloop.cli.command import Command, Context, print_error
from hotloop.engine.interrupt import Stopped
from hotloop.errors import OptionError
from hotloop.options import non_negative, option, positive

if TYPE_CHECKING:
    from hotloop.bench.benchmark import Benchmark, Selected
    from hotloop.bench.launch import RunnerOptions

EPILOG = """Files of the older runner (examples_utils) load unchanged, and commands of its scripts run as the hotloop
commands that replace them. A missing number, a crash or a timeout fails its variant alone; the status is 1 when any
failed. docs/benchmarks.md has the format and the files that a run leaves."""
MORE, OLD = "What else to do", "Options of the older runner"
STATUSES = ("passed", "failed", "timeout", "skipped")
QUIET = ("WARNING", "ERROR", "CRITICAL")
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
NO_SLURM = "SLURM is not supported; put `hotloop bench run` itself into the job script"
REFUSED = {
    "upload_checkpoints": "uploading is not supported; copy the checkpoints yourself after the run",
    "custom_metrics_files": "files of Python code are not run; print the number as a JSON line, or use a regexp",
    "submit_on_slurm": NO_SLURM,
    "slurm_machine_type": NO_SLURM,
    "slurm_resource_reservation": NO_SLURM,
}
WITHOUT_EFFECT = ("requirements_file", "no_code_sync", "remove_dirs_after", "ignore_errors")


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
    list: bool = option(False, "List the chosen variants, then stop.", group=MORE)
    dry_run: bool = option(False, "Show what would be run, then stop.", group=MORE)
    validate: bool = option(False, "Check the files, then stop.", group=MORE)
    additional_metrics: bool = option(
        False, "More CSV columns: duration, loss, result, cmd, env, commit.", group=OLD
    )
    csv_metrics: tuple[str, ...] = option((), "More CSV columns: metrics or parameters.", group=OLD)
    compile_only: bool = option(
        False, "Add --compile-only to the commands that know it, and skip the others; no metrics.", group=OLD
    )
    allow_wandb: bool = option(False, "Leave wandb options in the commands.", group=OLD)
    profile: bool = option(False, "Ask hotloop for a report and a profile of each run.", group=OLD)
    logging: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = option(
        "INFO", "How much is said while it runs; from WARNING on only what went wrong.", group=OLD
    )
    progress_trace_period: float = option(
        1.0, "Seconds between signs of life on a terminal.", check=positive, group=OLD
    )
    upload_checkpoints: tuple[str, ...] = option((), "Refused.", hidden=True)
    custom_metrics_files: tuple[str, ...] = option((), "Refused.", hidden=True)
    submit_on_slurm: bool = option(False, "Refused.", hidden=True)
    slurm_machine_type: str | None = option(None, "Refused.", hidden=True)
    slurm_resource_reservation: str | None = option(None, "Refused.", hidden=True)
    requirements_file: str | None = option(None, "Without effect, as before.", hidden=True)
    no_code_sync: bool = option(False, "Without effect: one machine.", hidden=True)
    remove_dirs_after: bool = option(False, "Without effect: one machine.", hidden=True)
    ignore_errors: bool = option(False, "Without effect: a failure stops nothing else.", hidden=True)

    def __post_init__(self) -> None:
        for name, reason in REFUSED.items():
            if getattr(self, name):
                raise OptionError(f"--{name.replace('_', '-')}: {reason}")
        if sum((self.list, self.dry_run, self.validate)) > 1:
            raise OptionError("--list, --dry-run and --validate: keep one")
        if self.resume and self.log_dir is None:
            raise OptionError("--resume needs --log-dir, the folder of the run to go on with")


def run(config: BenchRun, context: Context) -> Mapping[str, Any]:
    from hotloop.bench.benchmark import select

    refuse_empty(config, context)
    if unused := [f"--{name.replace('_', '-')}" for name in WITHOUT_EFFECT if getattr(config, name)]:
        context.warn(f"without effect: {', '.join(unused)}")
    benchmarks = load_specs(config.spec)
    selected = select(benchmarks, config.benchmark, config.tag, config.include_convergence)
    options = runner_options(config, context, "log")
    selected = bench_check.mark_skipped(selected, options)
    if config.list:
        return bench_check.list_variants(selected, context)
    if config.dry_run:
        return bench_check.show_commands(selected, options, context)
    if config.validate:
        return bench_check.validate_variants(selected, options, context)
    return run_all(selected, options, context, quiet=config.logging in QUIET)


def refuse_empty(config: Any, context: Context) -> None:
    """OptionError for an option that is given and names nothing, such as a variable of the shell that is not set."""
    for name in sorted(context.given):
        if getattr(config, name, None) == ():
            said = f"--{name.replace('_', '-')}"
            raise OptionError(f"{said} '': names nothing; give a name, or leave the option out")


def load_specs(files: Sequence[Path]) -> Mapping[str, "Benchmark"]:
    """The benchmarks of all files; several mistakes are told one a line."""
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


def run_all(
    selected: Sequence["Selected"], options: "RunnerOptions", context: Context, quiet: bool
) -> Mapping[str, Any]:
    """Status 1 if any failed."""
    from hotloop.bench.record import RECORDS, Record, read_lines
    from hotloop.bench.result_files import drop_replaced_skips
    from hotloop.bench.runner import run

    try:
        status = run(selected, options, WarningsConsole(context) if quiet else context)
    except KeyboardInterrupt as error:
        said = str(error) or "interrupted"
        raise Stopped.because_of(error, f"{said}; to go on: --resume --log-dir {options.log_dir}") from None
    records: list[Record] = drop_replaced_skips(read_lines(options.log_dir / RECORDS))
    counts = {word: sum(one["status"] == word for one in records) for word in STATUSES}
    kept = ("benchmark", "variant", "params", "repeat", "status", "reason", "seconds")
    brief = [
        {name: one[name] for name in kept}
        | {"metrics": {name: metric["value"] for name, metric in one["metrics"].items()}}
        for one in records
    ]
    result = {"log": options.log_dir, **counts, "results": brief}
    if status:
        bench_check.leave(result, context)
    return result


def runner_options(config: Any, context: Context, default_folder: str) -> "RunnerOptions":
    """What the runner needs of a command's options, which have its names; by default a new folder each second."""
    from hotloop.bench.launch import RunnerOptions

    names = {field.name for field in fields(RunnerOptions)} & vars(config).keys()
    values = {name: getattr(config, name) for name in names}
    values["log_dir"] = (
        config.log_dir or Path(f"{default_folder}_{datetime.now():%Y-%m-%d_%H-%M-%S}")
    ).absolute()
    platform = PLATFORMS.get(context.device)
    return RunnerOptions(**values, variables={"JAX_PLATFORMS": platform} if platform else {})


class WarningsConsole:
    """A console that keeps everything but warnings, and the table at the end, to itself."""

    def __init__(self, context: Context):
        self.warn, self.table = context.warn, context.table

    def say(self, text: str) -> None:
        """Nothing, by the user's choice of --logging."""


COMMAND = Command(
    "run", "Run benchmark files; results and logs go to a folder.", BenchRun, run, epilog=EPILOG
)
