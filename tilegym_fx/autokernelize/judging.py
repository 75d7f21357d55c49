"""Is a kernel right? By the inventory's rules, alone beside its reference, compiled, and in the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule

from tilegym_fx import ops
from tilegym_fx.closeness import error_ratio
from tilegym_fx.errors import Fault
from tilegym_fx.export import site_of
from tilegym_fx.inventory.check import check, run_all
from tilegym_fx.inventory.collect import collect
from tilegym_fx.kernel_check import compile_faults, disagreements
from tilegym_fx.pipeline import find
from tilegym_fx.rewrite import rewrite

from .subject import Call

if TYPE_CHECKING:
    from tilegym_fx.inventory import Inventory
    from tilegym_fx.plan import Policy

#: Roundings add up along a model, so results there may be off by more than a single kernel's.
_IN_A_MODEL = 16.0


def inventory_faults(root: Path, name: str, *, is_public: bool) -> list[str]:
    """What ``inventory check`` says about one Definition and its Solutions.

    Args:
        root: The inventory.
        name: The Definition.
        is_public: Whether its ``# Source:`` lines can be permanent links; a local file has none.
    """
    collection = collect([root])
    solutions = [s.record.name for s in collection.solutions.values() if s.record.definition == name]
    names = {name, *solutions}
    faults = [f for f in check([root], execute=False).faults if Path(_plain(f.file)).stem in names]
    for outcome in run_all([root], [name], collection):
        faults += outcome.faults
    return [str(f) for f in faults if is_public or not _is_about_sources(f)]


def _plain(file: str) -> str:
    return file.replace(os.sep, "/")


def _is_about_sources(fault: Fault) -> bool:
    return fault.field == "reference" and ("source" in fault.problem.lower())


def kernel_faults(inventory: Inventory, name: str, *, on_gpu: bool) -> list[str]:
    """What is wrong with the kernels of a Definition: interpreted, compiled, and on a GPU if there is one."""
    faults = []
    for solution in inventory.solutions_for(name):
        faults += [f"{solution.name}: {f}" for f in disagreements(inventory, solution.name)]
        faults = faults or [f"{solution.name}: {f}" for f in compile_faults(inventory, solution.name)]
        if on_gpu and not faults:
            faults = [
                f"{solution.name} on the GPU: {f}" for f in disagreements(inventory, solution.name, device="cuda")
            ]
    return faults


def model_faults(module: nn.Module, call: Call, inventory: Inventory, policy: Policy) -> list[str]:
    """Where a small model's outputs change when kernels, interpreted, are put into its graph."""
    if call.inputs is None:
        return []
    values = _arguments(module, call)
    with torch.no_grad():
        before = _as_list(call.graph.graph_module.forward(*values))
        graph_module = GraphModule(call.graph.graph_module, call.copy())
        outcome = find(graph_module.graph, inventory, policy, site_of, keep_layouts=True)
        ops.register(inventory)
        rewrite(graph_module.graph, outcome.plan)
        graph_module.recompile()
        ops.set_backend("interpret")
        try:
            after = _as_list(graph_module.forward(*values))
        finally:
            ops.set_backend("auto")
    return _compared(before, after)


def _arguments(module: nn.Module, call: Call) -> list[Any]:
    """What the captured graph takes: parameters and buffers by name, and the inputs in order."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    inputs = iter(call.inputs or ())
    placeholders = [n for n in call.graph.graph_module.graph.nodes if n.op == "placeholder"]
    names = call.graph.parameters
    return [tensors[names[p.name]] if p.name in names else next(inputs) for p in placeholders]


def _as_list(results: Any) -> list[torch.Tensor]:
    return [r for r in torch.utils._pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]


def _compared(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> list[str]:
    pairs = list(zip(before, after, strict=True))
    return [
        f"output {i} of the model is off by {error_ratio(b, a) / _IN_A_MODEL:.3g} times what rounding allows"
        for i, (b, a) in enumerate(pairs)
        if b.shape != a.shape or error_ratio(b, a) > _IN_A_MODEL
    ]
