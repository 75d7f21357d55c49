"""What the README shows of a scan is what scan finds."""

from __future__ import annotations

import re

from repository import ROOT

ROW = re.compile(r"^\| (\w+) \| (\d+) \| (\w+) \| [\d.]+% \|", re.MULTILINE)
#: The scan that the README shows.
MODEL, PHASE = "meta-llama/Llama-3.1-8B", "decode"


def test_the_table_has_the_counts_of_the_golden_file() -> None:
    shown = sorted(f"{name}: {sites} {kind}" for name, sites, kind in ROW.findall(_text("README.md")))
    section = _text("tests/golden/scan_counts.txt").split(f"# {MODEL}\n")[1].split("\n#")[0]
    found = sorted(line.strip() for line in section.split(f"{PHASE}\n")[1].splitlines() if line.startswith("  "))
    assert shown == found, f"run `python -m tilegym_fx.scan {MODEL} --phase {PHASE}` and show that"


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
