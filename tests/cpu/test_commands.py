"""`python -m tilegym_fx` names the commands that there are."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from repository import ROOT

from tilegym_fx.__main__ import COMMANDS, main


def test_every_command_is_named_and_every_name_is_one() -> None:
    package = ROOT / "tilegym_fx"
    files = {path.stem for path in package.glob("*.py") if 'if __name__ == "__main__"' in path.read_text("utf-8")}
    folders = {path.parent.name for path in package.glob("*/__main__.py")}
    assert set(COMMANDS) == (files | folders) - {"__main__"}
    assert all(importlib.util.find_spec(f"tilegym_fx.{name}") for name in COMMANDS)


@pytest.mark.parametrize(("given", "status"), [([], 0), (["--help"], 0), (["scan"], 2)])
def test_it_says_how_a_command_is_called(
    given: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tilegym_fx", *given])
    assert main() == status
    assert "python -m tilegym_fx.scan MODEL" in capsys.readouterr().out
