"""Ops made of Definitions, each once in a process."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library, register_autograd, register_fake

from tilegym_fx.errors import KernelError, UnknownNameError, did_you_mean

from .gradient import Gradient
from .in_place import InPlaceOp
from .op import Op

if TYPE_CHECKING:
    from tilegym_fx.inventory import Inventory
    from tilegym_fx.schema import Definition

_NAMESPACE = "tilegym_fx"
_library = Library(_NAMESPACE, "FRAGMENT")
_SCALARS = {"float": "float", "int": "int", "bool": "bool"}
_ops: dict[str, Op] = {}
_writing: dict[str, InPlaceOp] = {}
#: torch defines an op once in a process; models may run in several threads.
_making = threading.RLock()


def schema_of(definition: Definition, written: Collection[str] = ()) -> str:
    """The op's schema string: tensors and Python scalars in the Definition's order.

    Args:
        definition: Whose op.
        written: The inputs over which results are written, for the op that does so.
    """
    parameters = []
    for name, spec in definition.inputs.items():
        kind = "Tensor" if spec.shape is not None else _SCALARS[_scalar_kind(spec.dtype)]
        mark = f"({chr(ord('a') + list(written).index(name))}!)" if name in written else ""
        parameters.append(f"{kind}{mark} {name}")
    results = ["Tensor"] * (len(definition.outputs) - len(written))
    returns = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return f"{definition.name}{'_' if written else ''}({', '.join(parameters)}) -> {returns}"


def _scalar_kind(dtype: str) -> str:
    return "bool" if dtype == "bool" else "int" if dtype.startswith(("int", "uint")) else "float"


def register(inventory: Inventory) -> None:
    """Make one op for each Definition of the inventory that has none yet."""
    with _making:
        for name, definition in inventory.definitions.items():
            if name not in _ops:
                _make(definition, inventory)


def register_shipped() -> None:
    """Make the ops of the shipped inventory that are not made yet."""
    from tilegym_fx.inventory import load

    register(load())


def _make(definition: Definition, inventory: Inventory) -> None:
    name, op = definition.name, Op(definition, inventory)
    # Kernels take any strides. Held to those of the trace, inductor would copy an input for each op that reads it.
    _library.define(schema_of(definition), tags=torch.Tag.flexible_layout)
    _library.impl(name, op.cpu, "CPU")
    _library.impl(name, op.cuda, "CUDA")
    register_fake(f"{_NAMESPACE}::{name}", op.fake, lib=_library)
    gradient = Gradient(op.reference)
    register_autograd(f"{_NAMESPACE}::{name}", gradient.backward, setup_context=gradient.setup_context, lib=_library)
    _ops[name] = op


def overload(name: str) -> torch._ops.OpOverload:
    """``torch.ops.tilegym_fx.<name>.default``, registering the shipped inventory if needed.

    All of it, as a graph that is loaded later may call any op.
    """
    if name not in _ops:
        register_shipped()
    if name not in _ops:
        advice = f"{UnknownNameError.advice}{did_you_mean(name, _ops)}"
        raise KernelError(f"there is no op {name!r}", advice=advice)
    found: torch._ops.OpOverload = getattr(torch.ops.tilegym_fx, name).default
    return found


def writing_overload(name: str, written: Mapping[int, str]) -> torch._ops.OpOverload:
    """``torch.ops.tilegym_fx.<name>_.default``, which writes some results over inputs and returns the others.

    Args:
        name: Of the Definition.
        written: Place of an output -> the input over which it is written; the same at every call.
    """
    overload(name)
    if name not in _writing:
        inventory = _ops[name].inventory
        op = InPlaceOp(inventory.definitions[name], inventory, written)
        full = f"{_NAMESPACE}::{name}_"
        _library.define(schema_of(inventory.definitions[name], tuple(written.values())), tags=torch.Tag.flexible_layout)
        _library.impl(f"{name}_", op.cpu, "CPU")
        _library.impl(f"{name}_", op.cuda, "CUDA")
        _library.impl(f"{name}_", op.autograd, "Autograd")
        register_fake(full, op.fake, lib=_library)
        _writing[name] = op
    return _writing[name].overload


def behind(overload: Any) -> Op | None:
    """What an op of ours does; None for any other."""
    if getattr(overload, "namespace", "") != _NAMESPACE:
        return None
    name = overload._schema.name.partition("::")[2]
    return _ops.get(name) or _writing.get(name.removesuffix("_"))


def overloads() -> tuple[torch._ops.OpOverload, ...]:
    """The ops that exist now, those that write among them."""
    return (*map(overload, _ops), *(op.overload for op in _writing.values()))


def names() -> tuple[str, ...]:
    """The ops that exist now."""
    return tuple(_ops)
