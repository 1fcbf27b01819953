"""`hotloop` as a whole: help, version, exit statuses, one-line errors, strict JSON, quick answers."""

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import trainer_options

from hotloop import __version__
from hotloop.cli import main as main_module
from hotloop.cli.command import Command, Common
from hotloop.cli.helptext import command_help
from hotloop.cli.main import COMMANDS, find_command, main
from hotloop.errors import DataError
from hotloop.options import options_of


def failing(error):
    def run(config, context):
        context.say("started")
        raise error

    return run


PARENT = Command(
    "old",
    "Commands for the tests.",
    children=(
        trainer_options.TRAINER,
        trainer_options.PLACED,
        Command("user", "Fails.", run=failing(DataError("no data\nat all"))),
        Command("defect", "Fails.", run=failing(ZeroDivisionError("first\nsecond"))),
        Command("full", "Fails.", run=failing(OSError(28, "No space left on device", "results/x"))),
        Command("stop", "Stopped.", run=failing(KeyboardInterrupt())),
        Command("quiet", "Returns nothing.", run=lambda config, context: None, aliases=("silent",)),
    ),
)


@pytest.fixture(autouse=True)
def old_commands(monkeypatch):
    monkeypatch.setitem(sys.modules, "old_commands", SimpleNamespace(COMMAND=PARENT))
    monkeypatch.setitem(main_module.COMMANDS, "old", ("old_commands", "Commands for the tests."))


def test_a_command_runs_and_says_its_text_on_standard_output(capsys):
    assert main(["old", "train", "--model", "m"]) == 0
    assert capsys.readouterr() == ("model m\n", "")


@pytest.mark.parametrize("words", [["old", "train", "--json"], ["--json", "old", "train"]])
def test_json_is_one_strict_object_on_the_last_line_and_text_goes_to_standard_error(capsys, words):
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out, parse_constant=pytest.fail) == {"model": "toy_model", "learning_rate": None}
    assert out.count("\n") == 1
    assert err == "model toy_model\n"


def test_a_command_without_a_result_gives_an_empty_object(capsys):
    assert main(["old", "silent", "--json"]) == 0
    assert capsys.readouterr().out == "{}\n"


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["old", "user"], 2, "hotloop: error: no data at all"),
        (
            ["old", "defect"],
            1,
            "unexpected ZeroDivisionError: first; run again with --debug for the traceback",
        ),
        (["old", "full"], 2, "hotloop: error: results/x: No space left on device"),
        (["old", "stop"], 130, "hotloop: error: interrupted"),
        (["old", "train", "--num-epochs", "0"], 2, "--num-epochs 0: must be at least 1"),
        (["old", "trian"], 2, "hotloop old has no command 'trian'; did you mean train?"),
        (["old", "--json", "train"], 2, "hotloop old needs a command before --json: train, fetch"),
        (["kernal"], 2, "unknown command 'kernal'; did you mean kernel?"),
        (["--verbose"], 2, "--verbose: a command comes first"),
        (["old", "fetch"], 2, "NAMES is needed: What to fetch."),
    ],
)
def test_an_error_is_one_line_on_standard_error_and_a_status(capsys, words, status, text):
    assert main(words) == status
    out, err = capsys.readouterr()
    assert text in err
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


def test_under_json_an_error_is_an_object_too(capsys):
    assert main(["--json", "old", "defect"]) == 1
    out, _ = capsys.readouterr()
    assert json.loads(out)["error"].startswith("unexpected ZeroDivisionError: first")
    assert main(["old", "train", "--bogus", "--json"]) == 2
    assert "unknown option --bogus" in json.loads(capsys.readouterr().out)["error"]


