"""A command line cut into options and their texts, as the old programs' command lines were typed.

Hyphens or underscores, unambiguous prefixes, aliases, `--opt=value`, bare flags, `--flag False`,
`--no-flag`, several values after one option, negative numbers as values: argparse has no public way to take
all of these together (a boolean with a value swallows the next positional, `-1e-5` is taken for an option),
so the words are cut here and argparse only lays out the help. Types and checks are the options' own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hotloop.errors import OptionError, join_with_or
from hotloop.options import Option, did_you_mean
from hotloop.options.values import FALSE, TRUE, split_list


@dataclass(frozen=True)
class Spelling:
    """One way to write an option; `negated` where it turns a flag off."""

    option: Option
    negated: bool = False


class Names:
    """Every spelling of the options that may be used, and the way from what was typed to the option."""

    def __init__(self, options: Iterable[Option]):
        self.known: dict[str, Spelling] = {}
        for option in options:
            for word in (f"--{with_hyphens(option.name)}", *option.aliases):
                if word in self.known:
                    raise TypeError(f"two options are called {word}")
                self.known[word] = Spelling(option)
        flags = {word: each.option for word, each in self.known.items() if each.option.kind.element is bool}
        for word, option in flags.items():
            if word.startswith("--"):
                self.known.setdefault(f"--no-{word[2:]}", Spelling(option, negated=True))

    def find(self, typed: str) -> Spelling:
        """What a word such as `--batch_s` means, or an OptionError that names the nearest ones."""
        word = with_hyphens(typed)
        if word in self.known:
            return self.known[word]
        offered = {
            name: each for name, each in self.known.items() if not each.negated or word.startswith("--no-")
        }
        starts = [name for name in offered if word.startswith("--") and name.startswith(word)]
        if len({offered[name] for name in starts}) == 1:
            return offered[starts[0]]
        if starts:
            raise OptionError(f"{typed} could be {join_with_or(starts)}; write more of it")
        visible = [name for name, each in offered.items() if not each.option.hidden]
        raise OptionError(f"unknown option {typed}{did_you_mean(word, visible)}")


def with_hyphens(name: str) -> str:
    return name.replace("_", "-")


def is_option(word: str) -> bool:
    """Whether a word opens an option: a hyphen that is not a negative number's."""
    if not word.startswith("-") or len(word) == 1:
        return False
    if word.startswith("--"):
        return True
    return word[1].isalpha() and word[1:].lower() not in ("inf", "infinity", "nan")


def scan(argv: Sequence[str], options: Sequence[Option]) -> dict[str, Any]:
    """The texts given for each option, by field name; a list where several are taken."""
    names = Names(option for option in options if not option.positional)
    positionals = [option for option in options if option.positional]
    words, rest = list(argv), []
    given: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if word == "--":
            rest += words
            break
        if not is_option(word):
            rest.append(word)
            continue
        spelling, equals, text = word.partition("=")
        found = names.find(spelling)
        if found.negated and equals:
            raise OptionError(f"{word}: {spelling} takes no value")
        if found.negated:
            given[found.option.name] = "false"
        else:
            given[found.option.name] = text if equals else _values(found.option, words, bool(positionals))
    return given | _place(positionals, rest)


def _values(option: Option, words: list[str], positionals: bool) -> Any:
    """The values after an option, taken off the words."""
    follows = bool(words) and not is_option(words[0])
    if option.kind.element is bool and not option.kind.many:
        # Beside positionals, only a word that can be nothing else is the flag's value.
        is_value = follows and (not positionals or words[0].lower() in TRUE | FALSE)
        return words.pop(0) if is_value else "true"
    if option.kind.many:
        values = []
        while words and not is_option(words[0]):
            values += split_list(words.pop(0))
        return values
    if not follows:
        raise OptionError(f"{option.spelling}: a value is needed: {option.help}")
    return words.pop(0)


def _place(positionals: list[Option], words: list[str]) -> dict[str, Any]:
    """Words without an option go to the positionals in order; one that takes many takes all that are left."""
    placed: dict[str, Any] = {}
    left = list(words)
    for option in positionals:
        if not left:
            break
        if option.kind.many:
            placed[option.name], left = left, []
        else:
            placed[option.name] = left.pop(0)
    if left:
        raise OptionError(f"unexpected argument '{left[0]}'; options begin with --")
    return placed
