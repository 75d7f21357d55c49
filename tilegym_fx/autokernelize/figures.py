"""Coverage and throughput of a model: measured by the benchmark on a GPU, estimated without one.

An estimate takes the roofline's time for everything but the kernel under test. That one is charged for the
launches that its entry point really makes: each costs a start and the bytes of its arrays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from tilegym_fx.cost import Device
from tilegym_fx.errors import TilegymFxError
from tilegym_fx.launch import recorded
from tilegym_fx.pipeline import Outcome
from tilegym_fx.results import PlannedMatch

if TYPE_CHECKING:
    from tilegym_fx.inventory import Inventory

    from .subject import Subject

#: Bench cases whose figures count.
_PHASES = ("prefill:1x2048", "decode:1@2048")


class BenchError(TilegymFxError):
    """The benchmark gave no figures."""

    advice = "Run `python -m tilegym_fx.bench MODEL` by hand"


@dataclass(frozen=True)
class Figures:
    """What is compared before and after an experiment.

    Attributes:
        coverage: Share of the GPU's time in our kernels, 0 to 1.
        throughput: Tokens a second, or calls of a module that is no language model.
        noise: By how much throughput may differ between runs of the same, as a share.
        measured: Whether a GPU said so.
    """

    coverage: float
    throughput: float
    noise: float = 0.0
    measured: bool = False

    def as_json(self) -> dict[str, Any]:
        """For the ledger."""
        return asdict(self)


def estimated(
    subject: Subject, outcomes: Sequence[Outcome], inventory: Inventory, device: Device, tested: str = ""
) -> Figures:
    """Figures from the roofline.

    Args:
        subject: The model.
        outcomes: What the pass found in each of its calls.
        inventory: That has the Solutions.
        device: Whose roofline.
        tested: The Definition whose kernel is charged for its launches.
    """
    covered = sum(o.seconds_covered for o in outcomes)
    total = sum(o.seconds_total for o in outcomes)
    for outcome in outcomes:
        for planned in outcome.chosen:
            if planned.match.definition == tested and planned.solution:
                more = launch_seconds(planned, inventory, device) - planned.seconds_after
                covered, total = covered + more, total + more
    tokens = sum(call.tokens for call in subject.calls)
    return Figures(covered / total if total else 0.0, tokens / total if total else 0.0)


def launch_seconds(planned: PlannedMatch, inventory: Inventory, device: Device) -> float:
    """What the launches of a place's kernel cost: a start each, and the bytes of their arrays."""
    kernel = inventory.entry_point(str(planned.solution))
    with recorded() as launches:
        kernel(*(_on_meta(value) for value in planned.match.inputs.values()))
    moved = sum(a.nbytes for one in launches for a in one.args if isinstance(a, torch.Tensor))
    return len(launches) * device.launch_seconds + moved / device.bytes_per_second


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Node):
        return value
    like = value.meta["val"]
    return torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device="meta")


def measured(model: str, root: Path, limit: float) -> Figures:
    """Figures of the benchmark, with the kernels of ``root`` in place.

    Raises:
        BenchError: The benchmark fails, or a result is wrong.
    """
    from tilegym_fx.inventory import shipped_root

    extra = {} if root.resolve() == shipped_root().resolve() else {"TILEGYM_FX_INVENTORY": str(root)}
    command = [sys.executable, "-m", "tilegym_fx.bench", model, "--phases", *_PHASES]
    command += ["--variants", "kernelize", "--json", "--limit", str(limit)]
    done = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, text=True)
    try:
        results = json.loads(done.stdout)["results"]
    except (ValueError, KeyError) as error:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchError(f"the benchmark of {model} failed: {said}") from error
    ours = [r for r in results if r["variant"] == "kernelize"]
    failed = [r["error"] for r in ours if r["error"]]
    if failed or not ours:
        raise BenchError(f"the benchmark of {model} gives no figures: {(failed or ['nothing ran'])[0]}")
    return Figures(
        sum(r["coverage"] or 0.0 for r in ours) / len(ours),
        _mean_rate([r["tokens_per_second"] for r in ours]),
        max(r["wall_spread"] for r in ours),
        measured=True,
    )


def _mean_rate(rates: Sequence[float]) -> float:
    """The geometric mean, in which no case outweighs the others."""
    product = 1.0
    for rate in rates:
        product *= rate
    return float(product ** (1 / len(rates)))
