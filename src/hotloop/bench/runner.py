"""Runs the chosen variants one after the other and writes down each result before the next begins. Nothing that one
variant does (crash, hang, print nonsense) touches the others or the runner.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from hotloop.bench import result_files
from hotloop.bench.benchmark import Selected, count_of
from hotloop.bench.launch import Launch, LaunchError, RunnerOptions, prepare, prepare_python, run_pre_commands
from hotloop.bench.measure import measure
from hotloop.bench.process import kill_marked, last_lines
from hotloop.bench.provenance import collect_provenance
from hotloop.bench.record import RECORDS, Record, Results, add_provenance, hash_file
from hotloop.engine.interrupt import raise_stops
from hotloop.engine.run import check_can_make, write_json
from hotloop.errors import OptionError, RunError

SHOWN_LINES = 12
EMPTY = ("status", "reason", "command", "hotloop_command", "exitcode", "start", "end", "seconds")
NOTHING: dict[str, Any] = {**dict.fromkeys(EMPTY), "metrics": {}, "problems": {}, "monitor": {}, "log": {}}
"""What a record has of a run that has not begun."""


@contextmanager
def explain_write_errors(log: Path, advice: str) -> Iterator[None]:
    """A disk that is full, or a folder that cannot be written, becomes one line for the user."""
    try:
        yield
    except OSError as error:
        where, why = error.filename or log, error.strerror or error
        raise RunError(f"{where}: cannot be used: {why}; {advice}") from error


class BenchConsole(Protocol):
    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...


def run(selected: Sequence[Selected], options: RunnerOptions, console: BenchConsole) -> int:
    """Run everything that has no result yet; 0 if all of it passed, else 1."""
    check_run_folder(options)
    explaining = explain_write_errors(options.log_dir, "go on with --resume")
    with closing(Results(options.log_dir)) as results, raise_stops(), explaining:
        runner = Runner(selected, options, console, results)
        try:
            runner.run()
        except BaseException:
            with suppress(OSError):  # what stopped the run is what must be reported
                runner.finish()
            raise
        runner.finish()
    asked = {one.variant.name for one in selected if one.skip is None}
    statuses = {record["status"] for record in results.records if record["variant"] in asked}
    return 1 if runner.failed or statuses & {"failed", "timeout"} else 0


def check_run_folder(options: RunnerOptions) -> None:
    """As `check_folder`; what --resume goes on with may be there."""
    taken = () if options.resume else (RECORDS,)
    check_folder(options.log_dir, taken, "go on with --resume, or take another folder")


def check_folder(log: Path, taken: Sequence[str], advice: str) -> None:
    """RunError or OptionError where results have no place in the log folder; nothing is made."""
    try:
        check_can_make(log)
    except OSError as error:
        raise RunError(f"--log-dir {log}: cannot be made: {error.strerror}") from error
    if any((log / name).exists() for name in taken):
        raise OptionError(f"--log-dir {log}: holds results already; {advice}")


class Runner:
    """One run of the runner: the variants, how to run them, and the results so far.

    Where two programs run in turns it is a `side`, and `turns` is by variant what its records say of that.
    """

    def __init__(
        self,
        selected: Sequence[Selected],
        options: RunnerOptions,
        console: BenchConsole,
        results: Results,
        turns: Mapping[str, Mapping[str, str]] = {},
        side: str = "",
    ):
        self.selected, self.options, self.console, self.results = selected, options, console, results
        self.turns, self.side = turns, side
        self.log = options.log_dir.resolve()
        self.specs = {one.benchmark.file: hash_file(one.benchmark.file) for one in selected}
        files = {one.benchmark.name: one.benchmark.file for one in selected}
        files |= {one.variant.name: one.benchmark.file for one in selected}
        for record in results.records:
            before, sha256 = record["spec"]["file"], record["spec"]["sha256"]
            for name in (record["benchmark"], record["variant"]):
                if name not in files or self.specs[files[name]] == sha256:
                    continue
                now = str(files[name].resolve())
                said = f"{self.log} has '{name}' of {before}, not of {now}; results of two files"
                if now == before:
                    said = f"{before} has changed since {self.log} was begun; results of two versions"
                raise OptionError(f"--resume: {said} do not mix, so take another --log-dir")
        self.failed = False
        self.warned: set[tuple[str, str]] = set()
        self.ready: dict[str, RunnerOptions | LaunchError] = {}
        hashes = {str(file.resolve()): sha256 for file, sha256 in self.specs.items()}
        home = selected[0].benchmark.file.resolve().parent
        where = collect_provenance(hashes, home, options.variables)
        self.commit = where["commit"]
        self.provenance = add_provenance(self.log, where)

    def say(self, text: str) -> None:
        self.console.say(f"{self.side} {text}" if self.side else text)

    def warn(self, text: str) -> None:
        self.console.warn(f"{self.side}: {text}" if self.side else text)

    def run(self) -> None:
        options = self.options
        if options.resume and (count := kill_marked(str(self.log), within=True)):
            # Programs of a runner that was killed would disturb every measurement from now on.
            self.warn(f"{count} processes of an earlier run were still there and have been ended")
        ran = [record for record in self.results.records if record["status"] != "skipped"]
        done = {(record["variant"], record["repeat"]) for record in ran}
        known = {record["variant"] for record in self.results.records}
        for one in self.selected:
            if one.skip and one.variant.name not in known:
                record = {**self._blank(one, 1), "status": "skipped", "reason": one.skip}
                self.results.append({**record, "command": one.variant.cmd})
                self.say(f"{one.variant.name}  SKIPPED  {one.skip}")
        rounds = range(1 - options.warm_up, options.repeats + 1)
        running = [one for one in self.selected if one.skip is None]
        runs = [(one, repeat) for one in running for repeat in rounds]
        if options.interleave:
            runs = [(one, repeat) for repeat in rounds for one in running]
        undone = [(one, repeat) for one, repeat in runs if (one.variant.name, repeat) not in done]
        behind = {one.variant.name for one, repeat in undone if repeat > 0}  # which need their warm-up, too
        left = [(one, repeat) for one, repeat in undone if one.variant.name in behind]
        for number, (one, repeat) in enumerate(left, 1):
            record = self.perform(one, repeat, f"[{number}/{len(left)}]")
            self.failed |= record["status"] != "passed"
            if self.failed and options.fail_fast:
                rest = count_of(len(left) - number, "run")
                self.warn(f"stopped at the first failure, with {rest} to go (--resume)")
                return

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
            "env": dict(one.variant.env),
            "spec": {"file": str(file.resolve()), "sha256": self.specs[file]},
            "provenance": self.provenance,
        }

    def perform(self, one: Selected, repeat: int, count: str) -> Record:
        """One run, and its record, which is written unless it was a warm-up: those are repeats before 1."""
        place = one.variant.name
        if repeat != 1:
            place += f"/repeat-{repeat}" if repeat > 1 else f"/warm-up-{1 - repeat}"
        folder = self.log / place
        record = self._blank(one, repeat)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            launch = self._prepare(one, folder)
            record |= {"command": launch.command, "hotloop_command": launch.hotloop_command}
            record |= measure(one, launch, folder, self.options)
            record["log"] = {name: f"{place}/{name}" for name in ("stdout", "stderr")}
        except LaunchError as error:
            record |= {"command": one.variant.cmd, "status": "failed", "reason": str(error)}
        except OSError as error:
            record |= {"status": "failed", "reason": f"{folder}: cannot be used: {error.strerror}"}
        if repeat > 0:
            self.results.append(record)
            if folder.is_dir():
                write_json(folder / "variant_result.json", record)
        # A line on it, and the end of what one that failed said.
        name = one.variant.name + (" warm-up" if repeat < 1 else f" repeat {repeat}" if repeat > 1 else "")
        seconds = f"{record['seconds']:.2f} s" if record["seconds"] is not None else "not started"
        said = record["reason"] or result_files.describe_metrics([record])
        self.say(f"{count} {name}  {record['status'].upper()}  {seconds}  {said}".rstrip())
        if left_out := record.get("left_out_bytes"):
            self.warn(f"{name}: {left_out} bytes of output were left out, and their numbers with them")
        if record["status"] != "passed" and record["log"]:
            for line in last_lines(self.log / record["log"]["stderr"], SHOWN_LINES):
                self.say(f"    | {line}")
        return record

    def _prepare(self, one: Selected, folder: Path) -> Launch:
        benchmark, name, options = one.benchmark, one.benchmark.name, self.options
        if name not in self.ready:  # before its first run: packages and commands, or a word that they wait
            for notice in benchmark.notices:
                self.warn(f"{benchmark.file}:{benchmark.line}: {name}: {notice}")
            wanted = {"requirements_file": benchmark.requirements_file, "pre_run_commands": benchmark.pre_run}
            for key, value in wanted.items():
                if value and not options.install:
                    self.warn(f"{name}: {key} is left alone; --install sees to it")
            try:
                if options.install:
                    options = replace(options, python=prepare_python(benchmark, self.log))
                    run_pre_commands(benchmark, self.log, options)
                self.ready[name] = options
            except LaunchError as error:
                self.ready[name] = error
        if isinstance(ready := self.ready[name], LaunchError):
            raise ready
        launch = prepare(one, folder, ready)
        for notice in launch.notices:
            if (name, notice) not in self.warned:
                self.warn(f"{name}: {notice}")
                self.warned.add((name, notice))
        return launch

    def finish(self) -> None:
        records = self.write_tables()
        if records:
            self.say("")
            self.console.table(result_files.COLUMNS, result_files.table_rows(records))
        self.say(f"\nresults and logs: {self.options.log_dir}")

    def write_tables(self) -> list[Record]:
        records = result_files.drop_replaced_skips(self.results.records)
        result_files.write_results_json(self.log / "benchmark_results.json", records)
        additional, more = self.options.additional_metrics, self.options.csv_metrics
        result_files.write_csv(self.log / "benchmark_results.csv", records, more, additional, self.commit)
        result_files.write_junit(self.log / "benchmark_results.xml", records)
        return records
