"""Before: cast(x32 * clamp(threshold / (vector_norm(x32) + eps), max=1)), a node for each operation.
After:  one l2_clip.
Applies to any leading shape.
"""

from __future__ import annotations
