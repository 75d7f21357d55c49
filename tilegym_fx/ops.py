"""One torch op for each Definition: ``torch.ops.tilegym_fx.<name>``, also known as ``tilegym_fx.ops.<name>``.

CPU and fake tensors run the Definition's reference; CUDA tensors run its Solution where architecture and
dtype allow, else the reference. Every fallback is counted in :func:`fallbacks` and warned about once. Outputs
are always contiguous. Gradients flow through the reference.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library, register_autograd, register_fake

from . import settings
from .errors import KernelError

if TYPE_CHECKING:
    from .inventory import Inventory
    from .schema import Definition

_NAMESPACE = "tilegym_fx"
_library = Library(_NAMESPACE, "FRAGMENT")
_scalar_types = {"float": "float", "int": "int", "bool": "bool"}
_fallbacks: Counter[tuple[str, str]] = Counter()
_registered: dict[str, Op] = {}


class Op:
    """The implementations behind one torch op."""

    def __init__(self, definition: Definition, inventory: Inventory):
        self.name = definition.name
        self._definition = definition
        self._inventory = inventory
        self._kernels: dict[tuple[int, int], Callable[..., Any] | None] = {}
        self._broken: set[Any] = set()

    def reference(self, *args: Any) -> Any:
        """The Definition's reference with contiguous outputs."""
        return _contiguous(self._inventory.reference(self.name)(*args))

    def cpu(self, *args: Any) -> Any:
        if settings.interpret():
            kernel = self._kernel_for(None)
            if kernel is not None:
                return kernel(*args)
        return self.reference(*args)

    def cuda(self, *args: Any) -> Any:
        device = args[0].device.index
        capability = _capability(device)
        kernel = self._kernels.get(capability, _UNSEEN)
        if kernel is _UNSEEN:
            kernel = self._kernels[capability] = self._kernel_for(capability)
        if kernel is None:
            return self._fall_back(f"no Solution for sm_{capability[0]}{capability[1]}", args)
        try:
            return kernel(*args)
        except KernelError as error:
            return self._fall_back(str(error), args)

    def _kernel_for(self, capability: tuple[int, int] | None) -> Callable[..., Any] | None:
        for solution in self._inventory.solutions_for(self.name):
            if capability is None or runs_on(solution.spec.target_hardware, capability):
                return self._inventory.entry_point(solution.name)
        return None

    def _fall_back(self, reason: str, args: tuple[Any, ...]) -> Any:
        if not _fallbacks[self.name, reason]:
            warnings.warn(f"tilegym_fx: {self.name} runs its PyTorch reference: {reason}", stacklevel=3)
        _fallbacks[self.name, reason] += 1
        return self.reference(*args)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(a for a in inputs if isinstance(a, torch.Tensor)))
        ctx.literals = tuple(None if isinstance(a, torch.Tensor) else (a,) for a in inputs)

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The reference's own gradient, recomputed from the saved inputs."""
        saved = iter(ctx.saved_tensors)
        inputs = [literal[0] if literal else next(saved) for literal in ctx.literals]
        wanted = [i for i, (a, need) in enumerate(zip(inputs, ctx.needs_input_grad, strict=True)) if need]
        with torch.enable_grad():
            leaves = [
                a.detach().requires_grad_(i in wanted)
                if isinstance(a, torch.Tensor) and a.is_floating_point()
                else a
                for i, a in enumerate(inputs)
            ]
            outputs = self.reference(*leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
            found = torch.autograd.grad(
                [o for o, _ in pairs], [leaves[i] for i in wanted], [g for _, g in pairs], allow_unused=True
            )
        gradients = dict(zip(wanted, found, strict=True))
        return tuple(gradients.get(i) for i in range(len(inputs)))


def _UNSEEN() -> None:
    """Marks a compute capability for which no Solution has been looked up yet."""


def runs_on(targets: list[str] | tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether a kernel for these targets (``SM90``) runs on a device: same major version, minor not below."""
    major, minor = capability
    return any(t == f"SM{major}{m}" for t in targets for m in range(minor + 1))


@functools.cache
def _capability(device: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _contiguous(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.contiguous()
    return tuple(r.contiguous() for r in result)


def schema_of(definition: Definition) -> str:
    """The op's schema string: tensors and Python scalars in the Definition's order."""
    parameters = []
    for name, spec in definition.inputs.items():
        kind = "Tensor" if spec.shape is not None else _scalar_types[_scalar_kind(spec.dtype)]
        parameters.append(f"{kind} {name}")
    results = ["Tensor"] * len(definition.outputs)
    returns = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return f"{definition.name}({', '.join(parameters)}) -> {returns}"


def _scalar_kind(dtype: str) -> str:
    return "bool" if dtype == "bool" else "int" if dtype.startswith(("int", "uint")) else "float"


def register(inventory: Inventory) -> None:
    """Make one op for each Definition of the inventory that has none yet."""
    for name, definition in inventory.definitions.items():
        if name in _registered:
            continue
        op = Op(definition, inventory)
        _library.define(schema_of(definition))
        _library.impl(name, op.cpu, "CPU")
        _library.impl(name, op.cuda, "CUDA")
        register_fake(f"{_NAMESPACE}::{name}", op.reference, lib=_library)
        register_autograd(f"{_NAMESPACE}::{name}", op.backward, setup_context=op.setup_context, lib=_library)
        _registered[name] = op


def overload(name: str) -> torch._ops.OpOverload:
    """``torch.ops.tilegym_fx.<name>.default``, registering the shipped inventory if needed."""
    if name not in _registered:
        from .inventory import load

        register(load())
    if name not in _registered:
        raise KernelError(
            f"there is no op {name!r}", advice="`python -m tilegym_fx.inventory list` shows the names"
        )
    return getattr(torch.ops.tilegym_fx, name).default


def names() -> tuple[str, ...]:
    """The ops that exist now."""
    return tuple(_registered)


def fallbacks() -> Mapping[tuple[str, str], int]:
    """How often each ``(op, reason)`` ran its reference on a CUDA device instead of a kernel."""
    return dict(_fallbacks)


def __getattr__(name: str) -> torch._ops.OpOverload:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        op = overload(name)
    except KernelError as error:
        raise AttributeError(str(error)) from error
    globals()[name] = op
    return op
