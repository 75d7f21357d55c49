"""What ``tilegym_fx.ops.<name>`` is: the op itself, which besides takes ``backend=``."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tilegym_fx.errors import UsageError

from .backends import on_this_call

_below_autograd = torch._C._AutoDispatchBelowAutograd


class NamedOp(torch._ops.OpOverload):
    """``torch.ops.tilegym_fx.<name>.default`` with a keyword ``backend``.

    A subclass of the overload and no function around it, so that a plain call costs what the overload's own
    does, and ``torch.compile`` puts it into its graph as any op.

    Args:
        overload: The op.
    """

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        vars(self).update(vars(overload))

    def __call__(self, /, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        """Run the op.

        Args:
            *args: The Definition's inputs, in order.
            backend: See :mod:`tilegym_fx.ops.backends`; by default what :func:`set_backend` chose.
            **kwargs: The Definition's inputs, by name.

        Raises:
            NoImplementationError: A NotImplementedError: the op has nothing to run on this backend.
            UsageError: There is no such backend, or a graph is being captured, which would forget it.
        """
        if backend is None:
            if torch.is_grad_enabled():
                return self._op(*args, **kwargs)
            with _below_autograd():  # the layer that records gradients costs more than the rest of the call
                return self._op(*args, **kwargs)
        if any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):
            raise UsageError(
                f"backend={backend!r} on a call of {self.__name__} inside a captured graph",
                advice="Leave it out there and choose with tilegym_fx.ops.set_backend",
            )
        with on_this_call(backend):
            return self._op(*args, **kwargs)
