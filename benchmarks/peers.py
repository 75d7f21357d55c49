"""Kernels of other libraries behind the signatures of our ops, for the tables of the benchmarks.

Liger (Triton) and TileGym (cuTile) are used where they are installed; nothing of them is imported before it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import cuda.tile as ct

from tilegym_fx.export import MODEL_ERRORS

Run = Callable[..., Any]


def _of_triton() -> tuple[type[Exception], ...]:
    """What Triton raises for a kernel that does not compile or fit; nothing where it is not installed."""
    if find_spec("triton") is None:
        return ()
    from triton.errors import TritonError

    return (TritonError,)


#: What a kernel of another library may answer to a case.
REFUSALS: tuple[type[Exception], ...] = (*MODEL_ERRORS, ct.TileError, *_of_triton())


def peers_of(op: str) -> dict[str, Run]:
    """Name of an installed library -> its kernel for an op of ours, called as the op is."""
    installed = {"liger": find_spec("liger_kernel"), "tilegym": find_spec("tilegym")}
    return {name: runs[op] for name, runs in _PEERS.items() if installed[name] and op in runs}


def _rms_norm(x: Any, weight: Any, eps: float) -> Any:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


def _rms_norm_plus_one(x: Any, weight: Any, eps: float) -> Any:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, 1.0, "gemma", False)


def _add_rms_norm(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, 0.0, "llama", False)


def _layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def _silu_mul(gate: Any, up: Any) -> Any:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


def _gelu_tanh_mul(gate: Any, up: Any) -> Any:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)


def _rotary_embedding(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """In place where q and k are contiguous: of arguments that come round again the numbers change, not the time."""
    from liger_kernel.ops.rope import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin)


def _tilegym(name: str) -> Run:
    import tilegym

    tilegym.set_backend("cutile")
    run: Run = getattr(tilegym.ops, name)
    return run


def _tilegym_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return _tilegym("rms_norm")(x, weight.shape, weight, eps)


def _tilegym_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return _tilegym("layer_norm")(x, x.ndim - 1, x.ndim, weight, bias, eps)


def _tilegym_silu_mul_packed(x: Any) -> Any:
    return _tilegym("silu_and_mul")(x)


def _tilegym_rotary_embedding(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return _tilegym("apply_rope_base")(q, k, cos, sin)


def _tilegym_linear(x: Any, weight: Any) -> Any:
    return _tilegym("matmul")(x, weight.t())


def _tilegym_attention_causal(q: Any, k: Any, v: Any, mask: None, scale: float) -> Any:
    return _tilegym("fmha")(q, k, v, scaling=scale, is_causal=True).transpose(1, 2)


def _tilegym_attention(q: Any, k: Any, v: Any, mask: None, scale: float) -> Any:
    return _tilegym("fmha_decode")(q, k, v, scale).transpose(1, 2)


_PEERS: Mapping[str, Mapping[str, Run]] = {
    "liger": {
        "rms_norm": _rms_norm,
        "rms_norm_plus_one": _rms_norm_plus_one,
        "add_rms_norm": _add_rms_norm,
        "layer_norm": _layer_norm,
        "silu_mul": _silu_mul,
        "gelu_tanh_mul": _gelu_tanh_mul,
        "rotary_embedding": _rotary_embedding,
    },
    "tilegym": {
        "rms_norm": _tilegym_rms_norm,
        "layer_norm": _tilegym_layer_norm,
        "silu_mul_packed": _tilegym_silu_mul_packed,
        "rotary_embedding": _tilegym_rotary_embedding,
        "linear": _tilegym_linear,
        "gqa_attention_causal": _tilegym_attention_causal,
        "gqa_attention": _tilegym_attention,
    },
}
