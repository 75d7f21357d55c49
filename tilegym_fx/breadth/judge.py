"""Tries one model type: captured and matched at a realistic size, kernelized, compared and restored at a tiny one."""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from ..cost import Device, get_device, node_seconds
from ..errors import ExportError, TilegymFxError, VerifyError
from ..export import MODEL_ERRORS, build, describe, export_phase, site_of
from ..inventory import Inventory
from ..live import kernelize, report, restore
from ..live_report import Report
from ..pipeline import Outcome, find
from ..plan import Policy
from ..survey import PHASES, op_name
from . import sites
from .configs import Trial, realistic_trial, tiny_trial
from .recipes import FLOAT32
from .record import Row
from .steps import difference, randomize, run_steps

#: Tokens of the realistic prompt; of models whose graph has every token in it, fewer.
_SEQ, _SHORT = 2048, 64
_SHOWN_MISSES, _SHOWN_OPS = 6, 8
#: What a fault of ours, or of the model's own code, can raise.
FAULTS = (*MODEL_ERRORS, NameError, SyntaxError, MemoryError)
_FOLDERS = re.compile(r"/\S*?/(?:site-packages|dist-packages)/|/\S*/(?=tilegym_fx/)")
_LAYER = re.compile(r"\.(\d+)(\.|$)")


