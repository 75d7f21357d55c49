"""Before: weight * cast(x32 * rsqrt(mean(x32²) + eps)), times silu(gate32), cast.
After:  one rms_norm_gated.
Applies to any leading shape; the gate has the shape of what is normalised.
"""
