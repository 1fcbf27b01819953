"""Norms and convolutions joined with what follows them, as with hotloop-native, compute what the layers one by one do.

The package's handlers are the plain implementations here, each with a cosine to be known by.
"""

from collections import Counter
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, PartitionSpec

from hotloop.engine.precision import Policy
from hotloop.families.cnn.network import BATCH_NORM, INPUT, build, fold_norms, inference_logits
from hotloop.layers import conv, kernel_table, native, norm
from hotloop.layers.kernel_table import Times
from hotloop.layers.native import use_native
from hotloop.layers.norm import ReplicaGroups
from same_numbers import assert_same_numbers

MARK = "stablehlo.cosine"
OPERATIONS = {"norm": norm.join, "norm gradient": norm.join_gradient, "biased": conv.biased}
NETWORKS = [
    ("cifar_resnet8", "keras"),
    ("toy_model_bn", "keras"),
    ("resnet18", "keras"),
    ("resnet18", "torch"),
    ("resnet50", "keras"),
]
COMPUTED = [
    pytest.param(*each, marks=() if each[0] == "cifar_resnet8" else pytest.mark.slow) for each in NETWORKS
]
WHOLE_ALONE = (("resnet18", "keras"), ("resnet50", "keras"))
"""Not cut at every boundary, each of which is a program to compile: their sums and ReLUs are those of the others."""
CUT = [
    pytest.param(*each, split, marks=() if each[0] == "cifar_resnet8" else pytest.mark.slow)
    for each in NETWORKS
    for split in (False, True)
    if not (split and each in WHOLE_ALONE)
]


def marked(operation: Any) -> Any:
    def implementation(*arrays: Any, **settings: Any) -> Any:
        first, *others = jax.tree.leaves(found := operation.bind("default", settings)(*arrays))
        one = jnp.cos(0 * arrays[0].ravel()[0])
        return jax.tree.unflatten(jax.tree.structure(found), [first * one, *others])

    return implementation


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """One that has these operations, always faster."""
    targets = [operation.rival.target for operation in OPERATIONS.values()]
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "find_package", lambda: SimpleNamespace(VERSION="fake", TARGETS=targets))
    monkeypatch.setattr(native, "find_fault", lambda: ("", True))
    monkeypatch.setattr(native, "is_loaded", lambda: True)
    monkeypatch.setattr(kernel_table, "time_both", lambda *_: Times(2.0, 1.0))
    for operation in OPERATIONS.values():
        monkeypatch.setitem(operation._paths, "native", marked(operation))
    with use_native(True):
        yield


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(native, "find_package", lambda: None)
    with use_native(True):
        yield


def make(model: str, variant: Any = "keras") -> tuple[Any, ...]:
    """A network, parameters and statistics none of which is as at the start, and images."""
    size = 8 if model.startswith("cifar") else 32
    network, rng = build(model, (size, size, 3), 5, variant=variant), np.random.default_rng(0)
    params, statistics = network.init_on_host(jax.random.key(0))
    for node in network.nodes:
        if node.kind == BATCH_NORM:
            scale, offset = 0.5 + rng.random(node.shape[-1]), rng.normal(size=node.shape[-1])
            params[node.name] = {"scale": np.float32(scale), "offset": np.float32(offset)}
            statistics[node.name] = {"mean": np.float32(0.1 * offset), "variance": np.float32(scale)}
    return network, params, statistics, rng.normal(size=(3, size, size, 3)).astype(np.float32)


def one_by_one(network, params, statistics, values, start, stop, *, train, groups=None):
    """As `Network.run`, layer by layer."""
    known, batch = dict(values), {}
    for node in network.nodes[start:stop]:
        leaves, xs = params.get(node.name, {}), [known[x] for x in node.inputs]
        if node.apply is not None:
            known[node.name] = node.apply(leaves, *xs)
        elif train:
            known[node.name], mean, variance = norm.batch_norm(
                *xs, leaves["scale"], leaves["offset"], network.epsilon, groups
            )
            batch[node.name] = {"mean": mean, "variance": variance}
        elif node.name in statistics:
            given = {**leaves, **statistics[node.name]}
            known[node.name] = norm.normalise(*xs, **given, epsilon=network.epsilon)
        else:
            known[node.name] = xs[0] + leaves["bias"]
    return {name: known[name] for name in network.crossing(stop)}, batch


def in_stages(
    network: Any, run: Any, cuts: Any, params: Any, statistics: Any, images: Any, train: bool
) -> Any:
    """The values that cross each boundary, and the statistics of all stages."""
    values, crossed, batch = {INPUT: images}, [], {}
    for start, stop in zip([0, *cuts], [*cuts, len(network.nodes)], strict=True):
        values, found = run(params, statistics, values, start, stop, train=train)
        crossed.append(values)
        batch |= found
    return crossed, batch


