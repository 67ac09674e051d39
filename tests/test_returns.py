"""Q(λ) returns against a double loop written from the definition, and against values worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.returns import lambda_returns, successor_values


def returns_by_double_loop(reward, terminated, truncated, next_value, gamma, td_lambda):
    """The λ-weighted mean of n-step returns, summed up term by term for every start: O(T²), no recursion over time.

    From t, the n-step return collects n rewards and then bootstraps from V_{t+n-1}. An episode's end or the end of
    the window closes the sum: the last return takes all the weight that is left.
    """
    num_steps = len(reward)
    returns = np.zeros(num_steps)
    for t in range(num_steps):
        collected, weight = 0.0, 1.0
        for n in range(1, num_steps - t + 1):
            last = t + n - 1
            collected += gamma ** (n - 1) * reward[last]
            bootstrap = 0.0 if terminated[last] else gamma**n * next_value[last]
            if terminated[last] or truncated[last] or last == num_steps - 1:
                returns[t] += weight * (collected + bootstrap)
                break
            returns[t] += weight * (1 - td_lambda) * (collected + bootstrap)
            weight *= td_lambda
    return returns


@pytest.mark.parametrize("td_lambda", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_equals_the_double_loop(td_lambda, seed):
    """Red for an off-by-one in the chain, a chain not cut at an end, or a wrong bootstrap at the window's end."""
    rng = np.random.default_rng(seed)
    num_steps, num_envs = 12, 6
    reward, next_value = rng.normal(size=(2, num_steps, num_envs))
    terminated = rng.random((num_steps, num_envs)) < 0.2
    truncated = rng.random((num_steps, num_envs)) < 0.2
    terminated[4, 0] = truncated[4, 0] = True  # both at once
    terminated[-1, 1], truncated[-1, 2], terminated[-1, 3], truncated[-1, 3] = True, True, False, False
    expected = np.stack(
        [
            returns_by_double_loop(*(x[:, n] for x in (reward, terminated, truncated, next_value)), 0.9, td_lambda)
            for n in range(num_envs)
        ],
        axis=1,
    )
    got = lambda_returns(*map(jnp.asarray, (reward, terminated, truncated, next_value)), 0.9, td_lambda)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_termination_wins_and_its_value_is_never_read():
    """Red if a terminated step bootstraps, or multiplies a NaN by 0."""
    column = lambda *values: jnp.asarray(values)[:, None]  # noqa: E731
    both = column(False, True, False)
    got = lambda_returns(column(1.0, 1.0, 1.0), both, both, column(5.0, np.nan, 7.0), 0.5, 1.0)
    np.testing.assert_allclose(got[:, 0], [1.5, 1.0, 4.5])


def test_a_masked_step_after_an_end_changes_no_other_target():
    """A step inserted after an end, where the action is ignored, moves no target: the chain before it is cut."""
    rng = np.random.default_rng(0)
    reward, next_value = rng.normal(size=(2, 6, 1))
    ended, no = np.zeros((2, 6, 1), bool)
    ended[2] = True
    targets = [
        lambda_returns(*map(jnp.asarray, (r, no, ended, next_value)), 0.9, 0.7)
        for r in (reward, np.where(np.arange(6)[:, None] == 3, 1e6, reward))
    ]
    others = np.array([0, 1, 2, 4, 5])
    np.testing.assert_array_equal(targets[0][others], targets[1][others])


def test_successor_values():
    """Red if values are shifted the wrong way, or a truncated step takes the value after the reset."""
    value = jnp.arange(6.0).reshape(3, 2)
    final = jnp.full((3, 2), 100.0)
    truncated = jnp.asarray([[False, True], [False, False], [True, False]])
    got = successor_values(value, jnp.asarray([50.0, 51.0]), final, truncated)
    np.testing.assert_array_equal(got, [[2, 100], [4, 5], [100, 51]])
