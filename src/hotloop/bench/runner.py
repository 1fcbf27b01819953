"""What surrounds a run of benchmarks: a log folder that cannot be written becomes one line. It runs nothing.

What the runner is told: how often, where to, within which limits; and who listens. It decides nothing.
Runs the chosen variants one after the other and writes down each result before the next begins.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from hotloop.bench import result_files
from hotloop.bench.benchmark import Selected, VariantRun, plan_runs
from hotloop.bench.launch import Launch, LaunchError, LaunchOptions, prepare, prepare_python, run_pre_commands
from hotloop.bench.measure import Limits, measure, read_paces
from hotloop.bench.process import kill_marked, last_lines
from hotloop.bench.provenance import collect_provenance
from hotloop.bench.record import Record, Results, add_provenance, hash_file
from hotloop.engine.interrupt import raise_stops
from hotloop.engine.records import write_json
from hotloop.errors import OptionError, RunError
from hotloop.rehearsal import check_can_make


@contextmanager
def explain_write_errors(log: Path, advice: str = "go on with --resume") -> Iterator[None]:
    """A disk that is full, or a folder that cannot be written, becomes one line for the user."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{error.filename or log}: cannot be used: {error.strerror or error}; {advice}"
        ) from error


class BenchConsole(Protocol):
    """Who listens to the runner."""

    def say(self, text: str) -> None:
        """A line for people."""

    def warn(self, text: str) -> None:
        """A line that should not be missed."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Rows under their column names."""


@dataclass(frozen=True)
class RunnerOptions:
    """How to run; what is chosen comes beside it."""

    log_dir: Path
    repeats: int = 1
    warm_up: int = 0
    interleave: bool = False
    resume: bool = False
    fail_fast: bool = False
    install: bool = False
    additional_metrics: bool = False
    csv_metrics: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    settings: LaunchOptions = field(default_factory=LaunchOptions)


SHOWN_LINES = 12
NOTHING: dict[str, Any] = {
    "status": None,
    "reason": None,
    "command": None,
    "hotloop_command": None,
    "exitcode": None,
    "start": None,
    "end": None,
    "seconds": None,
    "metrics": {},
    "problems": {},
    "monitor": {},
    "log": {},
}


def run(selected: Sequence[Selected], options: RunnerOptions, console: BenchConsole) -> int:
    """Run everything that has no result yet; 0 if all of it passed, else 1."""
    _open_folder(options)
    telling = explain_write_errors(options.log_dir)
    with closing(Results(options.log_dir)) as results, raise_stops(), telling:
        runner = Runner(selected, options, console, results)
        try:
            runner.run()
        except BaseException:
            with suppress(OSError):  # what stopped the run is what must be told
                runner.finish()
            raise
        runner.finish()
    asked = {one.variant.name for one in selected if one.skip is None}
    theirs = [record for record in results.records if record["variant"] in asked]
    bad = any(record["status"] in ("failed", "timeout") for record in theirs)
    return 1 if bad or runner.failed else 0


def _open_folder(options: RunnerOptions) -> None:
    check_folder(options)
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--log-dir {options.log_dir}: cannot be made: {error.strerror}") from error


def check_folder(options: RunnerOptions) -> None:
    """RunError or OptionError where results have no place in the log folder; nothing is made."""
    try:
        check_can_make(options.log_dir)
    except OSError as error:
        raise RunError(f"--log-dir {options.log_dir}: cannot be made: {error.strerror}") from error
    if (options.log_dir / "results.jsonl").exists() and not options.resume:
        raise OptionError(
            f"--log-dir {options.log_dir}: holds results already; go on with --resume, or take another folder"
        )


