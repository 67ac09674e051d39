"""Losses against their formulas, and the gradients that learning uses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pqn_eqx.errors import ConfigError
from pqn_eqx.losses import HuberConfig, MSEConfig

Q, TARGET = jnp.asarray([[-3.0], [0.5], [1.0], [4.0]]), jnp.asarray([0.0, 0.0, 1.0, 0.5])


def losses_and_gradients(loss):
    return jax.vmap(jax.value_and_grad(loss.loss))(Q, TARGET)


def test_mse_is_half_the_square_and_its_gradient_the_error():
    values, gradients = losses_and_gradients(MSEConfig().build())
    np.testing.assert_allclose(values, [4.5, 0.125, 0, 6.125])
    np.testing.assert_allclose(gradients[:, 0], [-3, 0.5, 0, 3.5])


@pytest.mark.parametrize("delta", [0.25, 1.0, 10.0])
def test_huber_equals_optax_and_its_gradient_is_clipped(delta):
    values, gradients = losses_and_gradients(HuberConfig(delta).build())
    np.testing.assert_allclose(values, optax.huber_loss(Q[:, 0], TARGET, delta=delta), rtol=1e-6)
    np.testing.assert_allclose(gradients[:, 0], np.clip(Q[:, 0] - TARGET, -delta, delta), rtol=1e-6)


def test_one_output_is_the_value():
    """Red if acting would read something other than the network's only output."""
    outputs = jnp.arange(6.0).reshape(3, 2, 1)
    for loss in (MSEConfig().build(), HuberConfig().build()):
        assert loss.num_outputs == 1
        np.testing.assert_array_equal(loss.value(outputs), outputs[..., 0])


@pytest.mark.parametrize("delta", [0.0, -1.0, float("nan"), float("inf")])
def test_huber_refuses_a_delta_that_is_no_positive_number(delta):
    with pytest.raises(ConfigError, match=r"loss.delta must be a finite number above 0"):
        HuberConfig(delta)
