"""docs/speed.md and docs/history.md are what the raw files say: the newest of each case, with the right arithmetic."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import speed_cells  # noqa: E402
import speed_commands  # noqa: E402
import speed_coverage  # noqa: E402
import speed_rows  # noqa: E402
import speed_sources  # noqa: E402
import speed_tables  # noqa: E402
import speed_whole  # noqa: E402

ENVIRONMENT = {"platform": "cpu", "device_kinds": ["cpu"], "commit": "a" * 40, "dirty": False}


def side(name, rate, ratio=1.0, case="resnet8-b8", memory=None):
    ratios = {"ratio": ratio, "ratio_low": 0.9 * ratio, "ratio_high": 1.1 * ratio}
    return {"case": case, "side": name, "images_per_second": rate, "memory_bytes": memory, **ratios}


def write(folder, name, results, **more):
    document = {"environment": ENVIRONMENT, "results": results, **more}
    (folder / name).write_text(json.dumps(document))


def rows(folder):
    return speed_rows.newest(row for path in folder.glob("*.json") for row in speed_rows.rows_of(path))


@pytest.mark.parametrize(
    ("name", "make"), [("speed.md", speed_tables.speed_page), ("history.md", speed_tables.history_page)]
)
def test_the_page_is_what_the_command_makes_of_the_files(name, make):
    assert (ROOT / "docs" / name).read_text() == make(speed_tables.RESULTS), (
        "run: python benchmarks/speed_tables.py"
    )


def test_every_family_has_rows_and_every_ratio_lies_in_its_range():
    found = rows(speed_tables.RESULTS)
    with_files = {one for one in speed_rows.FAMILIES if any(speed_tables.RESULTS.glob(f"*_{one}_*.json"))}
    assert {row.family for row in found} == with_files >= set(speed_rows.FAMILIES) - {"hmc"}
    for row in found:
        if row.ratio:
            ratio, low, high = row.ratio
            assert low <= ratio <= high
            # A median of ratios is near the ratio of medians; a rate and a time would be far from it.
            medians = row.theirs / row.ours if row.unit == "us" else row.ours / row.theirs
            apart = 2 if row.unit == "ESS/s" else 1.25  # every round of a sampler has another seed
            assert 1 / apart < medians / ratio < apart, row


def test_figures_of_the_page_are_those_of_the_file(tmp_path):
    write(
        tmp_path,
        "2026-01-02_cnn_cpu.json",
        [side("ours", 2_000.0, memory=3 * 2**30), side("torch", 800.0, 2.5)],
    )
    (line,) = re.findall(r"^\| CIFAR ResNet-8.*$", speed_tables.speed_page(tmp_path), re.MULTILINE)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "CIFAR ResNet-8, training, batch 8",
        "CPU",
        "2,000 images/s",
        "25.0 s",  # 50,000 images at 2,000 a second
        "torch",
        "800 images/s",
        "**2.50** (2.25 to 2.75)",
        "3.00 GiB",
        "[2026-01-02](../benchmarks/results/2026-01-02_cnn_cpu.json), aaaaaaa",
    ]


def test_a_case_beside_a_peer_is_of_the_newest_file_that_has_both(tmp_path):
    write(
        tmp_path,
        "2026-01-01_cnn_cpu.json",
        [side("ours", 1.0), side("torch", 1.0), side("torch compile", 0.5, 2.0)],
    )
    write(tmp_path, "2026-01-03_cnn_cpu.json", [side("ours", 3.0), side("torch", 1.0, 3.0)])
    write(tmp_path, "2026-01-02_cnn_cpu.json", [side("ours", 2.0), side("torch", 1.0, 2.0)])
    found = {row.peer: (row.ours, row.source.date) for row in rows(tmp_path)}
    assert found == {"torch": (3.0, "2026-01-03"), "torch compile": (1.0, "2026-01-01")}


def test_of_one_day_a_quiet_machine_counts_before_a_busy_one(tmp_path):
    for name, load, rate in (("a", "0.00", 1.0), ("b", "1.00", 2.0)):
        results = [side("ours", rate), side("torch", 1.0, rate)]
        write(tmp_path, f"2026-01-01_cnn_cpu_{name}.json", results, load_before=load)
    assert [row.ours for row in rows(tmp_path)] == [1.0]
    write(tmp_path, "2026-01-02_cnn_cpu.json", [side("ours", 3.0), side("torch", 1.0, 3.0)], load_before="9")
    assert [row.ours for row in rows(tmp_path)] == [3.0]  # another day's state of the program


def test_a_quiet_machine_is_what_the_programs_call_one():
    from hotloop.bench.peers import QUIET

    assert speed_sources.QUIET == QUIET


def test_of_a_row_that_a_file_has_twice_the_last_counts(tmp_path):
    first = {"case": "rnn inference", "dtype": "float32", "ours_us": 2.0, "torch_us": 4.0}
    first |= {"ratio": 2.0, "ratio_low": 2.0, "ratio_high": 2.0}
    write(tmp_path, "2026-01-01_kernels_cpu.json", [first, {**first, "ours_us": 1.0}])
    assert [row.ours for row in rows(tmp_path)] == [1.0]


def test_requests_are_compared_in_their_own_round(tmp_path):
    def rounds(*rates):
        return {"8": [{"rate": rate} for rate in rates]}

    sides = {"hotloop serve": rounds(10.0, 30.0, 20.0), "other": rounds(10.0, 10.0, 10.0)}
    write(tmp_path, "2026-01-01_serving_cpu.json", {"peers": {"sides": sides}})
    (row,) = rows(tmp_path)
    assert (row.ours, row.theirs, row.ratio) == (20.0, 10.0, (2.0, 1.0, 3.0))


def test_samplers_are_compared_by_effective_draws_with_and_without_their_adaptation(tmp_path):
    def sampler(name, rate, total, **ratios):
        found = {"case": "funnel, 64 chains", "side": name, "chains": 64, "samples": 500}
        return found | {"ess_per_second": rate, "total_ess_per_second": total} | ratios

    apart = {"ratio": 4.0, "ratio_low": 3.0, "ratio_high": 5.0}
    apart |= {"total_ratio": 2.0, "total_ratio_low": 1.5, "total_ratio_high": 2.5}
    results = [
        sampler("ours", 4_000.0, 1_000.0, ratio=1.0),
        sampler("blackjax nuts", 1_000.0, 500.0, **apart),
    ]
    write(tmp_path, "2026-01-01_hmc_cpu.json", results, family="hmc")
    page = speed_tables.speed_page(tmp_path)
    lines = re.findall(r"^\| funnel.*$", page, re.MULTILINE)
    assert [line[2:].split(" | ")[:6] for line in lines] == [
        [
            "funnel, 64 chains, draws alone",
            *("CPU", "4,000 ESS/s", "blackjax nuts", "1,000 ESS/s"),
            "**4.00** (3.00 to 5.00)",
        ],
        [
            "funnel, 64 chains, draws and adaptation",
            *("CPU", "1,000 ESS/s", "blackjax nuts", "500 ESS/s"),
            "**2.00** (1.50 to 2.50)",
        ],
    ]
    assert "[hmc.md](hmc.md)" in page and "`python benchmarks/peers/hmc.py`" in page


def test_an_order_of_items_is_compared_by_users_in_a_second_of_a_core(tmp_path):
    found = {
        "batch_size": 64,
        "wall": {},
        "cpu": {"ours_epoch_s": 0.1, "same_network_epoch_s": 0.2, "recbole_epoch_s": 0.4},
    }
    for name, ratio in (("ratio", 4.0), ("same_network_ratio", 2.0)):
        found["cpu"] |= {name: ratio, f"{name}_low": ratio - 1, f"{name}_high": ratio + 1}
    write(
        tmp_path,
        "2026-01-01_ranking_cpu.json",
        [{"part": "RecBole", "rows": []}, {"part": "time", "time": found}],
    )
    preset, same = rows(tmp_path)
    assert (preset.ours, preset.theirs, preset.epoch_seconds) == (9430.0, 2357.5, 0.1)
    assert preset.ratio == (4.0, 3.0, 5.0) and same.ratio == (2.0, 1.0, 3.0) and same.ours == 4715.0


def test_both_sides_memory_is_shown_in_every_form_that_files_have(tmp_path):
    ratio = {"ratio": 2.0, "ratio_low": 2.0, "ratio_high": 2.0}
    kernel = {"case": "rnn training", "dtype": "float16", "ours_us": 1.0, "torch_us": 2.0, **ratio}
    write(
        tmp_path,
        "2026-01-01_kernels_h200.json",
        [{**kernel, "memory_bytes": {"ours": 5 * 2**20, "torch": 700 * 2**10}}],
    )
    update = {"batch_size": 100, **ratio}
    write(
        tmp_path,
        "2026-01-01_vcd_h200.json",
        [
            {"side": "ours", "updates_per_second": 2.0, "memory_bytes": 2**30, **update},
            {"side": "torch graph", "updates_per_second": 1.0, "memory_bytes": 2**31, **update},
        ],
    )
    of = {
        name: {"users_per_second": rate, "memory_bytes": size}
        for name, rate, size in (("ours", 2.0, 100 * 2**20), ("torch", 1.0, None))
    }
    row = {"shape": "small", "size": 128, "batch_size": 64, "device_memory_bytes": 1, **of, **ratio}
    write(tmp_path, "2026-01-01_recommender_h200.json", [row])
    (line,) = re.findall(r"^\| rnn training.*$", speed_tables.speed_page(tmp_path), re.MULTILINE)
    assert " | 5.0 MiB, the peer's 700 KiB | " in line
    (line,) = re.findall(r"^\| vcd update.*$", speed_tables.speed_page(tmp_path), re.MULTILINE)
    assert " | 1.00 GiB, the peer's 2.00 GiB | " in line
    (line,) = re.findall(
        r"^\| made-up ratings of 20,000 users.*$", speed_tables.speed_page(tmp_path), re.MULTILINE
    )
    assert " | 100 MiB | " in line


def test_a_layer_is_one_case_by_its_older_name_too(tmp_path):
    ratio = {"ratio": 2.0, "ratio_low": 2.0, "ratio_high": 2.0, "dtype": "float16"}
    for day, name, ours in ((1, "gru, reset before", 2.0), (2, "gru, reset before inference", 1.0)):
        row = {"case": name, "ours_us": ours, "torch_us": 2 * ours, **ratio}
        write(tmp_path, f"2026-01-0{day}_kernels_h200.json", [row])
    assert [(row.case, row.ours) for row in rows(tmp_path)] == [("gru, reset before inference, float16", 1.0)]


def test_a_server_is_shown_beside_its_program_called_by_itself(tmp_path):
    def middle(value):
        return {"median": value, "low": 0.9 * value, "high": 1.1 * value}

    row = {"model": "resnet50", "bits": 16, "clients": 16, "rows": 16, "alone_rows": 64}
    row |= {"served": middle(6000.0), "alone": middle(12_000.0), "share": middle(0.5)}
    write(tmp_path, "2026-01-01_serving_h200.json", [row])
    (line,) = re.findall(r"^\| hotloop serve.*$", speed_tables.speed_page(tmp_path), re.MULTILINE)
    assert line.startswith(
        "| hotloop serve, resnet50, 16 bits, 16 clients, 16 images a request | H200 | 6,000 images/s | "
        "no server: its program, 64 images a call | 12,000 images/s | 0.50 (0.45 to 0.55) | "
    )


def test_rows_are_in_the_order_of_their_numbers(tmp_path):
    cases = ("resnet8-b512", "resnet8-b64", "resnet8-b8")
    results = [side(name, 1.0, case=case) for case in cases for name in ("ours", "torch")]
    write(tmp_path, "2026-01-01_cnn_cpu.json", results)
    page = speed_tables.speed_page(tmp_path)
    assert re.findall(r"^\| CIFAR ResNet-8, training, batch (\d+)", page, re.MULTILINE) == ["8", "64", "512"]


@pytest.mark.parametrize(
    ("name", "family", "said"),
    [
        ("2026-01-01_cnn_cpu", 26, "Zen 5"),
        ("2026-01-01_cnn_cpu", 25, "Zen 3 or 4"),
        ("2026-01-01_cnn_cpu", 6, "family 6"),
        ("2026-01-01_cnn_cpu_zen5", None, "Zen 5"),
        ("2026-01-01_cnn_cpu", None, "Zen 3 or 4"),
        ("2026-11-18_hmc_cpu_64", None, "Zen 5"),
        ("2026-11-18_hmc_h200_64", None, ""),
    ],
)
def test_a_processors_generation_stands_beside_its_files_command(name, family, said):
    source = speed_sources.read_source(Path(f"{name}.json"), {"cpu_family": family})
    assert source.processor == said
    assert (f", {said}: `" if said else f", commit {source.commit}: `") in "\n".join(
        speed_tables.commands([source])
    )


def test_what_is_known_of_one_file_is_not_said_of_a_later_one():
    for name in (*speed_commands.COMMANDS, *speed_commands.NOTES, *speed_sources.COMMITS):
        later = Path(f"2027-01-01_{name[11:]}.json")
        source = speed_sources.read_source(later, {"command": "c", "commit": "d"})
        assert (source.made_by, source.commit) == ("`c`", "d")


def test_what_is_known_is_of_files_that_are_there():
    there = {path.stem for path in speed_tables.RESULTS.iterdir()}
    assert {*speed_commands.COMMANDS, *speed_commands.NOTES, *speed_sources.COMMITS} <= there


@pytest.mark.parametrize(
    "name", [name for name, said in speed_commands.COMMANDS.items() if "--rounds" in str(said)]
)
def test_a_command_that_is_known_has_the_rounds_of_its_file(name):
    """A case may have fewer where `--limit` ended it; some files keep the rounds themselves instead of their number."""
    said = {
        int(each) for line in speed_commands.COMMANDS[name] for each in re.findall(r"--rounds (\d+)", line)
    }
    results = speed_sources.read_document(speed_tables.RESULTS / f"{name}.json")["results"]
    found = {row["rounds"] for row in results if isinstance(row.get("rounds"), int)}
    assert not found or max(said) == max(found)


def test_every_command_that_is_known_runs_a_program_that_is_there_with_options_that_it_has():
    for line in (line for lines in speed_commands.COMMANDS.values() for line in lines):
        for program in re.findall(r"python (benchmarks/\S+\.py)", line):
            text = (ROOT / program).read_text()
            for option in re.findall(r" (--[a-z-]+)", line):
                assert f'"{option}"' in text or option.startswith("--no-"), (program, option)


def test_a_command_in_a_file_is_shown_as_the_file_has_it():
    path = Path("2027-01-01_hmc_cpu.json")
    said = "python benchmarks/peers/hmc.py --chains 4096 --skip nuts"
    assert speed_sources.read_source(path, {"command": said}).made_by == f"`{said}`"
    words = {"command": ["hotloop", "bench", "peers"], "options": ["--rounds", "5"]}
    assert speed_sources.read_source(path, words).made_by == "`hotloop bench peers --rounds 5`"


def kernel(ours, case="lstm B64 T25 H512 training"):
    ratio = {"ratio": 2.0, "ratio_low": 2.0, "ratio_high": 2.0}
    return {"case": case, "dtype": "float16", "ours_us": ours, "torch_us": 2 * ours, **ratio}


BEFORE_ALL = f"{speed_sources.BEFORE}: [newer]"
FIRST_FORM = "the first form of one kernel for all steps: [newer]"


def test_an_update_of_eager_torch_is_a_peer_of_its_own_until_there_is_one_with_graphs(tmp_path):
    write(tmp_path, "2026-11-15_lstm_h200.json", [kernel(4.0), kernel(3.0, "lstm B64 T25 H512 inference")])
    write(tmp_path, "2026-11-15_kernels_cpu.json", [kernel(5.0)])
    found = {(row.source.machine, row.case.split(", ")[0][-9:]): row.peer for row in rows(tmp_path)}
    assert found == {
        ("H200", " training"): "torch, eager",
        ("H200", "inference"): "torch",
        ("CPU", " training"): "torch",
    }
    write(tmp_path, "2026-11-17_persistent_h200.json", [kernel(2.0)])
    (row,) = [
        row
        for row in rows(tmp_path)
        if row.case.startswith("lstm B64 T25 H512 training") and row.source.machine == "H200"
    ]
    assert (row.ours, row.peer) == (2.0, "torch")


@pytest.mark.parametrize(
    ("file", "case", "said"),
    [
        ("2026-11-15_kernels_h200", "lstm B64 T25 H512 inference", BEFORE_ALL),
        ("2026-11-15_lstm_h200", "lstm B128 T50 H1536 training", BEFORE_ALL),
        ("2026-11-15_kernels_h200", "gru B1024 T150 H256, reset after inference", speed_sources.BEFORE),
        ("2026-11-15_kernels_h200", "rnn B128 T50 H1536 inference", speed_sources.BEFORE),
        ("2026-11-17_persistent_h200", "lstm B256 T25 H1024 training", FIRST_FORM),
        ("2026-11-17_persistent_h200", "lstm B1024 T150 H256 training", ""),
        ("2026-11-15_kernels_h200", "lstm B1 T5 H128 inference", ""),  # single rows keep the loop
        ("2026-11-15_kernels_h200", "lstm-multi B1 T200 I16 H256 L2 inference", ""),
        ("2026-11-15_kernels_h200", "dense B32 N1024 inference", ""),
        ("2026-11-19_kernels_h200", "lstm B64 T25 H512 inference", ""),
    ],
)
def test_a_row_that_the_program_has_overtaken_says_so(file, case, said):
    assert speed_sources.what_is_newer(f"{file}.json", f"{case}, float16").split("(")[0] == said


def test_a_row_says_that_there_are_newer_figures_where_the_results_have_them():
    section = (ROOT / "docs" / "results.md").read_text().split("### H200, recurrences as one kernel")[1]
    table = section.split("\n\n| ")[1].split("\n\n")[0]
    old = [
        row
        for row in rows(speed_tables.RESULTS)
        if (row.family, row.source.machine) == ("kernels", "H200") and row.source.date < "2026-11-18"
    ]
    assert {"[newer]" in row.note for row in old} == {True, False}
    for row in old:
        assert (f"| {row.case.removesuffix(', float16')} |" in f"| {table}") == ("[newer]" in row.note), row


def test_a_row_older_than_its_cases_newest_file_says_so(tmp_path):
    write(
        tmp_path,
        "2026-01-01_cnn_cpu.json",
        [side("ours", 1.0), side("torch", 1.0), side("torch compile", 0.5, 2.0)],
    )
    write(tmp_path, "2026-01-02_cnn_cpu.json", [side("ours", 2.0), side("torch", 1.0, 2.0)])
    assert {row.peer: row.note for row in rows(tmp_path)} == {"torch": "", "torch compile": speed_rows.OLDER}
    lines = re.findall(r"^\| CIFAR ResNet-8.*$", speed_tables.speed_page(tmp_path), re.MULTILINE)
    assert [f"({speed_rows.OLDER}) |" in line for line in lines] == [False, True]


def a_training(**more):
    return {
        "case": "netflix", "data": "random ratings of Netflix's shape", "seed": 0, "figure": "rmse", "value": 1.4,
        "command": "hotloop recommender train --data random --size 512 --batch-size 64 --epochs 2 --seed 0",
        "standard_error": None, "target": None, "target_seconds": None, "update": 10, "updates": 10, "cache": "empty",
        "training_seconds": 6.0, "result_seconds": 6.0, "seconds": 20.0, "samples_per_second": 160_000.0,
        "unit": "users/s", "memory_bytes": 2**30, **more,
    }  # fmt: skip


def test_made_up_ratings_have_a_rate_and_no_result(tmp_path):
    write(tmp_path, "2026-01-01_results_h200.json", [a_training()])
    (row,) = rows(tmp_path)
    assert row.case == "whole training, made-up ratings of 480,000 users (13 million), size 512, batch 64"
    assert (row.ours, row.epoch_seconds, row.memory, row.peer) == (160_000.0, 3.0, 2**30, None)
    assert speed_whole.whole_runs(tmp_path) == []


def test_made_up_ratings_are_as_many_as_the_command_draws():
    from hotloop.data import stand_ins

    defaults = stand_ins.draw_random_sets.__kwdefaults__ or {}
    drawn = defaults or dict(
        zip(("users", "items", "events"), stand_ins.draw_random_sets.__defaults__, strict=False)
    )
    assert (drawn["users"], drawn["events"]) == (speed_rows.RANDOM_USERS, 13_000_000)


def test_what_is_not_there_is_counted_from_the_rows(tmp_path):
    write(tmp_path, "2026-01-01_cnn_cpu.json", [side("ours", 2.0, memory=1), side("torch", 1.0, 2.0)])
    more = [side("ours", 2.0, case="resnet50-infer-b8"), side("torch", 1.0, 2.0, case="resnet50-infer-b8")]
    write(tmp_path, "2026-01-02_cnn_cpu.json", more)
    real = a_training(data="MovieLens-100K", command="hotloop recommender train --config ml-100k --seed 0")
    write(tmp_path, "2026-01-01_results_h200.json", [real, a_training()])
    whole = speed_whole.whole_runs(tmp_path)
    found = {line[:2]: line[2:] for line in speed_coverage.coverage(rows(tmp_path), whole)}
    assert set(found) == {(family, machine) for family in speed_rows.FAMILIES for machine in ("CPU", "H200")}
    none = "**none**"
    assert found["cnn", "CPU"] == ("2 rows", "1 of 2 rows", none, "1 of 2 rows", "all")
    assert found["recommender", "H200"] == ("1 row", "all", "1 training", "all", none)
    assert found["hmc", "CPU"] == (none, "does not apply", "does not apply", none, none)
    page = speed_tables.speed_page(tmp_path)
    assert "| cnn | CPU | 2 rows | 1 of 2 rows | **none** | 1 of 2 rows | all |" in page


def test_a_file_is_of_the_program_that_its_name_begins_with():
    found = {
        name: speed_sources.program_of(Path(f"2026-01-01_{name}.json"), machine)
        for name, machine in (
            ("first_update_h200_ahead", "H200"),
            ("kernels_cpu_zen5", "CPU"),
            ("what_cpu", "CPU"),
        )
    }
    assert found == {
        "first_update_h200_ahead": "python benchmarks/first_update.py --device gpu",
        "kernels_cpu_zen5": "python benchmarks/peers/kernels.py",
        "what_cpu": "not recorded",
    }
    # It has no such option.
    assert speed_sources.program_of(Path("2026-01-01_bulk_lists_h200.jsonl"), "H200").endswith(
        "bulk_lists.py"
    )


def test_files_of_other_forms_give_no_rows_and_are_listed(tmp_path):
    write(tmp_path, "2026-01-01_growth_cpu.json", [{"case": "x", "ours_us": 1.0, "torch_us": 2.0}])
    assert rows(tmp_path) == []
    listed = speed_tables.history_page(tmp_path)
    assert "[growth_cpu.json]" in listed and "`python benchmarks/growth.py`" in listed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("2026-11-20_cnn_cpu.json", '{"results": ['),
        ("2026-11-20_cnn_cpu.json", "[1, 2]"),
        ("2026-11-20_cnn_cpu.json", '{"results": [{"ratio": NaN}]}'),
        ("2026-11-20_cnn_cpu.json", '{"results": null}'),
        ("2026-11-20_cnn_cpu.json", json.dumps({"results": [side("torch", 1.0)]})),
        ("2026-11-20_cnn_cpu.json", json.dumps({"results": [side("ours", 0.0), side("torch", 1.0)]})),
        ("new.json", "{}"),
    ],
)
def test_a_file_that_is_not_of_results_is_named_in_one_line(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit, match=rf"^\S*/{name}: not a file of results: .*$"):
        speed_tables.speed_page(tmp_path)


def test_users_of_a_shape_are_those_that_were_drawn():
    text = (ROOT / "benchmarks" / "peers" / "netflix_shape.py").read_text()
    drawn = dict(re.findall(r'"(\w+)": \(([\d_]+),', text))
    assert {shape: int(users) for shape, users in drawn.items()} == speed_rows.USERS


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.05, "50.0 ms"), (0.5, "0.50 s"), (90, "90.0 s"), (180, "3.00 min"), (205_560, "2.38 days")],
)
def test_a_duration_has_the_unit_that_people_take(seconds, text):
    assert speed_cells.duration(seconds) == text


def test_every_command_of_the_pages_is_a_program_that_is_there():
    for page in ("speed.md", "history.md"):
        for program in re.findall(r"`python (benchmarks/\S+\.py)", (ROOT / "docs" / page).read_text()):
            assert (ROOT / program).is_file()
