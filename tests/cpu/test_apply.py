"""apply: only this instance changes, everything else keeps working, and a wrong model is refused."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import emit_modules
import pytest
import torch
from emit_support import emitted as support_emitted
from torch import nn

from tilegym_fx import apply as patching
from tilegym_fx.errors import ApplyError

WIDTH = emit_modules.WIDTH


class Block(nn.Module):
    """A stack whose layers are worth rewriting."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = emit_modules.Plain()
        self.gate = emit_modules.Separate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, residual = self.plain(x, x * 2)
        return self.gate(x) + residual


@pytest.fixture(scope="module")
def text() -> str:
    result = support_emitted(Block().eval(), (torch.randn(2, 3, WIDTH),))
    assert {written.match.definition for written in result.written} == {"add_rms_norm", "silu_mul", "linear"}
    return result.text


@pytest.fixture
def emitted(text: str) -> ModuleType:
    return patching.load(text)


@pytest.fixture
def model() -> Block:
    torch.manual_seed(0)
    return Block().eval()


X = torch.linspace(-1, 1, 6 * WIDTH).reshape(2, 3, WIDTH)


@pytest.mark.parametrize("what", [3, None, "model", nn.Linear], ids=str)
def test_what_is_no_module_is_refused(emitted: ModuleType, what: Any) -> None:
    with pytest.raises(ApplyError, match=r"is no module\. Give the model that the file was made for"):
        patching.apply(emitted, what)


def test_apply_runs_the_kernels_and_restore_gives_back_the_same_functions(emitted: ModuleType, model: Block) -> None:
    expected, forward = model(X), model.plain.forward.__func__
    patching.apply(emitted, model)
    assert model.plain.forward.__func__ is not forward
    torch.testing.assert_close(model(X), expected, rtol=0, atol=0)
    patching.restore(model)
    assert model.plain.forward.__func__ is forward
    assert type(model.plain) is emit_modules.Plain
    assert "forward" not in vars(model.plain)


def test_applying_twice_changes_nothing(emitted: ModuleType, model: Block) -> None:
    patching.apply(emitted, model)
    before = [type(m) for m in model.modules()]
    patching.apply(emitted, model)
    assert [type(m) for m in model.modules()] == before


def test_other_instances_and_the_class_are_untouched(emitted: ModuleType, model: Block) -> None:
    other, members = Block(), dict(vars(emit_modules.Plain))
    patching.apply(emitted, model)
    assert type(other.plain) is emit_modules.Plain
    assert dict(vars(emit_modules.Plain)) == members


def test_class_keeps_its_name_and_its_ancestors(emitted: ModuleType, model: Block) -> None:
    patching.apply(emitted, model)
    assert isinstance(model.plain, emit_modules.Plain)
    assert type(model.plain).__name__ == "Plain"
    assert type(model.plain).__module__ == "emit_modules"


def test_state_dict_is_the_same(emitted: ModuleType, model: Block) -> None:
    before = model.state_dict()
    patching.apply(emitted, model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[key] is not None and torch.equal(after[key], before[key]) for key in before)


def test_deep_copy_runs_on_its_own_weights(emitted: ModuleType, model: Block) -> None:
    patching.apply(emitted, model)
    twin = copy.deepcopy(model)
    assert type(twin.plain) is type(model.plain)
    with torch.no_grad():
        twin.plain.norm.weight.zero_()
    assert not torch.equal(twin(X), model(X))
    patching.restore(twin)
    assert type(twin.plain) is emit_modules.Plain
    assert isinstance(model.plain, patching.Patched)


def test_shallow_copy_is_bound_to_itself(emitted: ModuleType, model: Block) -> None:
    patching.apply(emitted, model)
    twin = copy.copy(model.plain)
    assert twin.forward.__self__ is twin


