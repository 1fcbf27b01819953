"""What is known of a data set before any file of it is there: its files, their content, where to get them.

Plain descriptions, shared by the catalogue and by everything that finds, checks or fetches. Nothing here
touches the disk or the network.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Download:
    """One file on the mirrors, with the checksum it must have before anything is made of it."""

    name: str
    mirrors: tuple[str, ...]
    size: int
    checksum: str


@dataclass(frozen=True)
class KnownFile:
    """One file of a set: `name` on the disk (or `name`.gz) and what its unpacked content must be."""

    name: str
    size: int
    checksum: str
    download: Download
    member: str = ""
    """Path inside the downloaded archive; empty when the download is the file itself."""
    needed: bool = True
    """Whether the set can be loaded at all without this file."""

    @property
    def stored_as(self) -> str:
        """The name under which a fetch leaves this file on the disk."""
        return self.name if self.member else self.download.name


@dataclass(frozen=True)
class KnownSet:
    """A data set: what it is, the folders it may lie in (the first is where a fetch puts it), its files."""

    name: str
    what: str
    licence: str
    folders: tuple[str, ...]
    files: tuple[KnownFile, ...] = ()
    expected: str = ""
    """For a set that cannot be fetched: the files a user has to bring."""

    @property
    def downloads(self) -> tuple[Download, ...]:
        """Every download once, in the order of the files."""
        return tuple(dict.fromkeys(file.download for file in self.files))

    @property
    def size(self) -> int:
        """Bytes of the unpacked files together."""
        return sum(file.size for file in self.files)
