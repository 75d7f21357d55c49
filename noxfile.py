"""Both ends of every supported range, each in its own environment: ``make matrix``.

One end alone: ``nox -s "ends(oldest)"``. ``nox -s drift`` scans a sample of model types with each version of
transformers. On Linux without an NVIDIA driver only CPU builds of torch are taken, so pip must know an index that
has them (see CONTRIBUTING.md); ``--any-build`` after ``--`` takes what the index offers. Other arguments go to
pytest: ``nox -s "ends(oldest)" -- -n 2 tests/models``.
"""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["ends"]

#: Name -> requirements. `floor-transformers` keeps the torch of constraints.txt, so it needs no other build.
ENDS: dict[str, tuple[str, ...]] = {
    "oldest": ("torch==2.11.0", "transformers==5.17.0", "cuda-tile==1.6.0"),
    "floor-transformers": ("torch==2.13.0", "transformers==5.17.0"),
    "pinned": ("torch==2.13.0", "transformers==5.24.0"),
    "newest": ("torch==2.15.0", "transformers>=5.24", "cuda-tile>=1.7"),
}


def torch_build(requirement: str, *, any_build: bool) -> str:
    """The requirement, narrowed to the CPU build where a CUDA build would be of no use."""
    needs_cpu = sys.platform == "linux" and shutil.which("nvidia-smi") is None and not any_build
    return f"{requirement}+cpu" if needs_cpu else requirement


@nox.session
@nox.parametrize("end", list(ENDS), ids=list(ENDS))
def ends(session: nox.Session, end: str) -> None:
    """Run the tests that need no GPU with one end of the version ranges."""
    torch, *others = ENDS[end]
    arguments = [argument for argument in session.posargs if argument != "--any-build"]
    build = torch_build(torch, any_build="--any-build" in session.posargs)
    session.install(build)
    session.install(build, *others, "-e", ".[test]")
    session.install("--no-deps", "-r", "tests/packages.txt")
    session.run(
        "pytest",
        "-m",
        "not gpu and not golden",
        "--ignore=tests/policy",
        *(arguments or ("-n", "2", "tests")),
    )


#: What `drift` can compare; each may have counts of its own in tests/models, else those of the pinned versions hold.
VERSIONS = ("pinned", "floor-transformers", "newest", "pre-release")


@nox.session
@nox.parametrize("end", list(VERSIONS), ids=list(VERSIONS))
def drift(session: nox.Session, end: str) -> None:
    """Scan a sample of model types with one version of transformers; fails when any count is below the committed.

    ``--update`` after ``--`` writes tests/models/coverage-<end>.json afresh instead.
    """
    torch, *others = ENDS.get(end, ENDS["pinned"])
    build = torch_build(torch, any_build="--any-build" in session.posargs)
    session.install(build)
    session.install(build, *others, "-e", ".")
    if end == "pre-release":
        session.install(build, "--pre", "--upgrade", "transformers")
    models = Path("tests", "models")
    own = models / f"coverage-{end}.json"
    floor = own if own.is_file() else models / "coverage-pinned.json"
    sample = runpy.run_path("tests/support/breadth_sample.py")["SAMPLE"]
    update = "--update" in session.posargs
    folder = session.create_tmp()
    limits = () if update else ("--floor", str(floor))
    session.run("python", "-m", "tilegym_fx.scan", "--all", *sample, "--out", folder, *limits)
    if update:
        shutil.copy(Path(folder, "coverage.json"), own)
