"""Errors: what happened and what to do next, each said once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.fx import Graph

from tilegym_fx import breadth, doctor, ops
from tilegym_fx.bench.cases import get_variant, parse_cases
from tilegym_fx.cost import get_device
from tilegym_fx.errors import ExportError, KernelError, TilegymFxError, did_you_mean
from tilegym_fx.inventory import load
from tilegym_fx.model_source import resolve_model
from tilegym_fx.new.scaffold import from_definition
from tilegym_fx.plan import Policy, plan


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


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("rms_nrom", ["rms_norm", "linear"], "; did you mean `rms_norm`"),
        ("RMS_Norm", ["rms_norm", "linear"], "; did you mean `rms_norm`"),
        ("norm", ["norm_a", "norm_b", "norm_c", "norm_d"], "; did you mean `norm_d`, `norm_c` or `norm_b`"),
        ("attention", ["rms_norm", "linear"], ""),
        ("rms_norm", [], ""),
    ],
    ids=["letters", "case", "three at most", "nothing near", "nothing known"],
)
def test_names_that_look_like_one_that_is_not_known(name: str, known: Sequence[str], said: str) -> None:
    assert did_you_mean(name, known) == said


def test_a_name_is_shown_once_however_many_of_its_spellings_are_near() -> None:
    meant = {"Llama-3": "meta/Llama-3"}
    assert did_you_mean("Llama-2", ["meta/Llama-3", "Llama-3"], meant) == "; did you mean `meta/Llama-3`"


def plan_with(**names: Sequence[str]) -> None:
    plan(Graph(), (), (), load(), Policy(get_device("h200"), **names))


#: Whatever takes a name of ours: how it is asked, a misspelt name, and the name that was meant.
LOOK_UPS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "only": (lambda name: plan_with(only=[name]), "rms_nrom", "rms_norm"),
    "skip": (lambda name: plan_with(skip=[name]), "silu_mull", "silu_mul"),
    "Definition": (lambda name: load().definition(name), "rms_nrom", "rms_norm"),
    "Solution": (lambda name: load().entry_point(name), "rms_nrom", "rms_norm"),
    "op": (ops.overload, "rms_nrom", "rms_norm"),
    "new --like": (lambda name: from_definition("mine", "norm", name, load()), "rms_nrom", "rms_norm"),
    "backend": (ops.set_backend, "interpreter", "interpret"),
    "variant": (get_variant, "eager+xf", "eager+fx"),
    "phase": (lambda name: parse_cases([f"{name}:1x8"]), "prefil", "prefill"),
    "device": (get_device, "h20o", "h200"),
    "model": (lambda name: resolve_model(name), "lamma", "llama"),
    "model type": (lambda name: breadth.run_all(Path("none"), [name]), "lamma", "llama"),
}


@pytest.mark.parametrize("what", LOOK_UPS)
def test_a_misspelt_name_is_answered_with_the_nearest(what: str) -> None:
    ask, misspelt, meant = LOOK_UPS[what]
    with pytest.raises(TilegymFxError, match=re.escape(f"; did you mean `{meant}`")):
        ask(misspelt)
    with pytest.raises(TilegymFxError) as stranger:
        ask("0xyzzyx0")
    assert "did you mean" not in str(stranger.value)


def test_a_misspelt_op_is_answered_where_it_is_an_attribute_too() -> None:
    with pytest.raises(AttributeError, match="did you mean `rms_norm`"):
        _ = ops.rms_nrom


def test_a_misspelt_variable_is_answered_with_the_nearest() -> None:
    assert "did you mean `TILEGYM_FX_INTERPRET`" in str(doctor.settings_check(["TILEGYM_FX_INTERPRT"]))
    assert "did you mean" not in str(doctor.settings_check(["TILEGYM_FX_FAST"]))
