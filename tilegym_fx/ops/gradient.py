"""The gradient of an op: that of its reference, run again in backward as it ran in forward.

Also where that is free, and the op chose otherwise than its reference would: of scores that are equal any may be the
best, and what is sorted may stand in any order among its like. Gradients come in the order of the op's own results, so
the reference is made to choose as the op did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tilegym_fx.errors import UsageError

_BACKWARD = (
    "Use `torch.autograd.functional.jvp`, which goes through `backward`, or the model as it was: "
    "`tilegym_fx.restore(model)`"
)
#: What chooses, with the place of `dim` among its arguments, and whether it gives values beside their places.
_CHOOSING: dict[Any, tuple[int, bool]] = {
    getattr(owner, name): form
    for name, form in {
        "topk": (2, True),
        "sort": (1, True),
        "argsort": (1, False),
        "argmax": (1, False),
        "argmin": (1, False),
    }.items()
    for owner in (torch, torch.Tensor)
}


@dataclass(frozen=True)
class Gradient:
    """What autograd asks of an op.

    Attributes:
        reference: The function whose gradient it is.
        choices: Which of the reference's choices is which of its results, once that is known.
    """

    reference: Callable[..., Any]
    choices: dict[int, int] = field(default_factory=dict)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the gradient needs."""
        tensors = [a for a in inputs if isinstance(a, torch.Tensor)]
        outputs = output if isinstance(output, tuple) else (output,)
        places = {i: o for i, o in enumerate(outputs) if _is_places(o)}
        ctx.save_for_backward(*tensors, *places.values())
        ctx.places = tuple(places)
        ctx.literals = tuple(None if isinstance(a, torch.Tensor) else (a,) for a in inputs)
        ctx.autocast = _autocast_states(tensors)

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The reference's own gradient, recomputed from the saved inputs; it has a graph where one is asked for."""
        saved_tensors = ctx.saved_tensors  # once: activation checkpointing gives them a single time
        count = len(saved_tensors) - len(ctx.places)
        tensors, places = saved_tensors[:count], dict(zip(ctx.places, saved_tensors[count:], strict=True))
        saved = iter(tensors)
        inputs = [literal[0] if literal else next(saved) for literal in ctx.literals]
        wanted = [i for i, need in enumerate(ctx.needs_input_grad) if need]
        higher_order = torch.is_grad_enabled()
        with torch.enable_grad(), _restored(ctx.autocast), _exact_attention(tensors):
            own = [_own(a, i in wanted, higher_order) for i, a in enumerate(inputs)]
            outputs = self._outputs(own, places)
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

    def _outputs(self, inputs: Sequence[Any], places: Mapping[int, torch.Tensor]) -> tuple[Any, ...]:
        """The reference's results where its choices are those that the op gave as results.

        Args:
            inputs: What it is called with.
            places: Results of the op that may be choices.
        """
        while True:
            mode = _Choosing({n: places[i] for n, i in self.choices.items() if i in places})
            with mode if places else nullcontext():
                outputs = self.reference(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            found = {n: i for n, made in enumerate(mode.made) for i in places if outputs[i] is made}
            if found.items() <= self.choices.items():
                return outputs
            self.choices.update(found)


class _Choosing(TorchFunctionMode):
    """Sees what a reference chooses, and makes it choose something else.

    Args:
        instead: The number of a choice -> the places that are chosen.
    """

    def __init__(self, instead: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.instead = instead
        self.made: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = _CHOOSING.get(func)
        if form is None:
            return func(*args, **kwargs)
        place, has_values = form
        index = self.instead.get(len(self.made))
        if index is None:
            result = func(*args, **kwargs)
        elif has_values:
            scores = args[0] if args else kwargs["input"]
            dim = args[place] if len(args) > place else kwargs.get("dim", -1)
            result = torch.return_types.topk((scores.gather(dim, index), index))
        else:
            result = index
        self.made.append(result[1] if has_values else result)
        return result


def _is_places(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()


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
