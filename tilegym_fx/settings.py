"""Every ``TILEGYM_FX_*`` environment variable, each read by one function at the moment it is asked for.

An unset or empty variable means its default. Any other value that cannot be read raises
:class:`~tilegym_fx.errors.SettingsError` with the variable's name.
"""

from __future__ import annotations

import os
from pathlib import Path

from tilegym_fx.errors import SettingsError

PREFIX = "TILEGYM_FX_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

#: Variable -> what it does. A variable that is not here does not exist.
VARIABLES: dict[str, str] = {
    "TILEGYM_FX_INTERPRET": "1: launch cuTile kernels on CPU tensors through the interpreter (default 0)",
    "TILEGYM_FX_CHECK": "1: check graphs on entry to and exit from every pass (default 0)",
    "TILEGYM_FX_INVENTORY": f"extra inventory roots, {os.pathsep!r} between them; their code is executed",
    "TILEGYM_FX_CACHE": "folder for what was measured and found on this machine (default ~/.cache/tilegym_fx)",
    "TILEGYM_FX_PLANS": "0: kernelize searches a model anew although it was verified here before (default 1)",
}


def interpret() -> bool:
    """Whether kernels launched on CPU tensors run through the interpreter (``TILEGYM_FX_INTERPRET``)."""
    return _flag("TILEGYM_FX_INTERPRET")


def check() -> bool:
    """Whether passes check graphs on entry and exit (``TILEGYM_FX_CHECK``)."""
    return _flag("TILEGYM_FX_CHECK")


def keeps_plans() -> bool:
    """Whether rewritings that were verified are kept for the next start (``TILEGYM_FX_PLANS``)."""
    return _flag("TILEGYM_FX_PLANS", default=True)


def inventory_roots() -> tuple[Path, ...]:
    """Extra inventory roots (``TILEGYM_FX_INVENTORY``), in the order given.

    Raises:
        SettingsError: An entry is not an existing folder.
    """
    name = "TILEGYM_FX_INVENTORY"
    entries = [entry for entry in os.environ.get(name, "").split(os.pathsep) if entry]
    roots = tuple(Path(entry).expanduser() for entry in entries)
    for root in roots:
        if not root.is_dir():
            raise SettingsError(f"{name} names {str(root)!r}, which is not a folder")
    return roots


def cache_folder() -> Path:
    """Where results of tuning and verified plans are kept (``TILEGYM_FX_CACHE``); it need not exist.

    A user without a home folder keeps nothing: then it is a folder that cannot exist.

    Raises:
        SettingsError: The variable names the home of nobody.
    """
    chosen = os.environ.get("TILEGYM_FX_CACHE", "").strip()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        if chosen:
            return Path(chosen).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "tilegym_fx"
    except RuntimeError as problem:
        if chosen:
            raise SettingsError(f"TILEGYM_FX_CACHE is {chosen!r}, and there is no such user here") from problem
        return Path(os.devnull) / "tilegym_fx"


def foreign_toolkits() -> dict[str, str]:
    """The variables that make programs use another CUDA toolkit than their own, and their values."""
    return {name: os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)}


def unknown_variables() -> tuple[str, ...]:
    """Names in the environment that start like ours and are not ours: misspelt, or of another version."""
    return tuple(sorted(name for name in os.environ if name.startswith(PREFIX) and name not in VARIABLES))


def _flag(name: str, *, default: bool = False) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if not value:
        return default
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise SettingsError(f"{name} is {value!r}, which is neither yes (1, true, yes, on) nor no (0, false, no, off)")
