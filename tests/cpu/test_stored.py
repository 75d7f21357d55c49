"""Calls that store what they compute in an object of the caller's: the object has it afterwards, or the call stays."""

from __future__ import annotations

import pytest
import store_modules
import torch
from store_modules import Appends, Past

from tilegym_fx import kernelize, report

pytestmark = pytest.mark.filterwarnings("ignore:tilegym_fx")
NEW = tuple(torch.linspace(-1, 1, 48).roll(i).reshape(1, 2, 3, 8) for i in range(2))


def past(cls: type[Past] = Past) -> Past:
    return cls(*(torch.linspace(-2, 2, 48).roll(i).reshape(1, 2, 3, 8) for i in range(2)))


def kernelized(cls: type[Past]) -> Appends:
    return kernelize(Appends().eval(), inputs=(*NEW, past(cls)), only="cache_append")


def assert_same(model: Appends, ours: Past, theirs: Past) -> None:
    torch.testing.assert_close(model(*NEW, ours), Appends()(*NEW, theirs))
    torch.testing.assert_close(vars(ours), vars(theirs))


@pytest.mark.parametrize("cls", [Past, store_modules.Counting, store_modules.Sliding], ids=lambda cls: cls.__name__)
def test_object_holds_what_the_kernels_gave(cls: type[Past]) -> None:
    model = kernelized(cls)
    assert report(model).counts() == {"cache_append": 2}
    assert f"type(past) is {cls.__name__}" in report(model).text
    assert "tilegym_fx.ops.cache_append(past.keys, keys)" in report(model).text
    ours, theirs = past(cls), past(cls)
    for _ in range(2):
        assert_same(model, ours, theirs)


def test_object_whose_method_was_replaced_is_called() -> None:
    model, ours, calls = kernelized(Past), past(), []

    def update(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        return Past.update(ours, *arguments)

    ours.update = update
    torch.testing.assert_close(model(*NEW, ours), Appends()(*NEW, past()))
    assert calls == [1]


def test_what_is_given_as_a_sample_is_left_as_it_is() -> None:
    sample, fresh = past(), past()
    kernelize(Appends().eval(), inputs=(*NEW, sample), only="cache_append")
    torch.testing.assert_close(vars(sample), vars(fresh))


def test_object_of_another_class_or_state_is_called_as_its_author_does() -> None:
    model = kernelized(Past)
    for cls in (store_modules.Later, store_modules.Counting, store_modules.OtherWay):
        assert_same(model, past(cls), past(cls))
    ours, theirs = past(), past()
    ours.open = theirs.open = False
    assert_same(model, ours, theirs)
    torch.testing.assert_close(model(*NEW), Appends()(*NEW))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("AsksLate", "is asked after it has been changed"),
        ("CountsLate", "has another name by then"),
        ("Logging", "a call for its effect .* would be dropped"),
        ("Normed", "does not keep what it gives"),
        ("OtherWay", "computed in another way than what stands beside it"),
        ("Chained", "has no expression there"),
        ("Swapped", "in another order"),
        ("Unsaid", "does not keep what it gives"),
    ],
)
def test_call_that_does_anything_else_stays(name: str, reason: str) -> None:
    with pytest.warns(match=f"Appends is unchanged: .*{reason}"):
        model = kernelized(getattr(store_modules, name))
    assert type(model) is Appends
