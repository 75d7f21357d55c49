"""A block that cannot be traced costs only itself: it becomes one opaque operation of the graph.

When a capture fails, the innermost module of the model in whose ``forward`` it failed is taken out, with all
others of its class, and the capture is tried again. In its place stands an operation that reads the block's
inputs and parameters and gives tensors of the right shapes, so everything around it is captured as it is. The
shapes are those that the block itself gives when the model is run once; on ``meta``, where it cannot be run, the
result is taken to be like its first input, as in residual blocks, and where that is wrong the block around it
goes too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from tilegym_fx.errors import ExportError

T = TypeVar("T")
Call = tuple[tuple[Any, ...], Mapping[str, Any]]

_MAX_ATTEMPTS = 12
_library = torch.library.Library("tilegym_fx_export", "DEF")
_library.define("opaque(Tensor[] read, SymInt[] shape, ScalarType dtype) -> Tensor")


@torch.library.impl(_library, "opaque", "CompositeExplicitAutograd")
def _opaque(read: list[torch.Tensor], shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=read[0].device)


@dataclass
class Holes:
    """The blocks that a capture leaves out.

    Attributes:
        reasons: Class of a block -> why it cannot be traced.
        results: Block -> what a run of it gave, tensors replaced by their shapes and dtypes; None if not run.
    """

    reasons: dict[type[nn.Module], str] = field(default_factory=dict)
    results: dict[nn.Module, Any] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, str]:
        """Name of each class that is left out -> the reason."""
        return {kind.__name__: reason for kind, reason in self.reasons.items()}

    @contextmanager
    def made(self, module: nn.Module) -> Iterator[None]:
        """Every block of these classes gives its stand-in while the body runs."""
        blocks = [part for part in module.modules() if type(part) in self.reasons]
        for block in blocks:
            vars(block)["forward"] = _stand_in(block, self.results.get(block))
        try:
            yield
        finally:
            for block in blocks:
                vars(block).pop("forward", None)


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: torch.dtype


def _stand_in(block: nn.Module, result: Any) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        like = result if result is not None else _Shape(tuple(given[0].shape), given[0].dtype)
        read = [*given, *block.parameters()]
        leaves, spec = tree_flatten(like, is_leaf=lambda item: isinstance(item, _Shape))
        made = []
        for leaf in leaves:
            if isinstance(leaf, _Shape):
                made.append(torch.ops.tilegym_fx_export.opaque(read, list(leaf.shape), leaf.dtype))
                read = made[-1:]  # what is read is read once
            else:
                made.append(leaf)
        return spec.unflatten(made)

    return forward


def with_holes(module: nn.Module, call: Call, attempt: Callable[[Holes], T]) -> T:
    """Try a capture; when a block of the module fails, try again without blocks of its class.

    Args:
        module: What is captured.
        call: Its positional and keyword arguments.
        attempt: Makes the capture with the blocks named left out; raises ExportError when it fails.

    Raises:
        ExportError: The first failure, if it is in no block of the module or no other try helps.
    """
    holes = Holes()
    first: ExportError | None = None
    for _ in range(_MAX_ATTEMPTS):
        try:
            return attempt(holes)
        except ExportError as error:
            first = first or error
            block = _failing_block(module, error.__cause__, holes)
            if block is None:
                raise first from first.__cause__
            holes.reasons[type(block)] = error.what
            holes.results |= _observed(module, call, type(block))
    raise first  # type: ignore[misc]  # set before the loop can end


def _failing_block(module: nn.Module, error: BaseException | None, holes: Holes) -> nn.Module | None:
    """The innermost block below the module, of a class that is still whole, in whose code an error was raised."""
    inside = {id(vars(part)): part for part in module.modules()}
    found = None
    traceback: TracebackType | None = error.__traceback__ if error is not None else None
    while traceback is not None:
        code, names = traceback.tb_frame.f_code, traceback.tb_frame.f_locals
        owner = names.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module):
            found = _candidate(inside.get(id(vars(owner))), module, holes) or found
        traceback = traceback.tb_next
    return found


def _candidate(part: nn.Module | None, module: nn.Module, holes: Holes) -> nn.Module | None:
    """A block that can be left out: one with parameters of its own, no leaf of torch, and not nearly everything."""
    if part is None or part is module or type(part) in holes.reasons or type(part) is type(module):
        return None
    is_torch = type(part).__module__.startswith("torch.nn")
    return None if is_torch or _is_the_body(part, module) else part


def _is_the_body(part: nn.Module, module: nn.Module) -> bool:
    """Whether a block has no parameters, or is the only one of its class and has most of all parameters."""
    size = sum(p.numel() for p in part.parameters())
    alone = sum(type(other) is type(part) for other in module.modules()) == 1
    return size == 0 or (alone and size > 0.5 * sum(p.numel() for p in module.parameters()))


def _observed(module: nn.Module, call: Call, kind: type[nn.Module]) -> dict[nn.Module, Any]:
    """What each block of a class gives when the module runs; nothing on ``meta``, or if it cannot be run."""
    if any(parameter.is_meta for parameter in module.parameters()):
        return {}
    from tilegym_fx.export.trace import MODEL_ERRORS, unchanged

    seen: dict[nn.Module, Any] = {}

    def note(block: nn.Module, args: Any, result: Any) -> None:
        seen[block] = tree_map_only(torch.Tensor, lambda t: _Shape(tuple(t.shape), t.dtype), result)

    handles = [part.register_forward_hook(note) for part in module.modules() if type(part) is kind]
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, call)
    try:
        with torch.no_grad(), unchanged(module):
            module(*args, **kwargs)
    except MODEL_ERRORS:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return seen
