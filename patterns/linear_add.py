"""Before: aten.linear without bias, then add to the residual.
After:  one linear_add.
Applies where the residual has the shape of the projected rows: a bias that is added by hand is refused.
"""
