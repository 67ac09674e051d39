"""Members side by side are what they would be alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.population import map_members, stack_members


class Line(eqx.Module):
    slope: jax.Array
    name: str = eqx.field(static=True)

    def __call__(self, x):
        return {"y": self.slope * x}


@pytest.mark.parametrize("slopes", [[2.0], [2.0, 3.0, -1.0]])
def test_map_members_equals_a_loop(slopes):
    """Red if the shortcut for one member returned other axes than the vmap."""
    members = [Line(jnp.asarray(slope), "line") for slope in slopes]
    x = jnp.arange(len(slopes) * 2.0).reshape(len(slopes), 2)
    got = map_members(lambda line, x: line(x), stack_members(members), x)
    expected = np.stack([slope * np.asarray(row) for slope, row in zip(slopes, x, strict=True)])
    np.testing.assert_array_equal(got["y"], expected)


def test_members_of_different_structure_are_refused():
    with pytest.raises(ValueError, match="structure|Mismatch"):
        stack_members([Line(jnp.asarray(1.0), "a"), Line(jnp.asarray(1.0), "b")])
