"""What no device could do is refused when processes have met, before one of them opens a device."""

import jax
import pytest

from hotloop.cli.main import main
from hotloop.engine import device, processes

CNN = "cnn train --model toy_model_bn --micro-batch-size 4 --synthetic-data host"
SPLIT = "--pipeline-splits conv2d_1 bn_1 dense"
REFUSED = [
    (1, f"{CNN} --pipeline-splits bn_9", "--pipeline-splits bn_9: no layer of toy_model_bn"),
    (1, f"{CNN} --pipeline-splits bn_1 bn_0", "--pipeline-splits bn_1 bn_0: must be different layers in the"),
    (1, f"{CNN} --pipeline-splits bn_0 bn_0", "--pipeline-splits bn_0 bn_0: must be different layers in the"),
    (1, f"{CNN} --pipeline-splits conv2d_0", "--pipeline-splits conv2d_0: the first layer opens the first"),
    (1, f"{CNN} --num-replicas 3 --global-batch-size 4", "--global-batch-size 4: micro batch 4 x replicas 3 = 12 is"),
    (1, f"{CNN} --global-batch-size 50004", "do not fill one global batch of 50004 (--micro-batch-size 4 x --num-re"),
    (1, f"{CNN} --top-k 11", "--top-k 11: cifar10 has only 10 classes"),
    (1, f"{CNN} {SPLIT} --device-mapping 0 1 0", "--device-mapping 0 1 0: has 3 entries for 4 stages"),
    (1, f"{CNN} {SPLIT} --device-mapping 0 1 3 3", "--device-mapping 0 1 3 3: must use every device from 0 to 3"),
    (1, f"{CNN} {SPLIT} --device-mapping 0 1 0 1 --strict-devices", "--strict-devices: --device-mapping 0 1 0 1: the"),
    (1, f"{CNN} --recomputation", "--recomputation: goes stage by stage, so it needs --pipeline-splits"),
    (1, f"{CNN} {SPLIT} --num-replicas 2 --dbn-replica-group-size 2", "--dbn-replica-group-size 2: needs one device"),
    (3, f"{CNN} --num-replicas 4 --gradient-accumulation 3", "--num-replicas 4: 3 instances do not divide them"),
    (3, f"{CNN} --num-replicas 2", "--num-instances 3: more than replicas (2) x devices a replica (1)"),
    (9, f"{CNN} --num-replicas 2 {SPLIT}", "--num-instances 9: more than replicas (2) x devices a replica (4)"),
    (1, "cnn validate --random-weights --pipeline-splits bn_9", "--pipeline-splits bn_9: no layer of toy_model"),
    (3, "cnn validate --random-weights --num-replicas 4", "--num-replicas 4: 3 instances do not divide them"),
    (3, "vcd train --replicas 4", "--replicas 4: 3 instances do not divide them; ask for a multiple of 3"),
    (3, "recommender train --replicas 4", "--replicas 4: 3 instances do not divide them; ask for a multiple of 3"),
    (3, "estimator --replicas 4", "--replicas 4: 3 instances do not divide them; ask for a multiple of 3"),
    (3, "estimator --ipus 4", "--replicas 4: 3 instances do not divide them"),
    (2, "estimator", "--num-instances 2: more than replicas (1) x devices a replica (1)"),
    (1, "vcd train --replicas 3", "--replicas 3: 100 images an update cannot be shared evenly"),
    (1, "estimator --replicas 3", "--batch-size 32: does not fall into 3 replicas x 1 parts"),
]  # fmt: skip


@pytest.fixture
def opened(monkeypatch):
    """The times that somebody asked jax for devices; nothing comes of it."""
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise RuntimeError("no devices in this test")

    for name in ("devices", "local_devices", "device_count", "default_backend"):
        monkeypatch.setattr(jax, name, refuse)
    monkeypatch.setattr(device, "enable_cache", lambda warn: None)
    return asked


@pytest.mark.parametrize(("instances", "words", "said"), REFUSED)
def test_what_no_device_could_do_is_one_line_before_one_is_opened(
    instances, words, said, opened, monkeypatch, capsys
):
    monkeypatch.setattr(processes, "count", lambda: instances)
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert (err.count("\n"), out, opened) == (1, "", [])


def test_what_devices_could_do_asks_for_them(opened, capsys):
    assert main([*CNN.split(), *SPLIT.split(), "--num-replicas", "2"]) != 0
    assert opened
