"""How much a reader has to read: sizes of the source, and the files that a command passes through.

    python benchmarks/house.py            # sizes, and the three training commands (about a minute)
    python benchmarks/house.py --sizes    # sizes alone
    python benchmarks/house.py --json     # the same as one JSON object
    PYTHONPATH=OTHER/src python benchmarks/house.py --source OTHER   # another checkout, by the same rules

A command is followed by a profile hook. Every function is read once, when it is first called; a file that is
entered counts once, and going back to one that was open before is a return. A function inside another is read with
it. Code that only runs while a module is imported does not count: nobody follows that.
"""

import argparse
import ast
import collections
import json
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

COMMANDS = {
    "cnn train": "cnn train --model-name cifar_resnet8 --dataset cifar10 --synthetic-data device --micro-batch-size 4 "
    "--weight-updates-per-epoch 4 --seed 1",
    "recommender train": "recommender train --training-data-file {ratings} --validation-data-file {ratings} "
    "--size 128 --batch-size 4 --epochs 2 --run-name house",
    "vcd train": "vcd train --data digits --updates 4 --hidden 8 8 --z-dim 2 --no-testing",
}
PARTICIPLES = {
    "begun", "broken", "built", "chosen", "done", "drawn", "found", "given", "held", "kept", "known", "left", "lost",
    "made", "meant", "said", "seen", "sent", "shown", "spelt", "taken", "thrown", "told", "written",
}  # fmt: skip
NO_PARTICIPLES = {"embed", "feed", "need", "read", "seed", "speed"}


def main() -> None:
    arguments = argparse.ArgumentParser(description="Measure the source as a reader meets it.")
    arguments.add_argument("--source", type=Path, default=Path(__file__).parents[1], help="a checkout")
    arguments.add_argument("--sizes", action="store_true", help="follow no command")
    arguments.add_argument("--json", action="store_true", help="one JSON object")
    arguments.add_argument("--follow", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    package = options.source.resolve() / "src" / "hotloop"
    if options.follow:
        print(json.dumps(follow(package, options.follow)), file=sys.stderr)
        return
    result = {"sizes": sizes(package, options.source / "tests"), "commands": {}}
    if not options.sizes:
        result["commands"] = {name: passed(options.source, words) for name, words in COMMANDS.items()}
    print(json.dumps(result, indent=1) if options.json else text(result))


def text(result: dict) -> str:
    lines = [f"{name:36} {value}" for name, value in result["sizes"].items()]
    for name, each in result["commands"].items():
        lines.append(
            f"{name:36} {each['files']} files, {each['returns']} returns, {each['functions']} functions"
        )
    return "\n".join(lines)


def sizes(package: Path, tests: Path) -> dict:
    files = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(source) for path, source in files.items()}
    lengths = sorted(source.count("\n") for source in files.values())
    functions = sorted(
        node.end_lineno - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    source_lines, test_lines = sum(lengths), sum(path.read_text().count("\n") for path in tests.rglob("*.py"))
    comments = sum(bool(re.match(r"\s*#", line)) for source in files.values() for line in source.splitlines())
    return {
        "files": len(files),
        "lines": source_lines,
        "lines of a file, median": statistics.median(lengths),
        "lines of a file, p90": quantile(lengths, 0.9),
        "lines of a function, median": statistics.median(functions),
        "lines of a function, p90": quantile(functions, 0.9),
        "lines of a function, most": functions[-1],
        "files of one definition": sum(len(definitions(tree)) == 1 for tree in trees.values()),
        "header lines, %": round(100 * sum(map(header, trees.values())) / source_lines, 1),
        "comment lines, %": round(100 * comments / source_lines, 2),
        "class names used twice": len(repeated_classes(trees)),
        "one-word participles": sum(
            is_participle(name) for tree in trees.values() for name in public_functions(tree)
        ),
        "test lines / source lines": round(test_lines / source_lines, 2),
        **{f"files, {room}": count for room, count in rooms(package, files).items()},
    }


def quantile(ordered: list[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def definitions(tree: ast.Module) -> list[ast.stmt]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def header(tree: ast.Module) -> int:
    """Lines before the first statement that is neither the docstring nor an import."""
    for place, node in enumerate(tree.body):
        if not isinstance(node, ast.Import | ast.ImportFrom) and (place or not isinstance(node, ast.Expr)):
            return node.lineno - 1
    return tree.body[-1].end_lineno if tree.body else 0


def repeated_classes(trees: dict[Path, ast.Module]) -> list[str]:
    names = [
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    return [name for name, count in collections.Counter(names).items() if count > 1]


def public_functions(tree: ast.Module) -> list[str]:
    return [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]


def is_participle(name: str) -> bool:
    return "_" not in name and (name in PARTICIPLES or (name.endswith("ed") and name not in NO_PARTICIPLES))


def rooms(package: Path, files: dict[Path, str]) -> dict[str, int]:
    def room(path: Path) -> str:
        parts = path.relative_to(package).parts
        return (
            parts[1] if parts[0] == "families" and len(parts) > 2 else parts[0] if len(parts) > 1 else "top"
        )

    return dict(sorted(collections.Counter(map(room, files)).items()))


def passed(source: Path, words: str) -> dict:
    """Follow one command in a process and a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        ratings = Path(folder) / "ratings.txt"
        ratings.write_text(
            "".join(f"{user}\t{item}\t{1 + (user * item) % 5}\n" for user in range(9) for item in range(7))
        )
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--source",
            str(source.resolve()),
            "--follow",
        ]
        done = subprocess.run(
            [*command, *words.format(ratings=ratings).split()], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{words}: {done.stderr[-2000:]}")
        return json.loads(done.stderr.splitlines()[-1])


def importing(frame) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").startswith("hotloop."):
            return True
        frame = frame.f_back
    return False


def follow(package: Path, words: list[str]) -> dict:
    inside, seen, files = f"{package}/", set(), []

    def enter(frame, event, _):
        code = frame.f_code
        if (
            event != "call"
            or code in seen
            or code.co_name == "<module>"
            or not code.co_filename.startswith(inside)
        ):
            return
        if "<locals>" in code.co_qualname or importing(frame):
            return
        seen.add(code)
        files.append(code.co_filename)

    sys.argv = ["hotloop", *words]
    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        runpy.run_module("hotloop", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    opened, returns, current = set(), 0, None
    for file in files:
        returns += file != current and file in opened
        opened.add(file)
        current = file
    return {"files": len(opened), "returns": returns, "functions": len(seen)}


if __name__ == "__main__":
    main()
