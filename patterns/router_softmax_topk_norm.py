"""Before: float32 softmax, topk, divided by the sum, cast.
After:  one router_softmax_topk_norm with two results.
Applies to [tokens, experts].
"""

SHAPES = {"logits": ("tokens", "E")}
