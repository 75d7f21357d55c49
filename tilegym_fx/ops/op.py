"""The implementations behind one torch op, and which of them a call runs."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from tilegym_fx import settings
from tilegym_fx.errors import KernelError
from tilegym_fx.recording import is_recording

from .backends import NoImplementationError, registered, selected
from .gradient import refuse_tangents
from .strides import for_grouped_products

if TYPE_CHECKING:
    from tilegym_fx.inventory import Inventory
    from tilegym_fx.schema import Definition

_fallbacks: Counter[tuple[str, str]] = Counter()


class Op:
    """What a Definition's op does on each kind of tensor.

    Args:
        definition: The Definition.
        inventory: Where its reference and its Solutions are.
    """

    def __init__(self, definition: Definition, inventory: Inventory):
        self.name = definition.name
        self.inventory = inventory
        self._has_products = "grouped_mm(" in definition.reference
        self._kernels: dict[tuple[int, int] | None, Callable[..., Any] | None] = {}

    def reference(self, *args: Any) -> Any:
        """The Definition's reference with contiguous outputs, for inputs of any strides as a kernel is."""
        if self._has_products:
            args = for_grouped_products(args)
        return _contiguous(self.inventory.reference(self.name)(*args))

    def fake(self, *args: Any) -> Any:
        """A call on tensors without memory: the reference, or where launches are recorded what the kernel launches."""
        if is_recording():
            device = args[0].device
            kernel = self._kernel_for(_capability(device.index) if device.type == "cuda" else None)
            if kernel is not None:
                return kernel(*args)
        return self.reference(*args)

    def results(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """What the Definition's reference gives for a call's arguments: every output, none written over an input."""
        return _as_tuple(Op.reference(self, *args))

    def outputs(self, returned: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Every output of a call that has been made, wherever the op leaves it."""
        return _as_tuple(returned)

    @property
    def written(self) -> frozenset[int]:
        """The places of the arguments that a call writes over."""
        return frozenset()

    def cpu(self, *args: Any) -> Any:
        """A call on CPU tensors."""
        if forward_ad._current_level >= 0:
            refuse_tangents(self.name, args)
        backend = selected()
        if backend is not None:
            return self._demanded(backend, args)
        if settings.interpret():
            kernel = self._kernel_for(None)
            if kernel is not None:
                return kernel(*args)
        return self.reference(*args)

    def cuda(self, *args: Any) -> Any:
        """A call on CUDA tensors."""
        if forward_ad._current_level >= 0:
            refuse_tangents(self.name, args)
        backend = selected()
        if backend is not None:
            return self._demanded(backend, args)
        capability = _capability(args[0].device.index)
        kernel = self._kernels.get(capability) or self._kernel_for(capability)
        if kernel is None:
            return self._fall_back(_no_solution(capability), args)
        try:
            return kernel(*args)
        except KernelError as error:
            return self._fall_back(str(error), args)

    def _demanded(self, backend: str, args: tuple[Any, ...]) -> Any:
        function = registered(self.name, backend)
        if function is not None:
            return self._of_others(function, args)
        if backend == "torch":
            return self.reference(*args)
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        if backend == "interpret":
            return self._interpreted(device, args)
        if backend == "cutile":
            return self._on_gpu(device, args)
        raise NoImplementationError.of(self.name, backend)

    def _of_others(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What a third party's implementation gives."""
        return _contiguous(function(*args))

    def _on_gpu(self, device: torch.device, args: tuple[Any, ...]) -> Any:
        if device.type != "cuda":
            raise NoImplementationError.of(self.name, "cutile", f"its tensors are on {device.type}")
        capability = _capability(device.index)
        kernel = self._kernel_for(capability)
        if kernel is None:
            raise NoImplementationError.of(self.name, "cutile", f"no Solution for sm_{capability[0]}{capability[1]}")
        return kernel(*args)

    def _interpreted(self, device: torch.device, args: tuple[Any, ...]) -> Any:
        kernel = self._kernel_for(None)
        if kernel is None:
            raise NoImplementationError.of(self.name, "interpret", "it has no Solution")
        return self._on_copies(kernel, tree_map_only(torch.Tensor, lambda t: t.cpu(), args), device, args)

    def _on_copies(self, kernel: Callable[..., Any], copies: tuple[Any, ...], device: torch.device,
                   args: tuple[Any, ...]) -> Any:  # fmt: skip
        """Run a kernel on CPU tensors in place of the arguments, which are on a device."""
        return tree_map_only(torch.Tensor, lambda t: t.to(device), kernel(*copies))

    def _kernel_for(self, capability: tuple[int, int] | None) -> Callable[..., Any] | None:
        """The entry point of the first Solution for a device, or of the first of all."""
        if capability not in self._kernels:
            self._kernels[capability] = next(
                (
                    self._implementation(solution.name)
                    for solution in self.inventory.solutions_for(self.name)
                    if capability is None or runs_on(solution.spec.target_hardware, capability)
                ),
                None,
            )
        return self._kernels[capability]

    def _implementation(self, solution: str) -> Callable[..., Any]:
        return self.inventory.entry_point(solution)

    def _fall_back(self, reason: str, args: tuple[Any, ...]) -> Any:
        if not _fallbacks[self.name, reason]:
            warnings.warn(f"tilegym_fx: {self.name} runs its PyTorch reference: {reason}", stacklevel=3)
        _fallbacks[self.name, reason] += 1
        return self.reference(*args)


def runs_on(targets: list[str] | tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether a kernel for these targets (``SM90``) runs on a device: same major version, minor not below."""
    major, minor = capability
    return any(t == f"SM{major}{m}" for t in targets for m in range(minor + 1))


def fallbacks() -> Mapping[tuple[str, str], int]:
    """How often each ``(op, reason)`` ran its reference on a CUDA device instead of a kernel."""
    return dict(_fallbacks)


@functools.cache
def _capability(device: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _no_solution(capability: tuple[int, int]) -> str:
    return f"no Solution for sm_{capability[0]}{capability[1]}"


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (() if result is None else (result,))


def _contiguous(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.contiguous()
    return tuple(r.contiguous() for r in result)
