"""Before: aten.linear without bias (matmul and Conv1D included).
After:  one linear.
Applies to a 2-D weight in any strides.
"""
