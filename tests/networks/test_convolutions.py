"""Convolutions against plain loops, the encoders made of them, and what they refuse."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.errors import ConfigError
from pqn_eqx.networks.convolutions import (
    MAX_PATCH_NUMBERS,
    Convolution,
    HadamaxCNNConfig,
    ImpalaCNNConfig,
    MaxPool,
    MinAtarCNNConfig,
    NatureCNNConfig,
)
from pqn_eqx.networks.layers import Linear, Product, Residual

KEY = jax.random.key(0)
ENCODERS = {
    "minatar-cnn": (MinAtarCNNConfig(channels=3, hidden_size=7), (6, 5, 2), 7),
    "nature-cnn": (NatureCNNConfig(hidden_size=7), (36, 44, 2), 7),
    "impala-cnn": (ImpalaCNNConfig(channels=(2, 3), hidden_size=7), (9, 6, 2), 7),
    "hadamax-cnn": (HadamaxCNNConfig(channels=2, hidden_size=7), (16, 12, 2), 7),
}


def loop(image, weight, bias, stride):
    """The definition, without padding."""
    height, width = weight.shape[:2]
    rows, columns = ((n - k) // stride + 1 for n, k in zip(image.shape[:2], (height, width), strict=True))
    out = np.zeros((rows, columns, weight.shape[3]))
    for i in range(rows):
        for j in range(columns):
            window = image[i * stride : i * stride + height, j * stride : j * stride + width]
            out[i, j] = np.tensordot(window, weight, axes=3) + bias
    return out


def with_bias(layer):
    return eqx.tree_at(lambda c: c.bias, layer, jnp.arange(1.0, len(layer.bias) + 1))


def parametric_layers(encoder):
    """Its convolutions and its dense layer, in the order in which an image meets them."""

    def parametric(node):
        return isinstance(node, (Convolution, Linear))

    return [node for node in jax.tree.leaves(encoder, is_leaf=parametric) if parametric(node)]


@pytest.mark.parametrize(("shape", "stride"), [((6, 5, 2), 1), ((9, 8, 2), 2), ((60, 60, 2), 1)])
def test_convolution_equals_the_loop(shape, stride):
    """Of small images by patches, of large ones and with a stride by XLA; red for patches in another order."""
    image = jax.random.normal(KEY, shape)
    assert (np.prod(shape) * 9 > MAX_PATCH_NUMBERS) == (shape[0] == 60)
    layer = with_bias(Convolution(2, 3, 3, key=KEY, stride=stride))
    expected = loop(np.asarray(image), np.asarray(layer.weight), np.asarray(layer.bias), stride)
    np.testing.assert_allclose(layer(image), expected, rtol=1e-4, atol=1e-4)


def test_same_padding_is_a_frame_of_zeros():
    """Red if the frame were anything but one zero pixel on each side of a 3 x 3 kernel."""
    layer = with_bias(Convolution(2, 3, 3, key=KEY, padding="SAME"))
    image = jax.random.normal(KEY, (6, 5, 2))
    framed = np.pad(np.asarray(image), ((1, 1), (1, 1), (0, 0)))
    expected = loop(framed, np.asarray(layer.weight), np.asarray(layer.bias), 1)
    np.testing.assert_allclose(layer(image), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "stride", "padding", "shape"),
    [(8, 4, "VALID", (20, 20)), (4, 2, "VALID", (41, 41)), (3, 2, "SAME", (42, 43)), (4, 1, "SAME", (84, 85))],
)
def test_shapes(size, stride, padding, shape):
    """⌊(n - k) / stride⌋ + 1 without padding, ⌈n / stride⌉ with; red if either were ignored."""
    layer = Convolution(1, 2, size, stride=stride, padding=padding, key=KEY)
    assert jax.eval_shape(layer, jax.ShapeDtypeStruct((84, 85, 1), jnp.float32)).shape == (*shape, 2)


def test_patches_have_the_gradient_of_the_convolution(monkeypatch):
    """Red if learning differed with the size of the image: both ways to convolve have one gradient."""
    image, layer = jax.random.normal(KEY, (6, 5, 2)), Convolution(2, 3, 3, key=KEY)

    def gradient():
        return jax.grad(lambda layer: jnp.sum(jnp.sin(layer(image))))(layer)

    patches = gradient()
    monkeypatch.setattr("pqn_eqx.networks.convolutions.MAX_PATCH_NUMBERS", 0)
    np.testing.assert_allclose(patches.weight, gradient().weight, rtol=1e-4, atol=1e-5)


def test_max_pool_by_hand():
    """Red if the padding counted as zeros, which are larger than the -7 in the corner."""
    image = jnp.asarray([[1.0, 2, 3], [4, 9, 6], [-7, -8, -1]])[..., None]
    np.testing.assert_array_equal(MaxPool(size=2, stride=2)(image)[..., 0], [[9, 6], [-7, -1]])


@pytest.mark.parametrize("name", ENCODERS)
def test_every_parameter_of_an_encoder_matters(name):
    """The length it promises, and a gradient in every leaf."""
    config, shape, size = ENCODERS[name]
    encoder = config.build(shape, key=KEY)
    images = jax.random.uniform(jax.random.key(1), (8, *shape))
    assert encoder(images[0]).shape == (size,)
    gradient = eqx.filter_jit(jax.grad(lambda encoder: jnp.sum(jnp.sin(jax.vmap(encoder)(images)))))(encoder)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.abs(leaf).max() > 0, path


@pytest.mark.parametrize("name", ENCODERS)
def test_bytes_are_divided_by_255_once_and_planes_are_not(name):
    """Red if an encoder forgot `as_float`, divided twice, or divided binary planes."""
    config, shape, _ = ENCODERS[name]
    encoder = config.build(shape, key=KEY)
    planes = jax.random.bernoulli(KEY, 0.3, shape)
    np.testing.assert_array_equal(encoder(planes), encoder(planes.astype(float)))
    pixels = jax.random.randint(KEY, shape, 0, 256).astype(jnp.uint8)
    np.testing.assert_allclose(encoder(pixels), encoder(pixels.astype(float) / 255), rtol=1e-5, atol=1e-5)


def test_minatar_cnn_by_hand():
    """Convolution, normalisation of the channels of each pixel, ReLU, hidden layer, normalisation, ReLU."""
    encoder = MinAtarCNNConfig(channels=3, hidden_size=7).build((6, 5, 2), key=KEY)
    convolution, dense = encoder.layers[1], encoder.layers[5]
    image = np.asarray(jax.random.bernoulli(KEY, 0.3, (6, 5, 2)), float)

    def normalized(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)

    x = np.maximum(normalized(loop(image, np.asarray(convolution.weight), 0, 1)), 0)
    x = np.maximum(normalized(x.reshape(-1) @ np.asarray(dense.weight)), 0)
    np.testing.assert_allclose(encoder(jnp.asarray(image)), x, rtol=1e-3, atol=1e-4)


def he(inputs, outputs):
    return 2 / inputs


def lecun(inputs, outputs):
    return 1 / inputs


def glorot(inputs, outputs):
    return 2 / (inputs + outputs)


@pytest.mark.parametrize(
    ("config", "shape", "of_convolutions", "of_dense"),
    [
        (MinAtarCNNConfig(), (10, 10, 20), he, he),
        (NatureCNNConfig(), (84, 84, 4), he, he),
        (ImpalaCNNConfig(), (12, 12, 12), lecun, lecun),
        (HadamaxCNNConfig(), (12, 12, 4), glorot, he),
    ],
)
def test_variance_of_the_weights_at_the_start(config, shape, of_convolutions, of_dense):
    """Red for another initialisation than that of the code the encoder follows, or biases that are not zero."""
    layers = parametric_layers(config.build(shape, key=KEY))
    for layer, variance in zip(layers, [of_convolutions] * (len(layers) - 1) + [of_dense], strict=True):
        *size, inputs, outputs = layer.weight.shape
        area = np.prod(size, dtype=int)
        assert np.std(layer.weight) == pytest.approx(np.sqrt(variance(area * inputs, area * outputs)), rel=0.08)
        assert not layer.bias.any()


class Reference(nn.Module):
    """The encoders as flax writes them: purejaxql's Atari network, Hadamax's, and IMPALA's residual one."""

    encoder: str
    channels: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        activation = nn.gelu if self.encoder == "hadamax-cnn" else nn.relu

        def active(x):
            return activation(nn.LayerNorm()(x))

        if self.encoder == "nature-cnn":
            for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                x = active(nn.Conv(channels, (size, size), stride, padding="VALID")(x))
        if self.encoder == "impala-cnn":
            for channels in self.channels:
                x = nn.max_pool(nn.Conv(channels, (3, 3))(x), (3, 3), (2, 2), padding="SAME")
                for _ in range(2):
                    y = nn.Conv(channels, (3, 3))(active(x))
                    x += nn.Conv(channels, (3, 3))(active(y))
            x = active(x)
        if self.encoder == "hadamax-cnn":
            for channels, size, pool, stride in zip(self.channels, (8, 4, 3), (4, 2, 3), (4, 2, 1), strict=True):
                x = active(nn.Conv(channels, (size, size))(x)) * active(nn.Conv(channels, (size, size))(x))
                x = nn.max_pool(x, (pool, pool), (stride, stride), padding="SAME")
        return active(nn.Dense(7)(x.reshape(-1)))


