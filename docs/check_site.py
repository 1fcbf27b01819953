"""Checks a built site (`python docs/check_site.py build/site`; `make docs` does): status 1 and a line for each fault.

Every link inside the site, anchors included, leads somewhere; nothing that a page needs to be seen comes from the
network; and the API reference has every public name.
"""

import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

PUBLIC_MODULES = (
    "hotloop.layers",
    "hotloop.mcmc.hmc",
    "hotloop.errors",
    "hotloop.serve.client",
    "hotloop.data",
    "hotloop.cli",
)
# Links to other places are for people to follow; these are fetched by a browser to show the page.
FETCHED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "video": "src"}
MAKER = "_static/"  # of the theme: its parts of other pages are no pages


@dataclass
class Page(HTMLParser):
    """What a page has (`ids`), where it leads (`links`), and what it fetches to be shown (`fetched`)."""

    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser."""
        has = {name: value or "" for name, value in attrs}
        self.ids |= {has[name] for name in ("id", "name") if has.get(name)}
        if tag == "a" and "href" in has:
            self.links.append(has["href"])
        if tag == "link" and has.get("rel") in ("stylesheet", "preload", "icon", "modulepreload"):
            self.fetched.append(has.get("href", ""))
        if has.get(FETCHED.get(tag, "")):
            self.fetched.append(has[FETCHED[tag]])


@cache
def read_page(path: Path) -> Page:
    """Each page is read once, however many lead to it."""
    return Page(path)


def faults_of_page(page: Page, site: Path) -> Iterator[str]:
    """Links and files that are not there, and addresses that need a network."""
    for link in page.links + page.fetched:
        parts = urlsplit(link)
        if parts.scheme in ("data", "mailto"):
            continue
        if parts.scheme or parts.netloc:
            if link in page.fetched:
                yield f"fetches {link}"
            continue
        target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path.resolve()
        if not target.exists() or site.resolve() not in (target, *target.parents):
            yield f"leads to {link}, which is not there"
        elif target.suffix == ".html" and unquote(parts.fragment) not in {"", "top"} | read_page(target).ids:
            yield f"leads to {link}, where nothing has this name"


def public_names() -> Iterator[str]:
    """Every name that the reference must have, as it is documented there."""
    hotloop = import_module("hotloop")
    for name in dir(hotloop):
        if not name.startswith("_") and not hasattr(getattr(hotloop, name), "__path__") and name != "hmc":
            yield f"hotloop.{name}"
    for module in PUBLIC_MODULES:
        found = import_module(module)
        own = [name for name, thing in vars(found).items() if getattr(thing, "__module__", "") == module]
        for name in getattr(found, "__all__", own):
            if not name.startswith("_"):
                yield f"{module}.{name}"


def documented_names(site: Path) -> set[str]:
    """The names of Sphinx's inventory: four lines of text, then one name a line, compressed."""
    with (site / "objects.inv").open("rb") as file:
        for _ in range(4):
            file.readline()
        lines = zlib.decompress(file.read()).decode().splitlines()
    return {line.split(" ", 1)[0] for line in lines if " py:" in line}


def faults(site: Path) -> Iterator[str]:
    """Every fault of the site, a line each."""
    for path in sorted(site.rglob("*.html")):
        name = str(path.relative_to(site))
        if not name.startswith(MAKER):
            yield from (f"{name}: {fault}" for fault in faults_of_page(read_page(path.resolve()), site))
    documented = documented_names(site)
    yield from (f"api: {name} is not in the reference" for name in public_names() if name not in documented)


def main() -> int:
    """The exit status: 1 if there is a fault."""
    found = list(dict.fromkeys(faults(Path(sys.argv[1]))))
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(found)} faults" if found else "links, anchors, offline, API: no faults")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
