"""Running an inventory's Python: references from their text, spellings and kernels from their files.

Files are imported under private names (``tilegym_fx_data.kernels.rms_norm``), never as ``kernels`` or
``patterns``, which other packages are called.
"""

from __future__ import annotations

import hashlib
import importlib
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tilegym_fx.errors import INSTALL_CUTILE, InventoryError, KernelError
from tilegym_fx.inventory.layout import shipped_root
from tilegym_fx.inventory.read import shown

_PACKAGE = "tilegym_fx_data"


def reference_function(name: str, text: str) -> Callable[..., Any]:
    """Executes a reference and returns its ``run``; tracebacks and ``inspect`` find its lines.

    Raises:
        InventoryError: It imports something that is not installed, or defines no ``run``.
    """
    file = f"<reference of {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": f"{_PACKAGE}.definitions.{name}", "__file__": file}
    try:
        exec(compile(text, file, "exec"), scope)
    except ImportError as error:
        raise InventoryError(
            f"the reference of {name!r} cannot be executed: {error}",
            advice="Install what it imports, or write it with torch alone",
        ) from error
    if not callable(scope.get("run")):
        raise InventoryError(f"the reference of {name!r} leaves no function `run` behind")
    run: Callable[..., Any] = scope["run"]
    return run


def load_file(folder: Path, file: Path) -> ModuleType:
    """Imports a Python file under a private name; relative imports inside ``folder`` work.

    Args:
        folder: The inventory root (or the folder into which embedded sources were written).
        file: The file, below ``folder``.

    Raises:
        KernelError: The file needs a package that is not installed.
        InventoryError: The file is no valid Python, or its path cannot be a module name.
    """
    parts = file.relative_to(folder).with_suffix("").parts
    if not all(part.isidentifier() for part in parts):
        raise InventoryError(
            f"{shown(file)} cannot be imported: its path has names that are no Python identifiers",
            advice="Rename the file or its folders",
        )
    package = _package_of(folder)
    for depth in range(len(parts)):
        _ensure_package(".".join((package, *parts[:depth])), folder.joinpath(*parts[:depth]))
    name = ".".join((package, *parts))
    if name not in sys.modules:
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        needs_cutile = error.name == "cuda" or (error.name or "").startswith("cuda.tile")
        advice = INSTALL_CUTILE if needs_cutile else "Install what it imports"
        raise KernelError(f"{shown(file)} cannot be imported: {error}", advice=advice) from error
    except SyntaxError as error:
        raise InventoryError(f"{shown(file)}, line {error.lineno}: no valid Python ({error.msg})") from error


def _package_of(folder: Path) -> str:
    folder = folder.resolve()
    if folder == shipped_root():
        return _PACKAGE
    return f"{_PACKAGE}_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def _ensure_package(name: str, folder: Path) -> None:
    """Puts an empty package in place, so that no ``__init__.py`` of the inventory runs."""
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