def training(network: Any, run: Any, cuts: Any) -> Any:
    """Logits, the batch's statistics, and the gradients of one number made of both: by images and norms, as those by
    kernels would take most of the compiler's time."""

    def loss(given: Any, kernels: Any) -> Any:
        norms, images = given
        crossed, batch = in_stages(network, run, cuts, {**kernels, **norms}, {}, images, train=True)
        (logits,) = crossed[-1].values()
        moments = sum((each**2).sum() for each in jax.tree.leaves(batch))
        return (logits**2).mean() + 0.01 * moments, (logits, batch)

    return jax.jit(jax.grad(loss, has_aux=True))


def for_training(network: Any, params: Any, images: Any) -> Any:
    """What `training` takes."""
    norms = {node.name for node in network.nodes if node.kind == BATCH_NORM}
    own = {name: leaves for name, leaves in params.items() if name in norms}
    return (own, images), {name: leaves for name, leaves in params.items() if name not in norms}


@cache
def _train_by_layers(model: str, variant: str) -> Any:
    network, params, _, images = make(model, variant)
    return training(network, by_layers(network), [])(*for_training(network, params, images))


@pytest.fixture
def trained_by_layers(model: str, variant: str) -> Any:
    return _train_by_layers(model, variant)


def inference(network: Any, run: Any, cuts: Any) -> Any:
    def values(params: Any, statistics: Any, images: Any) -> Any:
        return in_stages(network, run, cuts, *fold_norms(network, params, statistics), images, train=False)[0]

    return jax.jit(values)


def by_layers(network: Any) -> Any:
    return lambda *args, **how: one_by_one(network, *args, **how)


def all_cuts(network: Any) -> list[int]:
    return [position for position in range(1, len(network.nodes)) if network.may_split(position)]


def used(function: Any, *arguments: Any) -> dict[str, int]:
    """How often each operation is called in the traced program, inner programs included."""
    count: Counter[str] = Counter()
    names = {id(operation): name for name, operation in OPERATIONS.items()}

    def look(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "faster_path":
                count[names.get(id(equation.params["operation"]), "other")] += 1
            inner = jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
            )
            for program in inner:
                if hasattr(program, "eqns"):
                    look(program)

    look(jax.jit(function).trace(*arguments).jaxpr)
    return dict(count)


@pytest.mark.parametrize(("model", "variant", "split"), CUT)
def test_training_equals_the_layers_one_by_one_whole_and_at_every_boundary(
    package, trained_by_layers, model, variant, split
):
    network, params, _, images = make(model, variant)
    cuts = all_cuts(network) if split else []
    given = for_training(network, params, images)
    joined = training(network, network.run, cuts)
    count = sum(node.kind == BATCH_NORM for node in network.nodes)
    assert used(joined, *given) == {"norm": count, "norm gradient": count}
    assert_same_numbers(joined(*given), trained_by_layers, 2e-4)


@pytest.mark.parametrize(("model", "variant", "split"), CUT)
def test_folded_inference_equals_the_layers_one_by_one_whole_and_at_every_boundary(
    package, model, variant, split
):
    network, *given = make(model, variant)
    cuts = all_cuts(network) if split else []
    joined, plain = (inference(network, run, cuts) for run in (network.run, by_layers(network)))
    in_one_stage = sum(
        network.nodes[i - 1].name == node.inputs[0] and not (split and network.may_split(i))
        for i, node in enumerate(network.nodes)
        if node.kind == BATCH_NORM and not model.startswith("toy")
    )
    assert used(joined, *given).get("biased", 0) == in_one_stage
    assert_same_numbers(joined(*given), plain(*given), 1e-5)


@pytest.mark.parametrize(("model", "variant"), COMPUTED)
def test_every_part_hands_on_what_the_next_layers_read(package, model, variant):
    """Whatever layer it ends or begins at, also where no stage may."""
    network, *given = make(model, variant)
    params, statistics, images = jax.tree.map(jnp.asarray, given)
    shapes = {INPUT: images.shape} | {node.name: (len(images), *node.shape) for node in network.nodes}
    for stop in range(1, len(network.nodes) + 1):
        start, train = max(stop - 4, 0), bool(stop % 2)
        weights = (params, {}) if train else fold_norms(network, params, statistics)
        values = {name: jax.ShapeDtypeStruct(shapes[name], np.float32) for name in network.crossing(start)}
        run = partial(network.run, start=start, stop=stop, train=train)
        found, batch = jax.eval_shape(run, *weights, values)
        assert {name: value.shape for name, value in found.items()} == {
            name: shapes[name] for name in network.crossing(stop)
        }
        own = {node.name for node in network.nodes[start:stop] if node.kind == BATCH_NORM}
        assert set(batch) == (own if train else set())


