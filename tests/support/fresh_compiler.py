"""torch.compile as in a new process."""

from __future__ import annotations

import torch

from tilegym_fx import reports


def fresh_compiler() -> None:
    """No graph compiled before is left: neither Dynamo's own, nor one of the backend's few remembered reports."""
    torch._dynamo.reset()
    reports.clear()
