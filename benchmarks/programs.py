"""Looking at compiled programs: what crosses devices, and how much is multiplied."""

import math
import re
from collections import Counter
from typing import Any

KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")


def collectives(text: str) -> dict[str, int]:
    """How often each kind of collective stands in a program's compiled text; in a loop's body it stands once."""
    found = Counter(re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\(", text))
    return dict(found)


def matrix_flops(jaxpr: Any) -> int:
    """Floating-point operations of the matrix products and convolutions, loops of a known length counted in full.

    Loops whose length is known at run time alone count as one turn.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out_channels = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // out_channels
        turns = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += turns * matrix_flops(inner)
    return total
