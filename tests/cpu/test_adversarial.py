"""kernelize on modules made to trip it: each is right or refused with a reason, none is wrong."""

from __future__ import annotations

import ast
import copy
import warnings
from collections.abc import Callable
from typing import Any

import adversarial_modules as modules
import pytest
import torch
from emit_modules import WIDTH
from emit_support import BASIC, emitted
from torch import nn

from tilegym_fx.apply import is_applied
from tilegym_fx.emit.conditions import is_expression
from tilegym_fx.emit.render import Renderer
from tilegym_fx.live import kernelize, report, restore

Variant = dict[str, Any]


def tensors(count: int, *lead: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(*(lead or (2, 3)), WIDTH, generator=generator) for _ in range(count))


#: Case -> module, arguments of the sample, keywords of further calls.
CASES: dict[str, tuple[Callable[[], nn.Module], int, list[Variant]]] = {
    "starred condition": (modules.StarredCondition, 1, []),
    "starred helper": (modules.StarredHelper, 1, [{"eps": ()}, {"eps": (1e-2, 5.0)}, {"eps": (0.0,)}]),
    "or and and": (modules.LooseOr, 1, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": [], "b": 0}]),
    "number of an expression": (modules.LooseNumber, 1, [{"a": 1}, {"b": 1}, {"a": 2, "b": 1}]),
    "infinite constant": (modules.Infinite, 1, []),
    "string of two lines": (modules.Message, 1, [{"loud": True}]),
    "alias": (modules.Alias, 1, []),
    "alias inside": (modules.AliasInside, 2, []),
    "deleted local": (modules.Deleted, 2, []),
    "match statement": (modules.Matched, 1, [{"kind": "other"}]),
    "in a string": (modules.Formatted, 1, []),
    "comprehension": (modules.Comprehended, 1, []),
    "indexed module": (modules.Indexed, 2, [{"which": 1}, {"which": -1}]),
    "private name": (modules.Private, 1, []),
    "renamed forward": (modules.Renamed, 2, []),
    "partial function": (modules.Partial, 1, []),
    "tied weights": (modules.Tied, 1, []),
    "name bound anew by a gate": (modules.Gate, 1, []),
    "names that change places": (modules.Swapped, 2, []),
    "state of an earlier call": (modules.Kept, 1, []),
    "default that grows": (modules.Default, 1, [{"seen": []}, {"seen": [1, 2, 3]}]),
    "defaults of every kind": (modules.Defaults, 1, [{"scale": 2.0}, {"eps": ()}]),
    "residual that broadcasts": (modules.Broadcast, 2, []),
    "short circuit": (modules.Conditional, 1, [{"other": torch.ones(2, 3, WIDTH)}]),
    "raise in dropped code": (modules.Raised, 1, [{"limit": 3}]),
    "gradient switch": (modules.Switched, 2, []),
}


def outputs(model: nn.Module, args: Any, variants: list[Variant]) -> list[Any]:
    """What a fresh copy of the module's state gives for every call in turn."""
    found: list[Any] = []
    for kwargs in ({}, *variants):
        with torch.no_grad():
            found.append(model(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    return found


def leaves(values: Any) -> list[Any]:
    if isinstance(values, list | tuple):
        return [leaf for value in values for leaf in leaves(value)]
    return [values]


def assert_equal(got: Any, want: Any) -> None:
    assert len(leaves(got)) == len(leaves(want))
    for one, two in zip(leaves(got), leaves(want), strict=True):
        if isinstance(two, torch.Tensor):
            torch.testing.assert_close(one, two, rtol=0, atol=0)
        else:
            assert one == two


def kernelized(model: nn.Module, args: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kernelize(model, inputs=args, only=BASIC)


@pytest.mark.parametrize("case", CASES)
def test_module_is_right_or_refused_with_a_reason(case: str) -> None:
    build, count, variants = CASES[case]
    original, model, args = build().eval(), build().eval(), tensors(count)
    model.load_state_dict(original.state_dict())
    kernelized(model, args)
    if is_applied(model):
        ast.parse(report(model).text)
    else:
        with pytest.warns(UserWarning, match="is unchanged: .{20}"):
            kernelize(model, inputs=args, only=BASIC)
    assert_equal(outputs(model, args, variants), outputs(original, args, variants))
    assert_equal(outputs(restore(model), args, variants), outputs(original, args, variants))


@pytest.mark.parametrize(
    ("case", "written"),
    [
        ("starred helper", 0),
        ("or and and", 1),
        ("infinite constant", 1),
        ("string of two lines", 0),
        ("alias inside", 0),
        ("renamed forward", 1),
        ("default that grows", 0),
        ("defaults of every kind", 1),
        ("name bound anew by a gate", 1),
    ],
)
def test_what_is_left_out_is_no_more_than_it_must_be(case: str, written: int) -> None:
    build, count, _ = CASES[case]
    model = kernelized(build().eval(), tensors(count))
    assert bool(report(model).written if is_applied(model) else ()) == bool(written)


def test_a_wider_residual_than_that_of_the_sample_is_broadcast() -> None:
    model, original = modules.Broadcast().eval(), modules.Broadcast().eval()
    kernelized(model, tensors(2))
    assert is_applied(model)
    (x,), (residual,) = tensors(1, 1, 3), tensors(1, 4, 3)
    assert_equal(outputs(model, (x, residual), []), outputs(original, (x, residual), []))


def test_verifying_leaves_the_state_of_a_module_as_it_was() -> None:
    model = modules.Kept().eval()
    (x,) = tensors(1)
    model(x)
    last = model.last
    kernelized(model, (x,))
    assert is_applied(model)
    assert model.last is last


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("*rest", False), ("x = 1", False), ("a b", False), ("not (a or b)", True), ("x[1:] is y", True)],
)
def test_a_condition_is_an_expression(text: str, is_one: bool) -> None:
    assert is_expression(text) == is_one


def test_a_text_that_is_no_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever made it: the place is left to its author, the others are written."""
    monkeypatch.setattr(Renderer, "_argument", lambda self, argument, edit: "x y")
    result = emitted(modules.Broadcast().eval(), tensors(2))
    assert not result.text
    assert "no Python" in result.refused[0].reason
