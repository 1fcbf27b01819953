"""Prints the oldest allowed version of every package that hotloop may import, or of those named, as pip's constraints.

    python .github/oldest.py [NAME ...] > oldest.txt && pip install -e '.[test]' -c oldest.txt

They are read from pyproject.toml, so that what is tested is what is promised. Tools of the tests are not among them.
"""

import re
import sys
import tomllib
from pathlib import Path

LEAST = re.compile(r"(?P<name>[\w.-]+)(?:\[[^\]]*\])?\s*>=\s*(?P<version>[\w.]+)")
OTHERS = ("test", "docs", "dev", "package", "peers", "cuda", "tpu", "native")
"""Extras that are for developers, or of packages that no machine of the tests has."""
WITH_JAX = "jaxlib"  # which jax allows to be newer than itself


def oldest(project: dict) -> dict[str, str]:
    """Package -> the oldest version that the project or one of its extras allows."""
    extras = (lines for name, lines in project["optional-dependencies"].items() if name not in OTHERS)
    found: dict[str, str] = {}
    for line in [*project["dependencies"], *(line for lines in extras for line in lines)]:
        if not (match := LEAST.match(line)):
            raise SystemExit(f"{line}: names no oldest version")
        if found.setdefault(match["name"], match["version"]) != match["version"]:
            raise SystemExit(f"{line}: another extra allows {found[match['name']]}")
    return {**found, WITH_JAX: found["jax"]}


if __name__ == "__main__":
    document = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    found = oldest(document["project"])
    sys.stdout.writelines(f"{name}=={found[name]}\n" for name in sys.argv[1:] or found)
