"""Every reference and every spelling agrees with a float64 evaluation, up to the roundings that it makes."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
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
    "D": 16,
    "N": 12,
    "H": 72,
    "I": 40,
    "K": 48,
    "M": 56,
    "R": 8,
}
HEADS: tuple[dict[str, int], ...] = ({}, {"Hk": 6}, {"Hk": 1}, {"S": 1, "T": 13})
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
