"""The guards of a written kernel: it takes the shapes and dtypes that its plan was made for, no others."""

from __future__ import annotations

from tilegym_fx.schema import Definition


def guards_of(definition: Definition, *, rank_free: bool) -> str:
    """What ``patterns/<name>.py`` says of the kernel besides what its Definition declares.

    Args:
        definition: What the kernel computes.
        rank_free: Whether its leading dimensions may be any.
    """
    return f"{_dtypes(definition)}{_shapes(definition) if rank_free else ''}"


def _parameters(definition: Definition) -> str:
    return ", ".join(
        f"{name}: {'torch.Tensor' if spec.shape is not None else 'float'}" for name, spec in definition.inputs.items()
    )


def _shapes(definition: Definition) -> str:
    """Rows for whatever stands in front of them."""
    rows = [(name, spec.shape[-1]) for name, spec in definition.inputs.items() if spec.shape and len(spec.shape) > 1]
    lines = "".join(f'    "{name}": ("...", "{axis}"),\n' for name, axis in rows)
    return f"\n\nSHAPES = {{\n{lines}}}\n" if rows else ""


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
