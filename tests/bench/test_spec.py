from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.bench.benchmark import Benchmark
from hotloop.bench.spec import SpecError, load_benchmarks
from hotloop.errors import OptionError


def write(folder: Path, text: str, name: str = "benchmarks.yml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def one(folder: Path, text: str) -> Benchmark:
    """The only benchmark of a file."""
    (benchmark,) = load_benchmarks([write(folder, text)]).values()
    return benchmark


def problems(folder: Path, text: str) -> list[str]:
    """What is wrong in a file, as `LINE: problem`."""
    file = write(folder, text)
    with pytest.raises(SpecError) as caught:
        load_benchmarks([file])
    assert isinstance(caught.value, OptionError)
    return [line.removeprefix(f"{file}:") for line in str(caught.value).splitlines()]


def test_an_entry_is_read_with_all_that_it_says(tmp_path: Path) -> None:
    benchmark = one(
        tmp_path,
        """
bench:
  description: |
    Two lines
    of text.
  cmd: >-
    python3 x.py
    --a 1
  data:
    throughput: {regexp: 'throughput: (.*?) s', skip: 2, reduction_type: p90}
    loss: {regexp: 'loss: (.*)', field: validation.loss, unit: nats, sorted_skip: true}
    bare:
  derived:
    total: {expr: "throughput * loss", unit: h}
  output:
    - [samples/sec, throughput]
    - total (s): total
  env: {LEVEL: 1, OPTIONS: '{"a": "b"}'}
  location: sub
  timeout: 1.5
  requirements_file: requirements.txt
  pre_run_commands: [make, make install]
  kind: convergence
  needs_dataset: true
  devices: 4
  tags: [smoke, cpu]
""",
    )
    assert (benchmark.name, benchmark.line, benchmark.cmd) == ("bench", 2, "python3 x.py --a 1")
    assert benchmark.description == "Two lines\nof text."
    throughput, loss, bare = benchmark.metrics
    assert (throughput.skip, throughput.reduction, throughput.unit) == (2, "p90", "samples/sec")
    assert (loss.key, loss.unit, loss.sorted_skip, loss.reduction) == (
        "validation.loss",
        "nats",
        True,
        "mean",
    )
    assert (bare.regexp, bare.key) == (None, "bare")
    assert [(d.name, d.expr, d.unit) for d in benchmark.derived] == [("total", "throughput * loss", "h")]
    assert benchmark.output == (("samples/sec", "throughput"), ("total (s)", "total"))
    assert benchmark.env == {"LEVEL": "1", "OPTIONS": '{"a": "b"}'}
    assert benchmark.folder == tmp_path / "sub" and benchmark.timeout == 1.5
    assert benchmark.requirements_file == tmp_path / "requirements.txt"
    assert benchmark.pre_run == ("make", "make install")
    assert (benchmark.kind, benchmark.needs_dataset, benchmark.devices) == ("convergence", True, 4)
    assert benchmark.tags == ("smoke", "cpu") and benchmark.skip is None and benchmark.notices == ()
    (variant,) = benchmark.variants
    assert (variant.name, variant.params, variant.cmd) == ("bench", {}, benchmark.cmd)


def test_requirements_are_taken_from_the_folder_of_the_run_when_they_are_there(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "", "requirements.txt")
    text = "b: {cmd: python3 x.py, location: sub, requirements_file: requirements.txt}"
    assert one(tmp_path, text).requirements_file == tmp_path / "sub" / "requirements.txt"


def test_merge_keys_are_shallow_own_keys_win_and_earlier_items_win(tmp_path: Path) -> None:
    benchmark = one(
        tmp_path,
        """
a_options: &a
  data: {x: {regexp: 'a (.)'}}
  timeout: 1
  location: from_a
b_options: &b
  data: {y: {regexp: 'b (.)'}}
  timeout: 2
  devices: 2
base_options: &base
  <<: *b
  tags: [base]
real:
  <<: [*a, *base]
  location: own
  cmd: x
""",
    )
    assert [metric.name for metric in benchmark.metrics] == ["x"]  # replaced, not merged
    assert (benchmark.timeout, benchmark.devices, benchmark.tags) == (1.0, 2, ("base",))
    assert benchmark.folder.name == "own"


def test_the_first_of_two_merge_keys_wins(tmp_path: Path) -> None:
    text = "a_options: &a {timeout: 1}\nb_options: &b {timeout: 2}\nreal:\n  <<: *a\n  <<: *b\n  cmd: x\n"
    assert one(tmp_path, text).timeout == 1.0


def test_a_derived_metric_may_use_one_before_it_but_not_one_after(tmp_path: Path) -> None:
    first, second = "first: {expr: '2 * 3'}", "second: {expr: 'first + 1'}"
    text = "b:\n  cmd: x\n  derived:\n    %s\n    %s\n"
    assert [d.name for d in one(tmp_path, text % (first, second)).derived] == ["first", "second"]
    assert problems(tmp_path, text % (second, first))[0].startswith("4: derived.second: there is no 'first'")


def test_entries_with_options_in_their_name_are_defaults_alone(tmp_path: Path) -> None:
    text = "my_options_here: &a {whatever: 1}\nconfig_options: text\nb: {cmd: x}"
    assert list(load_benchmarks([write(tmp_path, text)])) == ["b"]


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ("{n: '1, 32'}", ["b_n_1", "b_n_32"]),
        ("{n: 4}", ["b_n_4"]),
        ("{n: [1, 16.10]}", ["b_n_1", "b_n_16.10"]),
        ("{n: '[1, 32]'}", ["b_n_1", "b_n_32"]),
        ("{n: '{1, 32}'}", ["b_n_1", "b_n_32"]),
        ("{n: {1, 32}}", ["b_n_1", "b_n_32"]),
        ("{n: '1,2', a: 'x,y'}", ["b_a_x_n_1", "b_a_y_n_1", "b_a_x_n_2", "b_a_y_n_2"]),
        ("[[n, a], [1, x], [2, y]]", ["b_a_x_n_1", "b_a_y_n_2"]),
        ("['n, a', '1, x', '2, y']", ["b_a_x_n_1", "b_a_y_n_2"]),
        ("[{n: 1, a: x}, {a: y, n: 2}]", ["b_a_x_n_1", "b_a_y_n_2"]),
        ("{n: '1, 1'}", ["b_n_1", "b_n_1_2"]),
    ],
)
def test_parameters_of_every_form_give_their_variants(
    parameters: str, names: list[str], tmp_path: Path
) -> None:
    benchmark = one(tmp_path, f"b:\n  cmd: x {{n}} {{a}}\n  parameters: {parameters}\n")
    assert [variant.name for variant in benchmark.variants] == names
    for variant in benchmark.variants:
        assert variant.cmd == f"x {variant.params['n']} {variant.params.get('a', '{a}')}"


