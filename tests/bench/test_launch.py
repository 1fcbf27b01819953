"""From a cmd to what is started: words, variables, programs, and old scripts."""

import shlex
import sys
from pathlib import Path

import pytest

from hotloop.bench.benchmark import Benchmark, Selected, Variant
from hotloop.bench.launch import (
    LaunchError,
    RunnerOptions,
    expand_environment,
    prepare,
    resolve_program,
    split_command,
    translate_script,
)

ENV = {"DATA": "/d", "TWO": "a b"}


@pytest.mark.parametrize(
    ("cmd", "words"),
    [
        ("run  --a 'x y' \"z\"", ["run", "--a", "x y", "z"]),
        ("run $DATA/x ${DATA}", ["run", "/d/x", "/d"]),
        ("run $TWO", ["run", "a", "b"]),
        ("run 'a|b' \"c && d\" 'e > f' g\\;", ["run", "a|b", "c && d", "e > f", "g;"]),
        ("curl http://h/?a=1&b=2 a->b x|y", ["curl", "http://h/?a=1&b=2", "a->b", "x|y"]),
        ("""run --params '{"a": 1}'""", ["run", "--params", '{"a": 1}']),
    ],
)
def test_a_cmd_is_split_as_a_shell_would_without_its_powers(cmd, words):
    assert split_command(cmd, ENV) == words


@pytest.mark.parametrize(
    ("cmd", "sign"),
    [
        ("a | b", "|"),
        ("a && b", "&&"),
        ("a || b", "||"),
        ("cd x; b", ";"),
        ("a ; b", ";"),
        ("a > f", ">"),
        ("a 2>&1", "2>&1"),
        ("a >f", ">f"),
        ("a < f", "<"),
        ("a &", "&"),
        ("a $(b)", "$("),
        ("a `b`", "`"),
        ("a 2>err", "2>err"),
        ("foo;", ";"),
    ],
)
def test_what_needs_a_shell_is_refused_and_named(cmd, sign):
    with pytest.raises(LaunchError, match="needs a shell") as caught:
        split_command(cmd, ENV)
    assert f"'{sign}'" in str(caught.value)


@pytest.mark.parametrize(
    ("cmd", "said"),
    [
        ("run $NONE/x $OTHER", "NONE, OTHER"),
        ("run 'x", "no closing quotation"),
        ("", "empty"),
    ],
)
def test_other_mistakes_are_named_too(cmd, said):
    with pytest.raises(LaunchError, match=said):
        split_command(cmd, ENV)


def launch(cmd):
    one = Selected(Benchmark("x", Path("f.yml"), 1, cmd), Variant("x", {}, cmd))
    return prepare(one, Path("log"), RunnerOptions(Path("log")))


@pytest.mark.parametrize(
    ("cmd", "named"),
    [
        ("a&&b", "'&&' in 'a&&b'"),
        ("a||b c", "'||' in 'a||b'"),
        ("a x>y", "'>' in 'x>y'"),
        ("a x<y", "'<' in 'x<y'"),
        ("a;b;c", "'; ;' in 'a;b;c'"),
        ("sleep 1& b", "'&' in '1&'"),
        ("python3 dense.py>log", "'>' in 'dense.py>log'"),
    ],
)
def test_operators_glued_to_a_word_are_named(cmd, named):
    (notice,) = launch(cmd).notices
    assert named in notice and "there is no shell" in notice


@pytest.mark.parametrize("cmd", ["a 'b;c' \"d|e\"", r"a b\;c d\>e", "a --url='http://x?a=1&b=2'"])
def test_operators_in_quotes_are_parts_of_words_and_nobody_wonders(cmd):
    assert split_command(cmd, ENV) == shlex.split(cmd)
    assert launch(cmd).notices == ()


def test_wandb_options_go_with_their_values_and_nothing_else_does():
    cmd = "train.py --wandb --a 1 --wandb-params '{\"x\": 1}' --use-wandb=1 b /home/wandb/x"
    assert launch(cmd).argv == ("train.py", "--a", "1", "b", "/home/wandb/x")


def test_python_and_hotloop_are_those_of_the_interpreter_in_use():
    assert resolve_program(["python3", "x.py"], "/v/python") == ("/v/python", "x.py")
    ours = ("/v/python", "-m", "hotloop", "kernel", "rnn")
    assert resolve_program(["hotloop", "kernel", "rnn"], "/v/python") == ours
    assert resolve_program(["/usr/bin/python3", "x.py"], "/v/python") == ("/usr/bin/python3", "x.py")


def test_the_command_of_an_old_script_becomes_hotloops(tmp_path):
    wanted = ["hotloop", "kernel", "lstm", "--train"]
    assert translate_script(["python3", "lstm.py", "--train"], tmp_path).command == wanted
    (tmp_path / "lstm.py").write_text("from tensorflow.python import ipu\n")
    assert translate_script(["python3", "-u", "lstm.py", "--train"], tmp_path).command == wanted
    for text in ("config = IPUConfig()", "num_ipus = 2", "import ipu_utils", "import popart, poptorch"):
        (tmp_path / "lstm.py").write_text(text)
        assert translate_script(["python3", "lstm.py", "--train"], tmp_path).command == wanted


def test_somebodys_own_script_of_that_name_and_unknown_scripts_run_as_they_are(tmp_path):
    (tmp_path / "train.py").write_text("print('mine')\n")
    assert translate_script(["python3", "train.py"], tmp_path) is None
    assert translate_script(["python3", "-u", "train.py"], tmp_path) is None
    assert translate_script(["python3", "-W", "ignore", "train.py"], tmp_path) is None
    (tmp_path / "train.py").write_text("# manipulate the data\n")
    assert translate_script(["python3", "train.py"], tmp_path) is None
    assert translate_script(["python3", "other.py"], tmp_path) is None
    assert translate_script(["./lstm.py"], tmp_path) is None


def test_a_launch_has_both_commands_and_an_environment_in_which_the_entrys_own_variables_win(tmp_path):
    env = {"HERE": "$THERE/y", "HOTLOOP_REPORT": "mine"}
    variant = Variant("b", {}, "A=b poprun -v --num-instances 2 python3 train.py --x $HERE", env, tmp_path)
    one = Selected(Benchmark("b", tmp_path / "f.yml", 1, ""), variant)
    options = RunnerOptions(Path("log"), profile=True, variables={"THERE": "/t"}, compile_only=True)
    launch = prepare(one, tmp_path / "log", options)
    assert launch.command == "poprun -v --num-instances 2 python3 train.py --x /t/y --compile-only"
    ours = "hotloop launch --num-instances 2 -- cnn train --x /t/y --compile-only --json"
    assert launch.hotloop_command == ours
    assert launch.argv[:4] == (sys.executable, "-m", "hotloop", "launch")
    assert "options of poprun" in launch.notices[0]
    assert launch.env["A"] == "b"
    assert launch.env["HOTLOOP_REPORT"] == "mine"
    assert launch.env["HOTLOOP_BENCH_LOG"] == str(tmp_path / "log")
    assert launch.env["PATH"].startswith(str(Path(sys.executable).parent))
    assert launch.folder == tmp_path


def test_environment_variables_are_expanded_and_unset_ones_stay_and_are_listed():
    environment = {"DATASETS_DIR": "/data", "A": "$B"}
    text = "$DATASETS_DIR/x ${DATASETS_DIR}y $A $MISSING ${MISSING} $ 5$"
    assert expand_environment(text, environment) == "/data/x /datay $B $MISSING ${MISSING} $ 5$"
    with pytest.raises(LaunchError, match="needs the variable MISSING: set it"):
        split_command(text, environment)
