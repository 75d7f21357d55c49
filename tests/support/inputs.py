"""Inputs of Definitions in regimes where rounding shows, and a result's distance to the float64
evaluation.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import exact_latents  # noqa: F401  registers what it holds
import exact_moe  # noqa: F401  registers what it holds
import exact_states  # noqa: F401  registers what it holds
import torch
from exact import EXACT, Rounding

from tilegym_fx import inventory

INVENTORY = inventory.load()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = {
    "B": 2,
    "Hq": 6,
    "Hk": 2,
    "S": 9,
    "T": 9,
    "L": 18,
    "D": 16,
    "N": 12,
    "H": 72,
    "I": 40,
    "K": 48,
    "M": 56,
    "Q": 112,
    "R": 8,
    "E": 5,
    "V": 24,
    "P": 3000,
    "A": 40,
    "C": 8,
    "O": 24,
    "Hd": 3,
    "X": 12,
    "J": 4,
    "W": 5,
    "Hs": 6,
    "Gs": 2,
    "Ps": 5,
    "Ns": 12,
    "Hv": 6,
    "Dv": 20,
}
HEADS: tuple[dict[str, int], ...] = ({}, {"Hk": 6}, {"Hk": 1}, {"S": 1, "T": 13, "B": 1})
#: Definitions whose results have a dtype of their own.
OUTPUT_DTYPES = {
    "indexer_scores": torch.float32,
    "linear_fp32": torch.float32,
    "l2_norm": torch.float32,
    "linear_fp32_weight": torch.float32,
    "rotary_embedding_pairs_to_halves_shared": torch.float32,
    "router_sigmoid": torch.float32, "router_sigmoid_groups": torch.float32,
    "router_softmax_topk_fp32": torch.float32, "router_softmax_topk_norm_fp32": torch.float32,
    "rotary_table": torch.bfloat16, "rotary_table_fp32": torch.float32,
    "rotary_table_half_width": torch.bfloat16, "rotary_table_scaled": torch.bfloat16,
    "mamba2_scan": torch.float32, "mamba2_step": torch.float32, "delta_decay": torch.float32,
    "gated_delta_step": torch.float32,
}  # fmt: skip
#: Definitions whose operands have 16 bits: with float32 ones they are another.
NARROW = frozenset({"linear_fp32", "linear_fp32_weight"})
SCALARS = {
    "scale": 0.3,
    "softcap": 3.0,
    "alpha": 1.7,
    "k": 3,
    "limit": 1.5,
    "groups": 3,
    "kept": 2,
    "padding_idx": -1,
    "past": 6,
    "divisor": 3.5,
    "fill": -3e4,
    "hides": 0,
    "chunk_size": 7,
    "least": 0.001,
    "most": 3.0,
}
#: The axis that an integer input indexes.
INDEXED = {"top_k_index": "E", "positions": "P", "ends": "N", "ids": "V"}
#: Inputs that are one number on the device.
NUMBERS = {"alpha_p": 0.3, "alpha_n": -1.2, "beta": 0.5, "eps": -1e-6}
WEIGHTS = {"as trained": 1.0, "near zero": 1e-3}
ROWS = {"ordinary": 1.0, "large": 3e3, "near zero": 1e-5}


def make_inputs(
    name: str, dtype: torch.dtype, rows: str, weights: str, sizes: dict[str, int], float_mask: bool = False
) -> dict[str, Any]:
    """Inputs of a Definition in one regime, on torch's default device. A third of the near-zero weights is zero."""
    definition = INVENTORY.definitions[name]
    axes = {**SIZES, **sizes}
    axes.update({a: axis.value for a, axis in definition.axes.items() if axis.type == "const"})
    axes.update(I2=2 * axes["I"], R2=2 * axes["R"], BH=axes["B"] * axes["Hq"])
    if "P == N * K" in definition.constraints:
        axes["P"] = axes["N"] * axes["K"]
    if "O == Hq * E" in definition.constraints:
        axes["O"] = axes["Hq"] * (axes["D"] + axes["V"])
    if "D == 2 * C" in (definition.constraints or ()):
        axes["C"] = axes["D"] // 2
    random = torch.Generator(torch.get_default_device()).manual_seed(
        zlib.crc32(f"{name} {dtype} {rows} {weights} {sizes}".encode())
    )
    amount = min(ROWS[rows], 4.0) if definition.op_type in ("gqa", "moe", "ssm") else ROWS[rows]
    inputs: dict[str, Any] = {}
    for key, spec in definition.inputs.items():
        if spec.shape is None:
            inputs[key] = axes["E"] if key == "count" else SCALARS.get(key, 1e-6)
            if key == "groups" and "H" in definition.axes and axes["H"] % inputs[key]:
                inputs[key] = 4  # groups of columns, which have to be alike
            continue
        shape = [axes[a] for a in spec.shape]
        if key == "order":
            inputs[key] = torch.randperm(shape[0], generator=random)
            continue
        if key == "positions" and "keys" in definition.inputs:  # of a cache
            inputs[key] = torch.randperm(axes["T"], generator=random)[: shape[0]]
            continue
        if spec.dtype in ("int64", "int32"):
            high = axes[INDEXED[key]]
            inputs[key] = torch.randint(0, max(high, 1), shape, generator=random).to(getattr(torch, spec.dtype))
            if key == "ends":  # they never fall, and the last row belongs to somebody
                inputs[key] = inputs[key].sort()[0].clamp(min=0)
                inputs[key][-1:] = high
            continue
        if key in NUMBERS:
            inputs[key] = torch.full(shape, NUMBERS[key], dtype=dtype)
            continue
        if key == "phases":
            angles = torch.randn(shape, generator=random, dtype=torch.float64)
            inputs[key] = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
            continue
        value = torch.randn(shape, generator=random, dtype=torch.float64)
        own = torch.float32 if spec.dtype == "float32" else dtype
        if key.endswith("_proj"):  # of experts: gate times up stays within float16
            value *= max(shape[-1], 1) ** -0.5
        elif key.endswith(("_weight", "_bias")):
            value *= max(shape[-1], 1) ** -0.5 if len(shape) == 2 else WEIGHTS[weights]
        elif key in ("weight", "bias"):
            value *= WEIGHTS[weights]
            value.view(-1)[::3] *= weights != "near zero"
        elif key == "logits":  # no two alike, and none so large that softmax saturates
            value = value.argsort(-1).double() / 8
        elif key == "frequencies":
            value = 10 ** -torch.linspace(0, 4, shape[0], dtype=torch.float64)
        elif key in ("cos", "sin"):
            angles = torch.arange(axes["S"])[:, None] / 10 ** torch.linspace(0, 4, shape[-1] // 2)
            value = getattr(angles, key)().repeat(1, 2).expand(shape)
        elif key == "mask":
            float_mask = float_mask or spec.dtype != "bool"
            seen = torch.rand(shape, generator=random) < 0.6
            seen[..., :1] = True
            if float_mask and name.endswith("filled"):
                value = seen
            else:
                value = torch.where(seen, value, torch.finfo(dtype).min) if float_mask else seen
            own = dtype if float_mask else torch.bool
        else:
            value *= amount
        inputs[key] = value.to(own)
    return inputs


def widened(inputs: dict[str, Any]) -> dict[str, Any]:
    floats = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    phases = {k: v.to(torch.complex128) for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_complex()}
    return {**inputs, **{k: v.double() for k, v in floats.items()}, **phases}


def worst(function: Callable[..., Any], name: str, inputs: dict[str, Any], dtype: torch.dtype) -> float:
    """The largest error over the outputs, in units of what is allowed at that element."""
    with torch.no_grad():
        got = function(**inputs)
    got = got if isinstance(got, tuple) else (got,)
    if name.startswith("router_"):  # in which order the chosen experts stand is free
        order = got[0].argsort(-1, descending=True)
        got = tuple(value.gather(-1, order) for value in got)
    if name == "experts_rows":  # and in which order pairs of one expert
        rows, order, ends = got
        place = (inputs["top_k_index"].reshape(-1)[order] * len(order) + order).argsort()
        got = rows[place], order[place], ends
    expected = EXACT[name](Rounding.of(dtype), name, **widened(inputs))
    ratio = 0.0
    for value, (right, tolerance) in zip(got, expected, strict=True):
        assert value.shape == right.shape
        if not value.is_floating_point():
            assert torch.equal(value, right)
            continue
        assert value.dtype == OUTPUT_DTYPES.get(name, dtype)
        largest = torch.finfo(value.dtype).max
        fits = right.abs() < 0.99 * largest
        assert (value[~fits].abs() > 0.9 * largest).all()
        ratio = max(ratio, ((value.double() - right).abs() / tolerance)[fits].max().item())
    return ratio
