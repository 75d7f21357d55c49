"""Models whose outputs jump under rounding: a right rewriting is kept, one that is wrong in one thing is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import INVENTORY, make_inputs
from planted_kernels import Planter
from routed import CHOSEN, EXPERTS, rounded_otherwise, routed

from tilegym_fx import kernelize, live, ops, report
from tilegym_fx.choices import Choices
from tilegym_fx.errors import VerifyError
from tilegym_fx.judging import Rewriting
from tilegym_fx.ops import registry
from tilegym_fx.places import Places, WrongError, require_right

pytestmark = pytest.mark.filterwarnings("ignore:tilegym_fx")
USED = {"rms_norm", "linear", "router_topk_softmax", "add_rms_norm"}
Change = Callable[[Any], Any]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Planter:
    planter = Planter(monkeypatch)
    planter.changed("rms_norm", rounded_otherwise)
    return planter


def test_a_right_rewriting_is_kept_although_a_rounding_turns_choices(plant: Planter) -> None:
    model, x = routed()
    before = model(x)[0]
    found = report(kernelize(model, inputs=x, strict=True))
    assert set(found.counts()) == USED
    assert (model(x)[0] - before).abs().max() > 1  # what a mere rounding came to
    assert found.judged_by_places.startswith("call: off by ")
    assert f"judged place by place, as {found.judged_by_places}" in str(found)
    assert "4 calls of 4 ops are right" in found.judged_by_places
    assert all(check.passed for check in found.checks)


def test_a_wider_run_takes_the_same_choices_and_so_tells_of_rounding_alone(plant: Planter) -> None:
    """Else the original were itself far off, and twice as much allowed."""
    model, x = routed()
    for check in report(kernelize(model, inputs=x)).checks:
        assert check.original_error is not None
        assert check.original_error < 0.1


def other_expert(found: Any) -> Any:
    weights, index = found
    return weights, (index + 1) % EXPERTS


def next_best(logits: torch.Tensor, k: int) -> Any:
    """The last choice is an expert that is the best of those that are clearly behind."""
    best, index = torch.topk(logits, k + 2, dim=-1)
    keep = [*range(k - 1), k + 1]
    return torch.softmax(best[:, keep], dim=-1, dtype=best.dtype), index[:, keep].contiguous()


def other_weights(found: Any) -> Any:
    weights, index = found
    return weights.flip(-1).contiguous(), index


def without_residual(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return INVENTORY.reference("add_rms_norm")(x, torch.zeros_like(residual), weight, eps)


def writing(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    normed = INVENTORY.reference("rms_norm")(x, weight, eps)
    x.mul_(1.5)
    return normed


def larger(value: torch.Tensor) -> torch.Tensor:
    return rounded_otherwise(value) * 1.05


def in_one_row(value: torch.Tensor) -> torch.Tensor:
    value = rounded_otherwise(value)
    value[17] *= 1.05
    return value


CHANGES: dict[str, tuple[str, Change, str]] = {
    "5 percent": ("rms_norm", larger, "rms_norm at norm: output 0 is off by"),
    "5 percent of a row": ("rms_norm", in_one_row, "rms_norm at norm: output 0 is off by"),
    "scores": ("linear", lambda value: value * 1.05, "linear: output 0 is off by"),
    "other expert": ("router_topk_softmax", other_expert, "router_topk_softmax: it chooses others"),
    "other weights": ("router_topk_softmax", other_weights, "router_topk_softmax: output 0 is off by"),
}
KERNELS: dict[str, tuple[str, Change | Callable[..., Any], str]] = {
    "next best": ("router_topk_softmax", next_best, "router_topk_softmax: it chooses others"),
    "no residual": ("add_rms_norm", without_residual, "add_rms_norm: output 0 is off by"),
    "writes": ("rms_norm", writing, "rms_norm at norm: it writes to its input 0"),
}


def is_refused(said: str) -> None:
    model, x = routed()
    before, classes = model(x), [type(module) for module in model.modules()]
    with pytest.raises(VerifyError, match=said):
        kernelize(model, inputs=x, strict=True)
    assert [type(module) for module in model.modules()] == classes
    assert all(map(torch.equal, model(x), before))


@pytest.mark.parametrize(("name", "change", "said"), CHANGES.values(), ids=CHANGES)
def test_a_wrong_result_is_refused_and_named(plant: Planter, name: str, change: Change, said: str) -> None:
    plant.changed(name, change)
    is_refused(said)


@pytest.mark.parametrize(("name", "kernel", "said"), KERNELS.values(), ids=KERNELS)
def test_a_wrong_kernel_is_refused_and_named(plant: Planter, name: str, kernel: Any, said: str) -> None:
    plant(name, kernel)
    is_refused(said)


def test_a_kernel_that_is_wrong_in_every_second_call_is_refused(plant: Planter) -> None:
    """In the run that fails and not in the one that is looked at, or the other way about."""
    calls = itertools.count()
    plant.changed("rms_norm", lambda value: rounded_otherwise(value) * (1 if next(calls) % 2 else 3))
    is_refused("two runs of the rewritten model differ: call: off by")


def test_references_that_choose_more_often_are_told_so(plant: Planter, monkeypatch: pytest.MonkeyPatch) -> None:
    def reference_of(overload: Any) -> Any:
        op = ops.behind(overload)
        if op is None or op.name != "router_topk_softmax":
            return None if op is None else op.reference
        return lambda logits, k: (logits.argmax(-1), op.reference(logits, k))[1]

    monkeypatch.setattr("tilegym_fx.judging._reference_of", reference_of)
    is_refused(r"with references in place of kernels: call chooses 2 times, 1 before \(call: off by")


@pytest.mark.parametrize("part", ["router", "experts", "last"])
def test_a_wrong_rewriting_of_right_kernels_is_refused(
    plant: Planter, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels agree with references on whatever they are given; what they are given has to be right too."""
    binding = live.binding.apply

    def wrong(module: Any, model: Any) -> Any:
        binding(module, model)
        weight = model.last.weight if part == "last" else getattr(model, part)
        weight.data = weight.data.roll(2, 0)
        return model

    monkeypatch.setattr(live.binding, "apply", wrong)
    model, x = routed()
    with pytest.raises(VerifyError, match="also with references in place of kernels: "):
        kernelize(model, inputs=x, strict=True)