def test_pickle_holds_the_model_as_it_was(emitted: ModuleType, model: Block) -> None:
    expected = model(X)
    patching.apply(emitted, model)
    loaded = pickle.loads(pickle.dumps(model.plain))
    assert type(loaded) is emit_modules.Plain
    stream = io.BytesIO()
    torch.save(model.plain, stream)
    stream.seek(0)
    assert type(torch.load(stream, weights_only=False)) is emit_modules.Plain
    assert isinstance(model.plain, patching.Patched)
    torch.testing.assert_close(model(X), expected, rtol=0, atol=0)


def test_training_gives_the_same_gradients(emitted: ModuleType, model: Block) -> None:
    twin = copy.deepcopy(model)
    patching.apply(emitted, model)
    for each in (model.train(), twin.train()):
        each(X).square().mean().backward()
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


def test_hooks_of_rewritten_modules_still_run(emitted: ModuleType, model: Block) -> None:
    seen: list[Any] = []
    model.plain.register_forward_hook(lambda module, args, output: seen.append(output))
    patching.apply(emitted, model)
    model(X)
    assert len(seen) == 1


def test_compile_makes_no_graph_break(emitted: ModuleType, model: Block) -> None:
    expected = model(X)
    patching.apply(emitted, model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), expected, rtol=0, atol=0)


def test_model_inside_another_module_is_found(emitted: ModuleType, model: Block) -> None:
    holder = nn.Sequential(model)
    patching.apply(emitted, holder)
    assert isinstance(model.plain, patching.Patched)


def test_block_undoes_itself(emitted: ModuleType, model: Block) -> None:
    with patching.applied(emitted, model):
        assert isinstance(model.plain, patching.Patched)
    assert type(model.plain) is emit_modules.Plain


def refused(emitted: ModuleType, model: nn.Module, message: str) -> None:
    before = [type(m) for m in model.modules()]
    with pytest.raises(ApplyError, match=message):
        patching.apply(emitted, model)
    assert [type(m) for m in model.modules()] == before


def test_hook_on_a_module_whose_call_is_gone_is_refused(emitted: ModuleType, model: Block) -> None:
    model.plain.norm.register_forward_hook(lambda module, args, output: None)
    refused(emitted, model, r"plain.*norm has a hook")


def test_exchanged_module_is_refused(emitted: ModuleType, model: Block) -> None:
    class Adapter(nn.Linear):
        """Stands for a LoRA or quantised linear."""

    model.gate.up = Adapter(WIDTH, WIDTH, bias=False)
    refused(emitted, model, r"gate.*up is a .*Adapter")


def test_forward_of_another_library_is_refused(emitted: ModuleType, model: Block) -> None:
    model.plain.forward = model.plain.forward  # type: ignore[method-assign]
    refused(emitted, model, "has a forward of its own")


def test_other_dtype_is_refused(emitted: ModuleType, model: Block) -> None:
    refused(emitted, model.to(torch.bfloat16), "bfloat16")


def test_model_without_the_modules_is_refused(emitted: ModuleType) -> None:
    refused(emitted, nn.Linear(2, 2), "has no Plain")


def test_changed_source_is_refused(text: str, model: Block) -> None:
    patch = patching.load(text).PATCHES[0]
    digest = next(iter(patch.sources.values()))
    refused(patching.load(text.replace(digest, "0" * 64)), model, "is not the text")


def wrapped(forward: Any) -> Any:
    @functools.wraps(forward)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        return [2 * value for value in forward(*args, **kwargs)]

    return doubled


def test_wrapper_around_a_method_that_the_file_replaces_is_refused(
    emitted: ModuleType, model: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emit_modules.Plain, "forward", wrapped(emit_modules.Plain.forward))
    refused(emitted, model, r"Plain\.forward is wrapped by doubled of .*, which the emitted file would run without")


def test_wrapper_around_a_method_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_modules.Plain, "forward", wrapped(emit_modules.Plain.forward))
    result = support_emitted(Block().eval(), (X,))
    assert {written.module_class for written in result.written} == {"Norm", "Separate"}
    model, plain = Block().eval(), Block().eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(patching.apply(patching.load(result.text), model)(X), plain(X))


