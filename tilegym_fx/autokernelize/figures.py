"""Coverage and throughput of a model, estimated; :mod:`.measuring` measures them.

An estimate takes the roofline's time for everything but the kernel under test. That one is charged for the
launches that its entry point really makes, and for the copies around them: each costs a start and the bytes of
its arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilegym_fx.cost import Device
from tilegym_fx.pipeline import Outcome
from tilegym_fx.recording import recorded
from tilegym_fx.results import PlannedMatch

if TYPE_CHECKING:
    from tilegym_fx.inventory import Inventory

    from .subject import Subject

#: Noise above which a throughput is not compared with another.
TRUSTED = 0.03


@dataclass(frozen=True)
class Figures:
    """What is compared before and after an experiment.

    Attributes:
        coverage: Share of the GPU's time in our kernels, 0 to 1.
        throughput: Tokens a second, or calls of a module that is no language model.
        noise: By how much throughput may differ between runs of the same, as a share.
        measured: Whether a GPU said so.
        note: Why the host's time is in the throughput; empty where it is not.
    """

    coverage: float
    throughput: float
    noise: float = 0.0
    measured: bool = False
    note: str = ""

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
    """What a place's entry point costs: for each launch, and each copy before or after it, a start and its bytes."""
    kernel = inventory.entry_point(str(planned.solution))
    inputs = [_on_meta(value) for value in planned.match.inputs.values()]
    with recorded() as launches, _Copies() as copies:
        kernel(*inputs)
    moved = sum(a.nbytes for one in launches for a in one.args if isinstance(a, torch.Tensor)) + copies.bytes
    return (len(launches) + copies.count) * device.launch_seconds + moved / device.bytes_per_second


class _Copies(TorchDispatchMode):
    """Counts the operations of torch that write memory, as making an input contiguous does, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            self.count += 1
            self.bytes += sum(t.nbytes for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor))
        return result


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Node):
        return value
    like = value.meta["val"]
    return torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device="meta")
