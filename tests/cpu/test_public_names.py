"""The names of the package, as the README uses them, in a process that has imported nothing else."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from repository import ROOT

SETUP = """
import torch, transformers, warnings
warnings.simplefilter("ignore")
config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                                  num_key_value_heads=1, vocab_size=64)
model = transformers.LlamaForCausalLM(config).eval()
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_readme_s_first_block_runs_as_it_is_written() -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    printed = run(SETUP + block[1] + "\nprint(type(fast).__name__)")
    assert "rms_norm" in printed


FUNCTIONS = ("kernelize", "kernelized", "report", "restore", "last_report", "recent_reports")


def test_every_public_function_is_one_whatever_is_asked_for_first() -> None:
    code = "import sys, tilegym_fx\nfor name in sys.argv[1:]: assert callable(getattr(tilegym_fx, name)), name\n"
    code += "for name in sys.argv[1:]: assert callable(getattr(tilegym_fx, name)), name"
    for order in ((first, *(n for n in FUNCTIONS if n != first)) for first in FUNCTIONS):
        done = subprocess.run(
            [sys.executable, "-c", code, *order], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert done.returncode == 0, (order, done.stderr[-500:])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_module_takes_the_name_of_a_public_function(name: str) -> None:
    assert not (ROOT / "tilegym_fx" / f"{name}.py").exists()
    assert not (ROOT / "tilegym_fx" / name).is_dir()