def test_only_a_model_that_chooses_is_watched(plant: Planter, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, call = [], Choices.call

    def counted(self: Choices, name: str) -> Any:
        watched.append(name)
        return call(self, name)

    monkeypatch.setattr(Choices, "call", counted)
    model, x = routed()
    plant.changed("rms_norm", lambda value: value * 1.5)
    with pytest.raises(VerifyError, match=r"Norm with rms_norm: call: off by"):
        kernelize(model.norm, inputs=x, strict=True)
    assert not watched
    with pytest.raises(VerifyError, match="rms_norm at norm"):
        kernelize(model, inputs=x, strict=True)
    assert watched


def test_choices_that_cannot_be_watched_widen_no_tolerance(plant: Planter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wider run that makes its own choices would say that the original is far off, and that a kernel may be."""
    monkeypatch.setattr(Choices, "call", None)
    plant.changed("rms_norm", lambda value: value * 1.5)
    is_refused(r"router_topk_softmax: call: off by .* allowed\.")


def look(name: str, inputs: dict[str, Any], got: Any) -> None:
    ops.overload(name)
    require_right(registry._ops[name], tuple(inputs.values()), got)


ROUTERS = [name for name in INVENTORY.definitions if name.startswith("router_")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_of_equal_scores_a_router_may_choose_any(name: str, dtype: torch.dtype) -> None:
    """Of equal groups too. Kernels take the first, torch whichever it comes upon."""
    inputs = make_inputs(name, dtype, "ordinary", "as trained", {"N": 70, "E": 12})
    inputs["logits"] = (inputs["logits"] / 2).round() / 4
    if "bias" in inputs:
        inputs["bias"] = torch.zeros_like(inputs["bias"])
    got = INVENTORY.entry_point(name)(**inputs)
    assert not torch.equal(got[1], INVENTORY.reference(name)(**inputs)[1])
    look(name, inputs, got)
    worse = inputs["logits"].scatter(-1, got[1][:, :1], -4.0)
    with pytest.raises(WrongError, match="chooses others"):
        look(name, inputs, INVENTORY.entry_point(name)(**{**inputs, "logits": worse}))


def test_pairs_of_one_expert_may_stand_in_any_order() -> None:
    inputs = make_inputs("experts_rows", torch.bfloat16, "ordinary", "as trained", {"N": 20, "E": 3, "K": 3})
    inputs["top_k_index"][:] = torch.tensor([0, 1, 2])
    rows, order, ends = INVENTORY.reference("experts_rows")(**inputs)
    swapped = order.clone()
    swapped[[0, 1]] = order[[1, 0]]
    moved = rows.clone()
    moved[[0, 1]] = rows[[1, 0]]
    look("experts_rows", inputs, (moved, swapped, ends))
    with pytest.raises(WrongError, match="output 0 is off by"):
        look("experts_rows", inputs, (rows, swapped, ends))
    swapped[[0, -1]] = order[[-1, 0]]
    with pytest.raises(WrongError, match="chooses others"):
        look("experts_rows", inputs, (moved, swapped, ends))
    with pytest.raises(WrongError, match="output 2 is another one"):
        look("experts_rows", inputs, (rows, order, ends + 1))


def test_a_result_of_another_kind_is_none() -> None:
    inputs = make_inputs("router_topk_softmax", torch.bfloat16, "ordinary", "as trained", {"N": 5, "E": 8})
    weights, index = INVENTORY.reference("router_topk_softmax")(**inputs)
    look("router_topk_softmax", inputs, (weights, index))
    with pytest.raises(WrongError, match=r"gives torch.float32 \[5, 3\]"):
        look("router_topk_softmax", inputs, (weights.float(), index))
    with pytest.raises(WrongError, match="is not among the 8 there are"):
        look("router_topk_softmax", inputs, (weights, index + 8))
    with pytest.raises(WrongError, match="chooses others"):  # one expert twice
        look("router_topk_softmax", inputs, (weights, index[:, :1].expand(-1, 3).contiguous()))
    with pytest.raises(WrongError, match="output 0 is off by inf"):
        look("router_topk_softmax", inputs, (weights.masked_fill(index == 2, torch.nan), index))


def test_results_that_are_written_over_inputs_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    overload = ops.writing_overload("cache_write", {0: "keys", 1: "values"})
    inputs = make_inputs("cache_write", torch.bfloat16, "ordinary", "as trained", {})

    def seen() -> dict[str, int]:
        places = Places(torch.nn.Identity())
        with places.call("decode 1"), torch.no_grad():
            overload(**inputs)
        return places.seen

    assert seen() == {"cache_write": 1}
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    monkeypatch.setitem(registry._writing["cache_write"]._kernels, None, lambda *args: (args[2].add_(1.0), None)[1])
    with pytest.raises(WrongError, match="decode 1: cache_write: output 0 is off by"):
        seen()


def test_a_rewriting_without_choices_is_the_usual_case() -> None:
    assert not Rewriting(torch.nn.Identity(), (), lambda: None, lambda: None).chooses
    assert CHOSEN % 2  # the last choice is one of two that are nearly equal
