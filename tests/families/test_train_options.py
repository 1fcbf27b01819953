"""What holds for the options of every training that has a config of its own: vcd and the recommender."""

import subprocess
import sys

import pytest

from hotloop.families.recommender.config import TrainOptions, UpdateOptions
from hotloop.families.vcd.config import VcdModel, VcdTrain
from hotloop.options import options_of


@pytest.mark.parametrize(("all_options", "part"), [(TrainOptions, UpdateOptions), (VcdTrain, VcdModel)])
def test_options_are_described_and_no_two_share_a_spelling(all_options, part):
    options = options_of(all_options)
    spellings = [spelling for option in options for spelling in (option.spelling, *option.aliases)]
    assert len(spellings) == len(set(spellings))
    assert all(option.help.endswith(".") and option.group for option in options)
    assert {option.name for option in options_of(part)} < {option.name for option in options}


@pytest.mark.parametrize("family", ["recommender", "vcd"])
def test_options_need_no_jax(family):
    module = f"hotloop.families.{family}.config"
    code = f"import sys, {module}; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
