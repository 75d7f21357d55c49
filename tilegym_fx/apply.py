"""Binding an emitted module to one model instance, and taking it off again.

An emitted module holds subclasses of the model's own classes. `apply` makes chosen modules instances of those
(`module.__class__ = ...`), as torch's FSDP and parametrizations do; no class, module or registry is touched.
Nothing is stored on the module, so state dicts, deep copies and hooks see no difference.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import linecache
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from tilegym_fx.emit.owner import plain_function
from tilegym_fx.emit.source import function_source
from tilegym_fx.errors import ApplyError

Model = TypeVar("Model", bound=nn.Module)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PREFIX = "tilegym_fx_emitted_"


class Patched:
    """Base of every emitted class: known to Python and to transformers by the name of the class that it
    replaces."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        original = original_class(cls)
        cls.__name__, cls.__qualname__ = original.__name__, original.__qualname__
        cls.__module__ = original.__module__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the class that it replaces: a pickle needs neither the emitted file nor this package."""
        reduced = super().__reduce_ex__(protocol)
        return (object.__new__, (original_class(type(self)),), *reduced[2:])

    def __copy__(self) -> Any:
        return _with_class(self, copy.copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _with_class(self, lambda module: copy.deepcopy(module, memo))


def _with_class(module: Any, copier: Any) -> Any:
    """Copies a module as an instance of its own class, and makes the copy what the original is."""
    patched = type(module)
    module.__class__ = original_class(patched)
    try:
        copied = copier(module)
    finally:
        module.__class__ = patched
    copied.__class__ = patched
    return copied


def original_class(patched: type) -> type:
    """The class that an emitted class replaces."""
    return next(base for base in patched.__mro__ if not issubclass(base, Patched))


@dataclass(frozen=True)
class Patch:
    """One row of an emitted module's table.

    Attributes:
        cls: The emitted class.
        paths: Paths of the modules that it is for, `*` standing for one number.
        sources: Method -> sha256 of the text that it replaces.
        constants: Path below the module -> the value that the text was made for.
        modules: Path below the module -> class of a submodule whose call the text replaces.
        dtypes: Path below the module -> dtype of a parameter, as `torch.bfloat16`.
    """

    cls: type
    paths: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)


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
    except (ImportError, AttributeError, SyntaxError, NameError, TypeError, ApplyError) as problem:
        del sys.modules[name]
        if isinstance(problem, ApplyError):
            raise
        raise ApplyError(f"{file} does not import here: {problem}") from problem
    return module


def save(text: str, path: Path) -> None:
    """Writes a file so that no reader ever sees a part of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def apply(module: ModuleType, model: Model) -> Model:
    """Makes a model run an emitted module. All or nothing; a second time changes nothing.

    Args:
        module: The emitted module, from `load` or imported.
        model: The model, or a module that holds it.

    Returns:
        The same model.

    Raises:
        ApplyError: If the emitted module was not made for this model as it is now. The model is unchanged.
    """
    chosen: list[tuple[nn.Module, type]] = []
    for patch in module.PATCHES:
        targets = list(_targets(patch, model))
        if not targets:
            raise ApplyError(
                f"the model has no {patch.cls.__name__} at {', '.join(map(repr, patch.paths))}",
                advice="Emit the file again from this model",
            )
        _check_sources(patch)
        for path, target in targets:
            if type(target) is patch.cls:
                continue
            _check(patch, path, target)
            chosen.append((target, patch.cls))
    for target, cls in chosen:
        target.__class__ = cls
    return model


def restore(model: Model) -> Model:
    """Makes every module of a model what it was before `apply`."""
    for module in model.modules():
        if isinstance(module, Patched):
            module.__class__ = original_class(type(module))
    return model


@contextmanager
def applied(module: ModuleType, model: Model) -> Iterator[Model]:
    """`apply` for the length of a block."""
    try:
        yield apply(module, model)
    finally:
        restore(model)


def _targets(patch: Patch, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    original = original_class(patch.cls)
    for path, module in model.named_modules():
        if type(module) in (original, patch.cls) and any(_fits(pattern, path) for pattern in patch.paths):
            yield path, module


def _fits(pattern: str, path: str) -> bool:
    """Whether a path, or the end of it (the model may sit inside another module), is what a pattern means."""
    if not pattern:
        return True
    wanted, parts = pattern.split("."), path.split(".")
    if len(parts) < len(wanted):
        return False
    tail = parts[len(parts) - len(wanted) :]
    return all(
        part.isdigit() if want == "*" else part == want for want, part in zip(wanted, tail, strict=True)
    )


def _check_sources(patch: Patch) -> None:
    original = original_class(patch.cls)
    for name, digest in patch.sources.items():
        held = next((vars(base)[name] for base in original.__mro__ if name in vars(base)), None)
        function = plain_function(held) if held is not None else None
        source = function_source(function.__code__) if function is not None else None
        if source is None or source.digest != digest:
            file = inspect.getsourcefile(original) or "an unknown file"
            raise ApplyError(
                f"{original.__qualname__}.{name} in {file} is not the text that the emitted file replaces"
            )


def _check(patch: Patch, path: str, module: nn.Module) -> None:
    where = f"module {path or '<root>'} ({type(module).__name__})"
    for name in patch.sources:
        if name in module.__dict__:
            raise ApplyError(
                f"{where} has a {name} of its own, put there by another library",
                advice="Apply first and let the other library wrap the result",
            )
    for name, value in patch.constants.items():
        found = _reach(module, name)
        if found != value or type(found) is not type(value):
            raise ApplyError(
                f"{where} has {name} = {found!r}, and the emitted file was made for {value!r}",
                advice="Emit the file again from this model's configuration",
            )
    for name, dtype in patch.dtypes.items():
        kept = str(getattr(_reach(module, name), "dtype", None))
        if kept != dtype:
            raise ApplyError(
                f"{where} has {name} in {kept}, and the emitted file was made for {dtype}",
                advice="Load the model in that dtype, or emit the file again from it",
            )
    for name, wanted in patch.modules.items():
        _check_submodule(f"{where}.{name}", _reach(module, name), wanted)


def _check_submodule(where: str, held: Any, wanted: str) -> None:
    cls = type(held)
    if isinstance(held, Patched):
        cls = original_class(cls)
    if f"{cls.__module__}.{cls.__qualname__}" != wanted:
        raise ApplyError(
            f"{where} is a {cls.__qualname__}, and the emitted file replaces a call of {wanted}",
            advice="Take the adapter or quantisation off, or emit the file again with it on",
        )
    hooks: Sequence[str] = [name for name in _HOOKS if getattr(held, name, None)]
    if hooks or "forward" in held.__dict__:
        raise ApplyError(
            f"{where} has a hook, and the emitted file replaces the call that would run it",
            advice="Remove the hook, or leave that Definition out with skip=",
        )


def _reach(module: Any, path: str) -> Any:
    held = module
    for part in path.split("."):
        held = held[int(part)] if part.isdigit() and not hasattr(held, part) else getattr(held, part, None)
    return held
