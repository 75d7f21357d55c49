"""Which implementation of an op runs: ``auto``, ``cutile``, ``torch``, ``interpret`` or a third party's.

``auto`` is where everybody starts: kernels on CUDA tensors, references everywhere else and wherever no kernel
fits. Every other backend is a demand: an op without an implementation for it raises.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from tilegym_fx import settings
from tilegym_fx.errors import INSTALL_CUTILE, KernelError, UsageError, did_you_mean

Implementation = TypeVar("Implementation", bound=Callable[..., Any])

AUTO = "auto"
#: Backend -> what it runs.
BUILT_IN = {
    AUTO: "a Solution on CUDA tensors, else the reference",
    "cutile": "the Solution's kernel on CUDA tensors",
    "torch": "the Definition's reference",
    "interpret": "the Solution's kernel in the CPU interpreter",
}

_everywhere: str | None = None
_told_of_references = False
_on_this_call: ContextVar[str | None] = ContextVar("tilegym_fx_backend", default=None)
_registered: dict[tuple[str, str], Callable[..., Any]] = {}


class NoImplementationError(KernelError, NotImplementedError):
    """An op has nothing to run on the backend that was asked for."""

    advice = "`tilegym_fx.ops.get_available_backends()` lists backends; register_impl adds to them"

    @classmethod
    def of(cls, op: str, backend: str, why: str = "") -> NoImplementationError:
        """The error for this op on this backend."""
        return cls(f"op {op!r} has no implementation for backend {backend!r}{': ' if why else ''}{why}")


def set_backend(backend: str) -> None:
    """Choose the backend of every call in this process that does not choose for itself.

    Args:
        backend: One of :func:`get_available_backends`; ``auto`` undoes an earlier choice.

    Raises:
        UsageError: There is no such backend, or it cannot run here.
    """
    global _everywhere
    _require_known(backend)
    if not is_backend_available(backend):
        raise UsageError(f"backend {backend!r} is not available here", advice=_advice(backend))
    _everywhere = None if backend == AUTO else backend


def get_current_backend() -> str:
    """The backend of calls that do not choose for themselves."""
    return selected() or AUTO


def is_backend_available(backend: str) -> bool:
    """Whether a backend can run on this machine; False for one that nobody knows."""
    if backend == "cutile":
        return torch.cuda.is_available() and has_cutile()
    if backend == "interpret":
        return has_cutile()
    return backend in BUILT_IN or any(known == backend for _, known in _registered)


def get_available_backends() -> tuple[str, ...]:
    """The backends that can run on this machine, third parties' last."""
    others = dict.fromkeys(backend for _, backend in _registered if backend not in BUILT_IN)
    return tuple(backend for backend in (*BUILT_IN, *others) if is_backend_available(backend))


def register_impl(name: str, backend: str, *, replace: bool = False) -> Callable[[Implementation], Implementation]:
    """Register a function as an op's implementation for a backend; a decorator.

    Args:
        name: Of the op. It need not exist yet.
        backend: A new name, or ``cutile`` for an op whose kernel comes from elsewhere.
        replace: Take the place of an earlier one.

    Raises:
        UsageError: The backend cannot be added to, or has an implementation of this op.
    """
    if backend in BUILT_IN and backend != "cutile":
        raise UsageError(f"backend {backend!r} is {BUILT_IN[backend]}", advice="Register under another name")

    def decorate(function: Implementation) -> Implementation:
        if not replace and (name, backend) in _registered:
            raise UsageError(f"op {name!r} has an implementation for backend {backend!r}", advice="Pass replace=True")
        _registered[name, backend] = function
        return function

    return decorate


def registered(name: str, backend: str) -> Callable[..., Any] | None:
    """What a third party has registered for an op on a backend."""
    return _registered.get((name, backend))


def selected() -> str | None:
    """The backend that was demanded for the call at hand; None for ``auto``."""
    chosen = _on_this_call.get()
    if chosen is None:
        return _everywhere
    return None if chosen == AUTO else chosen


@contextmanager
def on_this_call(backend: str) -> Iterator[None]:
    """Demand a backend for the calls in a block.

    Raises:
        UsageError: There is no such backend.
    """
    _require_known(backend)
    token = _on_this_call.set(backend)
    try:
        yield
    finally:
        _on_this_call.reset(token)


def what_runs(device: torch.device) -> str:
    """What calls on tensors of a device run that do not choose for themselves, in words that follow "run"."""
    backend = selected()
    if backend == "torch":
        return "PyTorch references, as the backend 'torch' is set"
    if backend == "interpret" or (backend is None and device.type == "cpu" and settings.interpret()):
        return "kernels in the CPU interpreter"
    if backend not in (None, "cutile"):
        return f"what is registered for the backend {backend!r}"
    if device.type == "cuda":
        return "kernels"
    if backend is None and device.type == "cpu":
        return "PyTorch references, as their tensors are on a CPU"
    return f"nothing, as their tensors are on {device.type}"


def tell_of_references(device: torch.device, stacklevel: int = 2) -> None:
    """Warn that calls on tensors of a device run references, once in a process and unless that was asked for."""
    global _told_of_references
    if _told_of_references or device.type != "cpu" or selected() is not None or settings.interpret():
        return
    _told_of_references = True
    why = "its tensors are on a CPU" if torch.cuda.is_available() else "no CUDA device here"
    warnings.warn(f"tilegym_fx: {why}, so its ops run their PyTorch references", stacklevel=stacklevel + 1)


def usual_device() -> torch.device:
    """Where tensors are that nothing else tells of: on the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _require_known(backend: str) -> None:
    if backend not in BUILT_IN and not is_backend_available(backend):
        known = tuple(dict.fromkeys((*BUILT_IN, *(b for _, b in _registered))))
        advice = f"Give one of {', '.join(known)}{did_you_mean(backend, known)}"
        raise UsageError(f"there is no backend {backend!r}", advice=advice)


def _advice(backend: str) -> str:
    if backend == "cutile" and not torch.cuda.is_available():
        return "It needs a CUDA device; `interpret` runs the same kernels on a CPU"
    return INSTALL_CUTILE


def has_cutile() -> bool:
    """Whether cuda-tile is installed."""
    try:
        return importlib.util.find_spec("cuda.tile") is not None
    except ModuleNotFoundError:
        return False
