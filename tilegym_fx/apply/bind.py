"""`apply` and `restore`: an emitted module put on one model and taken off again, all or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import ModuleType
from typing import TypeVar

from torch import nn

from tilegym_fx.apply import watch
from tilegym_fx.apply.table import Patch, check_dropped, check_module, check_sources, targets
from tilegym_fx.errors import ApplyError

Model = TypeVar("Model", bound=nn.Module)


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
    if not isinstance(model, nn.Module):
        raise ApplyError(f"a {type(model).__name__} is no module", advice="Give the model that the file was made for")
    check_dropped(module)
    chosen: list[tuple[nn.Module, str, Patch]] = []
    for patch in module.PATCHES:
        found = list(targets(patch, model))
        if not found:
            raise ApplyError(
                f"the model has no {patch.cls.__name__} at {', '.join(map(repr, patch.paths))}",
                advice="Emit the file again from this model",
            )
        check_sources(patch)
        for path, target in found:
            if type(target) is not patch.cls:
                _check_free(path, target)
                check_module(patch, path, target)
                chosen.append((target, path, patch))
    told: list[str] = []
    try:
        for target, path, patch in chosen:
            watch.bind(target, path, patch, told)
    except TypeError as problem:
        for target, _, _ in chosen:
            watch.unbind(target)
        raise ApplyError(f"a module does not let its class be set: {problem}") from problem
    return model


def _check_free(path: str, target: nn.Module) -> None:
    if watch.is_bound(target):
        raise ApplyError(
            f"module {path or '<root>'} ({type(target).__name__}) runs another emitted file",
            advice="Call restore(model) first",
        )


def restore(model: Model) -> Model:
    """Makes every module of a model what it was before `apply`."""
    for module, _ in list(watch.bonds(model)):
        watch.unbind(module)
    watch.forget(model)
    return model


def is_applied(model: nn.Module) -> bool:
    """Whether any module of a model runs an emitted method."""
    return next(watch.bonds(model), None) is not None


def emitted_files(model: nn.Module) -> list[str]:
    """Where the emitted methods that a model runs were imported from; text without a file has a made-up name."""
    classes = {bond.patch.cls for _, bond in watch.bonds(model)}
    methods = [unwrap(method) for cls in classes for method in vars(cls).values() if callable(method)]
    scopes = [getattr(method, "__globals__", {}) for method in methods]
    return sorted({str(scope.get("__file__")) for scope in scopes if "PATCHES" in scope})


@contextmanager
def applied(module: ModuleType, model: Model) -> Iterator[Model]:
    """`apply` for the length of a block."""
    try:
        yield apply(module, model)
    finally:
        restore(model)