def test_parameters_fill_command_environment_location_and_derived(tmp_path: Path) -> None:
    benchmark = one(
        tmp_path,
        """
b:
  cmd: >-
    x --json '{"rate": {n}}' --set '{{}}'
  env: {N: "n={n}"}
  location: sub{n}
  data: {time: {regexp: '(.*)'}}
  derived: {total: {expr: "{time} * {n} + n"}}
  parameters: {n: [3]}
""",
    )
    (variant,) = benchmark.variants
    assert variant.cmd == """x --json '{"rate": 3}' --set '{{}}'"""
    assert variant.env == {"N": "n=3"} and variant.folder == tmp_path / "sub3"
    assert variant.derived[0].expr == "{time} * 3 + n"
    assert benchmark.env == {"N": "n={n}"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tf2_resnet50_train_real_pod16_conv", "convergence"),
        ("kernel_grouped_conv", "throughput"),
        ("x_conv_large", "throughput"),
        ("conv", "throughput"),
        ("x_convergence", "throughput"),
    ],
)
def test_a_last_conv_in_a_name_means_convergence_but_a_layer_does_not(
    name: str, kind: str, tmp_path: Path
) -> None:
    assert one(tmp_path, f"{name}: {{cmd: x}}").kind == kind
    assert one(tmp_path, f"{name}: {{cmd: x, kind: throughput}}").kind == "throughput"


@pytest.mark.parametrize(
    ("entry", "needs"),
    [
        ("x_real: {cmd: x $DATASETS_DIR/a}", True),
        ("x_general: {cmd: x $DATASETS_DIR/a}", True),
        ("x_gen_2ipu: {cmd: x $DATASETS_DIR/a}", False),
        ("x_synth: {cmd: x $DATASETS_DIR/a}", False),
        ("x: {cmd: x $DATASETS_DIR/a, generated: true}", False),
        ("x: {cmd: x $DATASETS_DIR/a, synthetic: True}", False),
        ("x_gen: {cmd: x, needs_dataset: true}", True),
        ("x_real: {cmd: x, env: {A: $DATASETS_DIR}}", True),
        ("x_real: {cmd: x}", False),
    ],
)
def test_data_are_needed_where_they_are_named_unless_told_otherwise(
    entry: str, needs: bool, tmp_path: Path
) -> None:
    assert one(tmp_path, entry).needs_dataset is needs


