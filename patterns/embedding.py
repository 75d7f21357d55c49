"""Before: aten.embedding.
After:  one embedding.
Applies to ids of any shape.
"""

from __future__ import annotations
