"""Routers of mixtures of experts in cuTile: scores of each expert, the best K of a token, and their weights.

    LAST   weights are the softmax over the K best logits
    else   the softmax over all experts, divided by the sum of the chosen ones if NORMALIZE

A block holds all logits of ROWS tokens in float32 and takes the best K times; of equal logits the first
expert wins. Softmax does not change the order, so that the choice is made on logits and only K
exponentials are divided.
"""

from __future__ import annotations

import math
from functools import cache

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

#: Logits of one block.
BLOCK = 2048
LOG2_E = math.log2(math.e)
INFINITY = math.inf

Int = ct.Constant[int]
Flag = ct.Constant[bool]


@ct.kernel
def router_kernel(
    logits, weights, index, LAST: Flag, NORMALIZE: Flag,
    K: Int, ROWS: Int, EXPERTS: Int, CHOICES: Int,
):  # fmt: skip
    row = ct.reshape(ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32), (ROWS, 1))
    lane = ct.reshape(ct.arange(EXPERTS, dtype=ct.int32), (1, EXPERTS))
    choice = ct.reshape(ct.arange(CHOICES, dtype=ct.int32), (1, CHOICES))
    values = ct.astype(ct.gather(logits, (row, lane)), ct.float32)
    values = ct.where(lane < logits.shape[1], values, -INFINITY)
    top = ct.max(values, axis=1, keepdims=True)
    whole = ct.sum(ct.exp2((values - top) * LOG2_E), axis=1, keepdims=True)
    best = ct.full((ROWS, CHOICES), -INFINITY, ct.float32)
    chosen = ct.zeros((ROWS, CHOICES), ct.int32)
    for k in range(K):
        value = ct.max(values, axis=1, keepdims=True)
        expert = ct.min(ct.where(values == value, lane, EXPERTS - 1), axis=1, keepdims=True)
        best = ct.where(choice == k, value, best)
        chosen = ct.where(choice == k, expert, chosen)
        values = ct.where(lane == expert, -INFINITY, values)
    share = ct.exp2((best - top) * LOG2_E)
    if LAST:
        share = share / ct.sum(share, axis=1, keepdims=True)
    else:
        share = share / whole
        if NORMALIZE:
            share = share / ct.sum(share, axis=1, keepdims=True)
    place = ct.where(choice < K, choice, K)  # beyond the last choice is outside and dropped
    ct.scatter(weights, (row, place), ct.astype(share, weights.dtype))
    ct.scatter(index, (row, place), ct.astype(chosen, index.dtype))


@cache
def pick_rows(tokens: int, experts: int) -> tuple[int, int]:
    """ROWS and EXPERTS of a block."""
    lanes = covering_power(experts)
    return min(max(1, BLOCK // lanes), covering_power(tokens)), lanes


def _route(
    logits: torch.Tensor, k: int, dtype: torch.dtype, last: bool, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*logits.shape[:-1], k)
    weights = torch.empty(shape, dtype=dtype, device=logits.device)
    index = torch.empty(shape, dtype=torch.int64, device=logits.device)
    if weights.numel():
        tokens = weights.numel() // k
        rows, lanes = pick_rows(tokens, logits.shape[-1])
        arrays = (logits.reshape(tokens, -1), weights.view(tokens, k), index.view(tokens, k))
        constants = (last, normalize, k, rows, lanes, covering_power(k))
        launch(router_kernel, (-(-tokens // rows),), (*arrays, *constants))
    return weights, index


Routed = tuple[torch.Tensor, torch.Tensor]


def router_softmax_topk(logits: torch.Tensor, k: int) -> Routed:
    """The `k` largest of softmax(logits), in the dtype of the logits, and their places.

    Args:
        logits: [tokens, experts], float32, float16 or bfloat16.
        k: Experts of a token.

    Returns:
        Weights and int64 places, [tokens, k], the largest first.
    """
    return _route(logits, k, logits.dtype, False, False)


def router_softmax_topk_fp32(logits: torch.Tensor, k: int) -> Routed:
    """`router_softmax_topk` with float32 weights."""
    return _route(logits, k, torch.float32, False, False)


def router_softmax_topk_norm(logits: torch.Tensor, k: int) -> Routed:
    """`router_softmax_topk` with weights divided by their sum."""
    return _route(logits, k, logits.dtype, False, True)


def router_softmax_topk_norm_fp32(logits: torch.Tensor, k: int) -> Routed:
    """`router_softmax_topk_norm` with float32 weights."""
    return _route(logits, k, torch.float32, False, True)


def router_topk_softmax(logits: torch.Tensor, k: int) -> Routed:
    """softmax over the `k` largest logits, in the dtype of the logits, and their places."""
    return _route(logits, k, logits.dtype, True, False)
