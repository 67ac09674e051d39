"""Losses against their formulas, and the gradients that learning uses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from pqn_eqx.errors import ConfigError
from pqn_eqx.losses import HLGaussConfig, HuberConfig, MSEConfig

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


SUPPORT = (-2.0, 3.0, 10)
"""v_min, v_max and the number of bins: a bin width of ½."""


def hl_gauss(sigma_ratio=0.75, support=SUPPORT):
    return HLGaussConfig(*support, sigma_ratio).build()


def reference_mass(target, sigma_ratio=0.75, support=SUPPORT):
    """Section 3.1 and appendix A of arXiv 2403.03950, with scipy's normal distribution in float64."""
    edges = np.linspace(support[0], support[1], support[2] + 1)
    cdf = scipy.stats.norm.cdf(edges, loc=target, scale=sigma_ratio * (edges[1] - edges[0]))
    return np.diff(cdf) / (cdf[-1] - cdf[0])


@pytest.mark.parametrize("sigma_ratio", [0.2, 0.75, 2.0])
@pytest.mark.parametrize("target", [-2.3, -2.0, -1.1, 0.0, 0.25, 2.9, 3.0, 3.2])
def test_hl_gauss_mass_equals_the_reference(target, sigma_ratio):
    """Within the support, at its ends and a little outside. Red if σ were in other units, or the sum not divided by."""
    mass = hl_gauss(sigma_ratio).mass(jnp.asarray(target))
    if abs(target - np.clip(target, -2, 3)) <= 3 * sigma_ratio * 0.5:
        np.testing.assert_allclose(mass, reference_mass(target, sigma_ratio), rtol=2e-3, atol=2e-5)
    assert mass.sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("target", [-1e6, -30.0, 30.0, 1e6])
def test_hl_gauss_far_outside_the_support_is_finite_and_at_the_end(target):
    """Red without the limit of three deviations: 0/0 in every bin."""
    mass = hl_gauss().mass(jnp.asarray(target))
    assert mass[0 if target < 0 else -1] > 0.96
    assert mass.sum() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("sigma_ratio", [0.75, 1.0, 2.0])
def test_hl_gauss_mean_of_the_mass_is_the_target(sigma_ratio):
    """Within the bound that the docstring states."""
    loss = hl_gauss(sigma_ratio, support=(-20.0, 20.0, 80))
    targets = jnp.linspace(-20, 20, 997)
    mean = jnp.sum(loss.mass(targets) * (jnp.arange(80) + 0.5) * 0.5, axis=-1) - 20
    width, sigma = 0.5, sigma_ratio * 0.5
    inner = np.abs(targets) < 20 - 5 * sigma
    bound = width / np.pi * np.exp(-2 * (np.pi * sigma_ratio) ** 2)
    rounding = 2e-5  # float32 over 80 bins
    assert np.abs(mean - targets)[inner].max() <= bound + rounding
    assert np.abs(mean - targets).max() <= 0.8 * sigma + width / 2


def test_hl_gauss_with_a_vanishing_sigma():
    """All mass in the bin of the target; on the edge of two bins, half in each."""
    loss = hl_gauss(1e-3)
    np.testing.assert_allclose(loss.mass(jnp.asarray(0.2)), np.eye(10)[4], atol=1e-6)
    np.testing.assert_allclose(loss.mass(jnp.asarray(0.5)), (np.eye(10)[4] + np.eye(10)[5]) / 2, atol=1e-3)


def test_hl_gauss_gradient_is_softmax_minus_mass():
    logits = jax.random.normal(jax.random.key(0), (10,)) * 2
    loss, target = hl_gauss(), jnp.asarray(0.7)
    value, gradient = jax.value_and_grad(loss.loss)(logits, target)
    np.testing.assert_allclose(gradient, jax.nn.softmax(logits) - reference_mass(0.7), atol=1e-5)
    assert value == pytest.approx(-np.sum(reference_mass(0.7) * np.asarray(jax.nn.log_softmax(logits))), rel=1e-5)


def test_hl_gauss_value_is_the_expectation():
    loss = hl_gauss()
    assert loss.num_outputs == 10
    outputs = jnp.stack([jnp.zeros(10), jnp.where(jnp.arange(10) == 7, 50.0, 0.0)])
    np.testing.assert_allclose(loss.value(outputs), [0.5, -2 + 7.5 * 0.5], rtol=1e-5)
    np.testing.assert_allclose(loss.value(jnp.log(loss.mass(jnp.asarray(0.7)))), 0.7, atol=1e-4)


def test_hl_gauss_counts_targets_outside_the_support():
    outside = hl_gauss().metrics(jnp.asarray([-2.1, -2.0, 0.0, 3.0, 3.1]))["target_outside"]
    np.testing.assert_array_equal(outside, [1, 0, 0, 0, 1])
    assert hl_gauss().metric_names == ("target_outside",)


def test_hl_gauss_parameters_are_leaves():
    """So that a population can sweep them: three supports in one program."""
    losses = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(hl_gauss(r) for r in (0.5, 0.75, 1.0)))
    together = jax.vmap(lambda loss: loss.mass(jnp.asarray(0.3)))(losses)
    np.testing.assert_allclose(together[2], reference_mass(0.3, 1.0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"v_min": 1.0, "v_max": 1.0}, "loss.v_min must be less than loss.v_max, and both finite, got 1.0 and 1.0"),
        ({"v_max": float("inf")}, "loss.v_min must be less than loss.v_max, and both finite"),
        ({"num_bins": 1}, "loss.num_bins must be at least 2, got 1"),
        ({"sigma_ratio": 0.0}, "loss.sigma_ratio must be a finite number above 0, got 0.0"),
    ],
)
def test_hl_gauss_refuses_what_cannot_work(fields, message):
    with pytest.raises(ConfigError, match=message):
        HLGaussConfig(**fields)
