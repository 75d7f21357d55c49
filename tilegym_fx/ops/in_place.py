"""Ops that write some of their results over inputs: ``<name>_`` beside ``<name>``, as in torch.

A Definition gives new values, and so does its op. Where an author's code writes these values over the old ones, as a
static cache does, copying them would cost more than the kernel saves. So a kernel's file may have, beside the entry
point ``f``, a function ``f_`` with the same parameters, which writes over inputs what ``f`` would have returned for
them, and returns the rest. Without one the results of ``f`` are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .op import Op

if TYPE_CHECKING:
    from tilegym_fx.inventory import Inventory
    from tilegym_fx.schema import Definition


class InPlaceOp(Op):
    """What the writing op of a Definition does on each kind of tensor.

    Args:
        definition: The Definition.
        inventory: Where its reference and its Solutions are.
        written: Place of an output -> the input over which it is written.
    """

    def __init__(self, definition: Definition, inventory: Inventory, written: Mapping[int, str]):
        super().__init__(definition, inventory)
        inputs = list(definition.inputs)
        self._written = {output: inputs.index(name) for output, name in written.items()}

    def reference(self, *args: Any) -> Any:
        """The Definition's reference, its results copied."""
        return self._stored(super().reference(*args), args)

    def outputs(self, returned: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Every output of a call that has been made: those that it returned, and those in its arguments."""
        rest = iter(super().outputs(returned, args))
        count = len(self.inventory.definitions[self.name].outputs)
        return tuple(args[self._written[i]] if i in self._written else next(rest) for i in range(count))

    @property
    def written(self) -> frozenset[int]:
        """The places of the arguments that a call writes over."""
        return frozenset(self._written.values())

    def autograd(self, *args: Any) -> Any:
        """A call that may be recorded: then it is the reference's operations, which autograd knows."""
        wanted = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        if torch.is_grad_enabled() and wanted:
            return self.reference(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args)

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The op that this is behind."""
        found: torch._ops.OpOverload = getattr(torch.ops.tilegym_fx, f"{self.name}_").default
        return found

    def fake(self, *args: Any) -> Any:
        """What is returned on tensors without data."""
        return self._rest(super().reference(*args))

    def _of_others(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return self._stored(super()._of_others(function, args), args)

    def _implementation(self, solution: str) -> Callable[..., Any]:
        entry = super()._implementation(solution)
        own: Callable[..., Any] | None = entry.__globals__.get(f"{entry.__name__}_")
        return own or (lambda *args: self._stored(entry(*args), args))

    def _on_copies(self, kernel: Callable[..., Any], copies: tuple[Any, ...], device: torch.device,
                   args: tuple[Any, ...]) -> Any:  # fmt: skip
        result = super()._on_copies(kernel, copies, device, args)
        for place in self._written.values():
            args[place].copy_(copies[place])
        return result

    def _stored(self, results: Any, args: tuple[Any, ...]) -> Any:
        results = results if isinstance(results, tuple) else (results,)
        for output, place in self._written.items():
            args[place].copy_(results[output])
        return self._rest(results)

    def _rest(self, results: Any) -> Any:
        results = results if isinstance(results, tuple) else (results,)
        rest = tuple(result for i, result in enumerate(results) if i not in self._written)
        return rest[0] if len(rest) == 1 else rest or None
