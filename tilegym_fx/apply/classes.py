"""The classes that modules are given: emitted ones, and watched ones of the modules whose calls are gone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn

from tilegym_fx.apply import watch


class Watched:
    """A module whose call an emitted method skips. Before anything is put on it or exchanged in it, the
    emitted methods that this concerns are given back.

    Known to Python and to other libraries by the name of the class that it was before.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not torch.compiler.is_compiling():
            watch.assigned(self, name, value)  # type: ignore[arg-type]
            if not isinstance(cast(Any, self), Watched):  # assigning has put its class back
                setattr(self, name, value)
                return
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        watch.assigned(self, name, None)  # type: ignore[arg-type]
        _rest(self, "__delattr__")(name)

    def add_module(self, name: str, module: Any) -> None:
        watch.assigned(self, name, module)  # type: ignore[arg-type]
        _rest(self, "add_module")(name, module)

    def register_module(self, name: str, module: Any) -> None:
        watch.assigned(self, name, module)  # type: ignore[arg-type]
        _rest(self, "register_module")(name, module)

    def register_parameter(self, name: str, param: Any) -> None:
        watch.assigned(self, name, param)  # type: ignore[arg-type]
        _rest(self, "register_parameter")(name, param)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        before = watch.dtypes_of(self)  # type: ignore[arg-type]
        result = super()._apply(fn, *args, **kwargs)  # type: ignore[misc]
        watch.converted(self, before)  # type: ignore[arg-type]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the class that it was: a pickle needs neither the emitted file nor this package."""
        reduced = super().__reduce_ex__(protocol)
        return (object.__new__, (original_class(type(self)),), *reduced[2:])

    def __copy__(self) -> Any:
        return _copied(self, copy.copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copied(self, lambda module: copy.deepcopy(module, memo))


def _rest(module: Any, name: str) -> Callable[..., Any]:
    """The author's method behind one of the above. The class may have gone back in the meantime."""
    method: Callable[..., Any] = getattr(super(Watched, module) if isinstance(module, Watched) else module, name)
    return method


def _hook_method(name: str) -> Callable[..., Any]:
    def register(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch.called(self, "a hook was put on it")
        return _rest(self, name)(*args, **kwargs)

    register.__name__ = name
    register.__qualname__ = f"Watched.{name}"
    return register


for _name in (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_backward_hook",
):  # fmt: skip
    setattr(Watched, _name, _hook_method(_name))


class Patched(Watched):
    """Base of every emitted class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Patched in cls.__bases__:
            _name_as(cls, original_class(cls))


def _name_as(cls: type, original: type) -> None:
    cls.__name__, cls.__qualname__ = original.__name__, original.__qualname__
    cls.__module__, cls.__doc__ = original.__module__, original.__doc__


@lru_cache(maxsize=1024)
def watched_class(original: type) -> type:
    """The watched class of a class."""
    cls = type(original.__name__, (Watched, original), {})
    _name_as(cls, original)
    return cls


def is_ours(cls: type) -> bool:
    """Whether a class is an emitted or a watched one itself, not derived from one by another library."""
    return Patched in cls.__bases__ or Watched in cls.__bases__


def original_class(cls: type) -> type:
    """The class that an emitted or watched class stands for; any other class itself.

    A class that another library derived from ours (FSDP, parametrizations) is derived anew from the author's.
    """
    if not issubclass(cls, Watched):
        return cls
    if is_ours(cls):
        return next(base for base in cls.__bases__ if not issubclass(base, Watched))
    return _derived_anew(cls)  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _derived_anew(cls: type) -> type:
    bases = tuple(original_class(base) for base in cls.__bases__)
    skipped = ("__dict__", "__weakref__")
    return type(cls.__name__, bases, {k: v for k, v in vars(cls).items() if k not in skipped})


def set_class(module: nn.Module, cls: type) -> None:
    """`module.__class__ = cls`, past the watch."""
    object.__setattr__(module, "__class__", cls)


def _copied(module: Any, copier: Callable[[Any], Any]) -> Any:
    """Copies a module as an instance of its own class; the copy of a rewritten one is bound as it is."""
    ours = type(module)
    set_class(module, original_class(ours))
    try:
        copied = copier(module)
    finally:
        set_class(module, ours)
    watch.copied(module, copied)
    return copied
