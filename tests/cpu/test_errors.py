"""Errors: what happened and what to do next, each said once."""

from __future__ import annotations

import pytest

from tilegym_fx.errors import ExportError, KernelError, TilegymFxError


@pytest.mark.parametrize(
    ("what", "advice", "message"),
    [
        ("it fails", "do this", "it fails. do this."),
        ("it fails.", "do this.", "it fails. do this."),
        ("it\n  fails", None, f"it fails. {ExportError.advice}."),
        ("torch says that...", "do this", "torch says that.... do this."),
    ],
    ids=["plain", "full stops of others", "two lines", "cut"],
)
def test_a_message_is_two_sentences(what: str, advice: str | None, message: str) -> None:
    assert str(ExportError(what, advice=advice)) == message


def test_an_error_because_of_another_gives_the_advice_of_that_one_alone() -> None:
    inner = KernelError("the kernel is not there", advice="Install it")
    outer = ExportError.because("no phase can be captured", inner)
    assert type(outer) is ExportError
    assert str(outer) == "no phase can be captured: the kernel is not there. Install it."
    again = TilegymFxError.because("nothing works", outer)
    assert str(again) == "nothing works: no phase can be captured: the kernel is not there. Install it."


def test_several_causes_are_each_said_once() -> None:
    causes = [ExportError("no cache", advice="Scan prefill"), ExportError("no mask", advice="Scan prefill")]
    assert str(ExportError.because("m", *causes, causes[0])) == "m: no cache; no mask. Scan prefill."


def test_because_of_somebody_elses_error_the_class_advises() -> None:
    assert str(ExportError.because("m", ValueError("bad size."))) == f"m: bad size. {ExportError.advice}."
