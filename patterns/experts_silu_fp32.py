"""Before: sort the pairs of token and expert, gather rows, two grouped products around silu(gate) * up,
times the
        weights, back to the tokens' order, sum over the experts of each token in float32.
After:  one experts_silu_fp32.
Applies to [tokens, hidden] with weights of [experts, out, in].
"""

from __future__ import annotations

from .experts_silu import SHAPES, counted_as_floats, one_dtype

#: As for `experts_silu`: that the weights of the pairs are float32 shows when these are traced with them.
__all__ = ["SHAPES", "counted_as_floats", "one_dtype"]
