"""Each optimiser against optax's own, which includes the learning rate that ours leaves to the algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pqn_eqx.errors import ConfigError
from pqn_eqx.optimizers import AdamConfig, RAdamConfig, SGDConfig


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (RAdamConfig(b1=0.8, b2=0.99), optax.radam(0.1, b1=0.8, b2=0.99)),
        (AdamConfig(eps=1e-3), optax.adam(0.1, eps=1e-3)),
        (SGDConfig(), optax.sgd(0.1)),
        (SGDConfig(momentum=0.9), optax.sgd(0.1, momentum=0.9)),
    ],
)
def test_twenty_steps_equal_optax(config, reference):
    def minimize(transformation):
        def step(carry, _):
            x, state = carry
            updates, state = transformation.update(jax.grad(lambda x: jnp.sum(x**4))(x), state, x)
            x = optax.apply_updates(x, updates)
            return (x, state), x

        x = jnp.asarray([1.0, -2.0])
        return jax.lax.scan(step, (x, transformation.init(x)), length=20)[1]

    ours = optax.chain(config.build(), optax.scale_by_learning_rate(0.1))
    np.testing.assert_allclose(minimize(ours), minimize(reference), rtol=1e-5)


@pytest.mark.parametrize("make", [lambda: RAdamConfig(b1=1.0), lambda: AdamConfig(eps=0.0), lambda: SGDConfig(-0.1)])
def test_refuses_values_out_of_range(make):
    with pytest.raises(ConfigError, match=r"optimizer\.(b1|eps|momentum) must"):
        make()
