"""The gradient of an op: that of its reference, run again in backward as it ran in forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilegym_fx.errors import UsageError

_BACKWARD = (
    "Use `torch.autograd.functional.jvp`, which goes through `backward`, or the model as it was: "
    "`tilegym_fx.restore(model)`"
)


@dataclass(frozen=True)
class Gradient:
    """What autograd asks of an op.

    Attributes:
        reference: The function whose gradient it is.
    """

    reference: Callable[..., Any]

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the gradient needs."""
        tensors = [a for a in inputs if isinstance(a, torch.Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.literals = tuple(None if isinstance(a, torch.Tensor) else (a,) for a in inputs)
        ctx.autocast = _autocast_states(tensors)

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The reference's own gradient, recomputed from the saved inputs; it has a graph where one is asked for."""
        tensors = ctx.saved_tensors  # once: activation checkpointing gives them a single time
        saved = iter(tensors)
        inputs = [literal[0] if literal else next(saved) for literal in ctx.literals]
        wanted = [i for i, need in enumerate(ctx.needs_input_grad) if need]
        higher_order = torch.is_grad_enabled()
        with torch.enable_grad(), _restored(ctx.autocast), _exact_attention(tensors):
            own = [_own(a, i in wanted, higher_order) for i, a in enumerate(inputs)]
            outputs = self.reference(*own)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in pairs],
            [own[i] for i in wanted],
            [g for _, g in pairs],
            allow_unused=True,
            create_graph=higher_order,
        )
        gradients = dict(zip(wanted, found, strict=True))
        return tuple(gradients.get(i) for i in range(len(inputs)))


def refuse_tangents(name: str, args: Sequence[Any]) -> None:
    """Called under forward-mode differentiation: an op has no derivative for it, and torch would take it for 0.

    Raises:
        UsageError: An input has a tangent, or may have one.
    """
    # `torch.func.jvp` has taken its tangents off by now, so there it cannot be told which inputs had one.
    nested = getattr(import_module("torch._functorch.eager_transforms"), "JVP_NESTING", 0)
    tensors = (value for value in args if isinstance(value, torch.Tensor))
    if nested or any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise UsageError(f"forward-mode gradients (jvp, jacfwd) do not go through the op {name!r}", advice=_BACKWARD)


def _own(value: Any, wanted: bool, higher_order: bool) -> Any:
    """A value that is this backward's own, so that no gradient comes round through another input.

    A higher-order gradient goes on into what the value was computed from: then it is a view of it.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.view_as(value) if higher_order else value.detach().requires_grad_(wanted)


def _exact_attention(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """On a CPU attention as products: the gradient of torch's fused one is wrong where a float mask leaves a query no
    key that is above the lowest number (torch 2.13)."""
    on_cpu = any(tensor.device.type == "cpu" for tensor in tensors)
    return sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext()


def _autocast_states(tensors: Sequence[torch.Tensor]) -> tuple[dict[str, Any], ...]:
    """How autocast is set for the devices of the tensors, as arguments of ``torch.autocast``."""
    devices = {"cpu", *(t.device.type for t in tensors)}
    return tuple(
        {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for device in sorted(filter(torch.amp.is_autocast_available, devices))
    )


@contextmanager
def _restored(states: Sequence[dict[str, Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for state in states:
            stack.enter_context(torch.autocast(**state))
        yield
