"""Three doors to the same matches: this instance, `torch.compile`'s backend, and the emitted file in a new process."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from fresh_compiler import fresh_compiler
from parts import parts
from small_models import small
from torch import nn

from tilegym_fx.live import kernelize, report, restore
from tilegym_fx.reports import recent_reports

NAMES = ("meta-llama/Llama-3.2-1B", "openai-community/gpt2")
IDS = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(2))

#: Applies an emitted file to a saved model, in a process that has never traced anything.
_APPLY = """
import json, sys
from collections import Counter
import torch
from transformers import AutoModelForCausalLM
from tilegym_fx import apply, inventory, ops
folder, file, ids, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
apply.apply(apply.load(file), model)
seen = Counter()
for name in inventory.load().definitions:
    op = getattr(ops, name)
    def counted(*args, _op=op, _name=name, **kwargs):
        seen[_name] += 1
        return _op(*args, **kwargs)
    setattr(ops, name, counted)
with torch.no_grad():
    torch.save(model(torch.load(ids)).logits, out)
print(json.dumps(seen))
"""


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def in_a_new_process(model: nn.Module, file: Path, folder: Path) -> tuple[dict[str, int], torch.Tensor]:
    """Calls of each op, and the logits."""
    restore(model).save_pretrained(folder)
    torch.save(IDS, folder / "ids.pt")
    arguments = [str(folder), str(file), str(folder / "ids.pt"), str(folder / "logits.pt")]
    ran = subprocess.run(
        [sys.executable, "-c", _APPLY, *arguments], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1]), torch.load(folder / "logits.pt")


def compiled(model: nn.Module) -> tuple[dict[str, int], torch.Tensor]:
    fresh_compiler()
    found = logits(torch.compile(model, backend="tilegym_fx", dynamic=False, options={"inner": "eager"}))
    chosen = [planned.match.definition for outcome in recent_reports() for planned in outcome.chosen]
    fresh_compiler()
    return dict(Counter(chosen)), found


@pytest.mark.parametrize("name", NAMES)
def test_the_same_matches_and_logits_through_three_doors(name: str, tmp_path: Path) -> None:
    original = small(name)
    want = logits(original)
    by_backend, from_backend = compiled(copy.deepcopy(original))
    model = kernelize(original, emit=tmp_path, strict=True, verify=False)
    made = report(model)
    by_instance, from_instance = made.estimates["prefill"].counts(), logits(model)
    (file,) = tmp_path.glob("modeling_*.py")
    assert file.read_text(encoding="utf-8") == made.text
    by_file, from_file = in_a_new_process(model, file, tmp_path / "model")
    assert by_file == by_instance
    taken = [
        {part: count for part, count in parts(counts).items() if part != "residual add"}  # docs/limits.md
        for counts in (by_backend, made.graph_form["prefill"].counts(), by_instance)
    ]
    assert taken[0] == taken[1] == taken[2]
    for found in (from_backend, from_instance, from_file):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(from_file, from_instance)
