"""Emitted modules as text, as files and as imported modules."""

from __future__ import annotations

import hashlib
import linecache
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from tilegym_fx.errors import ApplyError

_PREFIX = "tilegym_fx_emitted_"
#: What a file that is not as it was emitted may raise when it is run.
_BY_A_FILE = (
    ArithmeticError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip


def load(text_or_path: str | os.PathLike[str]) -> ModuleType:
    """Imports an emitted module from its text or its file.

    Args:
        text_or_path: A path, or the text itself.

    Raises:
        ApplyError: If the file cannot be read or run, or is no emitted module.
    """
    if isinstance(text_or_path, str) and "\n" in text_or_path:
        return _imported(text_or_path, None)
    path = Path(text_or_path)
    if not path.is_file():
        raise ApplyError(f"there is no emitted file at {path}", advice="Give the file that --emit wrote")
    return _imported(path.read_text(encoding="utf-8"), path)


def _imported(text: str, path: Path | None) -> ModuleType:
    """The module of a text, made once per process. Without a file, tracebacks and `inspect` still show it."""
    name = _PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    file = str(path) if path is not None else f"tilegym_fx/emitted/{name}.py"
    module = ModuleType(name)
    module.__file__ = file
    if path is None:
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    sys.modules[name] = module
    try:
        exec(compile(text, file, "exec"), module.__dict__)
        if not hasattr(module, "PATCHES"):
            raise ApplyError(f"{file} has no PATCHES table", advice="Give the file that --emit wrote")
    except (*_BY_A_FILE, ApplyError) as problem:
        del sys.modules[name]
        if isinstance(problem, ApplyError):
            raise
        raise ApplyError(f"{file} does not import here: {problem}") from problem
    return module


def _umask() -> int:
    """What new files are not allowed; it can only be read by being set."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save(text: str, path: Path) -> None:
    """Writes a file so that no reader ever sees a part of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())  # a temporary file is its owner's alone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
