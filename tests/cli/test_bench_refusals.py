"""What `hotloop bench ...` refuses: status 2, one line that says why, and nothing runs or is written."""

import pytest
import yaml

from hotloop.cli.main import main

pytestmark = pytest.mark.usefixtures("signals_heard")

RATE = {"throughput": {"regexp": r"rate (\S+)"}}
ONE = {"cmd": "touch started", "data": RATE}
SPECS = {
    "benchmarks.yml": {"one": ONE},
    "many.yml": {"one": {**ONE, "devices": 9999}},
}
REFUSED = {
    "run": [
        ("--benchmark b", "--benchmark b: matches nothing"),
        ("--benchmark ''", "--benchmark '': names nothing"),
        ("--benchmark=", "--benchmark '': names nothing"),
        ("--tag ,", "--tag '': names nothing"),
        ("--spec ''", "--spec '': names nothing"),
        ("--spec none.yml", "none.yml"),
        ("--resume", "--resume needs --log-dir"),
        ("--log-dir there", "--log-dir {here}/there: holds results already; go on with --resume"),
        ("--log-dir benchmarks.yml", "cannot be made: Not a directory"),
        ("--upload-checkpoints s3", "--upload-checkpoints: uploading is not supported"),
        ("--custom-metrics-files x.py", "--custom-metrics-files: files of Python code are not run"),
        ("--submit-on-slurm", "--submit-on-slurm: SLURM is not supported"),
        ("--slurm-machine-type any", "--slurm-machine-type: SLURM is not supported"),
        ("--slurm-resource-reservation any", "--slurm-resource-reservation: SLURM is not supported"),
        ("--list --validate", "--list, --dry-run and --validate: keep one"),
        ("--timeout 0", "--timeout 0: must be greater"),
        ("--repeats 0", "--repeats 0: must be at least 1"),
    ],
    "compare": [
        ("there", "RESULTS: two folders, A and B, are needed, not 1"),
        ("there there there", "RESULTS: two folders, A and B, are needed, not 3"),
        ("there there --baseline x", "RESULTS: with --baseline one folder of results is needed, not 2"),
        ("there --update-baseline", "--update-baseline needs --baseline FILE"),
        ("there there --threshold 0", "--threshold 0: must be greater"),
        ("there there --fail-on ''", "--fail-on '': names nothing"),
        ("there there --metric ''", "--metric '': names nothing"),
        ("there there --repeats 5", "--repeats is for --ab"),
        ("there there --seed 0", "--seed is for --ab"),
        ("--spec benchmarks.yml", "--spec is for --ab"),
        ("there --ab benchmarks.yml benchmarks.yml", "--ab runs what it compares; leave out RESULTS there"),
        ("--ab benchmarks.yml benchmarks.yml --baseline x", "leave out --baseline"),
        ("--ab benchmarks.yml", "--ab: two benchmark files, FILE or FILE:NAME are needed, A and B, not 1"),
        ("--ab benchmarks.yml benchmarks.yml there", "two benchmark files"),
        ("--ab HEAD --spec benchmarks.yml", "--ab: two commits are needed, A and B, not 1"),
        ("--ab a b --spec benchmarks.yml", "is in no git repository"),
        ("--ab benchmarks.yml g.yml", "g.yml"),
        ("--ab benchmarks.yml:one benchmarks.yml:none", "none: matches nothing"),
        ("--ab benchmarks.yml benchmarks.yml --benchmark ''", "--benchmark '': names nothing"),
        (
            "--ab benchmarks.yml benchmarks.yml --metric none*",
            "--metric none*: matches nothing; known: throughput",
        ),
        ("--ab benchmarks.yml benchmarks.yml --log-dir there", "holds results already; take another folder"),
        ("--ab benchmarks.yml benchmarks.yml --log-dir sides", "holds results already; take another folder"),
        ("--ab benchmarks.yml benchmarks.yml --log-dir benchmarks.yml", "cannot be made: Not a directory"),
        ("--ab benchmarks.yml many.yml", "no variant of B can run: one is for 9999 devices"),
    ],
    "report": [
        ("", "RESULTS is needed: Log folders and files of results."),
        ("''", "RESULTS '': must be a path"),
        ("none", "none"),
        ("empty", "empty: has neither results.jsonl nor JSON files"),
    ],
    "peers": [
        ("--family kernel", "did you mean kernels"),
        ("--device tpu", "--device tpu: the other programs run on a CPU or a GPU"),
        ("-o no/such/file.json", "--output no/such/file.json: its folder is not there"),
        ("--rounds 0", "--rounds 0: must be at least 1"),
    ],
}


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [(command, *one) for command, table in REFUSED.items() for one in table],
)
def test_it_is_refused_in_one_line_before_anything_runs(tmp_path, monkeypatch, capfd, command, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name, entries in SPECS.items():
        (tmp_path / name).write_text(yaml.safe_dump(entries))
    for folder in ("there", "sides/A", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "there/results.jsonl").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(["bench", command, *(word.strip("'") for word in words.split())]) == 2
    err = capfd.readouterr().err
    assert said.format(here=tmp_path) in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
