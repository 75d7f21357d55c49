"""Every reference and every spelling agrees with a float64 evaluation, up to the roundings that it makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inputs import DTYPES, HEADS, INVENTORY, NARROW, ROWS, WEIGHTS, make_inputs, worst

from tilegym_fx.pattern import defaults


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
    what = INVENTORY.definitions[name]
    attention = what.op_type == "gqa" or "Hk" in what.axes
    cases = [
        (rows, weights, sizes, float_mask)
        for rows in ROWS
        for weights in WEIGHTS
        for sizes in (HEADS if attention else ({},))
        for float_mask in ((False, True) if name.endswith(("masked", "filled")) else (False,))
    ]
    ran = 0
    for rows, weights, sizes, float_mask in cases:
        inputs = make_inputs(name, dtype, rows, weights, sizes, float_mask) | defaults(function_of(name, form))
        is_outside = refused(name, form, inputs)
        if name in NARROW and dtype == torch.float32:
            assert is_outside
            ran += 1
        elif not is_outside:
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
    cited = [line for d in INVENTORY.definitions.values() for line in d.reference.splitlines() if "Source:" in line]
    cited += [s for name in INVENTORY.definitions for p in INVENTORY.spellings(name).values() for s in p.sources]
    assert len(cited) > len(INVENTORY.definitions)
    for source in cited:
        path, _, anchor = source.partition("/blob/v5.24.0/src/transformers/")[2].partition("#")
        first, last = (int(line[1:]) for line in anchor.split("-"))
        lines = (root / path).read_text().splitlines()
        assert 1 <= first <= last <= len(lines), source
        assert lines[first - 1].strip(), f"{source} begins at an empty line"
        assert lines[last - 1].strip(), f"{source} ends at an empty line"
