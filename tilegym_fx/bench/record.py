"""On what it was measured, and the dated record of a run."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tilegym_fx.doctor import driver_version
from tilegym_fx.errors import make_folder, writing
from tilegym_fx.survey import versions

from .report import report_lines
from .results import Result


def machine() -> dict[str, Any]:
    """Date, device, driver and versions."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.isoformat(timespec="seconds"),
        "machine": {
            "device": device_name(),
            "driver": driver_version() or "none",
            "CUDA": torch.version.cuda or "none",
        },
        "versions": versions(),
    }


def device_name() -> str:
    """Name of the GPU, or ``cpu``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def append_record(folder: Path, header: dict[str, Any], results: Sequence[Result]) -> Path:
    """Append the report to the day's file for this device, made where there is none.

    Args:
        folder: Where the records are.
        header: As in a file of results.
        results: To report.

    Returns:
        The file.
    """
    day = str(header.get("date", ""))[:10] or "undated"
    device = re.sub(r"[^a-z0-9]+", "-", header.get("machine", {}).get("device", "unknown").lower()).strip("-")
    file = folder / f"{day}-{device}.md"
    make_folder(folder)
    title = "" if file.exists() else f"# Measured on {day}, {device}\n"
    text = "\n".join(report_lines(header, results))
    with writing(file), file.open("a", encoding="utf-8") as record:
        record.write(f"{title}\n## {header.get('model', '?')}, {header.get('date', '')}\n\n```text\n{text}\n```\n")
    return file
