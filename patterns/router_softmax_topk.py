"""Before: float32 softmax, topk, cast.
After:  one router_softmax_topk with two results.
Applies to [tokens, experts].
"""

SHAPES = {"logits": ("tokens", "E")}