@pytest.mark.parametrize(("name", "channels"), [("nature-cnn", ()), ("impala-cnn", (2, 3)), ("hadamax-cnn", (2, 4, 4))])
def test_equals_flax_with_the_same_weights(name, channels):
    """Red if anything stood in another place: a normalisation, an activation, a pooling, the frame of a window."""
    config, shape, _ = ENCODERS[name]
    encoder = config.build(shape, key=KEY)
    reference, image = Reference(name, channels), jax.random.normal(KEY, shape)
    params = jax.jit(reference.init)(KEY, image)
    layers = [params["params"][f"Conv_{i}"] for i in range(len(parametric_layers(encoder)) - 1)]
    layers.append(params["params"]["Dense_0"])
    weights = [layer["kernel"] for layer in layers]
    encoder = eqx.tree_at(lambda e: [layer.weight for layer in parametric_layers(e)], encoder, weights)
    expected = jax.jit(reference.apply)(params, image)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(eqx.filter_jit(encoder)(image), expected, rtol=1e-3, atol=1e-4)


def test_nature_cnn_has_the_sizes_of_the_paper():
    """Red for another kernel, stride or width: 84 x 84 pixels end as 7 x 7 x 64."""
    encoder = NatureCNNConfig().build((84, 84, 4), key=KEY)
    sizes = [layer.weight.shape for layer in encoder.layers if isinstance(layer, Convolution)]
    assert sizes == [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64)]
    assert [layer.weight.shape for layer in encoder.layers if hasattr(layer, "weight")][-2] == (7 * 7 * 64, 512)


