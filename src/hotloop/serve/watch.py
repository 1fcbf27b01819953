"""Which versions lie in the folders that are served, and what becomes of those that come, change, or go.

A new version is loaded beside the others and takes over when it is ready; one that is damaged is refused with a line,
and what answered before goes on. A version whose folder is gone ends its requests, unless it is the last of its model.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hotloop.engine.model_place import versions_in
from hotloop.errors import OptionError
from hotloop.serve.models import Key, Models, describe_error, describe_load, describe_refusal

Say = Callable[[str], None]
Fingerprint = tuple[tuple[str, int, int], ...]


@dataclass
class Survey:
    """What lies in folders of models, or of one model each."""

    found: dict[Key, Path] = field(default_factory=dict)
    """Versions by model and number."""
    troubles: dict[Path, str] = field(default_factory=dict)
    """Folders whose versions cannot be known now, and why: nothing is there, or a model's name is there twice."""

    @classmethod
    def make(cls, folders: Sequence[Path]) -> "Survey":
        survey, owners = cls(), dict[str, Path]()
        for folder in folders:
            models = _models_in(folder)
            if not models:
                missing = (
                    "no model is in it; give a folder" if folder.is_dir() else "no such folder; give one"
                )
                survey.troubles[folder.absolute()] = f"{folder}: {missing} that `hotloop export -o` wrote"
            for model in models:
                owner = owners.setdefault(model.name, model)
                if owner != model:
                    text = f"{folder}: the model {model.name} is also in {owner.parent}; serve one"
                    survey.troubles |= {model: text, owner: text}
                survey.found |= {(model.name, number): path for number, path in versions_in(model).items()}
        survey.found = {key: path for key, path in survey.found.items() if not survey.is_unknown(path)}
        return survey

    def is_unknown(self, version: Path) -> bool:
        """Whether a version's folder is in one of those in trouble: it may be there or not."""
        return not self.troubles.keys().isdisjoint(version.parents)


def find_versions(folders: Sequence[Path]) -> dict[Key, Path]:
    """The versions in folders of models, or of one model each.

    OptionError where a folder has none, or a model's name is in two of them.
    """
    survey = Survey.make(folders)
    for text in survey.troubles.values():
        raise OptionError(text)
    return survey.found


def _models_in(folder: Path) -> list[Path]:
    """The folders of models in it, or itself if it is one."""
    if versions_in(folder):
        return [folder.absolute()]
    try:
        return [path for path in sorted(folder.absolute().iterdir()) if path.is_dir() and versions_in(path)]
    except OSError:
        return []


def fingerprint(folder: Path) -> Fingerprint:
    """Sizes and times of a version's files, which change when any of them does; empty where it is gone."""
    try:
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


class Watcher:
    """Keeps a server's models as its folders are."""

    def __init__(self, models: Models, folders: Sequence[Path], say: Say):
        self._models, self._folders, self._say = models, folders, say
        self._seen: dict[Key, Fingerprint] = {}
        """What each version looked like when it was last loaded or refused."""
        self._places: dict[Key, Path] = {}
        """Where each of them is, or was."""
        self._kept: set[Key] = set()
        """Versions that are gone, and answer because their model has no other."""

    async def load_all(self) -> None:
        """Load everything there is; the first version that is not right ends it by its error."""
        found = find_versions(self._folders)
        self._models.expect(set(found))
        for key, folder in sorted(found.items()):
            await self._load(key, folder, fingerprint(folder))

    async def watch(self, seconds: float) -> None:
        """Look every so many seconds, until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.look()
            except Exception as error:  # a server answers on, whatever becomes of its folders
                self._warn_once(f"{type(error).__name__}: {error}")

    async def look(self) -> None:
        """Load what is new or has changed, and let go of what is gone; a folder in trouble is as it was until then."""
        survey = await asyncio.to_thread(Survey.make, self._folders)
        self._warn_once(*survey.troubles.values())
        found = survey.found
        self._kept -= found.keys()
        for key, folder in sorted(found.items()):
            looks = await asyncio.to_thread(fingerprint, folder)
            if looks == self._seen.get(key):
                continue
            try:
                await self._load(key, folder, looks)
            except Exception as error:  # one that is wrong in a way of its own stops no other
                self._say(describe_refusal(folder, error))
        gone = (
            key for key, place in self._places.items() if key not in found and not survey.is_unknown(place)
        )
        for key in sorted(gone):  # the newest is the one that stays
            self._let_go(key)

    _warnings: frozenset[str] = frozenset()

    def _warn_once(self, *texts: str) -> None:
        for text in sorted(set(texts) - self._warnings):
            self._say(f"nothing is changed: {text}")
        self._warnings = frozenset(texts)

    async def _load(self, key: Key, folder: Path, looks: Fingerprint) -> None:
        self._seen[key], self._places[key] = looks, folder
        self._models.begin(key)
        try:
            version, took = await self._models.load(folder)
        except Exception as error:
            self._models.figures.count_load(*key, is_loaded=False)
            # Clients may read the reason, and need not know where the folder lies.
            self._models.refuse(key, describe_error(error).replace(str(folder), "/".join(map(str, key))))
            raise
        except BaseException:  # the server ends
            self._models.refuse(key, "loading was given up")
            raise
        self._models.put(version)
        self._models.figures.count_load(*key, is_loaded=True)
        self._kept.discard(key)
        self._say(describe_load(version, took))
        for old in [each for each in self._kept if each[0] == key[0]]:
            self._let_go(old)

    def _let_go(self, key: Key) -> None:
        name, number = key
        loaded = self._models.versions(name)
        if number not in loaded or len(loaded) > 1:
            self._models.remove(key)
            del self._seen[key], self._places[key]
            self._kept.discard(key)
            if number in loaded:  # else it had been refused
                self._say(f"removed {name} version {number}: its folder is gone")
        elif key not in self._kept:
            self._kept.add(key)
            self._say(f"kept {name} version {number}: its folder is gone, and the model has no other version")
