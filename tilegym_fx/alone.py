"""One kernelize at a time, and none of the model's calls in other threads meanwhile.

While a model is captured, tensors without memory stand in the place of its weights, and what torch offers to watch a
capture with is one for all threads. A call of another thread that begins meanwhile waits; one that has begun cannot be
stopped, so kernelize is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .errors import UsageError

#: How long a call waits; a model that hands its own calls to threads waits for itself.
PATIENCE = 900.0
_one = threading.RLock()


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Other threads neither run this model nor kernelize any while the body runs.

    Raises:
        UsageError: If another thread is inside a call of the model.
    """
    with _one:
        here, done = threading.get_ident(), threading.Event()
        parts = frozenset(id(module) for module in model.modules())

        def wait(module: nn.Module, _: Any) -> None:
            if threading.get_ident() != here and id(module) in parts and not done.wait(PATIENCE):
                raise UsageError(
                    f"a {type(module).__name__} was called while its model is being kernelized in another thread",
                    advice="Kernelize before other threads use the model",
                )

        handle = register_module_forward_pre_hook(wait)
        try:
            _require_idle(model, parts, here)
            yield
        finally:
            handle.remove()
            done.set()


def _require_idle(model: nn.Module, parts: Set[int], here: int) -> None:
    for thread, frame in sys._current_frames().items():
        busy = next(_inside(frame, parts), None) if thread != here else None
        if busy is not None:
            raise UsageError(
                f"{type(model).__name__} is being called in another thread ({busy.f_code.co_name} of "
                f"{busy.f_code.co_filename.rpartition('/')[2]}:{busy.f_lineno})",
                advice="Kernelize before other threads use the model, or once their calls have ended",
            )


def _inside(frame: FrameType | None, parts: Set[int]) -> Iterator[FrameType]:
    """The running methods of these modules, innermost first."""
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and id(frame.f_locals.get(code.co_varnames[0])) in parts:
            yield frame
        frame = frame.f_back
