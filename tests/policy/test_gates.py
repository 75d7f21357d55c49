"""Every gate of `make test` is live: on a tiny repository it passes, and on one planted fault it fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

CLEAN = '''"""A module without a fault."""

from __future__ import annotations


def twice(number: int) -> int:
    """Twice the number."""
    return 2 * number
'''
CLEAN_TEST = '''"""A test without a fault."""

from tilegym_fx.planted import twice


def test_twice() -> None:
    assert twice(2) == 4
'''

#: Rule family -> lines that break one of its rules and are well formatted.
LINT_FAULTS = {
    "E": "spam = lambda: 1\n",
    "F": "print(undefined)\n",
    "I": "import sys\nimport os\n\nprint(sys, os)\n",
    "B": "def spam(eggs=[]):\n    return eggs\n",
    "UP": "from typing import List\n\nSpam = List[int]\n",
    "RUF": "spam = [*[1], 2] + [3]\n",
    "SIM": "def spam(eggs):\n    if eggs:\n        return True\n    else:\n        return False\n",
    "PERF": "def spam(eggs):\n    for key, _ in eggs.items():\n        print(key)\n",
    "PT": "import pytest\n\n\n@pytest.mark.parametrize('a,b', [(1, 2)])\ndef test_spam(a, b):\n    pass\n",
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of one module and one test, under the real Makefile and the real configuration."""
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "tilegym_fx").mkdir()
    (tmp_path / "tilegym_fx" / "__init__.py").write_text('"""A package."""\n')
    (tmp_path / "tilegym_fx" / "planted.py").write_text(CLEAN)
    (tmp_path / "tests" / "support").mkdir(parents=True)
    (tmp_path / "tests" / "test_planted.py").write_text(CLEAN_TEST)
    return tmp_path


def make(clone: Path, target: str) -> subprocess.CompletedProcess[str]:
    """Run a target of the Makefile with the tools of this environment, and without installing anything."""
    ready = f"{sys.prefix}/.installed-dev"
    command = ["make", "-o", ready, f"VENV={sys.prefix}", "JOBS=0", target]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "MAKE", "MFLAGS"))}
    environment["PYTHONPATH"] = str(clone)
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("target", ["lint", "unit"])
def test_a_gate_passes_where_there_is_no_fault(clone: Path, target: str) -> None:
    done = make(clone, target)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("family", LINT_FAULTS)
def test_ruff_stops_a_planted_fault(clone: Path, family: str) -> None:
    (clone / "planted.py").write_text(LINT_FAULTS[family])
    done = make(clone, "lint")
    assert done.returncode != 0
    assert re.search(rf"^{family}\d+ ", done.stdout, re.MULTILINE)
    assert "planted.py" in done.stdout


def test_the_formatter_stops_a_badly_laid_out_file(clone: Path) -> None:
    (clone / "planted.py").write_text("spam   =  {  'eggs':1 }\n")
    done = make(clone, "lint")
    assert done.returncode != 0
    assert "would be reformatted" in done.stdout


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("def spam(eggs):\n    return eggs\n", "no-untyped-def"),
        ("def spam() -> int:\n    return 'eggs'\n", "return-value"),
        ("def spam(eggs: list) -> None: ...\n", "type-arg"),
    ],
)
def test_mypy_stops_a_planted_fault(clone: Path, fault: str, code: str) -> None:
    (clone / "tilegym_fx" / "planted.py").write_text(fault.replace("'", '"'))
    done = make(clone, "lint")
    assert done.returncode != 0
    assert f"[{code}]" in done.stdout


def test_pytest_stops_a_failing_test(clone: Path) -> None:
    (clone / "tests" / "test_planted.py").write_text(CLEAN_TEST.replace("== 4", "== 5"))
    assert make(clone, "unit").returncode != 0


def test_ci_runs_what_the_readme_says() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    readme = (ROOT / "README.md").read_text()
    assert "\nmake scan\n" in readme
    assert "\nmake test\n" in readme