@pytest.mark.parametrize("notebook", ["a.ipynb", "{file: a.ipynb, working_directory: b, timeout: 5}"])
def test_a_notebook_is_skipped_with_the_reason(notebook: str, tmp_path: Path) -> None:
    assert "a notebook (a.ipynb)" in str(one(tmp_path, f"b: {{notebook: {notebook}}}").skip)


@pytest.mark.parametrize(
    ("label", "unit"),
    [
        ("samples/sec", "samples/sec"),
        ("latency(ms)", "ms"),
        ("time to train (s)", "s"),
        ("loss", ""),
        ("ms", "ms"),
    ],
)
def test_units_come_from_labels(label: str, unit: str, tmp_path: Path) -> None:
    text = f"b: {{cmd: x, data: {{m: {{regexp: '(.)'}}}}, output: [[{label}, m]]}}"
    assert one(tmp_path, text).metrics[0].unit == unit


def test_what_has_no_effect_is_told(tmp_path: Path) -> None:
    benchmark = one(
        tmp_path,
        """
b:
  cmd: x {batchsiz} {{n}} {batchsiz}
  parameters: {batchsize: [1]}
  requirements_path: r.txt
  required_apt_packages: [a]
  required_apt_packages_path: a.txt
  reference_directory: .
  repository: {origin: a, ref: b}
  benchmark_path: a
  allow_wandb: true
  output: [[loss, loss]]
""",
    )
    assert benchmark.allow_wandb
    assert [notice.split()[0] for notice in benchmark.notices[:6]] == [
        *("requirements_path", "required_apt_packages", "required_apt_packages_path"),
        *("reference_directory", "repository", "benchmark_path"),
    ]
    assert benchmark.notices[6:] == (
        "{batchsiz} is no parameter and stays as it is",
        "the parameter batchsize fills nothing in",
        "output names loss, which is no metric",
    )


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("cmb: x\n  cmd: y", "2: unknown key 'cmb'; did you mean cmd?"),
        ("description: x", "1: an entry needs a cmd"),
        (
            "cmd: x\n  notebook: y",
            "1: an entry needs a cmd (the command to run), or else a notebook, and not both",
        ),
        (
            "notebook: {file: x, dir: y}",
            "2: unknown key 'dir' in notebook; known: file, timeout, working_directory",
        ),
        ("cmd: [a, b]", "2: cmd must be a text"),
        ("cmd: x\n  cmd: y", "3: the key 'cmd' is already in line 2; keep one"),
        ("cmd: x\n  data: [1]", "3: data must be a mapping"),
        ("cmd: x\n  data:\n    a: 5", "4: data.a must be a mapping"),
        ("cmd: x\n  data: {a: {regex: x}}", "3: unknown key 'regex' in data.a; did you mean regexp?"),
        (
            "cmd: x\n  data:\n    a:\n      regexp: '('",
            "5: data.a.regexp '(' is no regular expression: missing )",
        ),
        ("cmd: x\n  data: {a: {skip: -1}}", "3: data.a.skip must be a whole number from 0, not '-1'"),
        (
            "cmd: x\n  data: {a: {skip: 99999999999}}",
            "3: data.a.skip must be a whole number from 0, not '9999",
        ),
        ("cmd: x\n  data: {a: {skip: 1.5}}", "3: data.a.skip must be a whole number from 0, not '1.5'"),
        (
            "cmd: x\n  data: {a: {reduction_type: meen}}",
            "3: data.a.reduction_type 'meen' is not known; did you mean mean",
        ),
        (
            "cmd: x\n  data: {a: {sorted_skip: maybe}}",
            "3: data.a.sorted_skip must be true or false, not 'maybe'",
        ),
        ("cmd: x\n  derived: {a: {expr: 'b * 2'}}", "3: derived.a: there is no 'b'"),
        ("cmd: x\n  derived: {a: {expr: '2 *'}}", "3: derived.a: the expression breaks off"),
        ("cmd: x\n  derived: {a: }", "3: derived.a: the expression breaks off"),
        ("cmd: x\n  output: samples/sec", "3: output must be a list of [label, metric]"),
        ("cmd: x\n  output:\n  - [a]", "4: output must be a list of [label, metric]"),
        ("cmd: x\n  timeout: never", "3: timeout must be a number of seconds above 0, not 'never'"),
        ("cmd: x\n  timeout: 0", "3: timeout must be a number of seconds above 0, not '0'"),
        ("cmd: x\n  env: {A: [1]}", "3: env.A must be a text"),
        ("cmd: x\n  kind: fast", "3: kind must be throughput or convergence, not 'fast'"),
        ("cmd: x\n  devices: 0", "3: devices must be a whole number from 1, not '0'"),
        ("cmd: x\n  tags: {a: b}", "3: tags must be a list of texts"),
        ("cmd: x\n  parameters: 5", "3: parameters must be a mapping of names to values, or a list of rows"),
        ("cmd: x\n  parameters: {a: '1,,2'}", "3: parameters.a must be values such as '1, 32'"),
        ("cmd: x\n  parameters:\n  - [a, b]\n  - [1]", "5: this row of parameters has 1 values for 2 names"),
        (
            "cmd: x\n  parameters:\n  - [a, a]\n  - [1, 2]",
            "4: parameters need a first row of different names",
        ),
        (
            "cmd: x\n  parameters:\n  - {a: 1}\n  - {b: 1}",
            "5: each row of parameters must be a mapping of the same",
        ),
        (
            "cmd: x\n  parameters: {a: !!python/name:os.system 1}",
            "3: the tag tag:yaml.org,2002:python/name:os.system",
        ),
        ("cmd: x\n  <<: 5", "3: '<<' must name a mapping or a list of mappings"),
        ("cmd: x\n bad: y", "3: no YAML: "),
        ("cmd: *nothing", "2: no YAML: found undefined alias"),
    ],
)
def test_a_problem_has_its_line_and_says_what_is_wrong(body: str, problem: str, tmp_path: Path) -> None:
    found = problems(tmp_path, f"bench:\n  {body}\n")
    assert any(line.startswith(problem) for line in found), found
    assert len(found) <= 2


