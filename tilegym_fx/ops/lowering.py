"""Inductor is told, before it compiles anything, to call our ops as they are.

Left alone it does the same, at the first call that it meets of each op; but then torch 2.11 writes the call's
arguments, and all that they were computed from, into a log message that nobody reads. Where an op first comes up at
the end of a deep model, as the head's norm does, that text doubles with every layer: 32 never ended.
"""

from __future__ import annotations

from .registry import overloads


def lower_as_calls() -> None:
    """Register every op that exists now with inductor, in the form that inductor would give it."""
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for op in overloads():
        if op not in lowerings:
            make_fallback(op, layout_constraint=tag_to_layout_constraint(get_layout_constraint_tag(op)), warn=False)