def test_wrapper_that_stands_in_the_text_is_kept() -> None:
    """`@torch.no_grad()` wraps a method too; the new text says it again."""
    model = emit_modules.NoGrad().eval()
    result = support_emitted(model, (X,))
    assert "    @torch.no_grad()\n" in result.text
    assert patching.is_applied(patching.apply(patching.load(result.text), model))


@pytest.fixture(scope="module")
def with_helpers() -> ModuleType:
    result = support_emitted(emit_modules.HelperWithDocstring().eval(), (X,))
    assert result.written
    return patching.load(result.text)


def other_helper(*args: Any) -> torch.Tensor:
    return args[0]


@functools.wraps(emit_modules.normed)
def around_the_helper(*args: Any) -> torch.Tensor:
    return args[0] * 2


@pytest.mark.parametrize(
    ("owner", "name", "new"),
    [
        (emit_modules, "normed", other_helper),
        (emit_modules, "normed", around_the_helper),
        (emit_modules, "normed", lambda *args: args[0]),
        (emit_modules, "chosen_with_docstring", other_helper),
        (nn.Linear, "forward", other_helper),
    ],
    ids=["inner", "wrapped", "lambda", "outer", "module"],
)
def test_changed_code_that_the_file_has_dropped_is_refused(
    with_helpers: ModuleType, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, new: Any
) -> None:
    model = emit_modules.HelperWithDocstring().eval()
    monkeypatch.setattr(owner, name, new)
    refused(with_helpers, model, rf"{name} is not the text that the emitted file was made from.*Emit the file again")


def test_changed_code_that_the_file_does_not_speak_of_is_no_matter(
    with_helpers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = emit_modules.HelperWithDocstring().eval()
    monkeypatch.setattr(emit_modules, "chosen", other_helper)
    expected = model(X)
    torch.testing.assert_close(patching.apply(with_helpers, model)(X), expected)


def test_other_constant_is_refused(text: str, model: Block) -> None:
    changed = text.replace('"act.inplace": False', '"act.inplace": True')
    assert changed != text
    refused(patching.load(changed), model, "act.inplace = False")


def test_file_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApplyError, match="no emitted file"):
        patching.load(tmp_path / "nothing.py")
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(ApplyError, match="does not import"):
        patching.load(tmp_path / "bad.py")
    (tmp_path / "other.py").write_text("x = 1\n")
    with pytest.raises(ApplyError, match="no PATCHES"):
        patching.load(tmp_path / "other.py")


def test_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "modeling.py"
    patching.save("old\n", path)
    with pytest.raises(UnicodeEncodeError):
        patching.save("new\udc80", path)
    assert path.read_text() == "old\n"
    assert [p.name for p in tmp_path.iterdir()] == ["modeling.py"]


def test_file_may_be_read_by_whom_new_files_may_be_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        patching.save("text\n", tmp_path / "modeling.py")
        assert (tmp_path / "modeling.py").stat().st_mode & 0o777 == 0o640
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


def test_emitted_file_runs_alone_in_a_fresh_process(tmp_path: Path) -> None:
    path = tmp_path / "modeling_plain.py"
    path.write_text(support_emitted(emit_modules.Plain().eval(), (X, X)).text)
    code = (
        "import torch, emit_modules, modeling_plain\n"
        "model = emit_modules.Plain().eval()\n"
        "x = torch.linspace(-1, 1, 6 * 16).reshape(2, 3, 16)\n"
        "before = model(x, x)\n"
        "modeling_plain.apply(model)\n"
        "after = model(x, x)\n"
        "assert all(torch.equal(a, b) for a, b in zip(before, after))\n"
        "modeling_plain.restore(model)\n"
        "assert type(model) is emit_modules.Plain\n"
    )
    support = str(Path(emit_modules.__file__).parent)
    root = str(Path(patching.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{tmp_path}:{support}:{root}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
