"""Before: cast((1 + weight) * x32 * rsqrt(mean(x32²) + eps)), then add to the residual.
After:  one rms_norm_plus_one_add.
Applies where both addends have the same shape and the weight is one value for each column.
"""
