"""One torch op for each Definition: ``torch.ops.tilegym_fx.<name>``, also known as ``tilegym_fx.ops.<name>``.

By itself an op runs its Definition's reference on CPU and fake tensors; on CUDA tensors it runs a Solution
where architecture and dtype allow, else the reference. Every fallback is counted in :func:`fallbacks` and
warned about once. Outputs are always contiguous. Gradients flow through the reference.

Which implementation runs can be chosen, for all calls or for one::

    tilegym_fx.ops.set_backend("torch")
    tilegym_fx.ops.rms_norm(hidden_states, weight, eps, backend="interpret")

    backends   the choice, and implementations of third parties
    op         the implementations behind one op
    in_place   ops that write results over inputs
    registry   ops made of Definitions
    call       what ``tilegym_fx.ops.<name>`` is
    lowering   what inductor makes of them
"""

from __future__ import annotations

from tilegym_fx.errors import KernelError

from .backends import (
    NoImplementationError,
    get_available_backends,
    get_current_backend,
    is_backend_available,
    register_impl,
    set_backend,
    tell_of_references,
    usual_device,
    what_runs,
)
from .call import NamedOp
from .lowering import lower_as_calls
from .op import fallbacks, runs_on
from .registry import behind, names, overload, register, schema_of, writing_overload

__all__ = [
    "NoImplementationError",
    "behind",
    "fallbacks",
    "get_available_backends",
    "get_current_backend",
    "is_backend_available",
    "lower_as_calls",
    "names",
    "overload",
    "register",
    "register_impl",
    "runs_on",
    "schema_of",
    "set_backend",
    "tell_of_references",
    "usual_device",
    "what_runs",
    "writing_overload",
]


def __getattr__(name: str) -> NamedOp:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        op = NamedOp(overload(name))
    except KernelError as error:
        raise AttributeError(str(error)) from error
    globals()[name] = op
    return op
