"""Compiling in a child: ``python -m tilegym_fx.compile.child`` reads and answers one request, as JSON."""

from __future__ import annotations

import base64
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cuda.tile as ct

from tilegym_fx.compile.here import compile_here, timed_out
from tilegym_fx.errors import TilegymFxError
from tilegym_fx.inventory.code import load_file
from tilegym_fx.launch import CompileError

_HINTS = ("num_ctas", "occupancy", "opt_level", "num_worker_warps")


def compile_in_child(
    kernel: ct.kernel, parameters: Iterable[dict[str, Any]], arch: str, timeout: float | None
) -> bytes:  # fmt: skip
    """See :func:`tilegym_fx.compile.compile_kernel`; the arguments are described already."""
    name = kernel._pyfunc.__name__
    request = {
        **address(kernel),
        "parameters": list(parameters),
        "arch": arch,
        "hints": hints(kernel, arch),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "tilegym_fx.compile.child"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
        env=environment(),
    )  # fmt: skip
    try:
        answer, log = child.communicate(json.dumps(request), timeout=timeout)
    except subprocess.TimeoutExpired as problem:
        raise timed_out(name, arch, timeout) from problem
    finally:
        end(child)
    if child.returncode:
        last = log.strip().splitlines()[-1:] or ["no message"]
        raise CompileError(f"compiling kernel {name} for {arch} ended with status {child.returncode}: {last[0]}")
    reply = json.loads(answer)
    if "problem" in reply:
        raise CompileError(reply["problem"], advice=reply["advice"])
    return base64.b64decode(reply["cubin"])


def environment() -> dict[str, str]:
    """Of a child that is to import what this process can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def end(child: subprocess.Popen[str]) -> None:
    """Kill the child with the compiler that it may have started."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def address(kernel: ct.kernel) -> dict[str, str]:
    """Where the child finds the kernel.

    Raises:
        CompileError: It is no name at the top of a file.
    """
    function = kernel._pyfunc
    file = inspect.getsourcefile(function)
    if "." in function.__qualname__ or file is None or not Path(file).is_file():
        raise CompileError(
            f"kernel {function.__qualname__} is not at the top of a file",
            advice="Compile it with isolated=False",
        )
    depth = max(1, function.__module__.count("."))
    return {"folder": str(Path(file).resolve().parents[depth - 1]), "file": str(Path(file).resolve()),
            "name": function.__name__}  # fmt: skip


def hints(kernel: ct.kernel, arch: str) -> dict[str, int]:
    """The kernel's hints for one architecture; one that is left to the compiler is left out."""
    by_target = kernel._compiler_options.hints_by_target()
    given = {**by_target["default"], **by_target.get(arch, {})}
    return {hint: given[hint] for hint in _HINTS if given.get(hint) is not None}


def find(folder: str, file: str, name: str) -> ct.kernel:
    module = load_file(Path(folder), Path(file))
    for value in vars(module).values():
        if isinstance(value, ct.kernel) and value._pyfunc.__name__ == name:
            return value
    raise CompileError(f"{Path(file).name} defines no kernel {name}", advice="Compile it with isolated=False")


def main() -> None:
    """Answer the request on stdin; what the kernel's file prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    try:
        kernel = find(request["folder"], request["file"], request["name"]).replace_hints(**request["hints"])
        cubin = compile_here(kernel, request["parameters"], request["arch"], None)
        reply = {"cubin": base64.b64encode(cubin).decode()}
    except TilegymFxError as problem:
        reply = {"problem": problem.what, "advice": problem.next_step}
    json.dump(reply, answers)
    answers.close()


if __name__ == "__main__":
    main()
