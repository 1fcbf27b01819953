import subprocess
import sys
from dataclasses import fields

import pytest

from hotloop.errors import OptionError
from hotloop.families.kernels import config as configs
from hotloop.options import build

LAYERS = [configs.Dense, configs.GroupedConv, configs.Rnn, configs.Gru, configs.Lstm, configs.LstmMulti]
COMMON = {
    "steps": 5,
    "use_generated_data": False,
    "use_zero_values": False,
    "replicas": 1,
    "shards": 1,
    "device_id": -1,
    "convolution_options": None,
    "matmul_options": None,
    "enable_half_partials": False,
    "save_graph": False,
    "report_hw_cycle_count": False,
    "train": False,
    "dtype": "auto",
}
OWN = {
    configs.Dense: {"batch_size": 32, "size": 1024, "include_activation": False, "batches_per_step": 5000},
    configs.GroupedConv: {
        "batch_size": 1,
        "filter_in": 64,
        "filter_out": 64,
        "kernel_size": 3,
        "stride": 1,
        "input_size": 56,
        "block_repeats": 10,
        "group_dim": 1,
        "batches_per_step": 1000,
    },
    configs.Rnn: {"batch_size": 1, "timesteps": 5, "hidden_size": 128, "batches_per_step": 1000},
    configs.Gru: {"batch_size": 1, "timesteps": 5, "hidden_size": 128, "input_size": 128, "fused": False},
    configs.Lstm: {"batch_size": 1, "timesteps": 5, "hidden_size": 128, "fused": False},
    configs.LstmMulti: {
        "batch_size": 1,
        "timesteps": 200,
        "input_size": 16,
        "hidden_size": 256,
        "num_layers": 2,
        "batches_per_step": 1000,
    },
}


@pytest.mark.parametrize("layer", LAYERS)
def test_defaults_are_the_old_programs(layer):
    config = layer()
    assert {name: getattr(config, name) for name in COMMON} == COMMON
    assert {name: getattr(config, name) for name in OWN[layer]} == OWN[layer]


def test_hmc_defaults_are_the_old_programs_and_follow_the_target():
    config = configs.Hmc()
    assert (config.leapfrog_steps, config.hmc_steps, config.steps) == (5, 10000, 100)
    assert (config.number_of_chains, config.leapfrog_step_size) == (1, 1.0)
    decoder = configs.Hmc(target="vcd")
    assert (decoder.number_of_chains, decoder.leapfrog_step_size) == (100, 0.05)
    assert configs.Hmc(target="vcd", chains=7, step_size=0.2).number_of_chains == 7


@pytest.mark.parametrize("layer", [*LAYERS, configs.Hmc])
def test_every_size_refuses_zero_and_less_by_name(layer):
    sizes = [f.name for f in fields(layer) if f.type in (int, "int") and f.name not in ("device_id", "seed")]
    assert len(sizes) >= 4
    for name in sizes:
        for value in (0, -3):
            with pytest.raises(OptionError, match=f"--{name.replace('_', '-')} {value}: must be at least 1"):
                layer(**{name: value})


@pytest.mark.parametrize("layer", [*LAYERS, configs.Hmc, configs.AllKernels])
def test_configs_are_hashable(layer):
    assert hash(layer()) == hash(layer())
    assert build(layer, {"steps": "3"}) != layer()


# fmt: off
REFUSED = [
    (configs.Dense, {"dtype": "int"}, "--dtype int: must be one of auto, float32, float16, bfloat16"),
    (configs.Hmc, {"dtype": "float16"}, "--dtype float16: must be one of auto, float32; did you mean float32?"),
    (configs.GroupedConv, {"group_dim": 7}, "--group-dim 7: must divide --filter-out 64"),
    (configs.GroupedConv, {"filter_in": 48},
     "--filter-in 48: not divisible by the 64 groups that --filter-out 64 and --group-dim 1 make; use a "
     "multiple of 64"),
    (configs.GroupedConv, {"filter_in": 96, "filter_out": 32},
     "--filter-out 32: later blocks read it in groups of 3 channels, which do not divide it; use --block-repeats 1 or "
     "other channels"),
    (configs.Gru, {"reset_after": True}, "--reset-after: only the fast layer has it; add --fused"),
    (configs.Dense, {"shards": 2},
     "--shards 2: a single layer is not split over devices; --replicas makes copies"),
    (configs.Dense, {"use_zero_values": True, "use_generated_data": True},
     "--use-zero-values: only for data made on the device; leave out --use-generated-data"),
    (configs.Dense, {"replicas": 2, "device_id": 1},
     "--device-id 1: names one device, but --replicas 2 need more; leave one of them out"),
    (configs.Dense, {"enable_half_partials": True, "dtype": "float32"},
     "--enable-half-partials: needs 16-bit numbers; use --dtype float16 or bfloat16"),
]
# fmt: on


@pytest.mark.parametrize(("config", "options", "said"), REFUSED)
def test_options_that_cannot_work_are_refused_in_one_line(config, options, said):
    with pytest.raises(OptionError) as caught:
        build(config, options)
    assert str(caught.value) == said


def test_groups_change_after_the_first_block_as_the_old_program_had_it():
    config = configs.GroupedConv(filter_in=32, filter_out=16)
    assert (config.groups, config.depth, config.later_groups) == (16, 2, 8)


def test_configs_import_without_jax_or_numpy():
    code = "import sys, hotloop.cli.kernel; print('jax' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
