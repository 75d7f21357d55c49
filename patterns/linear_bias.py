"""Before: aten.linear with bias (addmm and Conv1D included).
After:  one linear_bias.
Applies to a 2-D weight in any strides and a bias with one value for each output feature.
"""
