"""The guards of a written kernel: it takes the shapes and dtypes that its plan was made for, no others."""

from __future__ import annotations

from collections.abc import Iterator

from tilegym_fx.schema import AxisConst, Definition


def guards_of(definition: Definition, *, rank_free: bool) -> str:
    """Guard functions for ``patterns/<name>.py``.

    Args:
        definition: What the kernel computes.
        rank_free: Whether its leading dimensions may be any.
    """
    return f"{_shapes(definition, rank_free)}\n\n{_dtypes(definition)}"


def _parameters(definition: Definition) -> str:
    return ", ".join(
        f"{name}: {'torch.Tensor' if spec.shape is not None else 'float'}" for name, spec in definition.inputs.items()
    )


def _shapes(definition: Definition, rank_free: bool) -> str:
    constants = {n: a.value for n, a in definition.axes.items() if isinstance(a, AxisConst)}
    used = {a for s in definition.inputs.values() for a in s.shape or ()}
    start = ", ".join(f'"{name}": {value}' for name, value in constants.items() if name in used)
    rows = "".join(f"        {row},\n" for row in _rows(definition, rank_free))
    return _SHAPES.format(parameters=_parameters(definition), start=start, rows=rows)


_SHAPES = """\
@guard
def shapes_are_as_declared({parameters}) -> str | None:
    sizes: dict[str, object] = {{{start}}}
    for name, shape, axes in (
{rows}    ):
        if len(shape) != len(axes):
            return f"{{name}} has {{len(shape)}} dimensions, not {{len(axes)}}"
        for axis, size in zip(axes, shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                return f"{{axis}} is {{size}} in {{name}} and {{sizes[axis]}} elsewhere"
    return None
"""


def _rows(definition: Definition, rank_free: bool) -> Iterator[str]:
    """For each tensor its name, its sizes and its axes; leading ones together if there may be any number."""
    for name, spec in definition.inputs.items():
        if spec.shape is None:
            continue
        if rank_free and len(spec.shape) > 1:
            yield f'("{name}", ({name}.shape[:-1], {name}.shape[-1]), ("leading", "{spec.shape[-1]}"))'
        else:
            axes = ", ".join(f'"{axis}"' for axis in spec.shape)
            yield f'("{name}", {name}.shape, ({axes}{"," if len(spec.shape) == 1 else ""}))'


def _dtypes(definition: Definition) -> str:
    tensors = {n: s for n, s in definition.inputs.items() if s.shape is not None}
    halves = [n for n, s in tensors.items() if s.dtype in ("bfloat16", "float16")]
    pairs = [(n, f"{halves[0]}.dtype") for n in halves[1:]]
    pairs += [(n, f"torch.{s.dtype}") for n, s in tensors.items() if n not in halves]
    lines = "".join(
        f'    if {name}.dtype != {wanted}:\n        return f"{name} is {{{name}.dtype}}, and {{{wanted}}} is needed"\n'
        for name, wanted in pairs
    )
    return f"""\
@guard
def dtypes_are_as_declared({_parameters(definition)}) -> str | None:
{lines}    return None
"""
