"""The table of an emitted module, and whether a model is what it was made for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import nn

from tilegym_fx.apply.classes import original_class
from tilegym_fx.apply.watch import described
from tilegym_fx.authored.functions import digest_of, foreign_wrapper, plain_function
from tilegym_fx.authored.modules import hooks_of, is_still, reach
from tilegym_fx.authored.source import function_source
from tilegym_fx.errors import ApplyError


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


def targets(patch: Patch, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model that a row is for, with their paths."""
    original = original_class(patch.cls)
    for path, module in model.named_modules():
        if original_class(type(module)) is original and any(_fits(p, path) for p in patch.paths):
            yield path, module


def _fits(pattern: str, path: str) -> bool:
    """Whether a path, or the end of it (the model may sit inside another module), is what a pattern means."""
    if not pattern:
        return True
    wanted, parts = pattern.split("."), path.split(".")
    if len(parts) < len(wanted):
        return False
    tail = parts[len(parts) - len(wanted) :]
    return all(part.isdigit() if want == "*" else part == want for want, part in zip(wanted, tail, strict=True))


def check_sources(patch: Patch) -> None:
    """Raises if a function that a row replaces is not the one that it was made from."""
    original = original_class(patch.cls)
    for name, digest in patch.sources.items():
        held = next((vars(base)[name] for base in original.__mro__ if name in vars(base)), None)
        function = plain_function(held) if held is not None else None
        source = function_source(function.__code__) if function is not None else None
        if (wrapper := foreign_wrapper(held)) is not None:
            raise ApplyError(
                f"{original.__qualname__}.{name} is wrapped by {wrapper}, which the emitted file would run without",
                advice="Apply first and wrap the result, or take the wrapper off",
            )
        if source is None or source.digest != digest:
            file = inspect.getsourcefile(original) or "an unknown file"
            raise ApplyError(f"{original.__qualname__}.{name} in {file} is not the text that the emitted file replaces")


def check_dropped(module: ModuleType) -> None:
    """Raises if a function whose code is gone from an emitted module is not the one that it was made from."""
    for owner, functions in getattr(module, "DROPPED", {}).items():
        for name, digest in functions.items():
            if digest_of((owner, name)) != digest:
                raise ApplyError(
                    f"{owner}.{name} is not the text that the emitted file was made from, and the file has kernels "
                    "in place of calls of it",
                    advice="Emit the file again from this model as it is now",
                )


def check_module(patch: Patch, path: str, module: nn.Module) -> None:
    """Raises if a row was not made for a module as it is now."""
    where = f"module {path or '<root>'} ({type(module).__name__})"
    for name in patch.sources:
        if name in module.__dict__:
            raise ApplyError(
                f"{where} has a {name} of its own, put there by another library",
                advice="Apply first and let the other library wrap the result",
            )
    for name, value in patch.constants.items():
        if not is_still(module, name, value):
            raise ApplyError(
                f"{where} has {name} = {described(reach(module, name))}, and the emitted file was made for {value!r}",
                advice="Emit the file again from this model's configuration",
            )
    for name, dtype in patch.dtypes.items():
        kept = str(getattr(reach(module, name), "dtype", None))
        if kept != dtype:
            raise ApplyError(
                f"{where} has {name} in {kept}, and the emitted file was made for {dtype}",
                advice="Load the model in that dtype, or emit the file again from it",
            )
    for name, wanted in patch.modules.items():
        _check_submodule(f"{where}.{name}", reach(module, name), wanted)


def _check_submodule(where: str, held: Any, wanted: str) -> None:
    cls = original_class(type(held))
    if f"{cls.__module__}.{cls.__qualname__}" != wanted:
        raise ApplyError(
            f"{where} is a {cls.__qualname__}, and the emitted file replaces a call of {wanted}",
            advice="Take the adapter or quantisation off, or emit the file again with it on",
        )
    if hooks_of(held):
        raise ApplyError(
            f"{where} has a hook, and the emitted file replaces the call that would run it",
            advice="Remove the hook, or leave that Definition out with skip=",
        )
