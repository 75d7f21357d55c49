"""What a model is, as one digest that other processes find too: one search for places serves all models of a digest.

Described is what a capture can see of a model: its modules, their classes with the text of their code, their
attributes, the weights but for their numbers. What cannot be described so that another process would find the same
(hooks, closures, objects of C libraries) makes a model that has no fingerprint.
"""

from __future__ import annotations

import hashlib
import inspect
import platform
from collections.abc import Iterator
from enum import Enum
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .authored.functions import layers
from .export import MODEL_ERRORS, describe
from .layers import own_attributes
from .reached import inside, reached, unwrapped

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
_CONTAINERS = (list, tuple, set, frozenset, dict)
#: Tables of a module by what is in them: what is called around a call of it, and around saving and loading.
_HOOKS = frozenset(name for name in vars(nn.Module()) if name.startswith(("_forward", "_backward")))
_SAVING = frozenset(name for name in vars(nn.Module()) if "state_dict" in name)
#: Attributes that no capture sees; the one that says how to sample has in it a hash that each process makes anew.
_NOT_CAPTURED = frozenset({"generation_config", *_SAVING})
#: What Python sets on a class of its own accord.
_GENERATED = frozenset({"__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__"})
#: Flag of a class that was made by Python code: its objects hold nothing but their attributes.
_OF_PYTHON = 1 << 9


class NoFingerprintError(Exception):
    """Something of a model that another process could not be sure to find equal."""


def fingerprint(model: nn.Module) -> str:
    """Equal for models in which the same places would be found, in this process or another one.

    Args:
        model: As it is to be captured; weights may be on any device.

    Raises:
        NoFingerprintError: If a part of it cannot be described.
    """
    try:
        return hashlib.sha256(repr(list(_Description(model).parts())).encode()).hexdigest()
    except (*MODEL_ERRORS, RecursionError) as problem:  # attributes are anybody's objects
        raise NoFingerprintError(f"it cannot be described: {describe(problem)}") from problem


class _Description:
    """Describes one model; what is held in several places is described once, and then named by its number."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._known: dict[int, int] = {}
        self._held: list[Any] = []  # an object that is gone would lend its identity to another

    def parts(self) -> Iterator[Any]:
        yield _surroundings()
        for path, module in self._modules.items():
            yield path, self._number(module), self._class(type(module)), module.training
        for path, module in self._modules.items():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                yield path, name, self._of(tensor)
            for name, held in own_attributes(module):
                if name in _HOOKS:
                    raise NoFingerprintError(f"{path or '<root>'} has hooks")
                if name not in _NOT_CAPTURED:
                    yield path, name, self._of(held)
        for name, held in reached(dict.fromkeys(map(type, self._modules.values()))):
            yield name, self._outline(held)

    def _number(self, held: Any) -> int:
        if id(held) not in self._known:
            self._held.append(held)
        return self._known.setdefault(id(held), len(self._known))

    def _class(self, cls: type) -> Any:
        """A class with the text of its functions, wherever it inherits them from; dynamo patches those of nn.Module."""
        bases = [base for base in cls.__mro__ if base.__flags__ & _OF_PYTHON and base is not nn.Module]
        return [self._known[id(base)] if id(base) in self._known else (self._number(base), *self._own_code(base))
                for base in bases]  # fmt: skip

    def _own_code(self, cls: type) -> Any:
        """A class without what it inherits: its functions and other attributes as they are now, patches among them."""
        held = {name: unwrapped(value) for name, value in vars(cls).items() if name not in _GENERATED}
        told = {name: value for name, value in held.items()
                if not name.startswith("__") or isinstance(value, (*_PLAIN, FunctionType))}  # fmt: skip
        return cls.__module__, cls.__qualname__, [(name, self._outline(value)) for name, value in told.items()]

    def _outline(self, held: Any, depth: int = 2) -> Any:
        """Of what code reads by a name: it may be anything, so that only what can be told of it is, as deep as that."""
        if isinstance(held, _PLAIN):
            return type(held).__name__, repr(held)
        if isinstance(held, type):
            return self._class(held)
        if isinstance(held, FunctionType):
            return _function(held)
        if isinstance(held, torch.Tensor) and depth:
            return self._of(held)
        inner = inside(held) if depth else ()
        named = getattr(held, "__qualname__", getattr(held, "__name__", ""))
        within = [(self._outline(name, 0), self._outline(value, depth - 1)) for name, value in inner]
        return type(held).__qualname__, str(named), within

    def _of(self, held: Any) -> Any:
        if isinstance(held, (*_PLAIN, Enum)):
            return type(held).__name__, repr(held), () if isinstance(held, Enum) else self._own(held)
        if id(held) in self._known:
            return "same as", self._known[id(held)]
        self._number(held)
        return type(held).__qualname__, self._content(held), self._own(held) if isinstance(held, _CONTAINERS) else ()

    def _own(self, held: Any) -> Any:
        """What an object of a class that inherits from one of C holds besides."""
        return [(name, self._of(value)) for name, value in getattr(held, "__dict__", {}).items()]

    def _content(self, held: Any) -> Any:
        if isinstance(held, torch.Tensor):
            kind = (self._class(type(held)), tuple(held.shape), held.stride() if held.layout == torch.strided else ())
            return (*kind, str(held.dtype), held.device.type, str(held.layout), held.requires_grad)
        if isinstance(held, list | tuple):
            return [self._of(item) for item in held]
        if isinstance(held, set | frozenset):
            return sorted(repr(self._of(item)) for item in held)
        if isinstance(held, dict):
            return [(self._of(key), self._of(value)) for key, value in held.items()]
        if isinstance(held, partial):
            return [self._of(part) for part in (held.func, held.args, held.keywords)]
        if isinstance(held, MethodType):
            return self._of(held.__func__), self._of(held.__self__)
        return self._object(held)

    def _object(self, held: Any) -> Any:
        if isinstance(held, type):
            return self._class(held)
        if isinstance(held, FunctionType) and not held.__closure__:
            return _function(held), self._of(held.__defaults__), self._of(held.__kwdefaults__), self._own(held)
        if isinstance(held, BuiltinFunctionType) and inspect.ismodule(held.__self__):
            return held.__module__, held.__qualname__
        bases = type(held).__mro__[:-1]
        if isinstance(held, nn.Module) or not all(base.__flags__ & _OF_PYTHON for base in bases):
            raise NoFingerprintError(f"a {type(held).__qualname__} cannot be described")
        if not hasattr(held, "__dict__") or any(base.__dict__.get("__slots__") for base in bases):
            raise NoFingerprintError(f"a {type(held).__qualname__} has slots")
        return self._class(type(held)), [(name, self._of(value)) for name, value in vars(held).items()]


def _surroundings() -> Any:
    """What every capture depends on besides the model."""
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    modes = torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()
    return platform.python_version(), torch.__version__, version("transformers"), repr((autocast, modes))


@cache
def _digest(file: str, changed: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _function(function: FunctionType) -> Any:
    """A function and what it wraps."""
    return [(layer.__qualname__, _text(layer.__code__)) for layer in layers(function)]


def _text(code: CodeType) -> Any:
    """The file that code is from, as it is on disk now, and the line; the code itself where there is no file."""
    file = Path(code.co_filename)
    return (_digest(str(file), file.stat().st_mtime_ns), code.co_firstlineno) if file.is_file() else _code(code)


def _code(code: CodeType) -> Any:
    constants = [
        _code(value) if isinstance(value, CodeType) else sorted(map(repr, value)) if isinstance(value, frozenset)
        else repr(value) for value in code.co_consts
    ]  # fmt: skip
    return code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars
