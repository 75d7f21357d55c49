"""``python -m tilegym_fx.doctor``: whether kernels can run on this machine, and what to do if not."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from tilegym_fx import ops, settings, tuning
from tilegym_fx.errors import CUTILE_BESIDE_WHEEL, KernelError, SettingsError, TilegymFxError, did_you_mean
from tilegym_fx.inventory import load, shipped_root

Status = Literal["ok", "note", "problem"]

_LEAST = {"torch": "2.11", "transformers": "5.17", "cuda-tile": "1.6"}
#: The wheels that bring cuTile's compiler; it uses them together or not at all.
_COMPILER_WHEELS = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
_LEAST_DRIVER_CUDA = (13, 0)
_PREFLIGHT_SECONDS = 60.0
_FALLBACK_ARCH = "sm_90"
#: Checks without which nothing works; all others are about kernels.
_CORE = ("python", "torch", "transformers", "inventory")


@dataclass(frozen=True)
class Check:
    """One line of the examination.

    Attributes:
        name: What was looked at.
        status: A ``note`` is worth knowing, a ``problem`` keeps kernels from running.
        found: What there is.
        fix: What to do about it.
    """

    name: str
    status: Status
    found: str
    fix: str = ""

    def __str__(self) -> str:
        word = {"ok": "OK", "note": "note", "problem": "PROBLEM"}[self.status]
        return f"{word:<8}{self.name}: {self.found}" + (f". {self.fix}" if self.fix else "")


def examine() -> Iterator[Check]:
    """All checks, from the packages up to a compiled kernel."""
    yield Check("python", "ok", f"{platform.python_version()}, tilegym_fx {_version('tilegym_fx')}")
    for package in ("torch", "transformers", "cuda-tile"):
        yield package_check(package, _version(package))
    tools = {name: tool_version(find_tool(name)) for name in ("tileiras", "ptxas")}
    wheels = {wheel: _version(wheel) for wheel in _COMPILER_WHEELS}
    yield compiler_check(tools["tileiras"], tools["ptxas"], wheels)
    yield toolkit_check(settings.foreign_toolkits(), tools["tileiras"], comes_in_wheels(wheels), _toolkit_version)
    yield driver_check(driver_version(), driver_cuda())
    yield device_check(_device(), supported_archs(find_tool("tileiras")))
    arch = tuning.arch_of(torch.device("cuda", 0)) if torch.cuda.is_available() else _FALLBACK_ARCH
    yield from _own_checks(arch)
    yield preflight(arch)


def _install() -> str:
    """How to get what kernels need: into a clone, or beside the wheel."""
    return 'pip install -e ".[cuda]" in the clone' if _is_clone() else CUTILE_BESIDE_WHEEL


def _is_clone() -> bool:
    return shipped_root().name != "_data"


def package_check(package: str, found: str | None) -> Check:
    """Whether a package is there and new enough."""
    if found is None:
        return Check(package, "problem", "not installed", f"Install it: {_install()}")
    if numbers(found) < numbers(_LEAST[package]):
        return Check(package, "problem", f"{found} is too old", f"Upgrade it to {_LEAST[package]} or newer")
    return Check(package, "ok", found)


def compiler_check(tileiras: str | None, ptxas: str | None, wheels: dict[str, str | None]) -> Check:
    """Whether cuTile's compiler is there and its three parts are of one release.

    Args:
        tileiras: Its release (``13.4``).
        ptxas: The release of the one beside it.
        wheels: Versions of the wheels that bring them and libnvvm.
    """
    name = "compiler"
    if tileiras is None:
        return Check(name, "problem", "tileiras, cuTile's compiler, is not found", f"Install it: {_install()}")
    installed = {wheel: found for wheel, found in wheels.items() if found}
    nvvm = wheels["nvidia-nvvm"] or "without a version"
    parts = f"tileiras {tileiras}, ptxas {ptxas or 'not found'}, libnvvm {nvvm}"
    releases = {numbers(found)[:2] for found in installed.values()} | {numbers(v)[:2] for v in (tileiras, ptxas) if v}
    if len(releases) > 1:
        listed = ", ".join(f"{wheel} {found}" for wheel, found in installed.items())
        fix = f"Bring all three to one version: pip install --upgrade {' '.join(_COMPILER_WHEELS)}"
        more = f" ({listed})" if listed else ""
        return Check(name, "problem", f"mixed releases: {parts}{more}", fix)
    if ptxas is None:
        return Check(name, "problem", f"{parts}", "Install nvidia-cuda-nvcc in the version of tileiras")
    return Check(name, "ok", parts)


def comes_in_wheels(wheels: dict[str, str | None]) -> bool:
    """Whether cuTile takes the compiler of the wheels, and so never looks at a toolkit's variables."""
    return None not in wheels.values() and len({numbers(found or "")[:2] for found in wheels.values()}) == 1


