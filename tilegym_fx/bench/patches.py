"""What a variant does to a model: kernelize it, compile it, or let a peer patch transformers first."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tilegym_fx.backend import tilegym_fx_backend
from tilegym_fx.errors import UsageError

from .cases import Variant

#: Peer -> its package, where in it the patches are, and the options that choose them.
_PEERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "liger": ("liger_kernel", "liger_kernel.transformers.monkey_patch", "MODEL_TYPE_TO_APPLY_LIGER_FN", {}),
    "tilegym": (
        "tilegym", "tilegym.transformers.monkey_patch", "MODEL_TYPE_TO_APPLY_TILEGYM_FN",
        {"use_cutile": True},
    ),
}  # fmt: skip


def is_installed(peer: str) -> bool:
    """Whether the package of a peer is there."""
    return importlib.util.find_spec(_PEERS[peer][0]) is not None


def patch_process(variant: Variant, model_type: str) -> None:
    """Let a peer patch transformers, for good: before the model is built, in a process of its own.

    Raises:
        UsageError: The peer has nothing for this model type.
    """
    if not variant.is_peer:
        return
    package, module, table, options = _PEERS[variant.patch]
    patches = vars(importlib.import_module(module))[table]
    patch = patches.get(model_type) or patches.get(model_type.removesuffix("_text"))
    if patch is None:
        raise UsageError(f"{package} has no patch for the model type {model_type!r}", advice="Leave this peer out")
    patch(**options)


def patch_model(variant: Variant, model: nn.Module) -> None:
    """Put our kernels into the model, where that is what the variant means."""
    if variant.patch == "kernelize":
        from tilegym_fx.live import kernelize

        kernelize(model, strict=True, verify=False)  # the worker judges what it times


def compile_options(variant: Variant, *, tiny: bool) -> dict[str, Any]:
    """Arguments of ``torch.compile``; a tiny model is captured and rewritten, but not compiled."""
    ours: dict[str, Any] = {"backend": tilegym_fx_backend} if variant.patch == "backend" else {}
    if tiny:
        return {**ours, "options": {"inner": "eager"}} if ours else {"backend": "aot_eager"}
    return {**ours, "mode": "reduce-overhead"} if variant.mode == "graphs" else ours


def forward_of(variant: Variant, model: nn.Module, *, tiny: bool) -> Callable[..., Any]:
    """The model as this variant calls it."""
    if variant.mode == "eager":
        return model
    compiled: Callable[..., Any] = torch.compile(model.forward, **compile_options(variant, tiny=tiny))
    if variant.mode == "compile" or tiny:
        return compiled

    @functools.wraps(model.forward)
    def step(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # the last step's logits may be overwritten
        return compiled(*args, **kwargs)

    return step


def generation_options(variant: Variant, *, tiny: bool) -> dict[str, Any]:
    """Arguments of ``generate()`` by which it runs the model as the variant does."""
    if variant.mode == "eager":
        return {}
    from transformers import CompileConfig

    config: Any = CompileConfig(**{"mode": None, **compile_options(variant, tiny=tiny)})
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}