def test_debug_shows_the_traceback(capsys):
    assert main(["old", "defect", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_print_config_stops_before_the_command_runs(capsys):
    assert main(["old", "defect", "--print-config"]) == 0
    assert capsys.readouterr().out.startswith("# hotloop old defect\n")


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_hotloop_alone_shows_every_command(capsys, words):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("words", [["old"], ["old", "--help"], ["help", "old"]])
def test_a_group_shows_its_commands(capsys, words):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(child.name in out for child in PARENT.children)


def test_help_shows_options_in_groups_with_defaults_aliases_choices_and_presets(capsys):
    assert main(["old", "train", "--num-epochs", "0", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    # Python 3.13 names what an option takes once, behind all its spellings.
    named = "--model-name, --model TEXT" if sys.version_info >= (3, 13) else "--model-name TEXT, --model TEXT"
    for text in (
        "--micro-batch-size N Samples per replica. (default: 1)",
        f"{named} The model. (default: toy_model)",
        "--validation, --no-validation Run the validation phase. (default: on)",
        "--logs-per-epoch A/B Logs per epoch. (default: 1)",
        "--device-mapping N ... Device of each stage.",
        "--dataset {imagenet,cifar10,mnist} The data. (default: cifar10)",
        "Data:",
        "Common options:",
        "--only-accelerator, --only-ipu",
        "Presets for --config: resnet8_test, resnet50_gn, broken",
    ):
        assert text in out


def test_help_is_coloured_on_a_terminal_unless_no_color_is_set(monkeypatch):
    pytest.importorskip("rich_argparse")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in command_help(trainer_options.TRAINER, "hotloop train")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in command_help(trainer_options.TRAINER, "hotloop train")


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hotloop {__version__}\n"
    assert main(["--json", "--version"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": __version__}


def leaves(command):
    yield command
    for child in command.children:
        yield from leaves(child)


@pytest.mark.parametrize("name", [name for name, (module, _) in COMMANDS.items() if find_spec(module)])
def test_every_command_has_a_help_page_and_defaults_that_pass_their_own_checks(name):
    for command in leaves(find_command([name])[0]):
        assert command.summary.endswith(".")
        assert command.summary in command_help(command, name)
        for option in (*options_of(command.config), *options_of(Common)):
            assert option.help
            assert option.required or option.accept(option.default) == option.default


def hotloop(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "hotloop", *words], capture_output=True, text=True, **options
    )


HEAVY = ("jax", "jaxlib", "numpy", "optax", "orbax", "rich", "yaml")
LISTING = (
    "import sys; from hotloop.cli.main import main; status = main(sys.argv[1:]);"
    f"print(status, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["kernel", "--help"], 0),
        (["plan", "--bogus", "3"], 2),
        (["cache", "--help"], 0),
    ],
)
def test_help_version_and_bad_options_answer_at_once_without_heavy_imports(words, status):
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", LISTING, *words], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == f"{status} []"
    # Alone it takes 0.1 s; the bound only has to tell that from the second that jax would take.
    assert time.perf_counter() - start < 3


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m hotloop --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", f"for i in 1 2 3; do {command}; done"], capture_output=True, text=True
    )
    assert set(done.stdout.split()) <= {"0", "141"}
    assert done.stderr == ""


NEEDS_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")


@NEEDS_FULL
@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--version >&-", 0),
        ("--json --version >&-", 0),
        ("nope 2>&-", 2),
        ("nope >&- 2>&-", 2),
        ("nope 2>/dev/full", 2),
        ("nope 2> >(true)", 2),
    ],
)
def test_a_standard_stream_that_is_closed_or_full_does_not_change_the_status(words, status):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m hotloop {words}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (status, "")


@NEEDS_FULL
def test_a_full_standard_output_is_one_line_that_names_it():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m hotloop --version >/dev/full"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "hotloop: error: a file or standard output: No space left on device\n"


def test_no_file_of_the_process_takes_the_place_of_a_closed_standard_stream():
    child = (
        "from hotloop import __main__; __main__.listen = lambda json: None; import os, sys;"
        "sys.argv = ['hotloop', '--version']; __main__.main(); os._exit(os.open('/dev/zero', os.O_RDONLY))"
    )
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "{child}" <&- >&- 2>&-'], check=False)
    assert done.returncode > 2


def test_the_module_is_the_command():
    done = hotloop("--version")
    assert (done.returncode, done.stdout) == (0, f"hotloop {__version__}\n")
