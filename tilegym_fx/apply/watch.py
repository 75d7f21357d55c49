"""What is put on a model after `apply`.

An emitted method reads `self.q_proj.weight` instead of calling `self.q_proj`. When that linear is exchanged
(an adapter, a quantised one), gets a hook or a `forward` of its own, or changes its dtype, the emitted method
would not notice. So the modules whose calls are gone are watched: before the change happens, every module that
skips the call goes back to its author's class. What was given back is kept here, for the report.

Nothing is stored on the modules: owners and watched modules know each other through weak references.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from tilegym_fx.apply import classes
from tilegym_fx.authored.modules import hooks_of, is_still, reach

#: The slot of a watched module that stands for its call.
CALL = "()"
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True)
class GivenBack:
    """A module that runs its author's code again.

    Attributes:
        path: Its path in the model that was kernelized.
        cls: Name of its class.
        why: What happened to it, as a sentence without a subject.
    """

    path: str
    cls: str
    why: str

    def __str__(self) -> str:
        return f"{self.path or '<root>'} ({self.cls}) runs its author's code again: {self.why}"


@dataclass
class Bond:
    """What binds one module to an emitted class.

    Attributes:
        path: Path of the module.
        patch: The row of the emitted table.
        told: One list for all modules of one `apply`; not empty once the user has been warned.
        watched: The modules that it watches, with the slot and the class or value that was there.
    """

    path: str
    patch: Any
    told: list[str]
    watched: list[tuple[ReferenceType[nn.Module], str, ReferenceType[nn.Module] | None]] = field(default_factory=list)


_bonds: WeakKeyDictionary[nn.Module, Bond] = WeakKeyDictionary()
_owners: WeakKeyDictionary[nn.Module, dict[str, WeakSet[nn.Module]]] = WeakKeyDictionary()
_given_back: WeakKeyDictionary[nn.Module, GivenBack] = WeakKeyDictionary()


def bind(module: nn.Module, path: str, patch: Any, told: list[str]) -> None:
    """Make a module an instance of an emitted class, and watch what it depends on."""
    unbind(module)
    _given_back.pop(module, None)
    classes.set_class(module, patch.cls)
    bond = _bonds[module] = Bond(path, patch, told)
    for at in patch.modules:
        _watch_path(module, at.split("."), bond, calls=True)
    for at in (*patch.dtypes, *patch.constants):
        _watch_path(module, at.split("."), bond, calls=False)


def _watch_path(owner: nn.Module, parts: list[str], bond: Bond, *, calls: bool) -> None:
    at: Any = owner
    for part in parts:
        held = getattr(at, part, None)
        _watch(at, part, owner, bond, held if isinstance(held, nn.Module) else None)
        if not isinstance(held, nn.Module):
            return
        at = held
    if calls:
        _watch(at, CALL, owner, bond, None)


def _watch(module: nn.Module, slot: str, owner: nn.Module, bond: Bond, held: nn.Module | None) -> None:
    slots = _owners.setdefault(module, {})
    slots.setdefault(slot, WeakSet()).add(owner)
    bond.watched.append((ref(module), slot, ref(held) if held is not None else None))
    if not isinstance(module, classes.Watched):
        classes.set_class(module, classes.watched_class(type(module)))  # type: ignore[arg-type]


def unbind(module: nn.Module) -> None:
    """Give a module its own class back, and those that only it watched theirs; harmless on any other."""
    bond = _bonds.pop(module, None)
    if bond is None:
        return
    for held, slot, _ in bond.watched:
        watched = held()
        if watched is None:
            continue
        slots = _owners.get(watched, {})
        slots.get(slot, WeakSet()).discard(module)
        if not any(len(owners) for owners in slots.values()):
            _owners.pop(watched, None)
            if watched not in _bonds:
                _release(watched)
    if module not in _owners:
        _release(module)
    else:
        _keep_watched(module)


def _release(module: nn.Module) -> None:
    if isinstance(module, classes.Watched):
        classes.set_class(module, classes.original_class(type(module)))


def _keep_watched(module: nn.Module) -> None:
    classes.set_class(module, classes.watched_class(classes.original_class(type(module))))


def is_bound(module: nn.Module) -> bool:
    """Whether a module runs an emitted method."""
    return module in _bonds


def bonds(model: nn.Module) -> Iterator[tuple[nn.Module, Bond]]:
    """The modules of a model that run emitted methods."""
    for module in model.modules():
        bond = _bonds.get(module)
        if bond is not None:
            yield module, bond


def assigned(module: nn.Module, name: str, value: Any) -> None:
    """An attribute of a watched module is about to be set, added or deleted (value None)."""
    slots = _owners.get(module)
    if slots is None:
        return
    if name in ("forward", "__class__", "__call__"):
        called(module, f"its {name} was exchanged")
    elif name in slots and not _is_same_kind(_held(module, name), value):
        _give_back(slots[name], f"{name} of {_name(module)} became {described(value)}")


def called(module: nn.Module, why: str) -> None:
    """Something is about to be put around the call of a watched module."""
    owners = _owners.get(module, {}).get(CALL, ())
    _give_back(owners, f"the call of a {type(module).__name__} is skipped, and {why}")


def dtypes_of(module: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes of a module's own tensors."""
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return {name: tensor.dtype for name, tensor in own}


