"""`hotloop bench run` with --list, --dry-run or --validate: what the files hold, and nothing is started."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from hotloop.cli.command import Context
from hotloop.cli.console import print_json

if TYPE_CHECKING:
    from hotloop.bench.launch import Settings
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
    """What would be started; status 1 if a cmd cannot be."""
    found = [prepared(one, options, options.settings) for one in selected]
    for record in found:
        say_command(record, context)
    return concluded(found, context)


def check(selected: Sequence["Selected"], options: "Options", context: Context) -> Mapping[str, Any]:
    """Whether every cmd could be started; variables that are not set here are no mistake of the file."""
    from hotloop.bench.spec import SpecError
    from hotloop.bench.variants import unset_variables

    found, mistakes = [], []
    for one in selected:
        extra = {name: f"${name}" for name in unset_variables(one.variant.cmd, {})}
        settings = replace(options.settings, extra={**extra, **options.settings.extra})
        found.append(prepared(one, options, settings))
        if wrong(found[-1]):
            place = f"{one.benchmark.file}:{one.benchmark.line}"
            mistakes.append(f"{place}: {one.variant.name}: {found[-1]['problem']}")
    if mistakes:
        raise SpecError("\n".join(mistakes))
    return concluded(found, context)


def prepared(one: "Selected", options: "Options", settings: "Settings") -> dict[str, Any]:
    """A variant with its commands, or with what is wrong about them."""
    from hotloop.bench.launch import LaunchError, prepare

    record = {**listed(one), "command": one.variant.cmd, "folder": one.variant.folder, "problem": one.skip}
    try:
        launch = prepare(one.benchmark, one.variant, options.log_dir / one.variant.name, settings)
        commands = {"command": launch.command, "hotloop_command": launch.hotloop_command}
        return {**record, **commands, "notices": launch.notices}
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
