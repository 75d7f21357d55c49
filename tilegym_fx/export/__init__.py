"""A model, or any module with sample inputs, to an ATen graph that still knows its source lines.

Graphs come from a non-strict ``torch.export`` under ``no_grad`` and are not decomposed: ``aten.linear``,
``aten.silu`` and ``aten.scaled_dot_product_attention`` are whole. Parameters and buffers are placeholders
with their own dtypes.
"""

from tilegym_fx.export.caches import cache_of
from tilegym_fx.export.holes import Holes, with_holes
from tilegym_fx.export.phases import (
    build,
    copies,
    export_phase,
    longest,
    once,
    phase_inputs,
    positions,
    run_without_memory,
    without_memory,
)
from tilegym_fx.export.sites import site_of
from tilegym_fx.export.trace import MODEL_ERRORS, ExportedGraph, describe, enter_transformers, export_module

__all__ = [
    "MODEL_ERRORS", "ExportedGraph", "Holes", "build", "cache_of", "copies", "describe", "enter_transformers",
    "export_module", "export_phase", "longest", "once", "phase_inputs", "positions", "run_without_memory",
    "site_of", "with_holes", "without_memory",
]  # fmt: skip
