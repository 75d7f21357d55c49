# ruff: noqa: PT030, PT031 - what warns here is several steps, and the texts are asserted on
"""watch: what is put on a model after `apply`, inside a call that is skipped, runs all the same."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import emit_modules
import pytest
import torch
from emit_support import emitted as support_emitted
from torch import nn
from torch.nn.utils import parametrize

from tilegym_fx import apply as patching
from tilegym_fx.apply import given_back
from tilegym_fx.errors import ApplyError

WIDTH = emit_modules.WIDTH
X = torch.linspace(-1, 1, 6 * WIDTH).reshape(2, 3, WIDTH)


class Block(nn.Module):
    """Two parts that are rewritten independently of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = emit_modules.Plain()
        self.gate = emit_modules.Separate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, residual = self.plain(x, x * 2)
        return self.gate(x) + residual


class Wrapper(nn.Module):
    """What an adapter is: it holds the linear, looks like one, and adds something."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 0.5


class Quantised(nn.Module):
    """What a quantised linear is: no linear, and a weight of another dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale)


class SubclassedWeight(torch.Tensor):
    """A parameter that computes in its own way, as torchao's do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            args = (args[0], args[1].as_subclass(torch.Tensor) * 2, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def by_attribute(model: Block) -> None:
    model.gate.up = Wrapper(model.gate.up)


def by_add_module(model: Block) -> None:
    model.gate.add_module("up", Wrapper(model.gate.up))


def by_register_module(model: Block) -> None:
    model.gate.register_module("up", Wrapper(model.gate.up))


def by_set_submodule(model: Block) -> None:
    model.set_submodule("gate.up", Wrapper(model.gate.up))


def deleted_and_set(model: Block) -> None:
    held = model.gate.up
    del model.gate.up
    model.gate.up = Wrapper(held)


def quantised(model: Block) -> None:
    model.gate.gate = Quantised(model.gate.gate)


def forward_hook(model: Block) -> None:
    model.gate.gate.register_forward_hook(lambda module, args, output: output * 3)


def forward_pre_hook(model: Block) -> None:
    model.gate.up.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def own_forward(model: Block) -> None:
    linear = model.gate.up
    linear._old_forward = linear.forward
    linear.forward = lambda x: linear._old_forward(x) - 1


def subclassed_weight(model: Block) -> None:
    weight = model.gate.up.weight.detach().as_subclass(SubclassedWeight)
    del model.gate.up.weight
    model.gate.up.weight = weight


def parametrized(model: Block) -> None:
    parametrize.register_parametrization(model.gate.up, "weight", Doubled())


def weight_from_a_hook(model: Block) -> None:
    torch.nn.utils.spectral_norm(model.gate.up)


def other_activation(model: Block) -> None:
    model.gate.act = nn.ReLU()


def other_dtype_of_a_part(model: Block) -> None:
    model.gate.up.double()
    model.gate.up.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    model.gate.up.register_forward_hook(lambda module, args, output: output.float())


def other_norm(model: Block) -> None:
    model.plain.norm = nn.LayerNorm(WIDTH)


def hook_on_the_norm(model: Block) -> None:
    model.plain.norm.register_forward_hook(lambda module, args, output: output + 1)


CHANGES: dict[Callable[[Block], None], str] = {
    **dict.fromkeys(
        (
            by_attribute, by_add_module, by_register_module, by_set_submodule, deleted_and_set, quantised,
            forward_hook, forward_pre_hook, own_forward, subclassed_weight, parametrized, weight_from_a_hook,
            other_activation, other_dtype_of_a_part,
        ),
        "gate",
    ),
    other_norm: "plain",
    hook_on_the_norm: "plain",
}  # fmt: skip


@pytest.fixture(scope="module")
def module() -> ModuleType:
    result = support_emitted(Block().eval(), (X,))
    assert {written.match.definition for written in result.written} == {"add_rms_norm", "silu_mul", "linear"}
    return patching.load(result.text)


@pytest.fixture
def model() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def changed(change: Callable[[Block], None], model: Block) -> None:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change(model)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_inside_a_skipped_call_runs(module: ModuleType, model: Block, change: Callable[[Block], None]) -> None:
    original = copy.deepcopy(model)
    patching.apply(module, model)
    changed(change, model)
    changed(change, original)
    torch.testing.assert_close(model(X), original(X), rtol=0, atol=0)
    touched = CHANGES[change]
    assert [back.path for back in given_back(model)] == [touched]
    other = {"gate": "plain", "plain": "gate"}[touched]
    assert isinstance(model.get_submodule(other), patching.Patched)
    assert model.state_dict().keys() == original.state_dict().keys()
    patching.restore(model)
    torch.testing.assert_close(model(X), original(X), rtol=0, atol=0)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()] or change is parametrized


def test_backward_hook_on_a_skipped_call_runs(module: ModuleType, model: Block) -> None:
    patching.apply(module, model)
    seen: list[int] = []
    with pytest.warns(UserWarning, match="runs its author's code again"):
        model.gate.up.register_full_backward_hook(lambda *args: seen.append(1))
    model(X.clone().requires_grad_()).sum().backward()
    assert seen == [1]


def test_user_is_told_once_what_happened_and_what_to_do(module: ModuleType, model: Block) -> None:
    patching.apply(module, model)
    with pytest.warns(UserWarning) as caught:
        by_attribute(model)
        other_norm(model)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "gate (Separate) runs its author's code again: up of gate became a" in text
    assert "kernelize(model) again" in text
    assert [str(back).partition(":")[0] for back in given_back(model)] == [
        "plain (Plain) runs its author's code again", "gate (Separate) runs its author's code again",
    ]  # fmt: skip


def test_what_an_emitted_method_does_not_notice_changes_nothing(module: ModuleType, model: Block) -> None:
    patching.apply(module, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.gate.up.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        model.gate.up = model.gate.up
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
        model.train().eval().requires_grad_(False).float()
        model.gate.register_forward_hook(lambda module, args, output: output + 1)
        model.gate.note = "an attribute that nobody reads"
    assert given_back(model) == []
    assert isinstance(model.gate, patching.Patched)
    expected = copy.deepcopy(model)
    torch.testing.assert_close(model(X), patching.restore(expected)(X), rtol=0, atol=0)


def test_other_dtype_gives_everything_back_that_was_made_for_the_first(module: ModuleType, model: Block) -> None:
    original = copy.deepcopy(model).to(torch.bfloat16)
    patching.apply(module, model)
    with pytest.warns(UserWarning, match=r"became torch\.bfloat16"):
        model.to(torch.bfloat16)
    assert len(given_back(model)) == 2
    x = X.to(torch.bfloat16)
    torch.testing.assert_close(model(x), original(x), rtol=0, atol=0)


def test_watched_modules_are_what_they_were_to_everybody_else(module: ModuleType, model: Block) -> None:
    patching.apply(module, model)
    linear = model.gate.up
    assert type(linear) is not nn.Linear
    assert isinstance(linear, nn.Linear)
    assert (type(linear).__name__, type(linear).__module__) == ("Linear", "torch.nn.modules.linear")
    assert repr(linear) == repr(nn.Linear(WIDTH, WIDTH, bias=False))
    assert vars(linear).keys() == vars(nn.Linear(WIDTH, WIDTH, bias=False)).keys()
    assert type(copy.deepcopy(linear)) is nn.Linear
    assert type(pickle.loads(pickle.dumps(linear))) is nn.Linear
    patching.restore(model)
    assert type(linear) is nn.Linear


def test_copy_is_watched_by_itself(module: ModuleType, model: Block) -> None:
    patching.apply(module, model)
    other = copy.deepcopy(model)
    with pytest.warns(UserWarning):
        by_attribute(other)
    assert isinstance(model.gate, patching.Patched)
    assert not isinstance(other.gate, patching.Patched)
    assert given_back(model) == []
    expected = patching.restore(copy.deepcopy(other))(X)
    torch.testing.assert_close(other(X), expected, rtol=0, atol=0)


def test_module_that_two_parents_skip_gives_both_back(module: ModuleType) -> None:
    model = nn.Sequential(Block(), Block()).eval()
    model[1].gate.up = model[0].gate.up
    original = copy.deepcopy(model)
    patching.apply(module, model)
    with pytest.warns(UserWarning):
        forward_hook(model[0])
        model[0].gate.up.register_forward_hook(lambda module, args, output: output * 2)
    forward_hook(original[0])
    original[0].gate.up.register_forward_hook(lambda module, args, output: output * 2)
    assert {back.path for back in given_back(model)} == {"0.gate", "1.gate"}
    torch.testing.assert_close(model(X), original(X), rtol=0, atol=0)


def test_exchange_past_every_watch_is_found_when_asked(module: ModuleType, model: Block) -> None:
    patching.apply(module, model)
    model.gate._modules["up"] = Wrapper(model.gate.up)
    assert given_back(model) == []
    with pytest.warns(UserWarning, match="up of gate became"):
        patching.check(model)
    assert [back.path for back in given_back(model)] == ["gate"]


def test_saved_whole_model_comes_back_as_its_author_wrote_it(module: ModuleType, model: Block) -> None:
    patching.apply(module, model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert [type(m) for m in loaded.modules()] == [type(m) for m in patching.restore(model).modules()]


def test_class_that_another_library_derived_is_derived_from_the_authors_again(module: ModuleType, model: Block) -> None:
    """FSDP and parametrizations set `module.__class__` to a class of their own above the one that was there."""
    patching.apply(module, model)
    mixed = type("FSDPSeparate", (Doubled, type(model.gate)), {"mark": 1})
    model.gate.__class__ = mixed
    assert type(model.gate).__name__ == "FSDPSeparate"
    patching.restore(model)
    assert type(model.gate).__mro__[1:3] == (Doubled, emit_modules.Separate)
    assert model.gate.mark == 1


def test_compiled_model_notices_the_change(module: ModuleType, model: Block) -> None:
    patching.apply(module, model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(X)
    with pytest.warns(UserWarning):
        by_attribute(model)
    torch.testing.assert_close(compiled(X), copy.deepcopy(model)(X), rtol=0, atol=0)
    torch._dynamo.reset()


class Remembers(emit_modules.WithNorm):
    """A module that keeps something from each call on itself."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x = residual + x
        y = self.norm(x)
        self.length = x.shape[1]
        return y + x


