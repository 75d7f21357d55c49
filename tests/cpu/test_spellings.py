"""Every reference and every spelling agrees with a float64 evaluation, up to the roundings that it makes."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegym_fx import inventory

INVENTORY = inventory.load()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDED32 = 2.0**-24  # relative error of one float32 rounding
FLOOR32 = 256 * torch.finfo(torch.float32).tiny  # below it float32 code may flush to zero
SIZES = {
    "B": 2,
    "Hq": 6,
    "Hk": 2,
    "S": 9,
    "T": 9,
    "D": 16,
    "N": 12,
    "H": 72,
    "I": 40,
    "K": 48,
    "M": 56,
    "R": 8,
}
HEADS = {
    "grouped": {},
    "a key head each": {"Hk": 6},
    "one key head": {"Hk": 1},
    "one token": {"S": 1, "T": 13},
}


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


def _rms(
    r: Rounding, x: torch.Tensor, weight: torch.Tensor, eps: float, name: str
) -> tuple[torch.Tensor, Any]:
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


def _attend(r: Rounding, q: Any, k: Any, v: Any, bias: Any, scale: float) -> Any:
    """Tolerance: scores, bias and sum may each be rounded, so may the weights and the output."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    size = (q.abs() @ k.abs().transpose(-1, -2) * scale).amax(-1, keepdim=True)
    seen = torch.where(bias > -1e4, (scores.abs() + bias.abs()), 0.0).amax(-1, keepdim=True)
    weights = torch.softmax(scores + bias, -1)
    score_error = 4 * r.relative * seen + 16 * ROUNDED32 * size
    relative = torch.expm1(2 * score_error) + 3 * r.relative
    tolerance = relative * (weights @ v.abs()) + r.step
    return (((weights @ v).transpose(1, 2), tolerance.transpose(1, 2)),)


@exact("gqa_attention")
def _gqa(r: Rounding, name: str, q: Any, k: Any, v: Any, scale: float) -> Any:
    return _attend(r, q, k, v, torch.zeros((), dtype=torch.float64), scale)


@exact("gqa_attention_causal")
def _gqa_causal(r: Rounding, name: str, q: Any, k: Any, v: Any, scale: float) -> Any:
    seen = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
    return _attend(r, q, k, v, torch.where(seen, 0.0, -math.inf).double(), scale)


