"""Environment variables are read when asked for, and bad values are refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tilegym_fx import settings
from tilegym_fx.errors import InventoryError, SettingsError, TilegymFxError

FLAGS = {"TILEGYM_FX_INTERPRET": settings.interpret, "TILEGYM_FX_CHECK": settings.check}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(
    ("value", "meaning"),
    [("1", True), ("true", True), ("ON", True), (" yes ", True), ("0", False), ("off", False), ("", False)],
)
def test_a_flag_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch, name: str, value: str, meaning: bool) -> None:
    monkeypatch.setenv(name, value)
    assert FLAGS[name]() is meaning
    monkeypatch.delenv(name)
    assert FLAGS[name]() is False


@pytest.mark.parametrize("name", FLAGS)
def test_a_bad_flag_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(SettingsError, match=f"{name} is 'maybe'"):
        FLAGS[name]()


def test_inventory_roots_are_split_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    roots = tuple(tmp_path / name for name in ("b", "a"))
    for root in roots:
        root.mkdir()
    monkeypatch.setenv("TILEGYM_FX_INVENTORY", os.pathsep.join(map(str, roots)))
    assert settings.inventory_roots() == roots


def test_a_missing_inventory_root_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEGYM_FX_INVENTORY", str(tmp_path / "absent"))
    with pytest.raises(SettingsError, match=r"TILEGYM_FX_INVENTORY names '.*absent'"):
        settings.inventory_roots()


def test_misspelt_variables_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_FX_INTERPRETER", "1")
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    assert settings.unknown_variables() == ("TILEGYM_FX_INTERPRETER",)


def test_an_error_is_one_line_and_ends_with_what_to_do() -> None:
    error = SettingsError("two\nlines")
    assert str(error) == f"two lines. {SettingsError.advice}."
    assert str(SettingsError("x", advice="Do this")) == "x. Do this."


def test_every_error_has_its_own_advice() -> None:
    pending, seen = [TilegymFxError], []
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        seen.append(kind.advice)
    assert len(set(seen)) == len(seen) > 10
    assert InventoryError.advice in seen
