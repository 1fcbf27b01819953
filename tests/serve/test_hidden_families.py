"""Every family: trained, exported, its run deleted, and loaded by a process that cannot import the families.

The answers are those of the family's own prediction, for every batch up to twice the largest, and one moved weight is
seen.
"""

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_models import without_comparing

from hotloop import Estimator, ModelSpec, RunConfig
from hotloop.cli.main import main
from hotloop.families.estimator.cifar.model import model_fn
from hotloop.families.vcd import model as vcd
from hotloop.families.vcd import networks
from hotloop.serve.artefact import find_disagreement

pytestmark = pytest.mark.slow

LARGEST = 4
ROWS = 2 * LARGEST
RATINGS = "".join(
    f"{1000 + user}\t{500 + 3 * (user * 7 + k * k) % 120}\t{1 + (user + k) % 5}\n"
    for user in range(60)
    for k in range(12)
)
LOADING = """
import sys
sys.modules["hotloop.families"] = None
import numpy as np
from hotloop.engine.device import setup
from hotloop.serve.artefact import Artefact, in_rungs
setup("cpu")
folder, given, out, moved = sys.argv[1:]
artefact = Artefact.open(folder)
call = artefact.load()
with np.load(given) as inputs:
    inputs = dict(inputs)
rows = len(next(iter(inputs.values())))
answers = {}
for count in range(1, rows + 1):
    found = in_rungs(call, artefact.ladder, {name: value[:count] for name, value in inputs.items()})
    answers |= {f"{count}/{name}": value for name, value in found.items()}
weight = call._weights[moved]
call._weights[moved] = weight.at[(0,) * weight.ndim].add(1)
answers |= {f"moved/{name}": value for name, value in in_rungs(call, artefact.ladder, inputs).items()}
np.savez(out, **answers)
assert not any(name.startswith("hotloop.families.") for name in sys.modules)
"""


def ask(capsys, *words):
    """The result of a command."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def train(words, folder):
    assert main([*words.split(), "--precision", "32.32"]) == 0
    return folder / "run"


def export_run(run, *options):
    """The model's folder, compared in a fresh process."""
    words = ["export", str(run), "-o", str(run.parent / "models"), "--max-batch", str(LARGEST), *options]
    assert main([*words, "--json"]) == 0
    return next((run.parent / "models").glob("*/1"))


def by_cnn(folder, capsys):
    """Shares of all classes by `cnn predict` of image files."""
    from PIL import Image

    run = train(
        "cnn train --model-name toy_model_bn --dataset mnist --synthetic-data host --weight-updates-per-epoch 4 "
        f"--micro-batch-size 8 --validation False --results-dir {folder} --run-name run",
        folder,
    )
    pixels = np.random.default_rng(1).integers(0, 256, (ROWS, 28, 28, 1), np.uint8)
    files = tuple(folder / f"{row}.png" for row in range(ROWS))
    for file, image in zip(files, pixels, strict=True):
        Image.fromarray(image[..., 0]).save(file)
    found = ask(capsys, "cnn", "predict", run, *files, "--top", 10)["predictions"]
    lists = [found[str(file)] for file in files]
    shares = np.zeros((ROWS, 10), np.float32)
    for row, each in enumerate(lists):
        shares[row, [one["class"] for one in each]] = [one["probability"] for one in each]
    expected = {
        "probabilities": shares,
        "classes": np.array([[one["class"] for one in each[:5]] for each in lists], np.int32),
        "scores": np.array([[one["probability"] for one in each[:5]] for each in lists], np.float32),
    }
    return export_run(run), {"image": pixels}, expected, "params/dense/bias"


def by_recommender(folder, capsys):
    """The lists of `recommender recommend`, for users by their ids."""
    (folder / "ratings.tsv").write_text(RATINGS)
    run = train(
        f"recommender train --training-data-file {folder}/ratings.tsv --size 128 --epochs 2 --batch-size 8 "
        f"--results-dir {folder} --run-name run",
        folder,
    )
    users = range(1003, 1003 + ROWS)
    found = ask(capsys, "recommender", "recommend", run, "--users", *users, "--top", 10)["recommendations"]
    expected = {
        "items": np.array([each["items"] for each in found], np.int32),
        "predictions": np.array([each["predictions"] for each in found], np.float32),
    }
    inputs = {
        "items": np.full((ROWS, 16), -1, np.int32),
        "ratings": np.zeros((ROWS, 16), np.float32),
        "user": np.array([each["user"] for each in found], np.int32),
    }
    place = export_run(run, "--best", "--with-users", "--max-ratings", "16")  # as recommend does
    return place, inputs, expected, "params/decoder/2/b"


