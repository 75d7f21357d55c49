"""Before: cast(x32 * rsqrt(mean(x32²) + eps)), a node for each operation.
After:  one rms_norm_unweighted.
Applies to any leading shape.
"""

from __future__ import annotations
