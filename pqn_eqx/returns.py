"""Return estimators: arrays in, arrays out. Time comes first, environments second."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def successor_values(
    value: Float[Array, "T N"],
    last_value: Float[Array, " N"],
    final_value: Float[Array, "T N"],
    truncated: Bool[Array, "T N"],
) -> Float[Array, "T N"]:
    """The value V_t of the true successor of every step.

    While an episode goes on, the successor of step t is the observation the agent acts on at t + 1, whose value is
    known from acting: V_t = `value`[t + 1], and `last_value` closes the window. A time limit hides its successor
    behind the reset, so there V_t = `final_value`[t], the value of the observation before the reset. Where a step
    terminates, V_t is the value of an unrelated world; `lambda_returns` never reads it.
    """
    following = jnp.concatenate([value[1:], last_value[None]])
    return jnp.where(truncated, final_value, following)


def lambda_returns(
    reward: Float[Array, "T N"],
    terminated: Bool[Array, "T N"],
    truncated: Bool[Array, "T N"],
    next_value: Float[Array, "T N"],
    gamma: Float[Array, ""],
    td_lambda: Float[Array, ""],
) -> Float[Array, "T N"]:
    """Q(λ) returns of a window of T steps, as PQN uses them (arXiv 2407.04811; Peng's Q(λ)).

    With V_t = `next_value`[t] = max_a Q(next_obs_t, a), for t = T-1, ..., 0:

        G_t = r_t + γ (1 - terminated_t) B_t
        B_t = V_t                           if step t was truncated or t = T-1
        B_t = (1 - λ) V_t + λ G_{t+1}       otherwise

    Termination wins when a step is terminated and truncated at once. Values at terminated steps are not read, so
    they may be anything, NaN included.
    """

    def step(following_return, inputs):
        reward, terminated, truncated, next_value = inputs
        blend = (1 - td_lambda) * next_value + td_lambda * following_return
        bootstrap = jnp.where(truncated, next_value, blend)
        current = reward + gamma * jnp.where(terminated, 0, bootstrap)
        return current, current

    # G_T = V_{T-1} makes B_{T-1} = V_{T-1} for every λ.
    _, returns = jax.lax.scan(step, next_value[-1], (reward, terminated, truncated, next_value), reverse=True)
    return returns
