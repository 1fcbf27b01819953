"""The help pages, laid out by argparse from the declared options; coloured by rich-argparse on a terminal.

Rich is imported only where colours will be seen, so that a page comes at once elsewhere. Nothing is parsed
here.
"""

import argparse
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from hotloop.cli.command import Command, has_colours
from hotloop.options import Option, Params, to_jsonable

METAVARS = {int: "N", float: "X", Fraction: "A/B", str: "TEXT", Path: "PATH", Params: "{KEY: VALUE}"}


def command_help(command: Command, path: str) -> str:
    parser = _parser(path, command.summary, command.epilog)
    if command.children:
        parser.usage = f"{path} COMMAND [OPTIONS]"
        _list(parser, "Commands", {child.name: child.summary for child in command.children})
    if command.run is not None:
        _options(parser, command.options)
    if command.presets:
        own = f"--{command.config_option.replace('_', '-')}"
        named = own if command.config_option else "--config"
        parser.epilog = f"{command.epilog}\n\nPresets for {named}: {', '.join(command.presets)}".strip()
    return parser.format_help()


def root_help(summaries: Mapping[str, str], summary: str) -> str:
    parser = _parser("hotloop", summary, "hotloop COMMAND --help says more about one command.")
    parser.usage = "hotloop COMMAND [OPTIONS]"
    _list(parser, "Commands", summaries)
    group = parser.add_argument_group("Options")
    group.add_argument("--version", action="store_true", help="Print the version.")
    return parser.format_help()


def _parser(prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    formatter: type[argparse.HelpFormatter] = argparse.RawDescriptionHelpFormatter
    if has_colours(sys.stdout):
        from rich_argparse import RawDescriptionRichHelpFormatter

        formatter = RawDescriptionRichHelpFormatter
    width = None if sys.stdout.isatty() else 100
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        add_help=False,
        formatter_class=lambda prog: formatter(prog, max_help_position=34, width=width),
    )


def _list(parser: argparse.ArgumentParser, title: str, entries: Mapping[str, str]) -> None:
    group = parser.add_argument_group(title)
    for name, summary in entries.items():
        group.add_argument(name, help=_escaped(summary), metavar=name)


def _options(parser: argparse.ArgumentParser, options: tuple[Option, ...]) -> None:
    if not parser.usage:
        positionals = [option for option in options if option.positional]
        places = [f"{option.spelling} ..." if option.kind.many else option.spelling for option in positionals]
        needed = [option.required for option in positionals]
        shown = [place if must else f"[{place}]" for place, must in zip(places, needed, strict=True)]
        parser.usage = " ".join((parser.prog, *shown, "[OPTIONS]"))
    groups: dict[str, Any] = {}
    visible = [option for option in options if not option.hidden]
    for option in sorted(visible, key=lambda each: (not each.positional, each.group is not None)):
        title = "Arguments" if option.positional else option.group or "Options"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        flags = [option.spelling, *option.aliases]
        if option.positional:
            groups[title].add_argument(option.name, metavar=option.spelling, help=_help(option))
        elif option.kind.element is bool:
            flags += [f"--no-{option.spelling[2:]}"] * (option.default is True)
            groups[title].add_argument(*flags, action="store_true", help=_help(option))
        else:
            metavar = METAVARS[option.kind.element] + (" ..." if option.kind.many else "")
            if option.kind.choices:
                metavar = "{" + ",".join(map(str, option.kind.choices)) + "}"
            groups[title].add_argument(*flags, metavar=option.metavar or metavar, help=_help(option))
    common = groups["Common options"]
    common.add_argument("-h", "--help", action="store_true", help="Show this page.")


def _help(option: Option) -> str:
    default = to_jsonable(option.default) if not option.required else None
    if default in (None, "", [], {}) or (default is False and option.kind.element is bool):
        return _escaped(option.help)
    shown = {True: "on"}.get(default) if isinstance(default, bool) else None
    if isinstance(default, list):
        shown = " ".join(map(str, default))
    return _escaped(f"{option.help} (default: {shown or default})")


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