def toolkit_check(
    variables: dict[str, str], tileiras: str | None, is_safe: bool, version_of: Callable[[str], str | None]
) -> Check:
    """Whether CUDA_HOME or CUDA_PATH lead a tileiras from the PATH to a libnvvm of another release."""
    name = "CUDA toolkit"
    if not variables:
        return Check(name, "ok", "CUDA_HOME and CUDA_PATH are unset")
    found = ", ".join(
        f"{variable}={place} (release {version_of(place) or '?'})" for variable, place in variables.items()
    )
    if is_safe:
        return Check(name, "ok", f"{found}; the compiler of the wheels ignores it")
    releases = {version_of(place) for place in variables.values()}
    if tileiras is not None and releases == {tileiras}:
        return Check(name, "ok", f"{found}, the release of tileiras")
    why = f"but tileiras is {tileiras or 'missing'}: it would load that toolkit's libnvvm and fail with code 5"
    return Check(name, "problem", f"{found}, {why}", f"Unset {' and '.join(variables)}")


def driver_check(driver: str | None, cuda: tuple[int, int] | None) -> Check:
    """Whether the driver is there and can load what the compiler makes."""
    if cuda is None:
        return Check("driver", "problem", "no NVIDIA driver", "Run on a machine with an NVIDIA GPU; scan needs none")
    found = f"{driver or '?'}, up to CUDA {cuda[0]}.{cuda[1]}"
    if cuda < _LEAST_DRIVER_CUDA:
        return Check("driver", "problem", found, "Install a driver for CUDA 13 (580 or newer)")
    return Check("driver", "ok", found)


def device_check(device: tuple[str, str] | None, supported: Sequence[str]) -> Check:
    """Whether there is a GPU that the compiler knows.

    Args:
        device: Name and architecture (``sm_90``).
        supported: What the compiler lists.
    """
    if device is None:
        return Check(
            "device",
            "problem",
            "torch sees no CUDA device",
            "Install a CUDA build of torch, on a GPU machine",
        )
    found = f"{device[0]}, {device[1]}"
    if supported and device[1] not in supported:
        listed = ", ".join(supported)
        fix = "Upgrade the compiler, or use another GPU"
        return Check("device", "problem", f"{found}, which this tileiras does not know ({listed})", fix)
    return Check("device", "ok", found)


def _own_checks(arch: str) -> Iterator[Check]:
    """The inventory, the caches and the settings."""
    try:
        inventory = load(*settings.inventory_roots())
    except TilegymFxError as error:
        yield Check("inventory", "problem", error.what, error.next_step)
        return
    capability = int(arch[3:-1]), int(arch[-1])
    usable = sum(ops.runs_on(s.spec.target_hardware, capability) for s in inventory.solutions.values())
    found = f"{usable} of {len(inventory.solutions)} Solutions run on {arch}"
    if usable:
        yield Check("inventory", "ok", found)
    else:
        yield Check("inventory", "problem", found, "Models stay as they are on this GPU")
    yield cache_check(settings.cache_folder())
    try:
        count = sum(len(tuning.entries(file)) for file in (tuning.shipped_file(arch), tuning.user_file(arch)))
        yield Check("tuning", "ok", f"{count} entries for {arch}")
    except tuning.TuningError as error:
        yield Check("tuning", "note", error.what, error.next_step)
    yield settings_check(settings.unknown_variables())


def settings_check(unknown: Sequence[str]) -> Check:
    """Whether every TILEGYM_FX_* variable in the environment means something."""
    if not unknown:
        return Check("settings", "ok", "no unknown variable")
    meant = {name.removeprefix(settings.PREFIX): name for name in settings.VARIABLES}
    near = did_you_mean(unknown[0].removeprefix(settings.PREFIX), meant, meant)
    advice = f"There are {', '.join(settings.VARIABLES)}{near}"
    return Check("settings", "note", f"{', '.join(unknown)} mean{'s' * (len(unknown) == 1)} nothing", advice)


