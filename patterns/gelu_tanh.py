"""Before: aten.gelu with approximate="tanh".
After:  one gelu_tanh.
Applies to any shape.
"""
