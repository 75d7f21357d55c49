"""Kernels written from references, on a GPU: as right as in the interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from repository import ROOT

from tilegym_fx.inventory import load
from tilegym_fx.kernel_check import disagreements
from tilegym_fx.new import scaffold
from tilegym_fx.schema import Definition
from tilegym_fx.synth import write_kernel

pytestmark = pytest.mark.gpu
DRAFTS = sorted((ROOT / "tests" / "support" / "drafts").glob("*.json"))


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda path: path.stem)
def test_a_region_of_a_real_model_is_right(draft: Path, tmp_path: Path) -> None:
    record = json.loads(draft.read_text(encoding="utf-8"))
    definition = Definition.model_validate(record)
    written = write_kernel(definition, definition.name)
    parts = scaffold.Parts(record, written.kernel, written.how, written.dtypes, guards=written.guards)
    scaffold.write(definition.name, parts, tmp_path)
    assert disagreements(load(tmp_path, shipped=False), definition.name, device="cuda") == []
