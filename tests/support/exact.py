"""What Definitions give in float64, and how far from it each of their roundings may lead."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ROUNDED32 = 2.0**-24  # relative error of one float32 rounding
FLOOR32 = 256 * torch.finfo(torch.float32).tiny  # below it float32 code may flush to zero


@dataclass(frozen=True)
class Rounding:
    """What one rounding to a dtype costs: relative to the value, and the least step near zero."""

    relative: float
    step: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Rounding:
        info = torch.finfo(dtype)
        return cls(info.eps / 2 * (1 + info.eps), info.smallest_normal * info.eps)


Exact = Callable[..., tuple[tuple[torch.Tensor, torch.Tensor], ...]]
EXACT: dict[str, Exact] = {}


def exact(*names: str) -> Callable[[Exact], Exact]:
    """Registers a float64 evaluation: (rounding, inputs) -> (value, tolerance) for each output."""

    def register(function: Exact) -> Exact:
        EXACT.update(dict.fromkeys(names, function))
        return function

    return register


def _rms(r: Rounding, x: torch.Tensor, weight: torch.Tensor, eps: float, name: str) -> tuple[torch.Tensor, Any]:
    factor = 1 + weight if "plus_one" in name else weight
    value = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * factor
    roundings = 1 if "plus_one" in name or "cast_last" in name else 2
    step = r.step * (1 + (roundings - 1) * factor.abs())
    return value, (roundings * r.relative + 16 * ROUNDED32) * value.abs() + step


@exact("rms_norm", "rms_norm_cast_last", "rms_norm_plus_one")
def _rms_norm(r: Rounding, name: str, hidden_states: Any, weight: Any, eps: float) -> Any:
    return (_rms(r, hidden_states, weight, eps, name),)


@exact("add_rms_norm", "add_rms_norm_cast_last", "add_rms_norm_plus_one")
def _add_rms_norm(r: Rounding, name: str, hidden_states: Any, residual: Any, weight: Any, eps: float) -> Any:
    total = hidden_states + residual
    value, tolerance = _rms(r, total, weight, eps, name)
    return (value, tolerance + 2 * r.relative * value.abs()), (total, r.relative * total.abs() + r.step)


@exact("rms_norm_add", "rms_norm_cast_last_add", "rms_norm_plus_one_add")
def _rms_norm_add(r: Rounding, name: str, hidden_states: Any, residual: Any, weight: Any, eps: float) -> Any:
    value, tolerance = _rms(r, hidden_states, weight, eps, name)
    out = residual + value
    return ((out, 1.01 * tolerance + r.relative * out.abs() + r.step),)


def _layer(r: Rounding, x: Any, weight: Any, bias: Any, eps: float, input_error: float) -> Any:
    scale = (x.var(-1, keepdim=True, unbiased=False) + eps).rsqrt()
    value = (x - x.mean(-1, keepdim=True)) * scale * weight + bias
    spread = x.abs().amax(-1, keepdim=True) * scale * weight.abs() + bias.abs()
    return value, r.relative * value.abs() + (16 * ROUNDED32 + input_error) * spread + r.step


@exact("layer_norm")
def _layer_norm(r: Rounding, name: str, hidden_states: Any, weight: Any, bias: Any, eps: float) -> Any:
    return (_layer(r, hidden_states, weight, bias, eps, 0.0),)


@exact("add_layer_norm")
def _add_layer_norm(
    r: Rounding, name: str, hidden_states: Any, residual: Any, weight: Any, bias: Any, eps: float
) -> Any:
    total = hidden_states + residual
    norm = _layer(r, total, weight, bias, eps, 4 * r.relative)
    return norm, (total, r.relative * total.abs() + r.step)


def _gated(r: Rounding, activated: Any, gate: Any, up: Any) -> Any:
    value = activated * up
    floor = (r.step + FLOOR32) * (1 + up.abs())
    return ((value, 2 * r.relative * value.abs() + 16 * ROUNDED32 * (gate * up).abs() + floor),)


@exact("silu_mul")
def _silu_mul(r: Rounding, name: str, gate: Any, up: Any) -> Any:
    return _gated(r, gate * torch.sigmoid(gate), gate, up)


@exact("silu_mul_packed")
def _silu_mul_packed(r: Rounding, name: str, gate_up: Any) -> Any:
    half = gate_up.shape[-1] // 2
    return _silu_mul(r, name, gate_up[..., :half], gate_up[..., half:])


@exact("gelu_mul")
def _gelu_mul(r: Rounding, name: str, gate: Any, up: Any) -> Any:
    return _gated(r, gate / 2 * torch.erfc(-gate / math.sqrt(2)), gate, up)


@exact("gelu_tanh_mul")
def _gelu_tanh_mul(r: Rounding, name: str, gate: Any, up: Any) -> Any:
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return _gated(r, gate / 2 * (1 + torch.tanh(inner)), gate, up)


@exact("gelu", "gelu_tanh", "relu", "relu_squared")
def _activation(r: Rounding, name: str, hidden_states: Any) -> Any:
    value = _ACTIVATIONS[name](hidden_states)
    return ((value, r.relative * value.abs() + 16 * ROUNDED32 * hidden_states.abs() + r.step + FLOOR32),)


@exact("gelu_new")
def _gelu_new(r: Rounding, name: str, hidden_states: Any) -> Any:
    """Written out: 1 + tanh loses to rounding what cancels, and the exponent's roundings grow with it."""
    x = hidden_states
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    slope = (1 - torch.tanh(inner) ** 2) * inner.abs()
    error = r.relative * (6 * slope + 4) + FLOOR32
    return ((_ACTIVATIONS["gelu_tanh"](x), error * x.abs() + r.step),)


