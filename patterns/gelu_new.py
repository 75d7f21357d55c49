"""Before: 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))).
After:  one gelu_new.
Applies to any shape.
"""
