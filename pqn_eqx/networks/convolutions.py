"""Encoders of images [height, width, channels]: MinAtar's, Nature's, IMPALA's and Hadamax."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.nn.initializers import glorot_normal, he_normal, lecun_normal
from jaxtyping import Array, Float, Key

from pqn_eqx.config_groups import group_member
from pqn_eqx.errors import require, require_at_least
from pqn_eqx.networks.layers import Function, Linear, Product, Residual, Sequential, as_float, flatten
from pqn_eqx.networks.normalization import NormalizationName, normalization

Padding = Literal["VALID", "SAME"]
Initializer = Callable[..., Array]

MAX_PATCH_NUMBERS = 16_384
"""Images whose patches are at most as many numbers are convolved as a matrix product of the patches.

XLA's convolutions are slow on CPU, above all the gradient in the kernel: MinAtar's layer, 3 x 3 on 10 x 10 x 4 in a
batch of 128, learns 8 times as fast as patches (measured on two cores). Of larger images they would fill the memory.
"""


class Convolution(eqx.Module):
    """A two-dimensional convolution with a bias. The kernel starts as `init` says, LeCun normal; the bias at zero."""

    weight: Float[Array, "height width in out"]
    bias: Float[Array, " out"]
    stride: int = eqx.field(static=True)
    padding: Padding = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: int,
        *,
        key: Key[Array, ""],
        stride: int = 1,
        padding: Padding = "VALID",
        init: Initializer = lecun_normal(),  # noqa: B008
    ):
        self.weight = init(key, (size, size, in_channels, out_channels))
        self.bias = jnp.zeros(out_channels)
        self.stride, self.padding = stride, padding

    def __call__(self, image: Float[Array, "H W in"]) -> Float[Array, "H2 W2 out"]:
        height, width, num_inputs, _ = self.weight.shape
        fits = image.shape[0] * image.shape[1] * height * width * num_inputs <= MAX_PATCH_NUMBERS
        if fits and self.padding == "VALID" and self.stride == 1:
            return self._patches(image) @ self.weight.reshape(-1, self.weight.shape[-1]) + self.bias
        dimensions = ("NHWC", "HWIO", "NHWC")
        strides = (self.stride, self.stride)
        (out,) = jax.lax.conv_general_dilated(
            image[None], self.weight, strides, self.padding, dimension_numbers=dimensions
        )
        return out + self.bias

    def _patches(self, image: Float[Array, "H W in"]) -> Float[Array, "H2 W2 height*width*in"]:
        """What the kernel sees at each place, in the order of its weights."""
        height, width = self.weight.shape[:2]
        rows, columns = image.shape[0] - height + 1, image.shape[1] - width + 1
        shifted = [image[i : i + rows, j : j + columns] for i in range(height) for j in range(width)]
        return jnp.concatenate(shifted, axis=-1)


class MaxPool(eqx.Module):
    """The maximum over windows of each channel, with padding so that every pixel is in one."""

    size: int = eqx.field(static=True)
    stride: int = eqx.field(static=True)

    def __call__(self, image: Float[Array, "H W C"]) -> Float[Array, "H2 W2 C"]:
        window, strides = (self.size, self.size, 1), (self.stride, self.stride, 1)
        return jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, window, strides, "SAME")


def _require_image(name: str, obs_shape: tuple[int, ...], smallest: int) -> None:
    require(
        len(obs_shape) == 3 and min(obs_shape[:2]) >= smallest,
        f"network.encoder:{name} needs an image [height, width, channels] of at least {smallest} x {smallest} pixels, "
        f"got observations of shape {obs_shape}; choose network.encoder:mlp, or another environment.",
    )


def _flat_size(layers: list[Any], obs_shape: tuple[int, ...]) -> int:
    image = jax.ShapeDtypeStruct(obs_shape, jnp.result_type(float))
    return math.prod(jax.eval_shape(Sequential(tuple(layers)), image).shape)


def _dense(
    layers: list[Any],
    obs_shape: tuple[int, ...],
    size: int,
    norm: NormalizationName,
    activation: Callable[[Array], Array],
    init: Initializer,
    key: Key[Array, ""],
) -> Sequential:
    """`layers` on images, and a hidden layer on what they make of one."""
    layer = Linear(_flat_size(layers, obs_shape), size, key=key, init=init)
    return Sequential((*layers, Function(flatten), layer, normalization(norm, size), Function(activation)))


@group_member("minatar-cnn")
@dataclasses.dataclass(frozen=True)
class MinAtarCNNConfig:
    """One convolution of 3 x 3 and a hidden layer, as purejaxql has them for MinAtar; He-normal at the start."""

    channels: int = 16
    """Channels of the convolution."""
    hidden_size: int = 128
    """Length of the feature vector."""
    normalization: NormalizationName = "layer"
    """What stands before each ReLU; on images it normalises the channels of each pixel."""

    def __post_init__(self):
        require_at_least(
            1, **{"network.encoder.channels": self.channels, "network.encoder.hidden_size": self.hidden_size}
        )

    def build(self, obs_shape: tuple[int, ...], *, key: Key[Array, ""]) -> Sequential:
        _require_image("minatar-cnn", obs_shape, smallest=3)
        convolution_key, dense_key = jax.random.split(key)
        layers = [
            Function(as_float),
            Convolution(obs_shape[2], self.channels, 3, key=convolution_key, init=he_normal()),
            normalization(self.normalization, self.channels),
            Function(jax.nn.relu),
        ]
        return _dense(layers, obs_shape, self.hidden_size, self.normalization, jax.nn.relu, he_normal(), dense_key)


@group_member("nature-cnn")
@dataclasses.dataclass(frozen=True)
class NatureCNNConfig:
    """The three convolutions of DQN (Mnih et al. 2015), normalised as in PQN; He-normal at the start (purejaxql)."""

    hidden_size: int = 512
    """Length of the feature vector."""
    normalization: NormalizationName = "layer"
    """What stands before each ReLU; on images it normalises the channels of each pixel."""

    def __post_init__(self):
        require_at_least(1, **{"network.encoder.hidden_size": self.hidden_size})

    def build(self, obs_shape: tuple[int, ...], *, key: Key[Array, ""]) -> Sequential:
        _require_image("nature-cnn", obs_shape, smallest=36)
        *keys, dense_key = jax.random.split(key, 4)
        layers: list[Any] = [Function(as_float)]
        channels = obs_shape[2]
        for (out, size, stride), layer_key in zip(((32, 8, 4), (64, 4, 2), (64, 3, 1)), keys, strict=True):
            layers += [
                Convolution(channels, out, size, stride=stride, key=layer_key, init=he_normal()),
                normalization(self.normalization, out),
                Function(jax.nn.relu),
            ]
            channels = out
        return _dense(layers, obs_shape, self.hidden_size, self.normalization, jax.nn.relu, he_normal(), dense_key)


@group_member("impala-cnn")
@dataclasses.dataclass(frozen=True)
class ImpalaCNNConfig:
    """IMPALA's residual network (arXiv 1802.01561, figure 3), normalised before each ReLU; starts LeCun normal."""

    channels: tuple[int, ...] = (16, 32, 32)
    """Channels of each section: a convolution, a pooling by 2, and two residual blocks of two convolutions."""
    hidden_size: int = 256
    """Length of the feature vector."""
    normalization: NormalizationName = "layer"
    """What stands before each ReLU; on images it normalises the channels of each pixel."""

    def __post_init__(self):
        require(
            len(self.channels) > 0 and min(self.channels) >= 1,
            f"network.encoder.channels must name at least one section, of at least one channel, got {self.channels}.",
        )
        require_at_least(1, **{"network.encoder.hidden_size": self.hidden_size})

    def build(self, obs_shape: tuple[int, ...], *, key: Key[Array, ""]) -> Sequential:
        _require_image("impala-cnn", obs_shape, smallest=1)
        *keys, dense_key = jax.random.split(key, len(self.channels) + 1)
        layers: list[Any] = [Function(as_float)]
        before = obs_shape[2]
        for channels, section_key in zip(self.channels, keys, strict=True):
            first, second, third = jax.random.split(section_key, 3)
            layers += [
                Convolution(before, channels, 3, padding="SAME", key=first),
                MaxPool(size=3, stride=2),
                self._block(channels, second),
                self._block(channels, third),
            ]
            before = channels
        layers += [normalization(self.normalization, before), Function(jax.nn.relu)]
        return _dense(layers, obs_shape, self.hidden_size, self.normalization, jax.nn.relu, lecun_normal(), dense_key)

    def _block(self, channels: int, key: Key[Array, ""]) -> Residual:
        layers: list[Any] = []
        for layer_key in jax.random.split(key):
            layers += [
                normalization(self.normalization, channels),
                Function(jax.nn.relu),
                Convolution(channels, channels, 3, padding="SAME", key=layer_key),
            ]
        return Residual(Sequential(tuple(layers)))