def cache_check(folder: Path) -> Check:
    """Whether the cache folder, or the nearest parent there is, can be written to."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        return Check("cache", "ok", str(folder))
    return Check("cache", "note", f"{folder} cannot be written to", "Name another folder in TILEGYM_FX_CACHE")


def preflight(arch: str) -> Check:
    """Compiles the smallest shipped kernel, which needs no GPU."""
    name = "compile"
    try:
        entry = load().entry_point("cache_append")
        from tilegym_fx.compile import compile_kernel
        from tilegym_fx.recording import recorded
    except KernelError as error:
        return Check(name, "problem", f"no kernel can be loaded: {error.what}", error.next_step)
    except ImportError as error:
        return Check(name, "problem", f"no kernel can be loaded: {error}", f"Install what is missing: {_install()}")
    cache = torch.empty(1, 8, 64, 128, dtype=torch.bfloat16, device="meta")
    with recorded() as launches:
        entry(cache, cache[:, :, :1])
    try:
        for launch in launches:
            compile_kernel(launch.kernel, launch.args, arch, timeout=_PREFLIGHT_SECONDS)
    except KernelError as error:
        return Check(name, "problem", error.what, error.next_step)
    return Check(name, "ok", f"a kernel compiles for {arch}")


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing: (2, 13, 0) of ``2.13.0+cu130``."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def find_tool(name: str) -> str | None:
    """The program that cuTile would run: of the wheels, on the PATH, or of the toolkit that is set."""
    wheels = {wheel: _version(wheel) for wheel in _COMPILER_WHEELS}
    if comes_in_wheels(wheels):
        spec = importlib.util.find_spec("nvidia.cu13")
        for folder in (spec.submodule_search_locations if spec else None) or ():
            found = shutil.which(name, path=str(Path(folder) / "bin"))
            if found:
                return found
    toolkits = [str(Path(place) / "bin") for place in settings.foreign_toolkits().values()]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(toolkits) or os.devnull)


def tool_version(program: str | None) -> str | None:
    """``13.4`` out of what ``--version`` prints."""
    found = re.search(r"release (\d+\.\d+)", _output(program, "--version"))
    return found.group(1) if found else None


def supported_archs(tileiras: str | None) -> tuple[str, ...]:
    """The architectures that tileiras lists."""
    return tuple(dict.fromkeys(re.findall(r"=(sm_\d+)\b", _output(tileiras, "--help"))))


def _toolkit_version(folder: str) -> str | None:
    return tool_version(shutil.which("nvcc", path=str(Path(folder) / "bin")))


@cache
def driver_version() -> str | None:
    """The driver's version, as nvidia-smi says."""
    said = _output(shutil.which("nvidia-smi"), "--query-gpu=driver_version", "--format=csv,noheader").split()
    return said[0] if said and numbers(said[0]) else None


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver knows; None without one."""
    import ctypes

    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    failed = driver.cuDriverGetVersion(ctypes.byref(number))
    return None if failed else (number.value // 1000, number.value % 1000 // 10)


def _device() -> tuple[str, str] | None:
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(), tuning.arch_of(torch.device("cuda", torch.cuda.current_device()))


def _output(program: str | None, *arguments: str) -> str:
    """What a program prints; nothing if it is not there or fails."""
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def verdict(checks: Sequence[Check]) -> str:
    """The last line: what works here, and what the rest needs."""
    wrong = [check.name for check in checks if check.status == "problem"]
    if not wrong:
        return "kernels can run here"
    broken = [name for name in wrong if name in _CORE]
    if broken:
        return f"kernels cannot run here, nor can anything else before this is put right: {', '.join(broken)}"
    has_tests = _is_clone() and importlib.util.find_spec("pytest") is not None
    works = "scan, kernelize with references and tests work" if has_tests else "scan and kernelize with references work"
    needs = f"kernels need what has a PROBLEM above: {', '.join(wrong)}"
    if not settings.interpret():
        return f"kernels cannot run here; {works} here; {needs}"
    if "cuda-tile" in wrong:
        return f"kernels cannot run here, as the CPU interpreter needs cuda-tile too; {works} here; {needs}"
    return f"kernels run in the CPU interpreter here, as TILEGYM_FX_INTERPRET is set; {works} here; on a GPU {needs}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 1 when kernels cannot run on a GPU."""
    p = argparse.ArgumentParser("python -m tilegym_fx.doctor", description=__doc__)
    p.add_argument("--json", action="store_true", help="print one JSON object")
    args = p.parse_args(argv)
    checks = []
    try:
        for check in examine():
            checks.append(check)
            if not args.json:
                print(check, flush=True)
        last = verdict(checks)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    healthy = all(check.status != "problem" for check in checks)
    if args.json:
        print(json.dumps({"kernels_can_run": healthy, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        print(last)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
