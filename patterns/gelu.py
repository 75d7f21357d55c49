"""Before: aten.gelu.
After:  one gelu.
Applies to any shape.
"""