def judge(model_type: str, inventory: Inventory, device: Device | None = None, *, estimate: bool = True) -> Row:
    """Everything about one model type.

    Args:
        model_type: Its name in transformers.
        inventory: Whose Definitions to look for.
        device: Whose time is estimated; an H200 by default.
        estimate: Also capture the realistic size.
    """
    started = time.perf_counter()
    row = Row(model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trial = tiny_trial(model_type)
            model = build(trial.config, _dtype(model_type), device="cpu")
            row = replace(row, class_name=type(model).__name__)
            if estimate:
                row = _estimated(row, model, inventory, device or get_device("h200"))
            row = _kernelize(row, model, trial, inventory)
        except TilegymFxError as error:
            row = replace(row, problem=str(error))
    return replace(
        row,
        seconds=round(time.perf_counter() - started, 2),
        exported={phase: without_folders(why) for phase, why in row.exported.items()},
        problem=without_folders(row.problem),
        misses=tuple(map(without_folders, row.misses)),
    )


def without_folders(text: str) -> str:
    """A reason without the folders in which packages are installed on this machine."""
    return _FOLDERS.sub("", text)


def usable(inventory: Inventory) -> list[str]:
    """The Definitions with a kernel, also those whose kernel has yet to run on a GPU."""
    return sorted(name for name, d in inventory.definitions.items() if "status:draft" not in d.tags)


def _dtype(model_type: str) -> torch.dtype:
    return torch.float32 if model_type in FLOAT32 else torch.bfloat16


def _estimated(row: Row, model: nn.Module, inventory: Inventory, device: Device) -> Row:
    """The row with what the realistic size gives; a crash there is noted, and the tiny model is still tried."""
    try:
        return _estimate(row, inventory, device, is_sequential(model))
    except FAULTS as error:
        return replace(row, exported={"prefill": f"crash: {describe(error)}"})


def _estimate(row: Row, inventory: Inventory, device: Device, sequential: bool) -> Row:
    """Both phases of the default configuration, without weights."""
    trial = realistic_trial(row.model_type)
    model = build(trial.config, _dtype(row.model_type))
    seq = _SHORT if sequential else _prompt_length(trial)
    policy = Policy(device, usable(inventory))
    exported: dict[str, str] = {}
    coverage: dict[str, float] = {}
    chosen: Counter[str] = Counter()
    for phase in PHASES:
        try:
            captured = export_phase(model, phase, 1, seq)
        except ExportError as error:
            exported[phase] = error.what
            continue
        exported[phase] = f"without {', '.join(sorted(captured.holes))}" if captured.holes else "whole"
        graph = captured.graph_module.graph
        outcome = find(graph, inventory, policy, site_of)
        coverage[phase] = round(_coverage(outcome, trial), 4)
        chosen.update(planned.match.definition for planned in outcome.chosen)
        if phase == "prefill":
            row = replace(row, places=_places(graph, outcome, trial, device), uncovered=_uncovered(outcome))
    return replace(row, exported=exported, coverage=coverage, definitions=dict(sorted(chosen.items())))


def _prompt_length(trial: Trial) -> int:
    config = trial.config
    named = [getattr(config, name, None) for name in ("n_positions", "max_position_embeddings", "max_target_positions")]
    limit = min([_SEQ + 4, *(n for n in named if isinstance(n, int) and n > 4)])
    return limit - 4


def _coverage(outcome: Outcome, trial: Trial) -> float:
    """Estimated share of time in kernels, each layer counted as often as the default configuration has it."""

    def weight(node: Node) -> float:
        inside = _LAYER.search(site_of(node).module_path)
        layer = int(inside[1]) if inside else None
        return trial.weights[layer] if layer is not None and layer < len(trial.weights) else 1.0

    ours = sum(p.seconds_after * weight(p.match.outputs[0]) for p in outcome.chosen)
    others = sum(seconds * weight(node) for node, seconds in outcome.uncovered)
    return ours / (ours + others) if ours else 0.0


def _places(graph: Graph, outcome: Outcome, trial: Trial, device: Device) -> dict[str, tuple[int, int]]:
    taken = {node for planned in outcome.chosen for node in planned.match.nodes}
    counts = sites.matched(sites.places(graph, trial.vocabulary), taken)
    blocks = sites.recurrent_blocks(graph, taken, lambda node: node_seconds(node, device))
    return counts | ({"SSM": blocks} if blocks else {})


def _uncovered(outcome: Outcome) -> tuple[tuple[str, float], ...]:
    total = outcome.seconds_total or 1.0
    shares: Counter[str] = Counter()
    for node, seconds in outcome.uncovered:
        shares[op_name(node)] += seconds / total  # type: ignore[assignment]
    return tuple((name, round(share, 4)) for name, share in shares.most_common(_SHOWN_OPS))


def _kernelize(row: Row, model: nn.Module, trial: Trial, inventory: Inventory) -> Row:
    """The tiny model: kernelized as a user does it, compared call by call, and put back."""
    randomize(model)
    before, classes = run_steps(model), _classes(model)
    try:
        kernelize(model, only=usable(inventory), strict=True)
        row = replace(row, verified=True)
    except VerifyError as error:
        return replace(row, verified=False, problem=error.what)
    except TilegymFxError as error:
        return replace(row, problem=error.what)
    except FAULTS as error:
        return replace(row, problem=f"crash: {describe(error)}")
    made = report(model)
    after = run_steps(model)
    restore(model)
    again = run_steps(model)
    same = _classes(model) == classes and all(torch.equal(before[step], again[step]) for step in before)
    return replace(
        row,
        written=_written(made, trial),
        definitions=dict(sorted((Counter(row.definitions) + Counter(made.counts())).items())),
        applied=sum(made.counts().values()),
        steps=tuple(before),
        difference=difference(before, after),
        restored=same,
        misses=tuple(made.misses()[:_SHOWN_MISSES]),
        problem="; ".join(f"{name}: {why}" for name, why in made.problems.items()),
    )


def _classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def _written(made: Report, trial: Trial) -> dict[str, tuple[int, int]]:
    """Places of the first capture that has any written Match."""
    if not made.written:
        return {}
    graph: Graph = made.written[0].match.outputs[0].graph
    taken = {node for w in made.written if w.match.outputs[0].graph is graph for node in w.match.nodes}
    return sites.matched(sites.places(graph, trial.vocabulary), taken)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def is_sequential(model: nn.Module) -> bool:
    """Whether the model runs operations of their own for each token, so that its graph grows with the prompt."""
    short, long = (_calls(model, length) for length in (8, 24))
    return long - short > 16


def _calls(model: nn.Module, length: int) -> int:
    ids = torch.zeros(1, length, dtype=torch.long)
    with torch.no_grad(), _Counting() as counting:
        model(input_ids=ids)
    return counting.calls
