"""`import tilegym_fx` is cheap, and brings in nothing that a machine may lack."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

ROUNDS = 3


def run_python(code: str, folder: Path) -> str:
    """What a fresh interpreter, outside the repository, prints for this code."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cpu_seconds(module: str, folder: Path) -> float:
    """Processor time that a first import takes; unlike time on the clock it does not grow with other work."""
    code = f"import time; t = time.process_time(); import {module}; print(time.process_time() - t)"
    return float(run_python(code, folder))


def test_import_brings_neither_transformers_nor_cutile(tmp_path: Path) -> None:
    loaded = json.loads(run_python("import json, sys, tilegym_fx; print(json.dumps(sorted(sys.modules)))", tmp_path))
    assert "tilegym_fx" in loaded
    heavy = [m for m in loaded if m.split(".")[0] in ("transformers", "cuda", "pydantic", "networkx", "rich")]
    assert heavy == []


def test_import_takes_less_than_a_fifth_more_than_torch(tmp_path: Path) -> None:
    ours, torchs = [], []
    for _ in range(ROUNDS):
        torchs.append(cpu_seconds("torch", tmp_path))
        ours.append(cpu_seconds("tilegym_fx", tmp_path))
    assert statistics.median(ours) < 1.2 * statistics.median(torchs)
