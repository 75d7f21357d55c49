"""scan, bench and autokernelize take one dtype: that of the checkpoint's configuration, or the one asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
import torch

from tilegym_fx import bench, scan
from tilegym_fx.autokernelize.ledger import Ledger
from tilegym_fx.autokernelize.loop import _request
from tilegym_fx.autokernelize.measuring import Bench
from tilegym_fx.autokernelize.options import Options
from tilegym_fx.autokernelize.preflight import environment
from tilegym_fx.autokernelize.subject import capture
from tilegym_fx.bench.__main__ import main
from tilegym_fx.bench.models import make_model

Asked = str | None
both = pytest.mark.parametrize(("asked", "dtype"), [(None, "float32"), ("float16", "float16")])


@pytest.fixture
def model(tmp_path: Path) -> str:
    return tiny_folder.write(tmp_path, dtype="float32")


def options(asked: Asked) -> list[str]:
    return [] if asked is None else ["--dtype", asked]


def dtypes(module: torch.nn.Module) -> set[str]:
    return {str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()}


@both
def test_scan(asked: Asked, dtype: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert scan.main([model, "--json", "--phase", "decode", "--seq", "8", *options(asked)]) == scan.EXIT_OK
    assert json.loads(capsys.readouterr().out)["dtype"] == dtype


@both
def test_bench(
    asked: Asked, dtype: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job carries it to the process of its variant."""
    made = []

    def recorded(job: Any) -> Any:
        made.append(make_model(job))
        return made[-1]

    monkeypatch.setattr(bench.worker, "make_model", recorded)
    quick = ["--dry-run", "--here", "--json", "--variants", "eager", "--phases", "decode:1@4", "--repeats", "3"]
    assert main([model, *quick, *options(asked)]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == dtype
    assert dtypes(made[0]) == {dtype}


@both
def test_autokernelize(asked: Asked, dtype: str, model: str, tmp_path: Path) -> None:
    """The benchmark that judges an experiment is told which, and so is whoever goes on with the run."""
    request = _request(Options(model, tmp_path, tmp_path, dry_run=True, dtype=asked), Ledger(model, {}), 0)
    subject = capture(request.model, ("decode",), dtype=request.dtype)
    assert dtypes(subject.module) == {subject.dtype} == {dtype}
    assert Bench(subject.name, None, tmp_path, tmp_path, 1, dtype=subject.dtype)._job("eager").dtype == dtype
    assert environment(dry_run=True, device="h200", dtype=asked).get("dtype") == asked
