"""Modules put together at random: rewritten in both forms, they compute what their author wrote, or are left alone.

Two hundred of them, always the same, in `make test`. Two thousand others:

    python -m pytest tests/cpu/test_random_modules.py --hypothesis-profile thorough
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emit_support import BASIC
from hypothesis import HealthCheck, given, settings
from pass_checks import capture, find_in
from random_modules import WIDTH, module_of, sources
from torch import nn

from tilegym_fx.apply import is_applied
from tilegym_fx.live import kernelize, report, restore
from tilegym_fx.rewrite import rewrite

CASES = max(200, settings.default.max_examples)
INPUTS = tuple(torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
seen: Counter[str] = Counter()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def results(code: Callable[..., Any], *more: Any) -> list[Any]:
    """What a call gives, and what it leaves in its inputs; the error, if that is what the author's code does."""
    inputs = copy.deepcopy(INPUTS)
    try:
        with torch.no_grad():
            given_back = code(*inputs, *more)
    except (RuntimeError, IndexError, UnboundLocalError, TypeError, AttributeError) as error:
        return [type(error)]
    return [*(given_back if isinstance(given_back, tuple) else (given_back,)), *inputs]


def assert_as_before(got: list[Any], want: list[Any]) -> None:
    assert len(got) == len(want)
    for one, two in zip(got, want, strict=True):
        if isinstance(two, torch.Tensor):
            size = float(two.abs().nan_to_num(0.0, 0.0, 0.0).max())
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5 * max(1.0, size), equal_nan=True)
        else:
            assert one == two


def calls(model: nn.Module) -> list[list[Any]]:
    """Twice each way, as a module may remember; and what it remembers at the end."""
    found = [results(model, *more) for more in ((), (True,), (False,))]
    return [*found, [model.kept]]


@settings(
    max_examples=CASES, derandomize=CASES == 200, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)  # fmt: skip
@given(text=sources())
def test_both_forms_compute_what_the_author_wrote(text: str, folder: Path) -> None:
    original, model = module_of(text, folder), None
    if isinstance(results(original)[0], type):
        return  # the author's own mistake
    seen["modules"] += 1
    model = module_of(text, folder)
    try:
        _source_form(model, original)
        _graph_form(module_of(text, folder), module_of(text, folder))
    finally:
        for name in [name for name in sys.modules if name.startswith(("random_case_", "tilegym_fx_emitted_"))]:
            del sys.modules[name]


def _source_form(model: nn.Module, original: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernelize(model, inputs=INPUTS, only=BASIC, verify=False)
    model.kept = original.kept = None
    if is_applied(model):
        seen["written"] += len(report(model).written)
        seen["kernelized"] += 1
    assert_all(calls(model), calls(original))
    model.kept = original.kept = None
    assert_all(calls(restore(model)), calls(original))


def assert_all(got: list[list[Any]], want: list[list[Any]]) -> None:
    for one, two in zip(got, want, strict=True):
        assert_as_before(one, two)


def _graph_form(model: nn.Module, original: nn.Module) -> None:
    graph_module = capture(model, copy.deepcopy(INPUTS))
    outcome = find_in(graph_module, only=BASIC)
    rewrite(graph_module.graph, outcome.plan)
    graph_module.recompile()
    seen["graphs"] += bool(outcome.chosen)
    assert_as_before(results(graph_module), results(original))


def test_most_of_them_were_rewritten() -> None:
    """Else the test above would show nothing. It runs after it, in the same process."""
    if not seen:
        pytest.skip("the modules were made in another process")
    assert seen["modules"] > CASES // 2
    assert seen["kernelized"] > seen["modules"] // 3, seen
    assert seen["graphs"] > seen["modules"] // 3, seen
