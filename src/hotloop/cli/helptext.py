"""The help pages, laid out by argparse from the declared options; coloured by rich-argparse on a terminal.

Rich is imported only where colours will be seen, so that a page comes at once elsewhere.
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
    usage = f"{path} COMMAND [OPTIONS]" if command.children else None
    parser = _parser(path, command.summary, command.epilog, usage)
    if command.children:
        _list_commands(parser, {child.name: child.summary for child in command.children})
    if command.run is not None:
        _add_options(parser, command.options, command.first_group)
    if command.presets:
        named = (command.config_option or "config").replace("_", "-")
        parser.epilog = (
            f"{command.epilog}\n\nPresets for --{named}: {', '.join(command.preset_names)}".strip()
        )
    return parser.format_help()


def root_help(summaries: Mapping[str, str], summary: str) -> str:
    epilog = "hotloop COMMAND --help says more about one command."
    parser = _parser("hotloop", summary, epilog, "hotloop COMMAND [OPTIONS]")
    _list_commands(parser, summaries)
    group = parser.add_argument_group("Options")
    group.add_argument("--version", action="store_true", help="Print the version.")
    return parser.format_help()


def _parser(prog: str, description: str, epilog: str, usage: str | None) -> argparse.ArgumentParser:
    formatter: type[argparse.HelpFormatter] = argparse.RawDescriptionHelpFormatter
    if has_colours(sys.stdout):
        from rich_argparse import RawDescriptionRichHelpFormatter

        formatter = RawDescriptionRichHelpFormatter
    width = None if sys.stdout.isatty() else 100
    return argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=epilog,
        add_help=False,
        formatter_class=lambda prog: formatter(prog, max_help_position=34, width=width),
    )


def _list_commands(parser: argparse.ArgumentParser, summaries: Mapping[str, str]) -> None:
    group = parser.add_argument_group("Commands")
    for name, summary in summaries.items():
        group.add_argument(name, help=summary.replace("%", "%%"), metavar=name)


def _add_options(parser: argparse.ArgumentParser, options: tuple[Option, ...], first_group: str = "") -> None:
    if not parser.usage:
        places = []
        for option in (each for each in options if each.positional):
            place = f"{option.spelling} ..." if option.kind.many else option.spelling
            places.append(place if option.required else f"[{place}]")
        parser.usage = " ".join((parser.prog, *places, "[OPTIONS]"))
    groups: dict[str, Any] = {}
    visible = [option for option in options if not option.hidden]

    def rank(option: Option) -> tuple[bool, bool, bool]:
        return not option.positional, option.group is not None, option.group != first_group

    for option in sorted(visible, key=rank):
        title = "Arguments" if option.positional else option.group or "Options"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        flags, kind, text = [option.spelling, *option.aliases], option.kind, option.help
        default = None if option.required else to_jsonable(option.default)
        if default not in (None, "", [], {}) and not (default is False and kind.element is bool):
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            text = f"{text} (default: {'on' if default is True else shown})"
        text = text.replace("%", "%%")
        if option.positional:
            groups[title].add_argument(option.name, metavar=option.spelling, help=text)
        elif kind.element is bool:
            flags += [f"--no-{option.spelling[2:]}"] * (option.default is True)
            groups[title].add_argument(*flags, action="store_true", help=text)
        else:
            metavar = METAVARS[kind.element] + (" ..." if kind.many else "")
            if kind.choices:
                metavar = "{" + ",".join(map(str, kind.choices)) + "}"
            groups[title].add_argument(*flags, metavar=option.metavar or metavar, help=text)
    groups["Common options"].add_argument("-h", "--help", action="store_true", help="Show this page.")
