"""What the rules of :mod:`.shrink` cannot know: model types whose default configuration is none that works.

``BASE`` completes a default configuration, before anything is shrunk: a field that has no default, a pattern of layers
of which the default has one kind alone, a batch that must be a multiple of something, or widths where the default is
a toy of a few thousand parameters. ``LAYERS`` and ``TINY``
correct what the rules get wrong, for fewer layers and for small widths: fields that depend on each other. ``None``
takes an override of the rules back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Recipes = Mapping[str, Mapping[str, Any]]

_FULL, _LINEAR, _SLIDING = "full_attention", "linear_attention", "sliding_attention"
_INDEXER = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}  # fmt: skip
_ASSISTANT = {
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": 4,
    "layer_types": [_SLIDING] * 3 + [_FULL],
    "num_kv_shared_layers": 4,
}  # fmt: skip
_DOTS_ATTENTION = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 24, "head_dim": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip

#: Model types that run in float32 alone: their own code mixes dtypes otherwise.
FLOAT32 = frozenset({"reformer", "xlnet"})

BASE: Recipes = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "bloom": {"hidden_size": 1024, "n_layer": 24, "n_head": 16},
    "blt": {"num_hidden_layers": 9},
    "cohere_compass_text": {
        "layer_types": ([_SLIDING] * 3 + [_FULL]) * 10,
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [22, 21, 21]}, _FULL: None,
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_ASSISTANT}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **_ASSISTANT}},
    "granitemoehybrid": {"layer_types": [_FULL if layer % 8 == 5 else _LINEAR for layer in range(32)]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 2},
    "lfm2_moe": {"layer_types": [_FULL if layer % 4 == 2 else "conv" for layer in range(32)]},
    "ministral": {"head_dim": 128},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip

LAYERS: Recipes = {
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL] * 2},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": [_LINEAR, "hybrid"] * 2},
}  # fmt: skip

TINY: Recipes = {
    "blt": {"global_config": {"hidden_size": 128, "head_dim": 32}},
    "dots3_note_text": {
        "num_hidden_layers": 3, "layer_types": ["indexed_attention", "indexed_attention", _SLIDING],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "num_key_value_heads": 4, "head_dim": 24,
        "per_layer_config": {"2": _DOTS_ATTENTION}, "rope_parameters": None,
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 48], "max_position_embeddings": 64},
    "xlnet": {"max_position_embeddings": None},
    "xlstm": {"qk_dim_factor": 1.0},
}  # fmt: skip
