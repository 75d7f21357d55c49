"""Kernels written from references: right on regions of real models, in one pass, refused where they must."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT

from tilegym_fx.inventory import Inventory, load
from tilegym_fx.kernel_check import compile_faults, difference, disagreements, finds, random_inputs
from tilegym_fx.new import scaffold
from tilegym_fx.pattern import forms_of
from tilegym_fx.recording import recorded
from tilegym_fx.schema import Definition
from tilegym_fx.synth import SynthesisError, write_kernel

pytestmark = pytest.mark.xdist_group("synth")  # what it sets up is made once
#: Regions drafted from models of transformers 5.24; tests/support/drafts has their code as it was drafted.
DRAFTS = {path.stem: path for path in sorted((ROOT / "tests" / "support" / "drafts").glob("*.json"))}
#: The 30 slowest regions of the shipped table's models: docs/synthesis.md.
REGIONS = {path.stem: path for path in sorted((ROOT / "tests" / "support" / "regions").glob("*.json"))}
#: Those that no kernel can be written for yet, with the operation that stands in the way.
REFUSED = {"gpt_oss_attention_mul_add_cat": "a concatenation inside it is not of columns"}
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")


def put(root: Path, *definitions: Definition) -> Inventory:
    """An inventory of Definitions, each with the kernel that is written for it."""
    for definition in definitions:
        record = definition.model_dump(mode="json", exclude_none=True)
        for spec in (*record["inputs"].values(), *record["outputs"].values()):
            spec.setdefault("shape", None)
        written = write_kernel(definition, definition.name)
        parts = scaffold.Parts(record, written.kernel, written.how, written.dtypes, guards=written.guards)
        scaffold.write(definition.name, parts, root)
    return load(root, shipped=False)


def made(body: str, outputs: str = "N H", dtype: str = "bfloat16", **inputs: str) -> Definition:
    """A Definition whose ``run`` has this body; capitals are variable axes, numbers constant ones."""

    def tensor(shape: str) -> dict[str, Any]:
        kind, _, rest = shape.rpartition(":")
        return {"shape": [f"d{a}" if a.isdigit() else a for a in rest.split()], "dtype": kind or dtype}

    results = [tensor(shape) for shape in outputs.split(",")]
    shapes = (*inputs.values(), *outputs.split(","))
    names = sorted({a for shape in shapes for a in shape.rpartition(":")[2].split()})
    constants = {f"d{a}": {"type": "const", "value": int(a)} for a in names if a.isdigit()}
    code = f"import torch\n\n\ndef run({', '.join(inputs)}):\n" + "".join(f"    {x}\n" for x in body.split("; "))
    return Definition.model_validate(
        {
            "name": "made",
            "op_type": "draft",
            "description": "Made for a test.",
            "tags": ["status:draft"],
            "axes": {**constants, **{a: {"type": "var"} for a in names if not a.isdigit()}},
            "inputs": {name: tensor(shape) for name, shape in inputs.items()},
            "outputs": {f"y{i}": spec for i, spec in enumerate(results)},
            "reference": code,
        }
    )


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Inventory, Path]:
    root = tmp_path_factory.mktemp("sample")
    return put(root, *(Definition.model_validate(json.loads(p.read_text())) for p in DRAFTS.values())), root


def test_there_is_a_sample() -> None:
    assert len(DRAFTS) >= 10


@pytest.mark.parametrize("name", DRAFTS)
def test_a_region_of_a_real_model_is_right(name: str, sample: tuple[Inventory, Path]) -> None:
    assert disagreements(sample[0], name) == []


@pytest.mark.parametrize("name", DRAFTS)
def test_a_region_of_a_real_model_compiles(name: str, sample: tuple[Inventory, Path]) -> None:
    """Architectures take turns; the first region is compiled for all."""
    turn = list(DRAFTS).index(name)
    archs = ARCHITECTURES if turn == 0 else (ARCHITECTURES[turn % 4],)
    assert compile_faults(sample[0], name, archs) == []


@pytest.mark.parametrize("name", DRAFTS)
def test_a_region_of_a_real_model_is_found_again(name: str, sample: tuple[Inventory, Path]) -> None:
    assert finds(sample[0], name)


@pytest.fixture(scope="module")
def thirty(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    paths = [path for name, path in REGIONS.items() if name not in REFUSED]
    definitions = (Definition.model_validate(json.loads(path.read_text())) for path in paths)
    return put(tmp_path_factory.mktemp("thirty"), *definitions)


@pytest.mark.parametrize("name", REGIONS)
def test_one_of_the_thirty_is_right_and_found_again_or_refused_by_name(name: str, request: Any) -> None:
    if name in REFUSED:
        with pytest.raises(SynthesisError, match=REFUSED[name]):
            write_kernel(Definition.model_validate(json.loads(REGIONS[name].read_text())), name)
        return
    inventory = request.getfixturevalue("thirty")
    assert disagreements(inventory, name) == []
    assert finds(inventory, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REGIONS if name not in REFUSED])
def test_one_of_the_thirty_compiles_for_hopper(name: str, thirty: Inventory) -> None:
    assert compile_faults(thirty, name, ["sm_90"]) == []


def test_the_table_of_the_thirty_says_what_is_tested() -> None:
    text = (ROOT / "docs" / "synthesis.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    shown = {row[1].strip("`"): row[5] for row in rows if row[0].isdigit()}
    assert shown.keys() == REGIONS.keys()
    assert {name for name, right in shown.items() if right != "yes"} == REFUSED.keys()
    assert f"{len(REGIONS) - len(REFUSED)} of {len(REGIONS)} are" in text
    timed = json.loads((ROOT / "benchmarks" / "synthesised_regions.json").read_text())
    assert {row["name"] for row in timed} == REGIONS.keys()


def test_written_files_pass_lint_and_say_what_they_are(sample: tuple[Inventory, Path]) -> None:
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "-q",
        "--no-cache",
        "--config",
        str(ROOT / "pyproject.toml"),
    ]
    done = subprocess.run([*ruff, str(sample[1])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for file in (sample[1] / "kernels").glob("*.py"):
        tree = ast.parse(file.read_text())
        assert "def run" not in file.read_text()
        assert ast.get_docstring(tree)
        names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
        assert [n for n in names if n.endswith("_kernel")] == [f"{file.stem}_kernel"]
        assert names[-1] == file.stem


SOFTMAX = "return torch.softmax(x + y, dim=-1)"


def test_a_row_that_fits_is_held_and_a_long_one_is_walked(tmp_path: Path) -> None:
    inventory = put(tmp_path, made(SOFTMAX, x="N H", y="H"))
    for width, held in ((3000, True), (40000, False)):
        with recorded() as launches:
            shapes = ((4, width), (width,))
            inventory.entry_point("made")(*(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes))
        assert len(launches) == 1
        assert launches[0].args[-3] is held
    inputs = random_inputs(inventory.definitions["made"], {"N": 2, "H": 20001})
    assert difference(inventory.reference("made"), inventory.entry_point("made"), inputs) == []


@pytest.mark.parametrize(
    ("body", "outputs", "inputs"),
    [
        ("return x * y + z", "B S H", {"x": "B S H", "y": "B 1 H", "z": "H"}),
        ("return torch.sigmoid(x) * y", "B S H", {"x": "B S 1", "y": "S H"}),
        ("return x - x.amax(-1, keepdim=True)", "N H", {"x": "N H"}),
        ("return x.float().mean(-1)", "float32:N", {"x": "N H"}),
        ("t = x.float(); return t.sum(-1, True), torch.exp(t)", "float32:N 1,float32:N H", {"x": "N H"}),
        ("return torch.cat([-x[..., 32:64], x[..., 0:32]], -1) * y", "N 64", {"x": "N 64", "y": "N 64"}),
        ("return torch.cat([x, y * 2.0], -1)", "N 96", {"x": "N 64", "y": "N 32"}),
        ("return torch.where(m, x, y)", "N H", {"x": "N H", "y": "N H", "m": "bool:N H"}),
        ("return (i.float() * x).cos().to(torch.bfloat16)", "S H", {"i": "int64:S 1", "x": "float32:H"}),
        ("return torch.layer_norm(x, (64,), w, b, 1e-5)", "N 64", {"x": "N 64", "w": "64", "b": "64"}),
        ("return (x > 0.02) & (y < 1)", "bool:N H", {"x": "N H", "y": "N H"}),
        ("return torch.nn.functional.gelu(x) + torch.nn.functional.softplus(x)", "N H", {"x": "N H"}),
    ],
)  # fmt: skip
def test_the_vocabulary_is_right(body: str, outputs: str, inputs: dict[str, str], tmp_path: Path) -> None:
    inventory = put(tmp_path, made(body, outputs, **inputs))
    assert disagreements(inventory, "made") == []
    assert finds(inventory, "made")


@pytest.mark.parametrize(("width", "chunk"), [(768, 256), (3584, 512), (2880, 2048), (720, 1024), (4096, 2048)])
def test_columns_are_cut_so_that_no_tile_is_ragged_where_that_is_possible(
    width: int, chunk: int, tmp_path: Path
) -> None:
    inventory = put(tmp_path, made("return torch.sigmoid(x) * y", x="N H", y="N 1"))
    with recorded() as launches:
        shapes = ((64, width), (64, 1))
        inventory.entry_point("made")(*(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes))
    assert launches[0].args[-2] == chunk
    inputs = random_inputs(inventory.definitions["made"], {"N": 9, "H": width})
    assert difference(inventory.reference("made"), inventory.entry_point("made"), inputs) == []


def test_strided_inputs_are_read_where_they_are(tmp_path: Path) -> None:
    inventory = put(tmp_path, made("return torch.tanh(x) * y", x="N H", y="N H"))
    packed = torch.randn(5, 96)
    inputs = {"x": packed[:, :48], "y": packed[:, 48:]}
    kernel = inventory.entry_point("made")
    assert difference(inventory.reference("made"), kernel, inputs) == []
    turned = {name: value.t() for name, value in inputs.items()}
    assert difference(inventory.reference("made"), kernel, turned) == []


def test_a_number_of_the_definition_is_passed_on(tmp_path: Path) -> None:
    shipped = load().definitions["rms_norm"]
    renamed = shipped.model_copy(update={"name": "made"})
    inventory = put(tmp_path, renamed)
    assert disagreements(inventory, "made") == []


@pytest.mark.parametrize(
    ("body", "inputs", "message"),
    [
        ("return x @ y", {"x": "N H", "y": "H K"}, r"aten\.(matmul|transpose)"),
        ("return x.float().mean(0)", {"x": "N H"}, "aten.mean.dim"),
        ("return torch.cumsum(x, -1)", {"x": "N H"}, "aten.cumsum"),
        ("return torch.sigmoid(x).transpose(-1, -2)", {"x": "N H"}, "aten.transpose"),
    ],
)
def test_what_cannot_be_written_is_named(body: str, inputs: dict[str, str], message: str) -> None:
    with pytest.raises(SynthesisError, match=message):
        write_kernel(made(body, **inputs), "made")


def test_guards_refuse_what_the_kernel_was_not_written_for(tmp_path: Path) -> None:
    inventory = put(tmp_path, made("return torch.tanh(x) * y", x="N H", y="N H"))
    guards = next(forms_of(inventory, "made")).guards

    def refused(x: torch.Tensor, y: torch.Tensor) -> bool:
        return any(guard(x=x, y=y) is not None for guard in guards)

    assert not refused(torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))
    assert refused(torch.zeros(2, 8), torch.zeros(1, 8))
    assert refused(torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.bfloat16))


def test_rows_may_have_any_leading_dimensions_however_they_are_declared(tmp_path: Path) -> None:
    inventory = put(tmp_path, made("return torch.tanh(x) * y", "B S H", x="B S H", y="B S H"))
    guards = next(forms_of(inventory, "made")).guards
    assert not any(guard(x=torch.zeros(7, 8), y=torch.zeros(7, 8)) for guard in guards)
    assert any(guard(x=torch.zeros(2, 5, 8), y=torch.zeros(2, 1, 8)) for guard in guards)


def test_no_rows_launch_nothing(tmp_path: Path) -> None:
    inventory = put(tmp_path, made(SOFTMAX, x="N H", y="H"))
    with recorded() as launches:
        result = inventory.entry_point("made")(torch.zeros(0, 8), torch.zeros(8))
    assert launches == []
    assert result.shape == (0, 8)
