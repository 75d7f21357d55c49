"""Before: add, then aten.layer_norm of the sum, which is also the next residual.
After:  one add_layer_norm with two results.
Applies where both addends have the same shape: token plus position embeddings broadcast, so they are refused.
"""
