"""Recording launches instead of running them.

    with recorded() as launches:
        rms_norm(x, weight, 1e-6)          # on the CPU, on `meta`, or without memory

Given tensors without memory, a kernel's entry point tells which launches a large shape leads to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import cuda.tile as ct


@dataclass(frozen=True)
class Launch:
    """One launch that was recorded instead of run.

    Attributes:
        kernel: The kernel, hints included.
        grid: Its block counts.
        args: Its arguments.
    """

    kernel: ct.kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]


_launches: ContextVar[list[Launch] | None] = ContextVar("tilegym_fx_launches", default=None)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record what is launched in this thread; nothing is run.

    Yields:
        The launches, in order; their outputs hold whatever the entry point allocated.
    """
    launches: list[Launch] = []
    token = _launches.set(launches)
    try:
        yield launches
    finally:
        _launches.reset(token)


def is_recording() -> bool:
    """Whether launches are recorded here."""
    return _launches.get() is not None


def note(kernel: ct.kernel, grid: tuple[int, ...], args: tuple[Any, ...]) -> bool:
    """Record a launch, if launches are recorded here; says whether."""
    launches = _launches.get()
    if launches is None:
        return False
    launches.append(Launch(kernel, tuple(grid), tuple(args)))
    return True
