"""Before: keys and values repeated for each query head, attention under a mask, transpose(1, 2).
After:  one gqa_attention_masked that reads every key head once.
Applies to [batch, heads, length, head_dim] with one head dimension for queries, keys and values.
The mask broadcasts to the scores, as torch lets it; eager code adds it, so there it must be a float.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tilegym_fx.spelling import guard, spelling

SHAPES = {"mask": None}


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/integrations/sdpa_attention.py#L85-L167"
)
def enable_gqa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The attention op shares keys and values itself."""
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2)


@spelling(
    source=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/integrations/sdpa_attention.py#L16-L25",
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/falcon/modeling_falcon.py#L333-L360",
    )
)
def without_repeat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Nothing is repeated where each query head has a key head, or all share one, which broadcasts."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


@spelling(
    source=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/whisper/modeling_whisper.py#L308-L312",
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/opt/modeling_opt.py#L148-L154",
    )
)
def scaled_before(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries are scaled, and rounded, before their products; nothing is repeated."""
    return F.scaled_dot_product_attention(q * scale, k, v, attn_mask=mask, scale=1.0).transpose(1, 2)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/llama/modeling_llama.py#L180-L202"
)
def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Matrix products around a float32 softmax."""
    return _eager(q, _share(k, q), _share(v, q), mask, scale, torch.float32)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/llama/modeling_llama.py#L168-L202"
)
def eager_without_repeat(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Matrix products around a float32 softmax, with nothing to repeat."""
    return _eager(q, k, v, mask, scale, torch.float32)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gpt2/modeling_gpt2.py#L55-L73"
)
def eager_softmax_in_own_dtype(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Matrix products around a softmax in the dtype of q, with nothing to repeat."""
    return _eager(q, k, v, mask, scale, None)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/trocr/modeling_trocr.py#L225-L272"
)
def heads_in_the_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Batches of matrices around a softmax in the dtype of q, which is scaled already."""
    return _in_batches(q, k, v, lambda scores: scores + mask)


@spelling(
    source=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/trocr/modeling_trocr.py#L192-L193",
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/trocr/modeling_trocr.py#L225-L272",
    )
)
def heads_in_the_batch_scaled_before(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same, with the factor that queries are multiplied with before."""
    return _in_batches(q, k, v, lambda scores: scores + mask, scale)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/xglm/modeling_xglm.py#L191-L241"
)
def heads_in_the_batch_bounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """With a lower bound on the sum so that it stays finite; q is scaled already."""
    return _in_batches(q, k, v, lambda scores: _bounded(scores + mask))


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/xglm/modeling_xglm.py#L191-L241"
)
def heads_in_the_batch_bounded_scaled_before(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """With a lower bound, and the factor that queries are multiplied with before."""
    return _in_batches(q, k, v, lambda scores: _bounded(scores + mask), scale)


def _in_batches(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masked: Callable[[torch.Tensor], torch.Tensor],
    scale: float | None = None,
) -> torch.Tensor:
    batch, heads, length, width = q.shape
    left, right, values = (x.reshape(batch * heads, x.shape[2], width) for x in (q, k, v))
    left = left if scale is None else left * scale
    scores = masked(torch.bmm(left, right.transpose(1, 2)).view(batch, heads, length, -1))
    weights = torch.softmax(scores.view(batch * heads, length, -1), dim=-1)
    return torch.bmm(weights, values).view(batch, heads, length, width).transpose(1, 2)


def _bounded(scores: torch.Tensor) -> torch.Tensor:
    return torch.max(scores, torch.full((), torch.finfo(scores.dtype).min, device=scores.device))


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gpt_neox_japanese/modeling_gpt_neox_japanese.py#L234-L268"
)
def added_to_zeros(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The scaled product is added to zeros; the softmax is in the dtype of q."""
    batch, heads, length, width = q.shape
    left, right = q.view(batch * heads, length, width), k.view(batch * heads, k.shape[2], width)
    zeros = torch.zeros(batch * heads, length, k.shape[2], dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(zeros, left, right.transpose(1, 2), beta=1.0, alpha=scale)
    weights = torch.softmax(scores.view(batch, heads, length, -1) + mask, dim=-1)
    return torch.matmul(weights, v).transpose(1, 2)


def _eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softmax_dtype: torch.dtype | None,
) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=softmax_dtype).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2)


def _share(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    batch, heads, length, width = x.shape
    groups = q.shape[1] // heads
    shared = x[:, :, None].expand(batch, heads, groups, length, width)
    return shared.reshape(batch, heads * groups, length, width)


@guard
def mask_broadcasts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> str | None:
    """With more dimensions or sizes the scores would have more; the attention op reads two dimensions at least."""
    scores = (*q.shape[:3], k.shape[2])
    behind = scores[-mask.dim() :] if 2 <= mask.dim() <= len(scores) else ()
    if behind and all(size in (1, whole) for size, whole in zip(mask.shape, behind, strict=True)):
        return None
    return f"mask is {list(mask.shape)}, which the kernel does not broadcast to {list(scores)}"


_IN_BATCHES = (
    "heads_in_the_batch",
    "heads_in_the_batch_scaled_before",
    "heads_in_the_batch_bounded",
    "heads_in_the_batch_bounded_scaled_before",
    "added_to_zeros",
)


@guard(only=("eager", "eager_without_repeat", "eager_softmax_in_own_dtype", *_IN_BATCHES))
def mask_is_added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> str | None:
    return None if mask.dtype == q.dtype else f"a mask of {mask.dtype} is added to scores of {q.dtype}"
