"""Before: aten.relu.
After:  one relu.
Applies to any shape.
"""