def test_attributes_set_in_forward_compile_without_a_break() -> None:
    model = Remembers().eval()
    result = support_emitted(model, (X, X))
    patching.apply(patching.load(result.text), model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, X), patching.restore(copy.deepcopy(model))(X, X))
    assert model.length == 3


def bias_by_attribute(model: Block) -> None:
    model.gate.up.bias = nn.Parameter(torch.ones(WIDTH))


def bias_registered(model: Block) -> None:
    model.gate.up.register_parameter("bias", nn.Parameter(torch.ones(WIDTH)))


@pytest.mark.parametrize("change", [bias_by_attribute, bias_registered], ids=lambda change: change.__name__)
def test_parameter_put_where_there_was_none_runs(
    module: ModuleType, model: Block, change: Callable[[Block], None]
) -> None:
    """As AWQ's shifts and BitFit do to a linear without a bias."""
    original = copy.deepcopy(model)
    patching.apply(module, model)
    with pytest.warns(UserWarning, match="bias of a Linear became a torch"):
        change(model)
    change(original)
    torch.testing.assert_close(model(X), original(X), rtol=0, atol=0)
    assert [back.path for back in given_back(model)] == ["gate"]
    assert isinstance(model.plain, patching.Patched)


def test_a_parameter_that_is_still_none_changes_nothing(module: ModuleType, model: Block) -> None:
    patching.apply(module, model)
    model.gate.up.bias = None
    model.gate.up.register_parameter("bias", None)
    model.gate.up.shift = nn.Parameter(torch.ones(WIDTH))
    assert given_back(model) == []


def test_a_bias_from_the_start_keeps_an_emitted_file_away(module: ModuleType, model: Block) -> None:
    bias_by_attribute(model)
    with pytest.raises(ApplyError, match=r"gate \(Separate\) has up\.bias = a torch"):
        patching.apply(module, model)


def test_bias_past_every_watch_is_found_when_asked(module: ModuleType, model: Block) -> None:
    patching.apply(module, model)
    model.gate.up._parameters["bias"] = nn.Parameter(torch.ones(WIDTH))
    assert given_back(model) == []
    with pytest.warns(UserWarning, match=r"up\.bias of gate became a torch"):
        patching.check(model)
    assert [back.path for back in given_back(model)] == ["gate"]
