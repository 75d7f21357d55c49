"""Compiling kernels before they are launched, side by side, into the cache on disk where the first launch finds them.

    with Compilers() as compilers:          # the processes are starting meanwhile
        ...
        compilers.compile(launches, "sm_90")

cuTile compiles one kernel at a time in a process, a second or more each, so there are several processes. A kernel that
does not compile here is none the worse: its launch compiles it again, and tells of what is wrong with it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import compilation

from tilegym_fx.compile.child import address, end, environment, find, hints
from tilegym_fx.errors import TilegymFxError
from tilegym_fx.recording import Launch

#: Processes: each holds torch, so more of them would cost memory for little time.
MOST = 8
#: Seconds for one kernel, and for all, which are compiled side by side.
LIMIT = 120
Request = dict[str, Any]
#: What a process says of a kernel; anything else on its output is somebody else's.
_ANSWERS = {"compiled": True, "failed": False}


def symbol_of(launch: Launch) -> str:
    """The name that cuTile gives the kernel compiled for a launch's arguments: it tells all that was assumed of them.

    Args:
        launch: Its tensors may be without memory.

    Raises:
        OSError: There is no CUDA driver.
        TypeError: An argument that kernels cannot take.
        ValueError: The same.
    """
    convention = compilation.CallingConvention
    args = tuple(_described(arg) for arg in launch.args)
    found = compilation.KernelSignature.from_kernel_args(launch.kernel, args, convention.cutile_python_v2())
    if all(getattr(p, "shape_constant", None) in (None, (None,) * getattr(p, "ndim", 0)) for p in found.parameters):
        # A launch takes the older convention where no length is a constant.
        found = compilation.KernelSignature(found.parameters, convention.cutile_python_v1())
    return str(found.with_mangled_symbol(launch.kernel._pyfunc.__name__).symbol)


def _described(arg: Any) -> Any:
    """A tensor on `meta` of the same layout: cuTile asks a tensor for its address, which those without memory lack."""
    if not isinstance(arg, torch.Tensor):
        return arg
    there = torch.empty(0, dtype=arg.dtype, device="meta")
    return there.as_strided(arg.shape, arg.stride(), arg.storage_offset())


def _kind(launch: Launch) -> tuple[Any, ...]:
    """Equal for launches of which one compilation serves all."""
    return (
        launch.kernel,
        *(_layout(arg) if isinstance(arg, torch.Tensor) else (type(arg), arg) for arg in launch.args),
    )


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def requests(launches: Iterable[Launch], arch: str) -> list[Request]:
    """What is to be compiled for some launches, each once. What another process cannot import, and what cuTile takes no
    arguments of, is left to its launch."""
    found: dict[str, Request] = {}
    seen: set[tuple[Any, ...]] = set()
    for launch in launches:
        with contextlib.suppress(TilegymFxError, OSError, TypeError, ValueError):
            if (kind := _kind(launch)) in seen:
                continue
            seen.add(kind)
            request = {
                **address(launch.kernel), "hints": hints(launch.kernel, arch), "symbol": symbol_of(launch), "arch": arch
            }  # fmt: skip
            found.setdefault(json.dumps(request), request)
    return list(found.values())


class Compilers:
    """Processes that compile. They start when the block is entered and end with it.

    Args:
        count: How many; by default one less than there are processors, `MOST` at most. With fewer than two there
            are none, as nothing would be gained.
    """

    def __init__(self, count: int | None = None) -> None:
        count = min(MOST, len(os.sched_getaffinity(0)) - 1) if count is None else count
        self._count = count if count > 1 else 0
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Compilers:
        command = [sys.executable, "-m", "tilegym_fx.compile.ahead"]
        with contextlib.suppress(OSError):  # as many as the machine bears
            for _ in range(self._count if sys.executable else 0):
                self._children.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                     text=True, start_new_session=True, env=environment())
                )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
                 ) -> None:  # fmt: skip
        for child in self._children:
            end(child)

    def compile(self, launches: Iterable[Launch], arch: str, limit: float = LIMIT) -> int:
        """Compiles the kernels of some launches; says how many were.

        Args:
            launches: What is going to be launched.
            arch: ``sm_90`` for example.
            limit: Seconds for all of them; then the processes are ended, whatever they wait for.
        """
        if not self._children:
            return 0
        wanted, lock, done = iter(requests(launches, arch)), threading.Lock(), list[bool]()
        threads = [threading.Thread(target=_serve, args=(child, wanted, lock, done)) for child in self._children]
        for thread in threads:
            thread.start()
        end_at = time.monotonic() + limit
        for thread in threads:
            thread.join(max(0.0, end_at - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            for child in self._children:
                end(child)
        for thread in threads:
            thread.join()
        return sum(done)


def _serve(child: subprocess.Popen[str], wanted: Iterator[Request], lock: threading.Lock, done: list[bool]) -> None:
    """Give one process requests until there are none, or it has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    while True:
        with lock:
            request = next(wanted, None)
        if request is None:
            return
        try:
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            return
        answer = next((line for line in map(str.strip, child.stdout) if line in _ANSWERS), None)
        if answer is None:
            return
        done.append(_ANSWERS[answer])


def _compiled(request: Request) -> bool:
    try:
        kernel = find(request["folder"], request["file"], request["name"]).replace_hints(**request["hints"])
        _, signature = compilation.demangle_kernel_name(request["symbol"])
        with ct.compiler_timeout(LIMIT):
            compilation.export_kernel(
                kernel, [signature], io.BytesIO(), gpu_code=request["arch"], output_format="cubin"
            )  # fmt: skip
    except (TilegymFxError, ct.TileError, OSError):
        return False
    return True


def main() -> None:
    """Answer requests on stdin, one a line; what the kernels' files print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        print("compiled" if _compiled(json.loads(line)) else "failed", file=answers, flush=True)


if __name__ == "__main__":
    main()
