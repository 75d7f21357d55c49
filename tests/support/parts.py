"""What a Definition is made of, so that counts hold whichever fusion the plan prefers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tilegym_fx.inventory import load

_NORMS = ("rms_norm", "rms_norm_cast_last", "rms_norm_plus_one", "layer_norm")
_GATES = ("silu_mul", "silu_mul_packed", "gelu_mul", "gelu_tanh_mul")
#: What stands around the products of experts whose gate has no kernel: of no part by itself.
_AROUND_EXPERTS = ("experts_rows", "experts_combine")
_ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_new", "relu", "relu_squared")

#: The Definitions with one norm, gate, rotary, attention or linear each, and a residual sum or bias at most.
PLAIN = (
    *_NORMS,
    *(f"add_{norm}" for norm in _NORMS),
    *(f"{norm}_add" for norm in _NORMS[:3]),
    *_GATES,
    *_ACTIVATIONS,
    "rotary_embedding",
    "rotary_embedding_complex",
    "rotary_embedding_fp32",
    "rotary_embedding_half_width",
    "rotary_embedding_interleaved_fp32",
    "rotary_embedding_interleaved_partial",
    "rotary_embedding_pairs_to_halves",
    "rotary_embedding_partial",
    "rotary_embedding_single",
    "gqa_attention",
    "gqa_attention_causal",
    "gqa_attention_masked",
    "mla_attention",
    "mla_attention_causal",
    "mla_attention_masked",
    "sink_attention_masked",
    "sink_attention_step",
    "softcap_attention_masked",
    "cache_append",
    "linear",
    "linear_add",
    "linear_bias",
    "experts_silu",
    "experts_silu_fp32",
    "experts_clamped",
)


def parts_of(name: str) -> dict[str, int]:
    """How many norms, linears, gates, tensors turned and so on one place of a Definition takes over."""
    results = len(load().definitions[name].outputs)
    gated = name.endswith(_GATES)
    packed = name.endswith("_packed")
    turned = results * ("rotary_embedding" in name)
    linears = 3 if "_qkv" in name else 2 if gated and not packed else 1
    found = {
        "norm": max(turned, 1) * ("_norm" in name and not name.startswith("router")),
        "linear": linears * ("linear" in name),
        "gate": gated,
        "activation": name in _ACTIVATIONS,
        "turned": turned,
        "attention": "attention" in name,
        "append": name == "cache_append",
        "experts": name.startswith("experts") and name not in _AROUND_EXPERTS,
        "router": name.startswith("router"),
        "residual add": name.startswith("add_") or name.endswith("_add"),
    }
    return {part: int(count) for part, count in found.items() if count}


def parts(counts: Mapping[str, int]) -> dict[str, int]:
    """The parts of all places together."""
    total: Counter[str] = Counter()
    for name, places in counts.items():
        for part, count in parts_of(name).items():
            total[part] += places * count
    return dict(total)