@pytest.mark.parametrize(("model", "variant"), [("cifar_resnet8", "keras"), ("resnet18", "torch")])
def test_each_sum_of_a_block_and_each_relu_is_in_an_ending(model, variant):
    network = build(model, (32, 32, 3), 5, variant=variant)
    taken = Counter(
        name
        for node in network.nodes
        if node.kind == BATCH_NORM
        for name in network.endings[node.name].layers
    )
    assert taken == Counter(node.name for node in network.nodes if node.kind in (BATCH_NORM, "add", "relu"))
    for node in network.nodes:
        if node.kind == "conv":
            (reader,) = (other.name for other in network.nodes if node.name in other.inputs)
            assert network.endings[node.name] == network.endings[reader]


@pytest.mark.parametrize(("model", "variant"), COMPUTED)
def test_without_the_package_the_program_is_that_of_the_layers_one_by_one(no_package, model, variant):
    network, *given = make(model, variant)
    params, _, images = given
    for form, arguments in ((training, for_training(network, params, images)), (inference, given)):
        found, wanted = (
            str(jax.make_jaxpr(form(network, run, []))(*arguments))
            for run in (network.run, by_layers(network))
        )
        assert "faster_path" not in found
        assert found == wanted


def test_statistics_of_replicas_together_and_shorter_types_are_not_joined(package):
    network, params, statistics, images = make("cifar_resnet8")

    def grouped(images: Any) -> Any:
        groups = ReplicaGroups("replica", ((0,),))
        return network.apply(params, statistics, images, train=True, groups=groups)

    mesh = jax.make_mesh((1,), ("replica",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    spread = jax.shard_map(
        grouped, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    assert used(spread, images) == {}
    short = jax.tree.map(jnp.bfloat16, (params, images))
    assert used(lambda params, images: network.apply(params, {}, images, train=True), *short) == {}
    folded = fold_norms(network, params, statistics)
    short = jax.tree.map(jnp.bfloat16, (folded[0], images))
    assert used(lambda params, images: network.apply(params, {}, images, train=False), *short) == {}


def test_norms_that_were_not_folded_go_by_their_statistics(package):
    network, *given = make("cifar_resnet8")

    def values(run: Any) -> Any:
        return lambda *given: in_stages(network, run, [], *given, train=False)[0]

    assert used(values(network.run), *given) == {}
    assert_same_numbers(
        jax.jit(values(network.run))(*given), jax.jit(values(by_layers(network)))(*given), 1e-6
    )


def test_an_export_has_none_of_the_packages_kernels_and_a_program_for_here_has(package):
    network, params, statistics, images = make("cifar_resnet8")

    def logits(state: Any, images: Any) -> Any:
        return inference_logits(network, Policy(), state, images)

    update, state = training(network, network.run, []), {"params": params, "statistics": statistics}
    for function, arguments, platforms in (
        (update, for_training(network, params, images), ("cpu",)),
        (jax.jit(logits), (state, images), ("cpu", "cuda", "tpu")),
    ):
        assert MARK in function.lower(*arguments).as_text()
        assert MARK not in export.export(function, platforms=platforms)(*arguments).mlir_module()


@pytest.mark.parametrize("with_residual", [False, True])
def test_a_convolution_joined_with_its_bias_can_be_differentiated(package, with_residual):
    rng = np.random.default_rng(0)
    shapes = [(2, 5, 5, 3), (3, 3, 3, 4), (4,), *([(2, 3, 3, 4)] if with_residual else [])]
    given = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    settings: Any = {"stride": 2, "pads": ((1, 1), (1, 1))}

    def joined(x: Any, kernel: Any, bias: Any, residual: Any = None) -> Any:
        return conv.conv2d_biased(x, kernel, bias, residual, relu=True, **settings)

    def plain(x: Any, kernel: Any, bias: Any, residual: Any = 0.0) -> Any:
        return jax.nn.relu(conv.conv2d_padded(x, kernel, *settings.values()) + bias + residual)

    assert used(joined, *given) == {"biased": 1}
    found, wanted = (
        jax.jit(jax.value_and_grad(lambda *given, f=f: (f(*given) ** 2).sum(), tuple(range(len(given)))))(
            *given
        )
        for f in (joined, plain)
    )
    assert_same_numbers(found, wanted, 1e-5)
