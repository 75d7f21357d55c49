"""Before: relu(x) * relu(x).
After:  one relu_squared.
Applies to any shape.
"""
