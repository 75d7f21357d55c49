"""Who could compute a region: an existing Definition as it is, with an adapter that is tested, or nobody."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegym_fx import candidates
from tilegym_fx.adapters import adapter_file
from tilegym_fx.candidates import Candidate, candidate_for
from tilegym_fx.inventory import Inventory, load
from tilegym_fx.inventory.code import load_file
from tilegym_fx.kernel_check import difference, random_inputs
from tilegym_fx.new.scaffold import files_beside
from tilegym_fx.schema import Definition

pytestmark = pytest.mark.xdist_group("candidates")  # what it sets up is made once
INVENTORY = load()


def region(body: str, output: str = "N H", dtype: str = "bfloat16", **inputs: str) -> Definition:
    """A draft whose ``run`` has this body; shapes are axis names, ``1`` is the constant."""

    def tensor(shape: str) -> dict[str, Any]:
        return {"shape": [f"one{a}" if a == "1" else a for a in shape.split()], "dtype": dtype}

    names = {a for shape in (*inputs.values(), output) for a in shape.split()} - {"1"}
    axes = {"one1": {"type": "const", "value": 1}, **{name: {"type": "var"} for name in names}}
    code = f"import torch\n\n\ndef run({', '.join(inputs)}):\n" + "".join(f"    {x}\n" for x in body.split("; "))
    return Definition.model_validate(
        {
            "name": "region",
            "op_type": "draft",
            "axes": axes,
            "inputs": {name: tensor(shape) for name, shape in inputs.items()},
            "outputs": {"y0": tensor(output)},
            "reference": code,
        }
    )


SILU_MUL = "return torch.nn.functional.silu({}) * {}"
NORM = (
    "wide = x0.float(); normal = wide * torch.rsqrt(wide.pow(2).mean({dim}, keepdim=True) + 1e-6); "
    "return x1 * normal.to(x0.dtype)"
)


def computes(found: Candidate, draft: Definition, inventory: Inventory, folder: Path) -> list[str]:
    """What is wrong with the kernel file that a compatible candidate gives, in the interpreter."""
    assert found.adapter is not None
    solution = inventory.solutions[found.solution or ""]
    texts = inventory.source_texts(solution.name)
    definition = inventory.definitions[found.definition or ""]
    source = texts[solution.entry_file]
    text = adapter_file(found.adapter, "adapted", draft, definition, source, solution.entry_function)
    for path, beside in {"adapted.py": text, **files_beside(text, solution.entry_file, texts)}.items():
        (folder / Path(path).name).write_text(beside)
    kernel = load_file(folder, folder / "adapted.py").adapted
    scope: dict[str, Any] = {}
    exec(draft.reference, scope)
    return difference(scope["run"], kernel, random_inputs(draft))


def test_a_definition_in_another_order_of_arguments_is_exact() -> None:
    found = candidate_for(region(SILU_MUL.format("x1", "x0"), x0="N H", x1="N H"), INVENTORY)
    assert (found.kind, found.definition, found.solution) == ("exact", "silu_mul", "silu_mul")


def test_a_literal_where_the_definition_has_a_number_is_exact() -> None:
    found = candidate_for(region(NORM.format(dim=-1), x0="N H", x1="H"), INVENTORY)
    assert (found.kind, found.definition) == ("exact", "rms_norm")


def test_a_broadcast_operand_is_compatible(tmp_path: Path) -> None:
    draft = region(SILU_MUL.format("x0", "x1"), x0="N H", x1="1 H")
    found = candidate_for(draft, INVENTORY)
    assert (found.kind, found.definition) == ("compatible", "silu_mul")
    assert found.adapter is not None
    assert found.adapter.broadcast
    assert computes(found, draft, INVENTORY, tmp_path) == []


def test_rows_in_another_dimension_are_compatible(tmp_path: Path) -> None:
    body = NORM.format(dim=-2).replace("x1 *", "x1.unsqueeze(-1) *")
    draft = region(body, "B H S", x0="B H S", x1="H")
    found = candidate_for(draft, INVENTORY)
    assert (found.kind, found.definition) == ("compatible", "rms_norm")
    assert found.adapter is not None
    assert found.adapter.dim == -2
    assert computes(found, draft, INVENTORY, tmp_path) == []


def test_a_dtype_that_a_solution_is_not_verified_for_is_cast(tmp_path: Path) -> None:
    record = INVENTORY.solutions["silu_mul"]
    narrow = {**record.model_dump(mode="json", exclude_none=True), "tags": ["dtype:float32"]}
    for folder in ("definitions", "solutions", "kernels"):
        (tmp_path / folder).mkdir()
    file = INVENTORY.file_of(INVENTORY.definitions["silu_mul"])
    (tmp_path / "definitions" / "silu_mul.json").write_text(file.read_text())
    (tmp_path / "solutions" / "silu_mul.json").write_text(json.dumps(narrow))
    source = INVENTORY.source_texts("silu_mul")[record.entry_file]
    (tmp_path / record.entry_file).write_text(source)
    narrow_inventory = load(tmp_path, shipped=False)
    draft = region(SILU_MUL.format("x0", "x1"), dtype="float16", x0="N H", x1="N H")
    found = candidate_for(draft, narrow_inventory)
    assert found.kind in ("compatible", "none")
    if found.kind == "compatible":
        assert found.adapter is not None
        assert found.adapter.cast == "float32"


def test_a_region_that_only_looks_alike_is_none() -> None:
    draft = region("return torch.nn.functional.silu(x0) * torch.tanh(x1)", x0="N H", x1="N H")
    assert candidate_for(draft, INVENTORY).kind == "none"


def test_the_same_operations_put_together_otherwise_are_none() -> None:
    draft = region("return torch.nn.functional.silu(x0 * x1)", x0="N H", x1="N H")
    assert candidate_for(draft, INVENTORY).kind == "none"


def test_a_definition_without_a_solution_is_exact_and_says_that_it_has_none(tmp_path: Path) -> None:
    (tmp_path / "definitions").mkdir()
    (tmp_path / "solutions").mkdir()
    file = INVENTORY.file_of(INVENTORY.definitions["silu_mul"])
    (tmp_path / "definitions" / "silu_mul.json").write_text(file.read_text())
    bare = load(tmp_path, shipped=False)
    found = candidate_for(region(SILU_MUL.format("x0", "x1"), x0="N H", x1="N H"), bare)
    assert (found.kind, found.solution) == ("exact", None)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_adapter_gives_contiguous_results_of_the_regions_dtype(seed: int) -> None:
    found = candidate_for(region(SILU_MUL.format("x0", "x1"), x0="N H", x1="1 H"), INVENTORY)
    assert found.adapter is not None
    inputs = {"x0": torch.randn(3, 5).bfloat16(), "x1": torch.randn(1, 5).bfloat16()}
    result = found.adapter.apply(INVENTORY.reference("silu_mul"), INVENTORY.definitions["silu_mul"], inputs)
    assert result.dtype == torch.bfloat16
    assert result.is_contiguous()


def test_a_large_region_does_not_hold_up_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region runs once for each sample, and the search ends in time, however many adapters there are."""
    calls = []
    real = candidates.reference_function

    def counted(name: str, text: str) -> Any:
        run = real(name, text)
        return lambda *args, **kw: calls.append(1) or run(*args, **kw)

    monkeypatch.setattr(candidates, "reference_function", counted)
    draft = region("return torch.nn.functional.silu(x0) * x1 * 2.5 - 2.5", x0="N H", x1="N H")
    monkeypatch.setattr(
        candidates, "_works_of", lambda inventory, name: {candidates._work(candidates._graph_of(draft)[0])}
    )
    monkeypatch.setattr(candidates, "_MAX_SECONDS", 0.5)
    named = {"silu_mul": INVENTORY.definitions["silu_mul"]}
    monkeypatch.setattr(candidates, "_exact", lambda *_: None)
    monkeypatch.setattr(INVENTORY, "definitions", named)
    calls.clear()
    started = time.monotonic()
    assert candidate_for(draft, INVENTORY).kind == "none"
    assert time.monotonic() - started < 10
    assert len(calls) <= 6