@exact("gqa_attention_masked")
def _gqa_masked(r: Rounding, name: str, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
    bias = torch.where(mask, 0.0, -math.inf).double() if mask.dtype == torch.bool else mask
    return _attend(r, q, k, v, bias, scale)


@exact("linear")
def _linear(r: Rounding, name: str, input: Any, weight: Any, bias: Any = None) -> Any:
    value = input @ weight.T + (0 if bias is None else bias)
    size = input.abs() @ weight.abs().T
    return ((value, r.relative * value.abs() + input.shape[-1] * ROUNDED32 * size + r.step),)


@exact("linear_bias")
def _linear_bias(r: Rounding, name: str, input: Any, weight: Any, bias: Any) -> Any:
    ((value, tolerance),) = _linear(r, name, input, weight, bias)
    return ((value, tolerance + 2 * ROUNDED32 * bias.abs()),)


@exact("linear_add")
def _linear_add(r: Rounding, name: str, input: Any, weight: Any, residual: Any) -> Any:
    ((value, tolerance),) = _linear(r, name, input, weight)
    out = residual + value
    return ((out, 1.01 * tolerance + r.relative * out.abs() + r.step),)


WEIGHTS = {"as trained": 1.0, "near zero": 1e-3}
ROWS = {"ordinary": 1.0, "large": 3e3, "near zero": 1e-5}


def make_inputs(
    name: str, dtype: torch.dtype, rows: str, weights: str, sizes: dict[str, int], float_mask: bool = False
) -> dict[str, Any]:
    """Inputs of a Definition in one regime. A third of the weights that are near zero is exactly zero."""
    definition = INVENTORY.definitions[name]
    axes = {**SIZES, **sizes}
    axes.update({a: axis.value for a, axis in definition.axes.items() if axis.type == "const"})
    axes["I2"] = 2 * axes["I"]
    random = torch.Generator().manual_seed(zlib.crc32(f"{name} {dtype} {rows} {weights} {sizes}".encode()))
    amount = min(ROWS[rows], 4.0) if definition.op_type == "gqa" else ROWS[rows]
    inputs: dict[str, Any] = {}
    for key, spec in definition.inputs.items():
        if spec.shape is None:
            inputs[key] = 0.3 if key == "scale" else 1e-6
            continue
        shape = [axes[a] for a in spec.shape]
        value = torch.randn(shape, generator=random, dtype=torch.float64)
        own = torch.float32 if spec.dtype == "float32" else dtype
        if key in ("weight", "bias"):
            value *= WEIGHTS[weights]
            value.view(-1)[::3] *= weights != "near zero"
        elif key in ("cos", "sin"):
            angles = torch.arange(axes["S"])[:, None] / 10 ** torch.linspace(0, 4, shape[-1] // 2)
            value = getattr(angles, key)().repeat(1, 2).expand(shape)
        elif key == "mask":
            seen = torch.rand(shape, generator=random) < 0.6
            seen[..., 0] = True
            value = torch.where(seen, value, torch.finfo(dtype).min) if float_mask else seen
            own = dtype if float_mask else torch.bool
        else:
            value *= amount
        inputs[key] = value.to(own)
    return inputs


def widened(inputs: dict[str, Any]) -> dict[str, Any]:
    floats = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return {**inputs, **{k: v.double() for k, v in floats.items()}}


def worst(function: Callable[..., Any], name: str, inputs: dict[str, Any], dtype: torch.dtype) -> float:
    """The largest error over the outputs, in units of what is allowed at that element."""
    with torch.no_grad():
        got = function(**inputs)
    got = got if isinstance(got, tuple) else (got,)
    expected = EXACT[name](Rounding.of(dtype), name, **widened(inputs))
    ratio = 0.0
    for value, (right, tolerance) in zip(got, expected, strict=True):
        assert value.shape == right.shape
        assert value.dtype == dtype
        fits = right.abs() < 0.99 * torch.finfo(dtype).max
        assert (value[~fits].abs() > 0.9 * torch.finfo(dtype).max).all()
        ratio = max(ratio, ((value.double() - right).abs() / tolerance)[fits].max().item())
    return ratio


def refused(name: str, form: str, inputs: dict[str, Any]) -> bool:
    """Whether a place with these inputs is outside a spelling: a guard says so, or PyTorch does."""
    if any(guard(**inputs) for guard in INVENTORY.guards(name, form)):
        return True
    try:
        form != "reference" and INVENTORY.spellings(name)[form].function(**inputs)
    except RuntimeError:
        return True
    return False


def forms() -> list[tuple[str, str]]:
    names = sorted(INVENTORY.definitions)
    return [(name, form) for name in names for form in ("reference", *INVENTORY.spellings(name))]


def function_of(name: str, form: str) -> Callable[..., Any]:
    return INVENTORY.reference(name) if form == "reference" else INVENTORY.spellings(name)[form].function


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("name", "form"), forms())
def test_agrees_with_float64(name: str, form: str, dtype: torch.dtype) -> None:
    attention = INVENTORY.definitions[name].op_type == "gqa"
    cases = [
        (rows, weights, sizes, float_mask)
        for rows in ROWS
        for weights in WEIGHTS
        for sizes in (HEADS if attention else ({},))
        for float_mask in ((False, True) if name.endswith("masked") else (False,))
    ]
    ran = 0
    for rows, weights, sizes, float_mask in cases:
        inputs = make_inputs(name, dtype, rows, weights, sizes, float_mask)
        if refused(name, form, inputs):
            continue
        ran += 1
        ratio = worst(function_of(name, form), name, inputs, dtype)
        assert ratio <= 1, f"rows {rows}, weights {weights}, {sizes}: {ratio:.2f} times the rounding error"
    assert ran >= len(ROWS) * len(WEIGHTS)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [("rms_norm", "rms_norm_plus_one"), ("rms_norm", "rms_norm_cast_last"), ("gelu_tanh_mul", "gelu_mul")],
)
def test_the_measure_tells_definitions_apart(wrong: str, name: str) -> None:
    inputs = make_inputs(name, torch.bfloat16, "ordinary", "near zero", {})
    assert worst(INVENTORY.reference(name), name, inputs, torch.bfloat16) <= 1
    assert worst(INVENTORY.reference(wrong), name, inputs, torch.bfloat16) > 1


@pytest.mark.parametrize("name", sorted(INVENTORY.definitions))
def test_spellings_have_the_parameters_of_the_reference(name: str) -> None:
    wanted = list(INVENTORY.definitions[name].inputs)
    assert list(inspect.signature(INVENTORY.reference(name)).parameters) == wanted
    for form in ("reference", *INVENTORY.spellings(name)):
        for function in (function_of(name, form), *INVENTORY.guards(name, form)):
            assert list(inspect.signature(function).parameters) == wanted


def sources() -> Iterator[str]:
    for name, definition in INVENTORY.definitions.items():
        yield from (line for line in definition.reference.splitlines() if line.startswith("# Source:"))
        for spelling in INVENTORY.spellings(name).values():
            yield from spelling.sources


def test_cited_lines_exist_in_transformers() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24.0")
    if transformers.__version__ != "5.24.0":
        pytest.skip("the sources cite transformers 5.24.0")
    root = Path(transformers.__file__).parent
    cited = [
        line for d in INVENTORY.definitions.values() for line in d.reference.splitlines() if "Source:" in line
    ]
    cited += [
        s for name in INVENTORY.definitions for p in INVENTORY.spellings(name).values() for s in p.sources
    ]
    assert len(cited) > len(INVENTORY.definitions)
    for source in cited:
        path, _, anchor = source.partition("/blob/v5.24.0/src/transformers/")[2].partition("#")
        first, last = (int(line[1:]) for line in anchor.split("-"))
        lines = (root / path).read_text().splitlines()
        assert 1 <= first <= last <= len(lines), source
        assert lines[first - 1].strip(), f"{source} begins at an empty line"
        assert lines[last - 1].strip(), f"{source} ends at an empty line"
