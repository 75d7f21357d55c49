"""Before: x = residual + hidden_states, kept; weight * cast(x32 * rsqrt(mean(x32²) + eps)).
After:  one add_rms_norm with two results.
Applies where both addends have the same shape and the weight is one value for each column.
"""
