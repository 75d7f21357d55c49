"""Before: rows times their weights, back to the tokens' order, summed over the experts of each token.
After:  one experts_combine, which rounds once where weights of 16 bits round each row besides.
Applies to rows of [pairs, hidden] and weights of [tokens, experts of a token].
"""

SHAPES = {"rows": ("tokens * K", "H"), "top_k_weights": ("tokens", "K"), "order": ("tokens * K",)}