@group_member("hadamax-cnn")
@dataclasses.dataclass(frozen=True)
class HadamaxCNNConfig:
    """Hadamax (arXiv 2505.15345): products of two convolutions with GELU, pooled by the maximum instead of strided.

    Sizes, normalisation and start (Glorot normal; the hidden layer He-normal) are those of the authors' code.
    """

    channels: int = 32
    """Channels of the first block; the others have twice as many."""
    hidden_size: int = 512
    """Length of the feature vector."""
    normalization: NormalizationName = "layer"
    """What stands before each GELU; on images it normalises the channels of each pixel."""

    def __post_init__(self):
        require_at_least(
            1, **{"network.encoder.channels": self.channels, "network.encoder.hidden_size": self.hidden_size}
        )

    def build(self, obs_shape: tuple[int, ...], *, key: Key[Array, ""]) -> Sequential:
        _require_image("hadamax-cnn", obs_shape, smallest=8)
        *keys, dense_key = jax.random.split(key, 4)
        layers: list[Any] = [Function(as_float)]
        before = obs_shape[2]
        for (factor, size, pool, stride), block_key in zip(
            ((1, 8, 4, 4), (2, 4, 2, 2), (2, 3, 3, 1)), keys, strict=True
        ):
            channels = factor * self.channels
            left, right = jax.random.split(block_key)
            layers += [
                Product(self._branch(before, channels, size, left), self._branch(before, channels, size, right)),
                MaxPool(pool, stride),
            ]
            before = channels
        return _dense(layers, obs_shape, self.hidden_size, self.normalization, jax.nn.gelu, he_normal(), dense_key)

    def _branch(self, before: int, channels: int, size: int, key: Key[Array, ""]) -> Sequential:
        return Sequential(
            (
                Convolution(before, channels, size, padding="SAME", key=key, init=glorot_normal()),
                normalization(self.normalization, channels),
                Function(jax.nn.gelu),
            )
        )
