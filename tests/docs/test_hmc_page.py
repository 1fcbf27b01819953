"""The program of docs/hmc.md runs, finds the exact posterior, and the page names every argument and every result."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotloop import hmc
from hotloop.mcmc.settings import Options, Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hmc.md").read_text()


def test_the_example_finds_the_exact_posterior(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    from hmc_targets import exact_schools

    (program,) = re.findall("```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    assert "R-hat" in capsys.readouterr().out
    result = names["result"]
    assert result.samples["z"].shape == (64, 500, 8)
    for name, (means, variances) in exact_schools().items():
        draws = np.asarray(result.samples[name], np.float64).reshape(64, 500, -1)
        for place, (mean, variance) in enumerate(zip(np.ravel(means), np.ravel(variances), strict=True)):
            for values, expected in ((draws[..., place], mean), ((draws[..., place] - mean) ** 2, variance)):
                error = values.std() / np.sqrt(hmc.ess_bulk(values))
                assert abs(values.mean() - expected) < 4.5 * error, (name, place)
    assert all(np.all(leaf < 1.01) for leaf in result.diagnose().r_hat.values())


def test_the_page_names_every_argument_with_its_default_and_every_result() -> None:
    assert set(Options.__annotations__) == {each.name for each in fields(Settings)}
    table = PAGE[PAGE.index("## What it takes") : PAGE.index("## What it gives")]
    for each in fields(Settings):
        (row,) = re.findall(rf"^\| `{each.name}` \|(.*?)\|", table, re.MULTILINE)
        default = "found" if each.default is None else str(each.default)
        assert row.strip() == ("" if each.name == "chains" else default)
    shown = {name for name in dir(hmc.Result) if not name.startswith("_")} | {
        f.name for f in fields(hmc.Result)
    }
    assert all(f"`{name}" in PAGE or f".{name}" in PAGE for name in shown - {"names"})
