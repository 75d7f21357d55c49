"""What every test can count on: no network, one thread a process, checks on, and golden files.

Markers: ``gpu`` needs a CUDA device. ``golden`` is set by itself on tests that take the ``golden`` fixture.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TILEGYM_FX_CHECK", "1")
os.environ["TILEGYM_FX_PLANS"] = "0"  # a test that changes how places are found must not get those of another

GOLDEN = Path(__file__).parent / "golden"
#: `--hypothesis-profile thorough`: for the tests that go by the profile, ten times as many cases, others each time.
settings.register_profile("thorough", max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden afresh (`make golden`)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark golden tests; leave gpu tests out where there is no GPU, unless they were asked for by name."""
    for item in items:
        if "golden" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.golden)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    asked_for = config.option.markexpr.strip()
    if not on_gpu or asked_for == "not gpu" or _cuda_is_there():
        return
    if asked_for == "gpu":
        raise pytest.UsageError("no CUDA device here, and tests marked gpu need one")
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _cuda_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``golden(name, text)``: the text equals tests/golden/<name>; ``--update-golden`` writes it instead.

    With ``section="title"`` the text is that of one section, which begins with the line ``# title``.
    """

    def check(name: str, text: str, section: str | None = None) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text if section is None else _with_section(path, section, text), encoding="utf-8")
        assert path.is_file(), f"tests/golden/{name} is missing: run `make golden` and read the diff"
        known = path.read_text(encoding="utf-8") if section is None else _sections(path).get(section)
        assert text == known, "intended? run `make golden` and read the diff"

    return check


def _sections(path: Path) -> dict[str, str]:
    """Title -> text of each section of a golden file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    parts = (part.partition("\n") for part in f"\n{text}".split("\n# ")[1:])
    return {title: f"{body.strip()}\n" for title, _, body in parts}


def _with_section(path: Path, section: str, text: str) -> str:
    sections = {**_sections(path), section: text}
    return "\n".join(f"# {title}\n{body}" for title, body in sorted(sections.items()))
