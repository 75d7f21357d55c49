"""doctor: every check says what is there, and what to do where kernels cannot run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tilegym_fx import doctor
from tilegym_fx.doctor import (
    Check,
    cache_check,
    compiler_check,
    device_check,
    driver_check,
    package_check,
    toolkit_check,
)
from tilegym_fx.errors import KernelError
from tilegym_fx.inventory import Inventory

WHEELS = dict.fromkeys(("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm"), "13.4.92")
NO_WHEELS: dict[str, str | None] = dict.fromkeys(WHEELS)


@pytest.mark.parametrize(
    ("check", "status", "words"),
    [
        (package_check("torch", "2.13.0+cpu"), "ok", "2.13.0"),
        (package_check("torch", "2.9.1"), "problem", "Upgrade it to 2.11"),
        (package_check("cuda-tile", None), "problem", "pip install"),
        (compiler_check("13.4", "13.4", {**WHEELS}), "ok", "libnvvm 13.4.92"),
        (compiler_check("13.4", "13.4", NO_WHEELS), "ok", "tileiras 13.4, ptxas 13.4"),
        (compiler_check("13.4", "13.0", NO_WHEELS), "problem", "mixed releases"),
        (compiler_check("13.4", "13.4", {**WHEELS, "nvidia-nvvm": "13.3.1"}), "problem", "one version"),
        (compiler_check("13.4", None, NO_WHEELS), "problem", "ptxas not found"),
        (compiler_check(None, None, NO_WHEELS), "problem", "tileiras, cuTile's compiler, is not found"),
        (driver_check("580.1", (13, 0)), "ok", "580.1"),
        (driver_check("535.1", (12, 2)), "problem", "CUDA 13"),
        (driver_check(None, None), "problem", "no NVIDIA driver"),
        (device_check(("NVIDIA H200", "sm_90"), ("sm_80", "sm_90")), "ok", "H200"),
        (device_check(("TITAN V", "sm_70"), ("sm_80", "sm_90")), "problem", "does not know (sm_80, sm_90)"),
        (device_check(None, ("sm_80",)), "problem", "no CUDA device"),
        (doctor.settings_check(()), "ok", ""),
        (doctor.settings_check(("TILEGYM_FX_FAST",)), "note", "TILEGYM_FX_INTERPRET"),
    ],
)  # fmt: skip
def test_a_check_says_what_to_do(check: Check, status: str, words: str) -> None:
    assert check.status == status
    assert words in str(check)
    assert bool(check.fix) == (status != "ok")


def release(place: str) -> str | None:
    return {"old": "13.0", "same": "13.4"}.get(place)


@pytest.mark.parametrize(
    ("variables", "in_wheels", "status"),
    [
        ({}, False, "ok"),
        ({"CUDA_HOME": "old"}, False, "problem"),
        ({"CUDA_HOME": "old"}, True, "ok"),
        ({"CUDA_HOME": "same"}, False, "ok"),
        ({"CUDA_HOME": "same", "CUDA_PATH": "old"}, False, "problem"),
        ({"CUDA_PATH": "unknown"}, False, "problem"),
    ],
)
def test_a_foreign_toolkit_is_a_trap_only_where_it_is_followed(
    variables: dict[str, str], in_wheels: bool, status: str
) -> None:
    check = toolkit_check(variables, "13.4", in_wheels, release)
    assert check.status == status
    if status == "problem":
        assert "fail with code 5" in check.found
        assert check.fix == f"Unset {' and '.join(variables)}"


def test_the_compiler_comes_in_wheels_only_where_all_three_are_of_one_release() -> None:
    assert doctor.comes_in_wheels({**WHEELS})
    assert not doctor.comes_in_wheels({**WHEELS, "nvidia-nvvm": None})
    assert not doctor.comes_in_wheels({**WHEELS, "nvidia-nvvm": "13.3.92"})


def test_a_cache_is_judged_by_the_nearest_folder_there_is(tmp_path: Path) -> None:
    assert cache_check(tmp_path / "a" / "b").status == "ok"
    (tmp_path / "file").write_text("")
    check = cache_check(tmp_path / "file" / "b")
    assert check.status == "note"
    assert "TILEGYM_FX_CACHE" in check.fix


def test_versions_are_read_from_what_tools_print(tmp_path: Path) -> None:
    tool = tmp_path / "tileiras"
    tool.write_text('#!/bin/sh\n[ $1 = --help ] && echo "    =sm_80   - SM 80" && echo "    =sm_120 - x"\n'
                    '[ $1 = --version ] && echo "Cuda tools, release 13.4, V13.4.92"\n')  # fmt: skip
    tool.chmod(0o755)
    assert doctor.tool_version(str(tool)) == "13.4"
    assert doctor.supported_archs(str(tool)) == ("sm_80", "sm_120")
    assert doctor.tool_version(None) is None
    assert doctor.supported_archs(str(tmp_path / "absent")) == ()


def test_one_kernel_is_compiled_where_the_compiler_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.tile")
    assert doctor.preflight("sm_90") == Check("compile", "ok", "a kernel compiles for sm_90")
    assert doctor.preflight("sm_70").status == "problem"
    monkeypatch.setitem(sys.modules, "tilegym_fx.compile", None)
    assert "no kernel can be loaded" in doctor.preflight("sm_90").found


def test_a_kernel_that_cannot_be_loaded_is_told_with_its_own_advice_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Inventory, name: str) -> None:
        raise KernelError(f"{name} is not there")

    monkeypatch.setattr(Inventory, "entry_point", missing)
    said = str(doctor.preflight("sm_90"))
    assert said == f"PROBLEM compile: no kernel can be loaded: cache_append is not there. {KernelError.advice}"


CHECKS = (Check("driver", "ok", "580"), Check("settings", "note", "x means nothing", "Unset it"))


@pytest.mark.parametrize(("more", "status"), [((), 0), ((Check("device", "problem", "none", "Get one"),), 1)])
def test_only_problems_make_it_fail(
    more: tuple[Check, ...], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter((*CHECKS, *more)))
    assert doctor.main([]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["OK      driver: 580", "note    settings: x means nothing. Unset it"]
    assert lines[-1] == doctor.verdict((*CHECKS, *more))
    assert lines[-1].startswith("kernels cannot run here; " if status else "kernels can run here")
    assert doctor.main(["--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["kernels_can_run"] is (status == 0)
    assert report["checks"][0] == {"name": "driver", "status": "ok", "found": "580", "fix": ""}


def test_the_last_line_says_what_works_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [Check(name, "problem", "none", "Get one") for name in ("driver", "device")]
    line = doctor.verdict((*CHECKS, *missing))
    assert "scan, kernelize with references and tests work here; kernels need" in line
    assert line.endswith(": driver, device")
    monkeypatch.setattr(doctor, "shipped_root", lambda: Path("site-packages/tilegym_fx/_data"))
    assert "tests" not in doctor.verdict(missing)
    for name in ("torch", "inventory"):
        line = doctor.verdict((*missing, Check(name, "problem", "broken", "Mend it")))
        assert "work here" not in line
        assert line.endswith(f": {name}")


def test_the_last_line_knows_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    no_gpu = [Check(name, "problem", "none", "Get one") for name in ("driver", "device")]
    line = doctor.verdict(no_gpu)
    assert line.startswith("kernels run in the CPU interpreter here, as TILEGYM_FX_INTERPRET is set; ")
    assert line.endswith("on a GPU kernels need what has a PROBLEM above: driver, device")
    line = doctor.verdict([package_check("cuda-tile", None), *no_gpu])
    assert line.startswith("kernels cannot run here, as the CPU interpreter needs cuda-tile too; ")


def test_a_setting_that_cannot_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter([Check("driver", "problem", "none", "Get one")]))
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "perhaps")
    assert doctor.main([]) == 1
    assert capsys.readouterr().err.startswith("error: TILEGYM_FX_INTERPRET is 'perhaps'")


def test_the_advice_is_for_a_clone_or_for_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'pip install -e ".[cuda]" in the clone' in package_check("cuda-tile", None).fix
    monkeypatch.setattr(doctor, "shipped_root", lambda: Path("site-packages/tilegym_fx/_data"))
    assert 'pip install "cuda-tile[tileiras]"' in package_check("cuda-tile", None).fix
    assert 'pip install "cuda-tile[tileiras]"' in compiler_check(None, None, NO_WHEELS).fix


def test_it_works_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "preflight", lambda arch: Check("compile", "ok", arch))
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    checks = {check.name: check for check in doctor.examine()}
    assert checks["device"].status == "problem"
    assert checks["inventory"].status == "ok"
    assert checks["compile"].found == "sm_90"
