"""Before: float32 softmax, topk, divided by the sum.
After:  one router_softmax_topk_norm_fp32 with two results.
Applies to [tokens, experts].
"""

SHAPES = {"logits": ("tokens", "E")}
