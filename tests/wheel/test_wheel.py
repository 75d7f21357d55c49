"""The built wheel, in an environment that cannot see the source tree, does the main job from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from repository import DATA_FOLDERS, PACKAGE, ROOT, files

#: One process builds and installs, and runs all tests of this file.
pytestmark = pytest.mark.xdist_group("wheel")

#: What the parent process was told about the source tree stays behind.
HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TILEGYM_FX_INVENTORY")


@dataclass(frozen=True)
class Environment:
    """A virtual environment that borrows the heavy packages of this one, but not tilegym_fx."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "venv" / "bin" / "python")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run its Python in an empty folder."""
        environment = {key: value for key, value in os.environ.items() if key not in HIDDEN}
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        return subprocess.run(
            [self.python, *arguments], cwd=empty, env=environment, capture_output=True, text=True, timeout=300
        )

    def json(self, *arguments: str) -> object:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the build backend of this environment."""
    folder = tmp_path_factory.mktemp("dist")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(ROOT))
    (built,) = folder.glob("tilegym_fx-*-py3-none-any.whl")
    return built


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The environment before the wheel is installed in it.

    A .pth file that names the parent's site-packages makes torch and the others importable. The .pth files in
    there, the one of an editable install among them, are not read.
    """
    environment = Environment(tmp_path_factory.mktemp("installed"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment.folder / "venv")], check=True)
    (packages,) = environment.folder.glob("venv/lib/python3*/site-packages")
    lines = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "borrowed.pth").write_text("\n".join(sorted(lines)) + "\n")
    return environment


@pytest.fixture(scope="module")
def installed(bare: Environment, wheel: Path) -> Environment:
    """The environment with the wheel in it."""
    before = bare.run("-c", "import torch, tilegym_fx.errors")
    assert "No module named 'tilegym_fx" in before.stderr, "the source tree leaks into the empty environment"
    pip("--python", bare.python, "install", "--no-deps", "--no-index", str(wheel))
    return bare


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_wheel_carries_the_package_and_the_four_folders_and_nothing_else(wheel: Path) -> None:
    packed = {entry for entry in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in entry}
    here = {path.relative_to(ROOT).as_posix() for path in files()}
    data = {f"tilegym_fx/_data/{path}" for path in here if path.split("/")[0] in DATA_FOLDERS}
    assert packed == data | {path for path in here if path.split("/")[0] == PACKAGE.name}
    assert "tilegym_fx/py.typed" in packed
    assert "tilegym_fx/_data/definitions/rms_norm.json" in packed


def test_the_installed_inventory_is_the_shipped_one(installed: Environment) -> None:
    root = installed.run("-c", "from tilegym_fx.inventory import shipped_root; print(shipped_root())").stdout.strip()
    assert Path(root).is_relative_to(installed.folder)
    done = installed.run("-m", "tilegym_fx.inventory", "check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_scan_runs_from_the_wheel(installed: Environment) -> None:
    found = installed.json("-m", "tilegym_fx.scan", "llama", "--json")
    assert isinstance(found, dict)
    assert found["model_type"] == "llama"
    assert [phase["phase"] for phase in found["phases"]] == ["prefill", "decode"]
    assert all(phase["definitions"] for phase in found["phases"])


def test_torch_finds_the_backend_by_name(installed: Environment) -> None:
    code = "import json; from importlib.metadata import entry_points as e; "
    code += "(b,) = {x.value: x for x in e(group='torch_dynamo_backends') if x.name == 'tilegym_fx'}.values(); "
    code += "print(json.dumps(callable(b.load())))"
    assert installed.json("-c", code) is True


def test_the_version_is_that_of_the_distribution(installed: Environment) -> None:
    code = "import json, tilegym_fx, importlib.metadata as m; "
    code += "print(json.dumps([tilegym_fx.__version__, m.version('tilegym_fx'), tilegym_fx.__file__]))"
    answer = installed.json("-c", code)
    assert isinstance(answer, list)
    assert answer[0] == answer[1]
    assert str(answer[2]).startswith(str(installed.folder))