@exact("xielu")
def _xielu(r: Rounding, name: str, hidden_states: Any, alpha_p: Any, alpha_n: Any, beta: Any, eps: Any) -> Any:
    """Tolerance: of written out code, with a rounding after each of at most six operations.

    Between `eps` and zero the exponential is that of `eps`, which is larger there than x.
    """
    x, line = hidden_states, beta * hidden_states
    up, down = torch.nn.functional.softplus(alpha_p), beta + torch.nn.functional.softplus(alpha_n)
    ends = torch.min(x, eps)
    value = torch.where(x > 0, up * x * x, down * (torch.expm1(ends) - x)) + line
    size = torch.where(x > 0, up * x * x, down * ends.abs()) + line.abs()
    return ((value, (6 * r.relative + 16 * ROUNDED32) * size + r.step * (4 + down + x.abs()) + FLOOR32),)


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": lambda x: x / 2 * torch.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "relu_squared": lambda x: x.clamp(min=0).square(),
}


def _turn(x: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """A vector rotated pair by pair, and the size of what is added to get there."""
    one, two = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    (c1, c2), (s1, s2) = cos.chunk(2, -1), sin.chunk(2, -1)
    value = torch.cat((one * c1 - two * s1, two * c2 + one * s2), -1)
    size = torch.cat(((one * c1).abs() + (two * s1).abs(), (two * c2).abs() + (one * s2).abs()), -1)
    return value, size


@exact("rotary_embedding")
def _rotary(r: Rounding, name: str, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    turned = [_turn(x, cos[:, None], sin[:, None]) for x in (q, k)]
    return tuple((value, r.relative * (1.01 * size + value.abs()) + 3 * r.step) for value, size in turned)


@exact("rotary_embedding_fp32")
def _rotary_fp32(r: Rounding, name: str, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    turned = [_turn(x, cos[:, None], sin[:, None]) for x in (q, k)]
    return tuple((value, r.relative * value.abs() + 3 * ROUNDED32 * size + r.step) for value, size in turned)


@exact("rotary_embedding_single")
def _rotary_single(r: Rounding, name: str, x: Any, cos: Any, sin: Any) -> Any:
    value, size = _turn(x, cos[:, :, None], sin[:, :, None])
    return ((value, r.relative * (1.01 * size + value.abs()) + 3 * r.step),)


@exact("rotary_embedding_half_width")
def _rotary_half_width(r: Rounding, name: str, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return _rotary(r, name, q, k, cos.repeat(1, 1, 2), sin.repeat(1, 1, 2))


@exact("rotary_embedding_partial")
def _rotary_partial(r: Rounding, name: str, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    width = cos.shape[-1]
    turned = _rotary(r, name, q[..., :width], k[..., :width], cos, sin)
    return tuple(_with_tail(r, pair, x[..., width:]) for pair, x in zip(turned, (q, k), strict=True))


def _with_tail(r: Rounding, pair: tuple[Any, Any], tail: Any) -> tuple[Any, Any]:
    return torch.cat((pair[0], tail), -1), torch.cat((pair[1], torch.full_like(tail, r.step)), -1)


@exact("rotary_table", "rotary_table_fp32", "rotary_table_half_width", "rotary_table_scaled")
def _rotary_table(r: Rounding, name: str, positions: Any, frequencies: Any, scale: float = 1.0) -> Any:
    """The angle is a float32 number, and what it is off by turns cosine and sine by as much."""
    angles = (positions.float() * frequencies.float()).double()
    angles = angles if "half" in name else torch.cat((angles, angles), -1)
    kind = Rounding.of(torch.float32 if "fp32" in name else torch.bfloat16)
    values = (angles.cos() * scale, angles.sin() * scale)
    return tuple((value, kind.relative * value.abs() + 8 * ROUNDED32 * scale + kind.step) for value in values)


def _pairs_to_halves(x: Any) -> Any:
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def _halves_to_pairs(x: Any) -> Any:
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


@exact("rotary_embedding_interleaved_fp32")
def _rotary_interleaved_fp32(r: Rounding, name: str, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    turned = _rotary_fp32(r, name, *map(_pairs_to_halves, (q, k, cos, sin)))
    return tuple((_halves_to_pairs(value), _halves_to_pairs(tolerance)) for value, tolerance in turned)


@exact("rotary_embedding_interleaved_fp32_shared")
def _rotary_interleaved_shared(r: Rounding, name: str, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return _rotary_interleaved_fp32(r, name, q, k, cos[:, 0], sin[:, 0])


@exact("rotary_embedding_interleaved_partial", "rotary_embedding_interleaved")
def _rotary_interleaved_partial(r: Rounding, name: str, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    width = cos.shape[-1]
    halves = (_pairs_to_halves(x) for x in (q[..., :width], k[..., :width], cos[:, 0], sin[:, 0]))
    turned = _rotary(r, name, *halves)
    pairs = [tuple(map(_halves_to_pairs, pair)) for pair in turned]
    return tuple(_with_tail(r, pair, x[..., width:]) for pair, x in zip(pairs, (q, k), strict=True))


@exact("rotary_embedding_complex")
def _rotary_complex(r: Rounding, name: str, q: Any, k: Any, phases: Any) -> Any:
    cos, sin = (part.repeat_interleave(2, -1) for part in (phases.real, phases.imag))
    return _rotary_interleaved_shared(r, name, q, k, cos, sin)


@exact("rotary_embedding_pairs_to_halves")
def _rotary_pairs_to_halves(r: Rounding, name: str, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    half = cos.shape[-1] // 2
    tables = (x[..., :half].repeat(1, 1, 2) for x in (cos, sin))
    return _rotary(r, name, _pairs_to_halves(q), _pairs_to_halves(k), *tables)


@exact("rotary_embedding_pairs_to_halves_shared")
def _rotary_halves_shared(r: Rounding, name: str, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """With float32 tables every step is float32."""
    tables = (x[:, 0].repeat(1, 1, 2) for x in (cos, sin))
    return _rotary(Rounding.of(torch.float32), name, _pairs_to_halves(q), _pairs_to_halves(k), *tables)


def attend(r: Rounding, q: Any, k: Any, v: Any, bias: Any, scale: float) -> Any:
    """Tolerance: scores, bias and sum may each be rounded, so may the weights and the output.

    The sums over the keys are taken in float32: n terms may lose n roundings, as for a linear layer.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    size = (q.abs() @ k.abs().transpose(-1, -2) * scale).amax(-1, keepdim=True)
    seen = torch.where(bias > -1e4, (scores.abs() + bias.abs()), 0.0).amax(-1, keepdim=True)
    weights = torch.softmax(scores + bias, -1)
    score_error = 4 * r.relative * seen + 16 * ROUNDED32 * size
    relative = torch.expm1(2 * score_error) + 3 * r.relative + k.shape[-2] * ROUNDED32
    tolerance = relative * (weights @ v.abs()) + r.step
    return (((weights @ v).transpose(1, 2), tolerance.transpose(1, 2)),)


@exact("sink_attention_masked", "sink_attention_step")
def _sink_attention(r: Rounding, name: str, q: Any, k: Any, v: Any, mask: Any, sinks: Any, scale: float) -> Any:
    """The sink is a key that gives its score whatever the query, and a value of zero."""
    sink = sinks[:, None, None].expand(q.shape[0], -1, q.shape[2], 1)
    return _attend_eagerly(r, q, k, v, mask, lambda scores: scores * scale, sink)


@exact("softcap_attention_masked")
def _softcap_attention(r: Rounding, name: str, q: Any, k: Any, v: Any, mask: Any, scale: float, softcap: float) -> Any:
    return _attend_eagerly(r, q, k, v, mask, lambda scores: softcap * torch.tanh(scores * scale / softcap), None)


@exact("biased_attention_masked")
def _biased_attention(r: Rounding, name: str, q: Any, k: Any, v: Any, bias: Any, mask: Any, scale: float) -> Any:
    """Taking away is adding so much that only that is left."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, -1e30, 0.0).double()
    bias = bias.unflatten(0, (-1, q.shape[1]))
    return _attend_eagerly(r, q, k, v, mask, lambda scores: scores * scale, None, bias)


@exact("biased_attention_filled")
def _biased_filled(
    r: Rounding, name: str, q: Any, k: Any, v: Any, bias: Any, mask: Any, divisor: float, fill: float, hides: int
) -> Any:
    scores = q @ k.transpose(-1, -2) / divisor
    hidden = mask == (hides if mask.dtype == torch.bool else 0)
    filling = torch.where(hidden, fill - scores, 0.0)
    return _attend_eagerly(r, q, k, v, filling, lambda scores: scores / divisor, None, bias)


def _attend_eagerly(
    r: Rounding, q: Any, k: Any, v: Any, mask: Any, score: Callable[[Any], Any], sink: Any, bias: Any = 0.0
) -> Any:
    """Tolerance: eight roundings of scores no larger than `score(|q| |k|)`, as eager code makes them."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    size = score(q.abs() @ k.abs().transpose(-1, -2)).amax(-1, keepdim=True)
    scores = score(q @ k.transpose(-1, -2)) + bias
    largest = scores.abs().amax(-1, keepdim=True)
    largest = largest + torch.where(mask > -1e4, mask.abs(), 0.0).amax(-1, keepdim=True)
    scores = scores + mask
    if sink is not None:
        scores, largest = torch.cat((scores, sink), -1), largest + sink.abs()
    weights = torch.softmax(scores, -1)[..., : k.shape[-2]].nan_to_num(0.0)  # a row at minus infinity gives 0
    relative = torch.expm1(2 * (8 * r.relative * largest + 16 * ROUNDED32 * size))
    relative = relative + 3 * r.relative + k.shape[-2] * ROUNDED32
    tolerance = relative * (weights @ v.abs()) + k.shape[-2] * r.step * v.abs().amax(-2, keepdim=True) + r.step
    tolerance = tolerance + FLOOR32 * (1 + v.abs().sum(-2, keepdim=True))  # weights too small for float32
    return (((weights @ v).transpose(1, 2), tolerance.transpose(1, 2)),)


@exact("gqa_attention", "mla_attention")
def _gqa(r: Rounding, name: str, q: Any, k: Any, v: Any, scale: float) -> Any:
    return attend(r, q, k, v, torch.zeros((), dtype=torch.float64), scale)


@exact("gqa_attention_causal", "mla_attention_causal")
def _gqa_causal(r: Rounding, name: str, q: Any, k: Any, v: Any, scale: float) -> Any:
    seen = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
    return attend(r, q, k, v, torch.where(seen, 0.0, -math.inf).double(), scale)


@exact("gqa_attention_masked", "mla_attention_masked")
def _gqa_masked(r: Rounding, name: str, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
    bias = torch.where(mask, 0.0, -math.inf).double() if mask.dtype == torch.bool else mask
    return attend(r, q, k, v, bias, scale)


@exact("rms_norm_unweighted")
def _rms_norm_unweighted(r: Rounding, name: str, hidden_states: Any, eps: float) -> Any:
    return (_rms(r, hidden_states, torch.ones(()).to(hidden_states), eps, "cast_last"),)


@exact("l2_norm")
def _l2_norm(r: Rounding, name: str, hidden_states: Any, eps: float) -> Any:
    value = hidden_states * (hidden_states.square().sum(-1, keepdim=True) + eps).rsqrt()
    return ((value, 16 * ROUNDED32 * value.abs() + FLOOR32),)


@exact("l2_clip")
def _l2_clip(r: Rounding, name: str, hidden_states: Any, threshold: float, eps: float) -> Any:
    length = hidden_states.norm(dim=-1, keepdim=True)
    value = hidden_states * (threshold / (length + eps)).clamp(max=1)
    return ((value, (r.relative + 16 * ROUNDED32) * value.abs() + r.step + FLOOR32),)


@exact("rms_norm_gated")
def _rms_norm_gated(r: Rounding, name: str, hidden_states: Any, gate: Any, weight: Any, eps: float) -> Any:
    norm, error = _rms(r, hidden_states, weight, eps, name)
    opened = gate * torch.sigmoid(gate)
    value = norm * opened
    floor = (r.step + FLOOR32) * (1 + norm.abs())
    return ((value, 1.01 * error * opened.abs() + (r.relative + 16 * ROUNDED32) * value.abs() + floor),)


@exact("layer_norm_no_bias")
def _layer_norm_no_bias(r: Rounding, name: str, hidden_states: Any, weight: Any, eps: float) -> Any:
    return (_layer(r, hidden_states, weight, torch.zeros_like(weight), eps, 0.0),)


@exact("padded_positions")
def _padded_positions(r: Rounding, name: str, ids: Any, padding_idx: int, past: int) -> Any:
    rows = [[int(i) != padding_idx for i in row] for row in ids]
    counted = [[padding_idx + is_token * (past + sum(row[: n + 1])) for n, is_token in enumerate(row)] for row in rows]
    value = torch.tensor(counted)
    return ((value, torch.zeros_like(value)),)


@exact("embedding")
def _embedding(r: Rounding, name: str, ids: Any, weight: Any, padding_idx: int) -> Any:
    return ((weight[ids], torch.full_like(weight[ids], r.step)),)


@exact("sigmoid_mul")
def _sigmoid_mul(r: Rounding, name: str, hidden_states: Any, gate: Any) -> Any:
    value = hidden_states * torch.sigmoid(gate)
    floor = (r.step + FLOOR32) * (1 + hidden_states.abs())
    return ((value, (2 * r.relative + 8 * ROUNDED32) * value.abs() * (1 + r.relative) + floor),)


@exact("concat_last", "concat_last_shared")
def _concat(r: Rounding, name: str, a: Any, b: Any) -> Any:
    value = torch.cat((a, b.expand(*a.shape[:3], -1)), -1)
    return ((value, torch.full_like(value, r.step)),)


@exact("linear")
def _linear(r: Rounding, name: str, input: Any, weight: Any, bias: Any = None) -> Any:
    value = input @ weight.T + (0 if bias is None else bias)
    size = input.abs() @ weight.abs().T
    return ((value, r.relative * value.abs() + input.shape[-1] * ROUNDED32 * size + r.step),)


@exact("linear_fp32", "linear_fp32_weight")
def _linear_fp32(r: Rounding, name: str, input: Any, weight: Any) -> Any:
    return _linear(Rounding.of(torch.float32), name, input, weight)


@exact("indexer_scores")
def _indexer_scores(r: Rounding, name: str, q: Any, k: Any, weights: Any, scale: float) -> Any:
    keys = k[:, None].mT
    products, sizes = (scale * q) @ keys, scale * q.abs() @ keys.abs()
    value = (weights[..., None] * products.clamp(min=0)).sum(-2)
    size = (weights.abs()[..., None] * sizes).sum(-2)
    return ((value, (sum(q.shape[-2:]) + 8) * ROUNDED32 * size + FLOOR32),)


@exact("linear_bias")
def _linear_bias(r: Rounding, name: str, input: Any, weight: Any, bias: Any) -> Any:
    ((value, tolerance),) = _linear(r, name, input, weight, bias)
    return ((value, tolerance + 2 * ROUNDED32 * bias.abs()),)


@exact("linear_add")
def _linear_add(r: Rounding, name: str, input: Any, weight: Any, residual: Any) -> Any:
    ((value, tolerance),) = _linear(r, name, input, weight)
    out = residual + value
    return ((out, 1.01 * tolerance + r.relative * out.abs() + r.step),)


@exact("rotary_cache_write")
def _rotary_cache_write(
    r: Rounding, name: str, q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any
) -> Any:
    turned, new = _rotary(r, name, q, k, cos, sin)
    exactly = (v, torch.full_like(v, r.step))
    caches = ((keys, new), (values, exactly))
    return turned, *(
        (cache.index_copy(2, positions, rows), torch.full_like(cache, r.step).index_copy(2, positions, tolerance))
        for cache, (rows, tolerance) in caches
    )


@exact("cache_write")
def _cache_write(r: Rounding, name: str, k: Any, v: Any, keys: Any, values: Any, positions: Any) -> Any:
    caches = ((keys, k), (values, v))
    return tuple((cache.index_copy(2, positions, new), torch.full_like(cache, r.step)) for cache, new in caches)


@exact("cache_roll_write")
def _cache_roll_write(r: Rounding, name: str, k: Any, v: Any, keys: Any, values: Any) -> Any:
    moved = (torch.cat((cache[:, :, 1:], new), dim=2) for cache, new in ((keys, k), (values, v)))
    return tuple((cache, torch.full_like(cache, r.step)) for cache in moved)


@exact("cache_append")
def _cache_append(r: Rounding, name: str, cache: Any, new: Any) -> Any:
    value = torch.cat((cache, new), dim=-2)
    return ((value, torch.full_like(value, r.step)),)


def _rows_projected(r: Rounding, rows: Any, weight: Any, bias: Any = None) -> tuple[Any, Any]:
    """A projection of rows that are known up to a tolerance, rounded once."""
    x, error = rows
    value = x @ weight.T + (0 if bias is None else bias)
    added = 0 if bias is None else 2 * ROUNDED32 * bias.abs()
    size = x.abs() @ weight.abs().T
    return value, error @ weight.abs().T + r.relative * value.abs() + x.shape[-1] * ROUNDED32 * size + r.step + added


def _opened(r: Rounding, name: str, gate: tuple[Any, Any], up: tuple[Any, Any]) -> Any:
    """The gated product of projections that are known up to a tolerance; neither gate is steeper than 1.2."""
    act = "gelu_tanh_mul" if "gelu" in name else "silu_mul"
    ((value, tolerance),) = EXACT[act](r, act, gate[0], up[0])
    opened = gate[0] / 2 * (1 + torch.tanh(gate[0] / 2)) if act == "silu_mul" else _ACTIVATIONS["gelu_tanh"](gate[0])
    steep = 1.2 * gate[1]
    return ((value, 1.01 * tolerance + steep * up[0].abs() + (opened.abs() + steep) * up[1]),)


def _normed(r: Rounding, name: str, x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    return _rms(r, x, weight, eps, "rms_norm_plus_one" if "plus_one" in name else "rms_norm")


@exact("linear_silu_mul", "linear_gelu_tanh_mul")
def _linear_mul(r: Rounding, name: str, input: Any, gate_weight: Any, up_weight: Any) -> Any:
    rows = input, torch.zeros_like(input)
    return _opened(r, name, _rows_projected(r, rows, gate_weight), _rows_projected(r, rows, up_weight))


@exact("linear_silu_mul_packed")
def _linear_mul_packed(r: Rounding, name: str, input: Any, weight: Any) -> Any:
    return _linear_mul(r, name, input, *weight.chunk(2))


@exact("rms_norm_linear_silu_mul", "rms_norm_plus_one_linear_gelu_tanh_mul")
def _norm_linear_mul(
    r: Rounding, name: str, hidden_states: Any, norm_weight: Any, eps: float, gate_weight: Any, up_weight: Any
) -> Any:
    rows = _normed(r, name, hidden_states, norm_weight, eps)
    return _opened(r, name, _rows_projected(r, rows, gate_weight), _rows_projected(r, rows, up_weight))


@exact("rms_norm_linear_silu_mul_packed")
def _norm_linear_mul_packed(
    r: Rounding, name: str, hidden_states: Any, norm_weight: Any, eps: float, weight: Any
) -> Any:
    return _norm_linear_mul(r, name, hidden_states, norm_weight, eps, *weight.chunk(2))


@exact("linear_qkv")
def _qkv(r: Rounding, name: str, input: Any, q_weight: Any, k_weight: Any, v_weight: Any) -> Any:
    rows = input, torch.zeros_like(input)
    return tuple(_rows_projected(r, rows, weight) for weight in (q_weight, k_weight, v_weight))


@exact("linear_qkv_bias")
def _qkv_bias(r: Rounding, name: str, input: Any, **named: Any) -> Any:
    rows = input, torch.zeros_like(input)
    return tuple(_rows_projected(r, rows, named[f"{x}_weight"], named[f"{x}_bias"]) for x in "qkv")


@exact("rms_norm_linear")
def _norm_linear(r: Rounding, name: str, hidden_states: Any, norm_weight: Any, eps: float, weight: Any) -> Any:
    return (_rows_projected(r, _normed(r, name, hidden_states, norm_weight, eps), weight),)


@exact("rms_norm_linear_qkv", "rms_norm_linear_qkv_bias", "rms_norm_plus_one_linear_qkv")
def _norm_qkv(r: Rounding, name: str, hidden_states: Any, norm_weight: Any, eps: float, **named: Any) -> Any:
    rows = _normed(r, name, hidden_states, norm_weight, eps)
    return tuple(_rows_projected(r, rows, named[f"{x}_weight"], named.get(f"{x}_bias")) for x in "qkv")


@exact("rms_norm_rotary_embedding", "rms_norm_plus_one_rotary_embedding")
def _norm_rotary(
    r: Rounding, name: str, q: Any, k: Any, q_weight: Any, k_weight: Any, eps: float, cos: Any, sin: Any
) -> Any:
    """The norm's tolerance is turned like the heads, with every sign taken as the worst."""
    cos, sin = cos[:, None], sin[:, None]
    outputs = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        head, error = (t.transpose(1, 2) for t in _normed(r, name, x, weight, eps))
        value, size = _turn(head, cos, sin)
        _, spread = _turn(error, cos.abs(), sin.abs())
        outputs.append((value, r.relative * (1.01 * size + value.abs()) + 3 * r.step + 1.02 * spread))
    return tuple(outputs)