def converted(module: nn.Module, before: dict[str, torch.dtype]) -> None:
    """The tensors of a watched module have been converted."""
    slots = _owners.get(module, {})
    for name, dtype in dtypes_of(module).items():
        if name in slots and before.get(name) != dtype:
            _give_back(slots[name], f"{name} of {_name(module)} became {dtype}")


def check(model: nn.Module) -> None:
    """Give back what was exchanged past every watch: `module._modules[name] = ...`, hooks put in by hand, a value
    in a configuration."""
    for owner, bond in list(bonds(model)):
        for path, value in bond.patch.constants.items():
            if not is_still(owner, path, value):
                _give_back([owner], f"{path} of {_name(owner)} became {described(reach(owner, path))}")
        for watched, slot, expected in bond.watched:
            module = watched()
            if module is None:
                _give_back([owner], "a module that it reads from is gone")
            elif slot == CALL and hooks_of(module):
                _give_back([owner], f"the call of a {type(module).__name__} is skipped, and it has a hook")
            elif expected is not None and module._modules.get(slot) is not expected():
                now = described(module._modules.get(slot))
                _give_back([owner], f"{slot} of {_name(module)} became {now}")


def given_back(model: nn.Module) -> list[GivenBack]:
    """What has been given back in a model since `apply`."""
    return [_given_back[module] for module in model.modules() if module in _given_back]


def forget(model: nn.Module) -> None:
    """Forget what was given back."""
    for module in model.modules():
        _given_back.pop(module, None)


def copied(module: nn.Module, copy: nn.Module) -> None:
    """Bind the copy of a module as the module is."""
    bond = _bonds.get(module)
    if bond is not None:
        bind(copy, bond.path, bond.patch, bond.told)


def _give_back(owners: Iterable[nn.Module], why: str) -> None:
    for owner in list(owners):
        bond = _bonds.get(owner)
        if bond is None:
            continue
        unbind(owner)
        record = _given_back[owner] = GivenBack(bond.path, type(owner).__name__, why)
        if not bond.told:
            bond.told.append(str(record))
            warnings.warn(
                f"tilegym_fx: {record}. Further ones are only counted: print(tilegym_fx.report(model)). "
                "To use kernels around the change, call kernelize(model) again",
                stacklevel=5,
            )


def _held(module: nn.Module, name: str) -> Any:
    for table in (module._parameters, module._buffers, module._modules, module.__dict__):
        if name in table:
            return table[name]
    return getattr(module, name, None)


def _is_same_kind(held: Any, value: Any) -> bool:
    """Whether an emitted method does not notice the exchange: the same, or another tensor of one kind."""
    if value is held:
        return True
    if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor):
        return type(value) in _PLAIN_TENSORS and value.dtype == held.dtype
    if isinstance(held, (nn.Module, torch.Tensor)) or isinstance(value, (nn.Module, torch.Tensor)):
        return False
    return type(held) is type(value) and held == value


def _name(module: nn.Module) -> str:
    bond = _bonds.get(module)
    return f"{bond.path or '<root>'}" if bond is not None else f"a {type(module).__name__}"


def described(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, (nn.Module, torch.Tensor)):
        cls = type(value)
        return f"a {cls.__module__.partition('.')[0]} {cls.__qualname__}"
    return repr(value)