def by_vcd(folder, capsys):
    """The ELBO by `evaluate`, whose draws belong to the images' numbers."""
    run = train(
        f"vcd train --data digits --updates 20 --no-testing --results-dir {folder} --run-name run", folder
    )
    found, generator = vcd.load_run(run), np.random.default_rng(1)
    pixels = generator.integers(0, 256, (ROWS, 28, 28, 1), np.uint8)
    seeds = generator.integers(0, 1000, ROWS).astype(np.int32)
    bits = (pixels.reshape(ROWS, 784) > 127).astype(np.float32)
    elbo = jax.jit(vcd.evaluate(found.job))(found.state, {"image": bits, "index": seeds})["elbo"]
    params = found.state["params"]
    mean, spread = networks.encode(params, bits)
    draws = [jax.random.normal(jax.random.fold_in(jax.random.key(0), seed), mean.shape[1:]) for seed in seeds]
    logits = networks.forward(params["decoder"], mean + spread * np.stack(draws))[-1]
    pictures = np.asarray(jax.nn.sigmoid(logits)).reshape(pixels.shape)
    expected = {"reconstruction": pictures, "elbo": np.asarray(elbo)}
    return export_run(run), {"image": pixels, "seed": seeds}, expected, "decoder/0/w"


def rows_of(estimator, features):
    """What `Estimator.predict` gives, by name."""
    found = list(estimator.predict(lambda: features))
    return {name: np.stack([row[name] for row in found]) for name in found[0]}


def by_estimator(folder, capsys):
    """`Estimator.predict` of the CIFAR program's model."""
    run = train(
        "estimator --generated-data --epochs 1/2000 --batch-size 16 --batches-per-step 1 --train-only "
        f"--model-dir {folder}/run",
        folder,
    )
    pixels = np.random.default_rng(1).integers(0, 256, (ROWS, 32, 32, 3), np.uint8)
    params = json.loads((run / "config.json").read_text())["params"]
    estimator = Estimator(model_fn, RunConfig(run, batch_size=LARGEST, precision="32.32"), params, quiet=True)
    return export_run(run), {"features": pixels}, rows_of(estimator, pixels), "weights/dense2/bias"


def own_model(features, labels, mode, params):
    return ModelSpec(
        init=lambda key: {"w": jax.random.normal(key, (3, 2)), "b": jnp.zeros(2)},
        apply=lambda weights, x: x["a"] @ weights["w"] + weights["b"] * x["c"]["d"],
        loss=lambda outputs, labels: ((outputs - labels[:, None]) ** 2).sum(-1),
        predictions=lambda outputs: {"both": outputs, "more": {"best": outputs.argmax(-1)}},
        optimizer=optax.sgd(0.01),
    )


def by_own_model(folder, capsys):
    """`Estimator.predict` of a model in a program of one's own, with dicts on both sides."""
    draw = np.random.default_rng(1).normal
    features = {"a": draw(size=(64, 3)).astype(np.float32), "c": {"d": draw(size=(64, 1)).astype(np.float32)}}
    estimator = Estimator(own_model, RunConfig(folder / "run", batch_size=16), quiet=True)
    given = features, draw(size=64).astype(np.float32)
    place = estimator.train(given, steps=5).export(folder / "models", given, max_batch=LARGEST)
    inputs = {"a": features["a"][:ROWS], "c/d": features["c"]["d"][:ROWS]}
    found = list(estimator.predict(lambda: {"a": inputs["a"], "c": {"d": inputs["c/d"]}}))
    expected = {
        "both": np.stack([row["both"] for row in found]),
        "more/best": np.stack([row["more"]["best"] for row in found]),
    }
    return place, inputs, expected, "weights/w"


@pytest.mark.parametrize("by", [by_cnn, by_recommender, by_vcd, by_estimator, by_own_model])
def test_a_folder_answers_without_run_and_families_as_the_family_does(by, tmp_path, monkeypatch, capsys):
    folder, inputs, expected, moved = by(tmp_path, capsys)
    shutil.rmtree(tmp_path / "run")
    np.savez(tmp_path / "given.npz", **inputs)
    files = tmp_path / "given.npz", tmp_path / "out.npz"
    subprocess.run([sys.executable, "-c", LOADING, folder, *files, moved], check=True)
    with np.load(tmp_path / "out.npz") as answers:
        for count in range(1, ROWS + 1):
            found = {name: answers[f"{count}/{name}"] for name in expected}
            wanted = {name: value[:count] for name, value in expected.items()}
            assert find_disagreement(wanted, found, 1e-5) is None
        assert find_disagreement(expected, {name: answers[f"moved/{name}"] for name in expected}, 1e-5)
    if by is by_own_model:
        return
    without_comparing(monkeypatch)
    assert main(["export", "--refresh", str(folder)]) == 0
    new = folder.with_name("2")
    assert (new / "weights.safetensors").read_bytes() == (folder / "weights.safetensors").read_bytes()
    assert (new / "program.bin").stat().st_size > 0


def test_what_two_processes_of_two_stages_trained_is_exported_by_one(tmp_path, capsys):
    words = (
        "launch --num-instances 2 --num-replicas 2 -- cnn train --model-name toy_model_bn --dataset mnist "
        "--synthetic-data host --weight-updates-per-epoch 2 --micro-batch-size 4 --gradient-accumulation 4 "
        "--pipeline-splits conv2d_1 --precision 32.32 --validation False --device cpu --run-name run"
    )
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "hotloop", *words.split(), "--results-dir", str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, **devices})
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "models"), "--max-batch", "2"]) == 0
    assert "compared in a fresh process" in capsys.readouterr().out
