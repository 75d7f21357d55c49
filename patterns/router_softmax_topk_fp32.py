"""Before: float32 softmax, topk.
After:  one router_softmax_topk_fp32 with two results.
Applies to [tokens, experts].
"""

SHAPES = {"logits": ("tokens", "E")}