class Runner:
    """One run of the runner: the variants, how to run them, and the results so far."""

    def __init__(
        self, selected: Sequence[Selected], options: RunnerOptions, console: BenchConsole, results: Results
    ):
        self.selected, self.options, self.console, self.results = selected, options, console, results
        self.log = options.log_dir.resolve()
        self.specs = {one.benchmark.file: hash_file(one.benchmark.file) for one in selected}
        self._refuse_changed_specs()
        ran = [record for record in results.records if record["status"] != "skipped"]
        self.done = {(record["variant"], record["repeat"]) for record in ran}
        self.known = {record["variant"] for record in results.records}
        self.failed = False
        self.turns: Mapping[str, Mapping[str, str]] = {}
        """By variant, what records say of a session in which two programs run in turns."""
        self.warned: set[str] = set()
        self.ready: dict[str, LaunchOptions | LaunchError] = {}
        files = {str(file.resolve()): name for file, name in self.specs.items()}
        where = collect_provenance(files, _home(selected), options.settings.extra)
        self.commit = where["commit"]
        self.provenance = add_provenance(self.log, where)

    def _refuse_changed_specs(self) -> None:
        files = {one.benchmark.name: one.benchmark.file for one in self.selected}
        files |= {one.variant.name: one.benchmark.file for one in self.selected}
        for record in self.results.records:
            before = record["spec"]
            for name in (record["benchmark"], record["variant"]):
                if name in files and self.specs[files[name]] != before["sha256"]:
                    raise OptionError(f"--resume: {self._difference(name, before['file'], files[name])}")

    def _difference(self, name: str, before: str, file: Path) -> str:
        if str(file.resolve()) == before:
            said = f"{before} has changed since {self.log} was begun; results of two versions"
        else:
            said = f"{self.log} has '{name}' of {before}, not of {file.resolve()}; results of two files"
        return f"{said} do not mix, so take another --log-dir"

    def run(self) -> None:
        """Every job that is left, in order."""
        self._clean_up_after_the_killed()
        self._record_skipped()
        options = self.options
        all_jobs = list(plan_runs(self.selected, options.repeats, options.warm_up, options.interleave))
        behind = {
            job.selected.variant.name for job in all_jobs if job.repeat > 0 and job.key not in self.done
        }
        left = [job for job in all_jobs if job.key not in self.done and job.selected.variant.name in behind]
        for number, job in enumerate(left, 1):
            record = self.perform(job)
            self.tell(record, f"[{number}/{len(left)}]")
            self.failed |= record["status"] != "passed"
            if self.failed and options.fail_fast:
                self.console.warn(
                    f"stopped at the first failure; {len(left) - number} runs are left (--resume)"
                )
                return

    def _clean_up_after_the_killed(self) -> None:
        """Programs of a runner that was killed would disturb every measurement from now on."""
        if self.options.resume and (count := kill_marked(str(self.log), within=True)):
            self.console.warn(f"{count} processes of an earlier run were still there and have been ended")

    def _record_skipped(self) -> None:
        for one in self.selected:
            if one.skip and one.variant.name not in self.known:
                record = {**self._blank(one, 1), "status": "skipped", "reason": one.skip}
                self.results.append({**record, "command": one.variant.cmd})
                self.console.say(f"{one.variant.name}  SKIPPED  {one.skip}")

    def _blank(self, one: Selected, repeat: int) -> Record:
        """What is known of a run before it starts."""
        file = one.benchmark.file
        return {
            "benchmark": one.benchmark.name,
            "variant": one.variant.name,
            "params": dict(one.variant.params),
            "repeat": repeat,
            **NOTHING,
            **({"turns": self.turns[one.variant.name]} if self.turns else {}),
            "env": dict(one.variant.env or one.benchmark.env),
            "spec": {"file": str(file.resolve()), "sha256": self.specs[file]},
            "provenance": self.provenance,
        }

    def perform(self, job: VariantRun) -> Record:
        """One run, and its record, which is written unless it was a warm-up."""
        folder = self.log / job.folder
        record = self._blank(job.selected, job.repeat)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            launch = self._prepare(job.selected, folder)
            record |= {"command": launch.command, "hotloop_command": launch.hotloop_command}
            before = read_paces()
            record |= measure(
                job.selected,
                launch,
                folder,
                self.options.limits,
                compile_only=self.options.settings.compile_only,
            )
            record["paces"] = [*before, *read_paces()]
            record["log"] = {name: f"{job.folder}/{file}" for name, file in record["log"].items()}
        except LaunchError as error:
            record |= {"command": job.selected.variant.cmd, "status": "failed", "reason": str(error)}
        except OSError as error:
            record |= {"status": "failed", "reason": f"{folder}: cannot be used: {error.strerror}"}
        if job.repeat > 0:
            self.results.append(record)
            self.done.add(job.key)
            _write_beside(folder, record)
        return record

    def _prepare(self, one: Selected, folder: Path) -> Launch:
        settings = self.ready.get(one.benchmark.name)
        if settings is None:
            try:
                settings = self._make_ready(one)
            except LaunchError as error:
                settings = error
            self.ready[one.benchmark.name] = settings
        if isinstance(settings, LaunchError):
            raise settings
        launch = prepare(one.benchmark, one.variant, folder, settings)
        for notice in launch.notices:
            self._warn_once(f"{one.benchmark.name}: {notice}")
        return launch

    def _warn_once(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            self.console.warn(text)

    def _make_ready(self, one: Selected) -> LaunchOptions:
        """What happens once before a benchmark's first run: packages and commands, or a word that they wait."""
        benchmark, settings = one.benchmark, self.options.settings
        for notice in benchmark.notices:
            self.console.warn(f"{benchmark.file}:{benchmark.line}: {benchmark.name}: {notice}")
        wanted = {"requirements_file": benchmark.requirements_file, "pre_run_commands": benchmark.pre_run}
        if not self.options.install:
            for name in (name for name, value in wanted.items() if value):
                self.console.warn(f"{benchmark.name}: {name} is left alone; --install sees to it")
            return settings
        settings = replace(settings, python=prepare_python(benchmark, self.log))
        run_pre_commands(benchmark, self.log, settings)
        return settings

    def tell(self, record: Mapping[str, Any], count: str) -> None:
        """A run in a line, and the end of what one that failed said."""
        repeat = f" repeat {record['repeat']}" if record["repeat"] > 1 else ""
        name = record["variant"] + (repeat if record["repeat"] > 0 else " warm-up")
        seconds = f"{record['seconds']:.2f} s" if record["seconds"] is not None else "not started"
        said = record["reason"] or result_files.describe_metrics([record])
        self.console.say(f"{count} {name}  {record['status'].upper()}  {seconds}  {said}".rstrip())
        if left_out := record.get("left_out_bytes"):
            self.console.warn(
                f"{name}: {left_out} bytes of output were left out, and their numbers with them"
            )
        if record["status"] != "passed" and record["log"]:
            for line in last_lines(self.log / record["log"]["stderr"], SHOWN_LINES):
                self.console.say(f"    | {line}")

    def finish(self) -> None:
        """The files and the table over all records, whatever happened before."""
        records = self.write_tables()
        if records:
            self.console.say("")
            self.console.table(result_files.COLUMNS, result_files.table_rows(records))
        self.console.say(f"\nresults and logs: {self.options.log_dir}")

    def write_tables(self) -> list[Record]:
        """The files over all records, which are the result."""
        records = result_files.drop_replaced_skips(self.results.records)
        result_files.write_results_json(self.log / "benchmark_results.json", records)
        additional, more = self.options.additional_metrics, self.options.csv_metrics
        result_files.write_csv(self.log / "benchmark_results.csv", records, more, additional, self.commit)
        result_files.write_junit(self.log / "benchmark_results.xml", records)
        return records


def _home(selected: Sequence[Selected]) -> Path:
    return selected[0].benchmark.file.resolve().parent


def _write_beside(folder: Path, record: Mapping[str, Any]) -> None:
    if folder.is_dir():
        write_json(folder / "variant_result.json", record)
