"""`hotloop bench run` with --list, --dry-run or --validate: what the files hold, and nothing is started."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hotloop.cli import bench_fit
from hotloop.cli.command import Context
from hotloop.cli.console import print_error, print_json

if TYPE_CHECKING:
    from hotloop.bench.run_options import Options
    from hotloop.bench.select import Selected


def variants(selected: Sequence["Selected"], context: Context) -> Mapping[str, Any]:
    """The chosen variants and what is to know of them."""
    columns = ("variant", "kind", "metrics", "tags", "devices", "data", "skipped because")
    context.table(columns, [list_row(one) for one in selected])
    return {"variants": [listed(one) for one in selected]}


def list_row(one: "Selected") -> tuple[Any, ...]:
    """A line of `--list`."""
    said = one.benchmark
    metrics = ",".join([*(metric.name for metric in said.metrics), *(metric.name for metric in said.derived)])
    devices, data = said.devices or "-", "yes" if said.needs_dataset else "-"
    return one.variant.name, said.kind, metrics, ",".join(said.tags) or "-", devices, data, one.skip or ""


def listed(one: "Selected") -> dict[str, Any]:
    """A variant for `--json`."""
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


def commands(selected: Sequence["Selected"], options: "Options", context: Context) -> Mapping[str, Any]:
    """What would be started; status 1 if a cmd cannot be, an error if the results would have no place."""
    from hotloop.bench.runner import check_folder

    check_folder(options)
    found = [prepared(one, options) for one in selected]
    for record in found:
        say_command(record, context)
    return concluded(found, context)


def check(selected: Sequence["Selected"], options: "Options", context: Context) -> Mapping[str, Any]:
    """The same verdicts, with the places of commands that cannot be started, as mistakes: status 2."""
    from hotloop.bench.spec import SpecError

    found = [prepared(one, options) for one in selected]
    for record in found:
        if record["skip"]:
            context.say(f"{record['variant']}  skipped: {record['skip']}")
        for notice in record.get("notices", ()):
            context.warn(f"{_place(record)}: {notice}")
    *others, last = [f"{_place(record)}: {record['problem']}" for record in found if wrong(record)] or [""]
    for line in others:
        print_error(line)
    if last:
        raise SpecError(last)
    return concluded(found, context)


def _place(record: Mapping[str, Any]) -> str:
    return f"{record['file']}:{record['line']}: {record['variant']}"


def prepared(one: "Selected", options: "Options") -> dict[str, Any]:
    """A variant with its commands, or with what is wrong about them."""
    from hotloop.bench.launch import LaunchError, prepare

    record = {**listed(one), "command": one.variant.cmd, "folder": one.variant.folder, "problem": one.skip}
    try:
        launch = prepare(one.benchmark, one.variant, options.log_dir / one.variant.name, options.settings)
        commands = {"command": launch.command, "hotloop_command": launch.hotloop_command}
        problem = one.skip or bench_fit.refusal(one, launch, options)
        return {**record, **commands, "notices": launch.notices, "problem": problem}
    except LaunchError as error:
        return {**record, "problem": one.skip or str(error)}


def wrong(record: Mapping[str, Any]) -> bool:
    """Whether there is a problem that nobody asked for."""
    return bool(record["problem"]) and not record["skip"]


def say_command(record: Mapping[str, Any], context: Context) -> None:
    """The command of one variant in a few lines."""
    context.say(f"{record['variant']}")
    context.say(f"  {record['command']}")
    if record.get("hotloop_command"):
        context.say(f"  -> {record['hotloop_command']}")
    for notice in record.get("notices", ()):
        context.say(f"  {notice}")
    if record["problem"]:
        context.say(f"  {'skipped' if record['skip'] else 'cannot run'}: {record['problem']}")


def concluded(found: Sequence[Mapping[str, Any]], context: Context) -> Mapping[str, Any]:
    """The last line, and status 1 where something is wrong."""
    count, files = sum(map(wrong, found)), {str(record["file"]) for record in found}
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