def test_all_problems_of_all_files_are_told_at_once_and_each_once(tmp_path: Path) -> None:
    text = "options: &o\n  skp: 1\na:\n  <<: *o\n  cmd: x\nb:\n  <<: *o\n  timeout: x\n"
    first, second = write(tmp_path, text, "a.yml"), write(tmp_path, "c: 5\n", "b.yml")
    with pytest.raises(SpecError) as caught:
        load_benchmarks([first, second])
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [
        *(f"{first}:2", f"{first}:6", f"{first}:8", f"{second}:1"),
    ]


def test_an_equal_name_in_two_files_names_both_places(tmp_path: Path) -> None:
    first, second = write(tmp_path, "b: {cmd: x}", "a.yml"), write(tmp_path, "\nb: {cmd: x}", "b.yml")
    with pytest.raises(SpecError, match=f"^{second}:2: the name 'b' is taken by {first}:1; rename"):
        load_benchmarks([first, second])
    assert list(load_benchmarks([first, tmp_path / "." / "a.yml"])) == [
        "b"
    ]  # the same file twice is one file


def test_a_variant_called_as_another_benchmark_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "b:\n  cmd: x {n}\n  parameters: {n: 1}\nb_n_1: {cmd: x}\n")
    assert problem.startswith("4: 'b_n_1' is also a variant of b (")


def test_files_are_merged_in_order(tmp_path: Path) -> None:
    files = [write(tmp_path, f"{name}: {{cmd: x}}", f"{name}.yml") for name in "ba"]
    assert list(load_benchmarks(files)) == ["b", "a"]


@pytest.mark.parametrize("text", ["", "# nothing", "- a\n- b", "text"])
def test_a_file_without_benchmarks_is_told(text: str, tmp_path: Path) -> None:
    assert problems(tmp_path, text) == [
        "1: there are no benchmarks here; a file maps names to entries, each with a cmd"
    ]


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.yml: cannot be read: No such file"):
        load_benchmarks([tmp_path / "none.yml"])
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        load_benchmarks([tmp_path])
    (tmp_path / "bytes.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not UTF-8"):
        load_benchmarks([tmp_path / "bytes.yml"])


@pytest.mark.parametrize(
    "text",
    [
        "b: &b {cmd: x, env: *b}",
        "b: &b\n  <<: *b\n  cmd: x",
        "b: " + "[" * 5000,
        "b: {cmd: x, env: " + "{a: " * 100 + "1" + "}" * 101,
        "a: &a [x]\n" + "".join(f"a{n}: &a{n} [{', '.join(['*a'] * 9)}]\n" for n in range(9)),
        "b: {cmd: x, parameters: {" + ", ".join(f"p{n}: [1, 2, 3]" for n in range(40)) + "}}",
    ],
)
def test_files_made_to_hang_end_in_a_spec_error(text: str, tmp_path: Path) -> None:
    assert problems(tmp_path, text)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="abcmd:{}[]-&*<!|>'\"\n ,1?#%@`\t", max_size=80))
def test_any_text_loads_or_is_a_spec_error(tmp_path_factory, text: str) -> None:
    file = write(tmp_path_factory.getbasetemp(), f"b:\n  cmd: x\n{text}", "fuzz.yml")
    try:
        load_benchmarks([file])
    except SpecError as error:
        assert str(error).startswith(str(file))