def test_impala_blocks_add_to_what_they_read():
    """With the last convolution of every block at zero, a section is its convolution and pooling alone."""
    encoder = ImpalaCNNConfig(channels=(2,), hidden_size=7).build((6, 6, 2), key=KEY)
    blocks = [layer for layer in encoder.layers if isinstance(layer, Residual)]
    assert len(blocks) == 2
    x = jax.random.normal(KEY, (3, 3, 2))
    for block in blocks:
        silent = eqx.tree_at(lambda b: b.inner.layers[-1].weight, block, jnp.zeros((3, 3, 2, 2)))
        np.testing.assert_array_equal(silent(x), x)
        np.testing.assert_allclose(block(x) - x, block.inner(x), atol=1e-6)


def test_hadamax_multiplies_its_branches():
    """Red if branches were added, shared their weights, or were pooled by other than 4, 2 and 1."""
    encoder = HadamaxCNNConfig(channels=2, hidden_size=7).build((16, 12, 2), key=KEY)
    products = [layer for layer in encoder.layers if isinstance(layer, Product)]
    assert len(products) == 3
    image = jax.random.normal(KEY, (16, 12, 2))
    left, right = products[0].left(image), products[0].right(image)
    assert left.shape == (16, 12, 2)
    assert np.abs(left - right).max() > 0.1
    np.testing.assert_allclose(products[0](image), left * right, rtol=1e-6)
    assert encoder.layers[-3].weight.shape == (2 * 2 * 4, 7)


@pytest.mark.parametrize(
    ("name", "smallest"), [("minatar-cnn", 3), ("nature-cnn", 36), ("impala-cnn", 1), ("hadamax-cnn", 8)]
)
def test_refuses_what_is_no_image_or_too_small(name, smallest):
    """Red if the smallest image it names did not pass, or a smaller one did."""
    config = ENCODERS[name][0]
    message = rf"network.encoder:{name} needs an image .* at least {smallest} x {smallest} pixels, got observations of"
    with pytest.raises(ConfigError, match=message):
        config.build((4,), key=KEY)
    if smallest > 1:
        with pytest.raises(ConfigError, match=message):
            config.build((smallest - 1, 99, 3), key=KEY)
    config.build((smallest, smallest, 1), key=KEY)


@pytest.mark.parametrize("channels", [(), (4, 0)])
def test_refuses_sections_without_channels(channels):
    """Red if a network without sections, or with an empty one, were built."""
    with pytest.raises(ConfigError, match="network.encoder.channels must name at least one section"):
        ImpalaCNNConfig(channels=channels)
