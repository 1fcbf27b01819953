"""The networks: sizes, names, order, first values, and what they compute."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.errors import OptionError
from hotloop.families.cnn.description import describe_network
from hotloop.families.cnn.network import NormChoice, build
from hotloop.families.cnn.options import MODELS
from hotloop.layers import norm
from hotloop.layers.conv import max_pool
from hotloop.layers.paths import force_path

QUICK = {"xla_backend_optimization_level": 0}
CIFAR, IMAGENET = (32, 32, 3), (224, 224, 3)
GENERATOR = np.random.default_rng(0)


@pytest.fixture(scope="module")
def resnet8():
    network = build("cifar_resnet8", CIFAR, 10)
    return network, *network.init(jax.random.key(0))


@pytest.fixture(scope="module")
def resnet20():
    return build("cifar_resnet20", CIFAR, 10).init(jax.random.key(1))[0]


@pytest.fixture(scope="module")
def trained(resnet8):
    """A batch, its logits in training and its statistics."""
    network, params, statistics = resnet8
    images = np.random.default_rng(5).normal(size=(4, *CIFAR)).astype(np.float32)
    return images, *applied(network, train=True)(params, statistics, images)


def applied(network, *, train):
    return jax.jit(lambda *arguments: network.apply(*arguments, train=train), compiler_options=QUICK)


def splits(network):
    """Whether a stage may begin at each layer."""
    return {node.name: network.may_split(i) for i, node in enumerate(network.nodes)}


def parameters(network):
    return sum(node.weights for node in network.nodes)


@pytest.mark.parametrize(
    ("model", "shape", "classes", "wanted"),
    [
        ("resnet18", IMAGENET, 1000, 11_693_736),
        ("resnet34", IMAGENET, 1000, 21_801_896),
        ("resnet50", IMAGENET, 1000, 25_557_032),
        ("resnet101", IMAGENET, 1000, 44_549_160),
        ("resnet152", IMAGENET, 1000, 60_192_808),
        ("cifar_resnet8", CIFAR, 10, 75_290),
        ("cifar_resnet20", CIFAR, 10, 269_722),
        ("cifar_resnet32", CIFAR, 10, 464_154),
        ("cifar_resnet44", CIFAR, 10, 658_586),
        ("cifar_resnet56", CIFAR, 10, 853_018),
        ("cifar_resnet110", CIFAR, 10, 1_727_962),
        ("toy_model", CIFAR, 10, 242),
        ("toy_model_bn", CIFAR, 10, 242 + 2 * (4 + 8)),
    ],
)
def test_trainable_parameters(model, shape, classes, wanted):
    assert parameters(build(model, shape, classes)) == wanted


@pytest.mark.parametrize(("model", "wanted"), [("resnet18", 11_689_512), ("resnet34", 21_797_672)])
def test_the_torch_variant_has_no_projection_where_shapes_match(model, wanted):
    network = build(model, IMAGENET, 1000, variant="torch")
    assert parameters(network) == wanted
    assert "conv2_block1_0_conv" not in [layer.name for layer in network.nodes]


def test_the_parameters_that_init_makes_are_those_that_the_layers_count(resnet8):
    network, params, statistics = resnet8
    made = {name: sum(leaf.size for leaf in leaves.values()) for name, leaves in params.items()}
    assert made == {node.name: node.weights for node in network.nodes if node.weights}
    assert {leaf.dtype for leaf in jax.tree.leaves((params, statistics))} == {jnp.dtype("float32")}
    norms = [node.name for node in network.nodes if node.kind == "batch norm"]
    assert sorted(statistics) == sorted(norms)


def test_names_and_order_of_a_bottleneck_block():
    names = [layer.name for layer in build("resnet50", IMAGENET, 1000).nodes]
    parts = [
        "0_conv",
        "0_bn",
        "1_conv",
        "1_bn",
        "1_relu",
        "2_conv",
        "2_bn",
        "2_relu",
        "3_conv",
        "3_bn",
        "add",
        "out",
    ]
    assert names[:4] == ["conv1_conv", "conv1_bn", "conv1_relu", "pool1_pool"]
    assert names[4:16] == [f"conv2_block1_{part}" for part in parts]
    assert names[16:26] == [f"conv2_block2_{part}" for part in parts[2:]]
    assert names[-3:] == ["conv5_block3_out", "avg_pool", "predictions"]


def test_names_and_order_of_a_cifar_block():
    names = [layer.name for layer in build("cifar_resnet20", CIFAR, 10).nodes]
    start = names.index("conv3_block1_shortcut")
    parts = [
        "shortcut",
        "layer1_conv_ds",
        "layer1_bn",
        "layer1_relu",
        "layer2_conv",
        "layer2_bn",
        "add",
        "post_addition_relu",
    ]
    assert names[start : start + 8] == [f"conv3_block1_{part}" for part in parts]
    assert names[start + 8] == "conv3_block2_layer1_conv"
    assert names[-2:] == ["avg_pool", "fc_layer"]


def test_shapes_go_down_as_they_should():
    shapes = {layer.name: layer.shape for layer in build("resnet50", IMAGENET, 1000).nodes}
    assert shapes["conv1_conv"] == (112, 112, 64)
    assert shapes["pool1_pool"] == (56, 56, 64)
    # The stride is in the 3x3 convolution, not in the 1x1 before it.
    assert shapes["conv3_block1_1_conv"] == (56, 56, 128)
    assert shapes["conv3_block1_2_conv"] == (28, 28, 128)
    assert shapes["conv5_block3_out"] == (7, 7, 2048)


@pytest.mark.parametrize(
    ("model", "shape", "layer", "wanted"),
    [
        ("cifar_resnet8", (28, 28, 1), "conv4_block1_add", (7, 7, 64)),
        ("cifar_resnet56", IMAGENET, "conv4_block1_add", (56, 56, 64)),
        ("cifar_resnet8", (33, 31, 3), "conv4_block1_add", (9, 8, 64)),
        ("toy_model", (28, 28, 1), "flatten", (8,)),
        ("resnet18", (32, 32, 3), "conv5_block2_out", (1, 1, 512)),
    ],
)
def test_other_images_go_into_every_topology(model, shape, layer, wanted):
    assert {info.name: info.shape for info in build(model, shape, 10).nodes}[layer] == wanted


def test_scales_start_from_zero_only_in_bottlenecks_without_projection():
    def zeros(model):
        values = {node.name: node.parameters for node in build(model, IMAGENET, 10).nodes}
        return [name for name, leaves in values.items() if "scale" in leaves and leaves["scale"].scale == 0]

    blocks = [
        f"conv{stack}_block{i}" for stack, n in ((2, 3), (3, 4), (4, 6), (5, 3)) for i in range(2, n + 1)
    ]
    assert zeros("resnet50") == [f"{block}_3_bn" for block in blocks]
    assert zeros("resnet34") == zeros("cifar_resnet20") == []


def test_block_kernels_are_truncated_normals_of_variance_one_over_fan_in(resnet20):
    kernels = [np.asarray(leaves["kernel"], np.float64) for leaves in resnet20.values() if "kernel" in leaves]
    units = np.concatenate([np.ravel(k) * (9 * k.shape[2]) ** 0.5 for k in kernels if k.ndim == 4])
    assert units.mean() == pytest.approx(0, abs=5 / units.size**0.5)
    assert units.std() == pytest.approx(1, rel=5e-3)
    # Cut off at two standard deviations of the normal before the cut, which is 1 / 0.8796 times wider.
    assert np.abs(units).max() == pytest.approx(2 / 0.87962566, rel=1e-3)


def test_stems_for_imagenet_and_dense_layers_start_from_glorot_uniform_values(resnet20):
    network = build("resnet50", IMAGENET, 10)
    start = network.nodes[0].parameters["kernel"]
    assert (start.kind, start.scale) == ("uniform", pytest.approx((6 / (49 * (3 + 64))) ** 0.5))
    kernel, limit = np.asarray(resnet20["fc_layer"]["kernel"]), (6 / (64 + 10)) ** 0.5
    assert np.abs(kernel).max() == pytest.approx(limit, rel=2e-2) and np.abs(kernel).max() <= limit
    assert not np.asarray(resnet20["fc_layer"]["bias"]).any()


def test_no_two_kernels_share_values(resnet20):
    values = np.concatenate(
        [np.ravel(leaves["kernel"]) for leaves in resnet20.values() if "kernel" in leaves]
    )
    # 24 bits of randomness repeat by chance; shared kernels would repeat by the thousand.
    assert len(np.unique(values)) > 0.96 * len(values)


def test_first_values_are_the_same_inside_a_compiled_program(resnet8):
    network, params, statistics = resnet8
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
        jax.jit(network.init, compiler_options=QUICK)(jax.random.key(0)),
        (params, statistics),
    )


@pytest.mark.parametrize(
    "model", ["cifar_resnet8", "toy_model", "toy_model_bn", pytest.param("resnet18", marks=pytest.mark.slow)]
)
def test_a_black_image_gives_every_class_the_same_probability(model):
    network = build(model, CIFAR, 2)
    logits, batch = applied(network, train=False)(*network.init(jax.random.key(3)), jnp.zeros((1, *CIFAR)))
    np.testing.assert_array_equal(jax.nn.softmax(logits), [[0.5, 0.5]])
    assert batch == {}


def test_statistics_of_the_batch_come_back_from_training_and_serve_in_evaluation(resnet8, trained):
    network, params, statistics = resnet8
    images, logits, batch = trained
    assert jax.tree.map(jnp.shape, batch) == jax.tree.map(jnp.shape, statistics)
    evaluated, _ = applied(network, train=False)(params, batch, images)
    np.testing.assert_allclose(evaluated, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_half_precision_networks_keep_logits_and_statistics_in_float32(resnet8, trained, dtype):
    network, params, statistics = resnet8
    half, images = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, jnp.asarray(trained[0])))
    last = len(network.nodes) - 1
    features, _ = jax.eval_shape(
        lambda *a: network.run(*a, 0, last, train=True), half, {}, {"images": images}
    )
    assert features["avg_pool"].dtype == dtype
    logits, batch = applied(network, train=True)(half, statistics, images)
    assert {leaf.dtype for leaf in jax.tree.leaves((logits, batch))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(logits, trained[1], atol=0.1)


def test_a_network_cut_at_layers_gives_the_same_logits(resnet8, trained):
    network, params, statistics = resnet8
    cuts = ("conv1_relu", "conv3_block1_layer1_bn", "conv3_block1_post_addition_relu", "fc_layer")
    names = [node.name for node in network.nodes]
    places = [0, *map(names.index, cuts), len(names)]

    def in_parts(params, images):
        values, batch = {"images": images}, {}
        for start, stop in pairwise(places):
            assert tuple(values) == network.crossing(start)
            values, more = network.run(params, statistics, values, start, stop, train=True)
            batch |= more
        return values["fc_layer"], batch

    ours = jax.jit(in_parts, compiler_options=QUICK)(params, trained[0])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, tuple(trained[1:])
    )


def test_stages_may_begin_where_one_value_crosses():
    may = splits(build("resnet50", IMAGENET, 1000))
    assert not may["conv1_conv"]
    assert may["conv2_block1_out"] and may["conv4_block2_out"] and may["conv3_block2_1_conv"]
    assert not may["conv2_block1_1_conv"] and not may["conv3_block2_2_conv"] and not may["conv3_block2_add"]
    cifar = splits(build("cifar_resnet56", IMAGENET, 1000))
    assert cifar["conv2_block4_post_addition_relu"] and not cifar["conv2_block4_layer2_conv"]


def test_group_norm_by_groups_and_by_channels(monkeypatch):
    by_groups = build("cifar_resnet8", CIFAR, 10, NormChoice("group", groups=4))
    by_channels = build("cifar_resnet8", CIFAR, 10, NormChoice("group", channels_per_group=4))
    taken = []
    with monkeypatch.context() as patched:
        patched.setattr(norm, "group_norm", lambda x, scale, offset, groups, _: taken.append(groups) or x)
        for network in (by_groups, by_channels):
            forms = jax.eval_shape(network.init, jax.random.key(0))
            jax.eval_shape(partial(network.apply, train=True), *forms, jnp.zeros((1, *CIFAR)))
    assert taken == [*[4] * 7, 4, 4, 4, 8, 8, 16, 16]
    names = [layer.name for layer in by_groups.nodes]
    assert (
        "conv1_gn" in names and "conv4_block1_layer2_gn" in names and not any("bn" in name for name in names)
    )
    params, statistics = by_groups.init(jax.random.key(0))
    assert statistics == {} and "conv1_gn" in params and parameters(by_groups) == 75_290
    images = jnp.asarray(GENERATOR.normal(size=(2, *CIFAR)), jnp.float32)
    logits, batch = applied(by_groups, train=True)(params, {}, images)
    assert logits.shape == (2, 10) and np.isfinite(logits).all() and batch == {}
    programs = {
        str(jax.make_jaxpr(partial(by_groups.apply, train=train))(params, {}, images))
        for train in (True, False)
    }
    assert len(programs) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: build("resnet51", IMAGENET, 10), ["--model-name", "'resnet51'", *MODELS]),
        (lambda: build("cifar_resnet9", CIFAR, 10), ["--model-name", "'cifar_resnet9'", "6n + 2"]),
        (lambda: build("toy_model", (8, 8, 3), 10), ["8x8x3", "too small", "pool_1"]),
        (lambda: build("cifar_resnet8", CIFAR, 10, variant="torch"), ["cifar_resnet8", "'torch'"]),
        (
            lambda: build("cifar_resnet8", CIFAR, 10, NormChoice("group", groups=32)),
            ["num_groups 32", "16 channels"],
        ),
        (
            lambda: build("toy_model_bn", CIFAR, 10, NormChoice("group", channels_per_group=3)),
            ["channels_per_group 3"],
        ),
        (lambda: NormChoice("group"), ["--norm-layer", "exactly one"]),
        (lambda: NormChoice("group", groups=2, channels_per_group=2), ["--norm-layer", "exactly one"]),
        (lambda: NormChoice("group", groups=0), ["at least 1"]),
        (lambda: NormChoice("batch", groups=2), ["group_norm"]),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(make, words):
    with pytest.raises(OptionError) as refused:
        make()
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def float64_gradient():
    """Loss and gradient of a cifar_resnet8 in training, small images, in float64."""
    network, generator = build("cifar_resnet8", (8, 6, 3), 4), np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: np.asarray(leaf) + generator.normal(0, 0.1, leaf.shape),
        network.init(jax.random.key(0))[0],
    )
    images, weights = generator.normal(size=(3, 8, 6, 3)), generator.normal(size=(3, 4))
    with jax.enable_x64(True):

        def loss(params):
            return (weights * network.apply(params, {}, jnp.asarray(images), train=True)[0]).sum()

        compiled = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)
        return compiled, params, images, weights, jax.device_get(compiled(params))


def test_the_gradient_is_the_slope_of_the_loss(float64_gradient):
    compiled, params, _, _, (_, gradient) = float64_gradient
    generator = np.random.default_rng(2)
    for _ in range(3):
        along = jax.tree.map(lambda leaf: generator.normal(size=leaf.shape), params)
        with jax.enable_x64(True):
            ahead, behind = (
                compiled(jax.tree.map(lambda p, v, h=h: p + h * v, params, along))[0] for h in (1e-7, -1e-7)
            )
            slope = (float(ahead) - float(behind)) / 2e-7
        wanted = sum(jax.tree.leaves(jax.tree.map(lambda g, v: (g * v).sum(), gradient, along)))
        assert slope == pytest.approx(wanted, rel=1e-5)


def test_training_loss_and_gradient_equal_torch_in_float64(float64_gradient):
    torch = pytest.importorskip("torch")
    _, params, images, weights, (loss, gradient) = float64_gradient
    leaves = jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf), requires_grad=True), params)

    def conv(name, x, stride=1):
        kernel = leaves[name]["kernel"].permute(3, 2, 0, 1)
        edges = [
            edge
            for size in (x.shape[3], x.shape[2])
            for need in [max((-(-size // stride) - 1) * stride + 3 - size, 0)]
            for edge in (need // 2, need - need // 2)
        ]
        return torch.nn.functional.conv2d(torch.nn.functional.pad(x, edges), kernel, stride=stride)

    def norm(name, x):
        scale, offset = leaves[name]["scale"], leaves[name]["offset"]
        return torch.nn.functional.batch_norm(x, None, None, scale, offset, training=True, eps=1.001e-5)

    x = torch.relu(norm("conv1_bn", conv("conv1_conv", torch.tensor(images).permute(0, 3, 1, 2))))
    for stack in (2, 3, 4):
        name, stride = f"conv{stack}_block1_layer", 1 if stack == 2 else 2
        y = torch.relu(norm(f"{name}1_bn", conv(f"{name}1_conv" + "_ds" * (stride - 1), x, stride)))
        y = norm(f"{name}2_bn", conv(f"{name}2_conv", y))
        if stride == 2:
            x = torch.cat([x[:, :, ::2, ::2], 0 * x[:, :, ::2, ::2]], 1)
        x = torch.relu(x + y)
    logits = x.mean((2, 3)) @ leaves["fc_layer"]["kernel"] + leaves["fc_layer"]["bias"]
    theirs = (torch.tensor(weights) * logits).sum()
    theirs.backward()
    assert float(loss) == pytest.approx(theirs.item(), rel=1e-12)
    jax.tree.map(
        lambda ours, leaf: np.testing.assert_allclose(ours, leaf.grad.numpy(), rtol=1e-9, atol=1e-10),
        gradient,
        leaves,
    )


@pytest.mark.parametrize("path", ["default", "phases"])
@pytest.mark.parametrize(("size", "stride", "padding"), [(3, 2, 1), (5, 5, 0), (2, 1, 0)])
def test_max_pool_takes_and_gives_back_to_the_largest_of_each_window(size, stride, padding, path):
    x = GENERATOR.permutation(2 * 9 * 8 * 3).reshape(2, 9, 8, 3).astype(np.float32) + 1
    with force_path(path):
        y, backward = jax.vjp(lambda x: max_pool(x, size, stride, padding), jnp.asarray(x))
        dy = GENERATOR.normal(size=y.shape).astype(np.float32)
        (dx,) = jax.jit(backward)(dy)
    padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (1, 2))[:, ::stride, ::stride]
    largest = windows.max((-1, -2))
    np.testing.assert_array_equal(y, largest)
    wanted = np.zeros(x.size + 1)
    np.add.at(wanted, largest.astype(int), dy)
    np.testing.assert_allclose(dx, wanted[x.astype(int)], rtol=1e-5, atol=1e-6)


def test_networks_are_static_arguments():
    assert build("resnet18", CIFAR, 10) == build("resnet18", CIFAR, 10)
    assert len({build("resnet18", CIFAR, classes) for classes in (10, 10, 11)}) == 2
    assert hash(build("toy_model", CIFAR, 10, NormChoice(momentum=0.9))) != hash(
        build("toy_model", CIFAR, 10)
    )


def test_the_cost_of_a_network_is_two_for_each_multiply_add():
    assert build("resnet50", IMAGENET, 1000).flops == pytest.approx(8.178e9, rel=1e-4)
    toy = 2 * (30 * 30 * 4 * 27 + 6 * 6 * 8 * 4 + 8 * 10)
    assert build("toy_model", CIFAR, 10).flops == toy


def test_the_table_lists_every_layer_and_where_a_stage_may_begin():
    network = build("cifar_resnet8", CIFAR, 10)
    lines = describe_network(network)[0].splitlines()
    assert lines[0].startswith(
        "cifar_resnet8 (keras), images 32x32x3, 10 classes: 75,290 parameters, 0.024 GFLOP"
    )
    assert [line.split()[0] for line in lines[3:]] == [layer.name for layer in network.nodes]
    assert [line.endswith("  yes") for line in lines[3:]] == list(splits(network).values())
    (row,) = [line for line in lines if line.startswith("conv3_block1_layer1_conv_ds")]
    assert row.split() == ["conv3_block1_layer1_conv_ds", "conv", "16x16x32", "4,608", "2.359"]


def test_option_a_shortcut_takes_every_second_pixel_and_appends_zero_channels():
    node = {node.name: node for node in build("cifar_resnet8", (5, 4, 1), 2).nodes}["conv3_block1_shortcut"]
    x = GENERATOR.normal(size=(2, 5, 4, 16)).astype(np.float32)
    y = node.apply({}, jnp.asarray(x))
    assert y.shape == (2, *node.shape)
    np.testing.assert_array_equal(y[..., :16], x[:, ::2, ::2])
    assert not y[..., 16:].any()
