"""kernelize, report and restore: what is no module, and options that cannot be, are one clear line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import emit_modules
import pytest
import torch
from torch import nn

from tilegym_fx import kernelize, report, restore
from tilegym_fx.errors import UsageError

X = torch.linspace(-1, 1, 3 * emit_modules.WIDTH).reshape(3, -1)
pytestmark = pytest.mark.filterwarnings("ignore:tilegym_fx")


def scripted() -> Any:
    return torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))


@pytest.mark.parametrize("front_door", [kernelize, report, restore], ids=lambda door: door.__name__)
@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda: "x", "a str is no module"),
        (lambda: None, "a NoneType is no module"),
        (lambda: nn.Linear, "the class Linear is no module"),
        (scripted, "is no module with Python code"),
    ],
    ids=["text", "none", "class", "scripted"],
)
def test_what_is_no_module_is_refused(front_door: Callable[..., Any], made: Callable[[], Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        front_door(made())


@pytest.mark.parametrize("emit", ["missing/folder/of/model.py", 3], ids=["folder", "number"])
def test_emit_that_cannot_be_written_is_refused(tmp_path: Path, emit: Any) -> None:
    (tmp_path / "missing").write_text("a file")
    where = tmp_path / emit if isinstance(emit, str) else emit
    model = emit_modules.Norm()
    with pytest.raises(UsageError, match="cannot be written"):
        kernelize(model, inputs=X, emit=where)
    assert type(model) is emit_modules.Norm


def test_one_name_is_taken_as_one_name() -> None:
    assert report(kernelize(emit_modules.Norm(), inputs=X, only="rms_norm")).counts() == {"rms_norm": 1}
    assert "rms_norm" not in report(kernelize(emit_modules.Norm(), inputs=X, skip="rms_norm")).counts()
