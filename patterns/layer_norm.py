"""Before: aten.layer_norm over the last dimension.
After:  one layer_norm.
Applies to any leading shape; weight and bias must be one value for each column.
"""
