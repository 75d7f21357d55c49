"""Routers of mixtures of experts whose scores are sigmoids, in cuTile.

    score  = sigmoid(logit), rank = score + bias
    chosen = the K best ranks, of all experts or of those in the KEPT best groups
    weight = score / (sum of the chosen scores + eps) * scale

A group is worth the sum of its two best ranks. A block holds all logits of ROWS tokens in float32 and takes the best
K times; of equal ranks the first expert wins, of equal groups the first group.
"""

from __future__ import annotations

import math

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

from .router import pick_rows

INFINITY = math.inf

Int = ct.Constant[int]


def first_of(values, best, lane, last):
    """The first lane of each row that holds its best value."""
    return ct.min(ct.where(values == best, lane, last), axis=1, keepdims=True)


def in_best_groups(ranks, group, lane, groups, kept, slots, rows, experts):
    """The ranks of the experts in the best groups; the others are out."""
    slot = ct.reshape(ct.arange(slots, dtype=ct.int32), (1, slots))
    worth = ct.full((rows, slots), -INFINITY, ct.float32)
    for g in range(groups):
        own = ct.where(group == g, ranks, -INFINITY)
        best = ct.max(own, axis=1, keepdims=True)
        others = ct.where(lane == first_of(own, best, lane, experts - 1), -INFINITY, own)
        worth = ct.where(slot == g, best + ct.max(others, axis=1, keepdims=True), worth)
    open_groups = ct.zeros((rows, experts), ct.int32)
    for _ in range(kept):
        best = ct.max(worth, axis=1, keepdims=True)
        taken = first_of(worth, best, slot, slots - 1)
        open_groups = ct.where(group == taken, 1, open_groups)
        worth = ct.where(slot == taken, -INFINITY, worth)
    return ct.where(open_groups > 0, ranks, -INFINITY)


@ct.kernel
def router_sigmoid_kernel(
    logits, bias, weights, index, eps, scale,
    K: Int, GROUPS: Int, KEPT: Int, ROWS: Int, EXPERTS: Int, CHOICES: Int, SLOTS: Int,
):  # fmt: skip
    row = ct.reshape(ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32), (ROWS, 1))
    lane = ct.reshape(ct.arange(EXPERTS, dtype=ct.int32), (1, EXPERTS))
    choice = ct.reshape(ct.arange(CHOICES, dtype=ct.int32), (1, CHOICES))
    count = logits.shape[1]
    scores = 1.0 / (1.0 + ct.exp(-ct.astype(ct.gather(logits, (row, lane)), ct.float32)))
    offset = ct.reshape(ct.gather(bias, ct.arange(EXPERTS, dtype=ct.int32)), (1, EXPERTS))
    ranks = ct.where(lane < count, scores + ct.astype(offset, ct.float32), -INFINITY)
    if GROUPS > 1:
        ranks = in_best_groups(ranks, lane // (count // GROUPS), lane, GROUPS, KEPT, SLOTS, ROWS, EXPERTS)
    best = ct.zeros((ROWS, CHOICES), ct.float32)
    chosen = ct.zeros((ROWS, CHOICES), ct.int32)
    for k in range(K):
        expert = first_of(ranks, ct.max(ranks, axis=1, keepdims=True), lane, EXPERTS - 1)
        score = ct.sum(ct.where(lane == expert, scores, 0.0), axis=1, keepdims=True)
        best = ct.where(choice == k, score, best)
        chosen = ct.where(choice == k, expert, chosen)
        ranks = ct.where(lane == expert, -INFINITY, ranks)
    share = best / (ct.sum(best, axis=1, keepdims=True) + eps) * scale
    place = ct.where(choice < K, choice, K)  # beyond the last choice is outside and dropped
    ct.scatter(weights, (row, place), ct.astype(share, weights.dtype))
    ct.scatter(index, (row, place), ct.astype(chosen, index.dtype))


Routed = tuple[torch.Tensor, torch.Tensor]


def _route(
    logits: torch.Tensor, bias: torch.Tensor, k: int, groups: int, kept: int, eps: float, scale: float
) -> Routed:
    tokens, experts = logits.shape
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    index = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
    if tokens:
        rows, lanes = pick_rows(tokens, experts)
        constants = (k, groups, kept, rows, lanes, covering_power(k), covering_power(groups))
        launch(router_sigmoid_kernel, (-(-tokens // rows),), (logits, bias, weights, index, eps, scale, *constants))
    return weights, index


def router_sigmoid(logits: torch.Tensor, bias: torch.Tensor, k: int, eps: float, scale: float) -> Routed:
    """The `k` experts with the largest sigmoid(logits) + bias, weighted by their sigmoids' shares.

    Args:
        logits: [tokens, experts], float32, float16 or bfloat16.
        bias: [experts], float.
        k: Experts of a token.
        eps: Added to the sum of the chosen sigmoids.
        scale: Factor on the weights.

    Returns:
        float32 weights and int64 places, [tokens, k], the best first.
    """
    return _route(logits, bias, k, 1, 1, eps, scale)


def router_sigmoid_groups(
    logits: torch.Tensor, bias: torch.Tensor, kept: int, groups: int, k: int, eps: float, scale: float
) -> Routed:
    """`router_sigmoid` among the experts of the `kept` best of `groups` groups of neighbours.

    Arguments as for `router_sigmoid`; the number of experts is a multiple of `groups`.
    """
    return _route(logits, bias, k, groups, kept, eps, scale)
