"""What is found at a path below a module, and what other code has put around its calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: Any) -> list[str]:
    """What other code has put around the calls of a module: names of its tables of hooks, or `forward`."""
    own = ["forward"] if "forward" in vars(module) else []
    return own + [name for name in _HOOKS if getattr(module, name, None)]


def is_looked_at(module: nn.Module) -> bool:
    """Whether somebody looks at what a module returns; transformers' own hooks do only when asked to."""
    return any(not is_recorder(hook) for hook in module._forward_hooks.values())


def is_recorder(hook: Any) -> bool:
    """Whether a forward hook is the one by which transformers collects hidden states and attention weights."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def reach(module: Any, path: str) -> Any:
    """What a path of attributes and indices below a module leads to; None if it leads nowhere."""
    held = module
    for part in path.split("."):
        if isinstance(held, Mapping):
            held = held.get(part)
        else:
            held = held[int(part)] if part.isdigit() and not hasattr(held, part) else getattr(held, part, None)
    return held


def is_still(module: Any, path: str, value: Any) -> bool:
    """Whether a path below a module leads to this very plain value."""
    held = reach(module, path)
    return type(held) is type(value) and bool(held == value)
