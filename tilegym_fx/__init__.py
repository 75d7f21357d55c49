"""Finds the subgraphs of any Hugging Face model that a cuTile kernel computes, and puts it there."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

#: Public name -> the module it comes from, whose own name must be another one: an import sets it on the package.
_HOME = {
    "kernelize": "live",
    "kernelized": "live",
    "report": "live",
    "restore": "live",
    "last_report": "reports",
    "recent_reports": "reports",
    "ops": None,
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: ``import tilegym_fx`` itself loads nothing heavy."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME[name]
    module = importlib.import_module(f"{__name__}.{home or name}")
    value = module if home is None else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
