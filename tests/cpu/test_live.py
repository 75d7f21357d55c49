"""kernelize, report and restore: what is no module, and options that cannot be, are one clear line."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import emit_modules
import pytest
import torch
from torch import nn

from tilegym_fx import kernelize, last_report, report, restore
from tilegym_fx.errors import ExportError, UsageError, VerifyError

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


@pytest.mark.parametrize("flag", ["verify", "strict"])
@pytest.mark.parametrize("value", ["no", None, 0])
def test_a_flag_that_is_neither_true_nor_false_is_refused(flag: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{flag}={value!r} is neither True nor False"):
        kernelize(nn.Linear(2, 2), inputs=torch.ones(1, 2), **{flag: value})


@pytest.mark.parametrize("emit", ["missing/folder/of/model.py", 3], ids=["folder", "number"])
def test_emit_that_cannot_be_written_is_refused(tmp_path: Path, emit: Any) -> None:
    (tmp_path / "missing").write_text("a file")
    where = tmp_path / emit if isinstance(emit, str) else emit
    model = emit_modules.Norm()
    with pytest.raises(UsageError, match="cannot be written"):
        kernelize(model, inputs=X, emit=where)
    assert type(model) is emit_modules.Norm


@pytest.mark.parametrize("name", ["mine.py", ""], ids=["file", "folder"])
def test_emit_writes_over_no_file_that_is_not_ours(tmp_path: Path, name: str) -> None:
    file = tmp_path / (name or "modeling_norm.py")
    file.write_text("# precious")
    model = emit_modules.Norm()
    with pytest.raises(UsageError, match=f"{file.name}' was not written by tilegym_fx"):
        kernelize(model, inputs=X, emit=tmp_path / name)
    assert type(model) is emit_modules.Norm
    assert file.read_text() == "# precious"
    file.write_text("\n")
    for _ in range(2):  # over an empty file, and over one of ours
        kernelize(model, inputs=X, emit=tmp_path / name)
        assert "PATCHES" in file.read_text()


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        (torch.ones(3, emit_modules.WIDTH + 1), "RuntimeError"),
        ({"zz": X}, "unexpected keyword argument 'zz'"),
        ("hello", "Error"),
        ((), "missing 1 required positional argument"),
    ],
    ids=["shape", "name", "text", "none"],
)
def test_inputs_that_the_model_itself_does_not_take_are_told(inputs: Any, what: str) -> None:
    model, told = emit_modules.Norm(), f"Norm does not run with these inputs: .*{what}.*Give what it is called with"
    with pytest.warns(UserWarning, match=f"Norm is unchanged: {told}"):
        kernelize(model, inputs=inputs)
    assert type(model) is emit_modules.Norm
    with pytest.raises(ExportError, match=told):
        kernelize(model, inputs=inputs, strict=True)


def test_a_graph_of_a_kernelized_model_counts_the_ops_that_are_there() -> None:
    model = kernelize(two_gates(), inputs=X)
    torch.compile(model, backend="tilegym_fx", options={"inner": "eager"})(X)
    found = last_report()
    assert found.already == 2
    assert "2 of ops of ours already: 2 places" in str(found)
    assert found.counts() == {"linear": 2}
    assert found.coverage == 1


def two_gates() -> Any:
    return nn.Sequential(emit_modules.Separate(), emit_modules.Separate())


def test_a_report_on_an_emitted_file_says_what_the_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal() -> str:
        with pytest.raises(UsageError) as refused:
            report(model)
        return str(refused.value)

    kernelize(two_gates(), inputs=X, emit=tmp_path / "modeling_two_gates.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = two_gates()
    assert "has not been kernelized" in refusal()
    importlib.import_module("modeling_two_gates").apply(model)
    said = refusal()
    assert f"runs the emitted code of {tmp_path / 'modeling_two_gates.py'}, which kernelize did not" in said
    assert "The head of the emitted file lists its places; tilegym_fx.restore(model) takes it off" in said
    assert "again" not in said
    model[0].act.register_forward_hook(lambda *_: None)
    assert "did not put there; 0 (Separate) runs its author's code again: the call of a SiLU is " in refusal()
    model[1].act.register_forward_hook(lambda *_: None)
    assert "Sequential runs its author's code again after an emitted file was applied to it; 0 (Sep" in refusal()
    restore(model)
    assert "has not been kernelized" in refusal()


def test_one_name_is_taken_as_one_name() -> None:
    assert report(kernelize(emit_modules.Norm(), inputs=X, only="rms_norm")).counts() == {"rms_norm": 1}
    assert "rms_norm" not in report(kernelize(emit_modules.Norm(), inputs=X, skip="rms_norm")).counts()


@pytest.mark.parametrize("options", ["reduce-overhead", 3, {"mode": "nope"}, {"backend": "nope"}, {"nope": 1}], ids=str)
def test_what_torch_compile_does_not_take_is_refused_before_anything_is_done(options: Any) -> None:
    model = emit_modules.Norm()
    with pytest.raises(UsageError, match="is nothing that torch"):
        kernelize(model, inputs=X, compile=options)
    assert type(model) is emit_modules.Norm


def test_what_torch_compile_takes_is_handed_on() -> None:
    model = kernelize(emit_modules.Norm(), inputs=X, compile={"backend": "eager", "dynamic": False})
    assert model._compiled_call_impl is not None
    torch.testing.assert_close(model(X), emit_modules.Norm()(X))


class OnlyCaptured(emit_modules.WithNorm):
    """Runs in a capture only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            raise RuntimeError("the database is not there")
        return self.norm(x)


def test_model_that_does_not_run_is_left_as_it_is() -> None:
    model = OnlyCaptured()
    with pytest.warns(match="OnlyCaptured is unchanged: .* does not run by itself: RuntimeError: the database is not"):
        kernelize(model, inputs=X)
    with pytest.raises(UsageError, match=r"left this OnlyCaptured as it was: .* the database is not there.*strict="):
        report(model)
    with pytest.raises(ExportError, match="pass verify=False"):
        kernelize(model, inputs=X, strict=True)
    assert type(model.norm) is emit_modules.Norm
    assert report(kernelize(model, inputs=X, verify=False)).counts() == {"rms_norm": 1}


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ValueError("other shapes"), VerifyError), (torch.OutOfMemoryError("full"), torch.OutOfMemoryError)],
    ids=["fault", "memory"],
)
def test_result_that_does_not_run_is_put_back(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    def broken(*_: Any) -> Any:
        raise error

    model = emit_modules.Norm()
    monkeypatch.setattr("tilegym_fx.verify.compare", broken)
    monkeypatch.setattr("tilegym_fx.verify.apart", lambda *_: [])
    with pytest.raises(raised, match=r"Norm with rms_norm does not run: ValueError: other shapes|full"):
        kernelize(model, inputs=X)
    assert type(model) is emit_modules.Norm


def test_a_report_says_what_runs_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kernelize(emit_modules.Norm(), inputs=X)
    on_a_cpu = str(report(model)).splitlines()
    assert on_a_cpu[0] == "Norm: 1 place runs PyTorch references, as their tensors are on a CPU"
    assert any(line.startswith("  estimated coverage of call on h200: ") for line in on_a_cpu)
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    assert str(report(model)).startswith("Norm: 1 place runs kernels in the CPU interpreter\n")
    monkeypatch.setattr("tilegym_fx.live.model_device", lambda model: torch.device("cuda", 0))
    assert str(report(model)).startswith("Norm: 1 place runs kernels\n")


def test_the_emitted_text_names_what_was_planned_and_claims_no_run() -> None:
    text = report(kernelize(emit_modules.Norm(), inputs=X)).text
    assert (
        "Solution planned for each; a call runs one for its GPU, and on a CPU the reference:\n    rms_norm  rms_norm\n"
        in text
    )
    assert " ran " not in text.partition("import")[0]


class InOneDtype(emit_modules.WithNorm):
    """Takes float32 and nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32, please")
        return self.norm(x)


def test_report_says_when_no_wider_run_judged() -> None:
    judged = report(kernelize(emit_modules.Norm(), inputs=X))
    alone = report(kernelize(InOneDtype(), inputs=X))
    assert (judged.no_wider, "wider dtype" in str(judged)) == ("", False)
    assert "not with one in a wider dtype: its code takes no torch.float64: TypeError: float32, please" in str(alone)
    assert all(check.passed for check in (*judged.checks, *alone.checks))


class Meeting(emit_modules.WithNorm):
    """Says that it runs, and stays until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.go_on.wait(60)
        return self.norm(x)


def test_model_that_another_thread_runs_is_refused() -> None:
    model = Meeting()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(model, X)
        assert model.entered.wait(60)
        with pytest.raises(UsageError, match="Meeting is being called in another thread"):
            kernelize(model, inputs=X)
        model.go_on.set()
        torch.testing.assert_close(running.result(), emit_modules.Norm()(X))
    assert report(kernelize(model, inputs=X)).counts() == {"rms_norm": 1}


def test_call_that_begins_in_another_thread_waits() -> None:
    model = Meeting()
    with ThreadPoolExecutor(2) as pool:
        done = pool.submit(kernelize, model, inputs=X)
        assert model.entered.wait(60)  # it is being captured
        other, calling = pool.submit(model, X), emit_modules.Norm()(X)
        torch.testing.assert_close(emit_modules.Norm()(X), calling)  # other models run on
        assert not other.done()
        model.go_on.set()
        torch.testing.assert_close(other.result(), calling)
        assert report(done.result()).counts() == {"rms_norm": 1}


def test_two_threads_kernelize_one_after_the_other() -> None:
    models = [emit_modules.Norm() for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda model: kernelize(model, inputs=X), models))
    assert [report(model).counts() for model in done] == [{"rms_norm": 1}] * 2
