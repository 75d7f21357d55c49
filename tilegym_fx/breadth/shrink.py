"""Makes a configuration smaller by rules on the names of its fields, keeping every kind of layer.

``layers_only`` is for estimates: all widths stay, and of the layers one of each kind. ``tiny`` shrinks the
widths as well, for a model that is run on a CPU. Both give overrides for the configuration class.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

Fields = Mapping[str, Any]
Overrides = dict[str, Any]

#: Names of the number of layers; the first that a configuration has counts those of the language model.
LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers",
)  # fmt: skip
_SIDE_COUNTS = ("encoder_layers", "num_encoder_layers", "num_blocks", "num_global_layers")
_MIN_LAYERS, _MAX_LAYERS = 2, 6
_INDEX_LIST = re.compile(r"_(layers|idxs|ids|indices)$")
#: Fields that hold the configuration of a part.
NESTED = re.compile(r"(_config|^decoder|^text_encoder|^audio_encoder)$")
#: Patterns along the layers that are given by a period and, for some, an offset.
_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers")
_SHARED = "num_kv_shared_layers"
_PATTERN = "block_types"
_PERIODS = (("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset"))

WIDTH, HEADS, HEAD_DIM, VOCABULARY, POSITIONS, WINDOW, EXPERTS = 64, 4, 16, 120, 80, 8, 8
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim_model", "emb_dim")
#: Widths that stand in a fixed ratio to the hidden size.
_RATIO = re.compile(
    r"^(hidden_size(_global)?|d_model|n_embd|dim_model|emb_dim|embedding_dim|embedding_size|lru_width"
    r"|attention_hidden_size|word_embed_proj_dim|input_embedding_size|output_embedding_size"
    r"|backbone_hidden_size|cross_attention_hidden_size)$"
)
#: Name of a field -> its tiny value; the first that fits counts, and no field grows.
_TINY: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(f"^({names})$"), value)
    for names, value in (
        (r"(moe|expert)_\w*(intermediate|hidden)_size|expert_ffn_hidden_size", 32),
        (r"shared_\w*intermediate_size", 64),
        (r"\w*intermediate_size(_mlp)?|\w*ffn_dim|d_ff|dff|dim_ff|ffn_hidden_size|feed_forward_size|d_inner", 128),
        (r"n_inner|mamba_d_ssm", 128),
        (r"index_n_heads|linear_num_key_heads", 2),
        (r"mamba_n(um)?_heads|n_mamba_heads", 8),
        (r"\w*num_attention_heads|n_heads?|num_heads|\w*attention_heads|dim_head|linear_num_(value_)?heads", HEADS),
        (r"n_head_kv|\w*num_key_value_heads|kv_n_heads|num_kv_heads|num_query_groups", 2),
        (r"qk_rope_head_dim|rotary_dim", 8),
        (r"qk_head_dim", 24),
        (r"\w*head_dim|d_head|attention_head_size|kv_channels|mamba_d_head|mamba_headdim|linear_\w*head_dim", HEAD_DIM),
        (r"qk_nope_head_dim|v_head_dim|\w*d_state|state_size|ssm_state_size", HEAD_DIM),
        (r"q_lora_rank|kv_lora_rank|o_lora_rank|adapter_rank|laurel_rank|\w+_rank", 24),
        (r"index_topk|index_topk_blocks|index_local_blocks", 2),
        (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts", EXPERTS),
        (r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|zero_expert_num", 2),
        (r"n_group|num_expert_group", 2),
        (r"topk_group", 1),
        (r"time_step_rank|mamba_dt_rank", 4),
        (r"mamba_chunk_size|chunk_size|block_size|max_inference_chunksize|index_block_size", 16),
        (r"hidden_size_per_layer_input|ple_embed_dim", 16),
        (r"vocab_size\w*|decoder_vocab_size|unpadded_vocab_size|\w*hash_byte_group_vocab", VOCABULARY),
        (r"\w*max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length", POSITIONS),
        (r"max_(source|target)_positions", POSITIONS),
        (r"sliding_window(_size)?|attention_window_size|window_size|attention_chunk_size", WINDOW),
        (r"local_attention(_window_len)?", WINDOW),
    )
)  # fmt: skip
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def layer_count(fields: Fields) -> int:
    """How many layers the language model has; 0 where no field says so."""
    named = next((fields[name] for name in LAYER_COUNTS if isinstance(fields.get(name), int)), None)
    if named is not None:
        return int(named)
    lists = [value for key, value in fields.items() if key.endswith(("layer_types", "layers_block_type"))]
    return len(lists[0]) if lists and isinstance(lists[0], list) else 0


def layer_kinds(fields: Fields) -> list[tuple[Any, ...]]:
    """For each layer what tells it from others: its entries in the per-layer fields."""
    count = layer_count(fields)
    columns = [_as_column(key, value, count) for key, value in fields.items()]
    columns += [_period_column(fields, names, count) for names in _PERIODS]
    for name in _FIRST_LAYERS:
        if isinstance(fields.get(name), int):
            columns.append([layer < fields[name] for layer in range(count)])
    if fields.get(_SHARED):
        columns.append([layer >= count - fields[_SHARED] for layer in range(count)])
    return list(zip(*(column for column in columns if column), strict=True)) or [()] * count


def _as_column(key: str, value: Any, count: int) -> list[Any] | None:
    if _is_index_list(key, value, count):
        return [layer in value for layer in range(count)]
    if isinstance(value, list) and len(value) == count:
        return [repr(item) for item in value]
    if isinstance(value, Mapping) and _is_by_layer(key, value):
        by_layer = {int(layer): repr(item) for layer, item in value.items()}
        return [by_layer.get(layer) for layer in range(count)]
    return None


def _is_index_list(key: str, value: Any, count: int) -> bool:
    if not isinstance(value, list) or not _INDEX_LIST.search(key) or key.endswith("token_ids"):
        return False
    return bool(value) and all(type(i) is int and 0 <= i < count for i in value) and value == sorted(set(value))


def _is_by_layer(key: str, value: Mapping[str, Any]) -> bool:
    return "layer" in key and bool(value) and all(str(name).isdigit() for name in value)


def _period_column(fields: Fields, names: tuple[str, str], count: int) -> list[Any] | None:
    period, offset = (fields.get(name) for name in names)
    if not isinstance(period, int) or not isinstance(offset, int):
        return None
    return [layer % period == offset for layer in range(count)]


def kept_layers(fields: Fields) -> list[int]:
    """The first layer of each kind, at most six; the next layers where there are fewer than two kinds."""
    if fields.get(_PATTERN):
        return list(range(len(fields[_PATTERN])))
    kinds = layer_kinds(fields)
    first: dict[tuple[Any, ...], int] = {}
    for layer, kind in enumerate(kinds):
        first.setdefault(kind, layer)
    kept = list(first.values())[:_MAX_LAYERS]
    others = (layer for layer in range(len(kinds)) if layer not in kept)
    while len(kept) < min(_MIN_LAYERS, len(kinds)):
        kept.append(next(others))
    return sorted(kept)


def layer_weights(before: Fields, after: Fields) -> list[float]:
    """For each layer of a smaller configuration, how many of the larger one it stands for."""
    all_kinds, kept_kinds = Counter(layer_kinds(before)), layer_kinds(after)
    kept = Counter(kept_kinds)
    if set(kept) == set(all_kinds):
        return [all_kinds[kind] / kept[kind] for kind in kept_kinds]
    return [layer_count(before) / max(1, len(kept_kinds))] * len(kept_kinds)


def layers_only(fields: Fields) -> Overrides:
    """Overrides that leave one layer of each kind, and every width as it is."""
    kept, count = kept_layers(fields), layer_count(fields)
    overrides: Overrides = {}
    for key, value in fields.items():
        if key in LAYER_COUNTS and isinstance(value, int):
            overrides[key] = len(kept)
        elif key in _SIDE_COUNTS and isinstance(value, int):
            overrides[key] = min(value, _MIN_LAYERS)
        elif _is_nested(key, value):
            overrides[key] = layers_only(value)
        elif count > len(kept):
            overrides.update(_kept_part(key, value, kept, count))
    if fields.get("is_decoder") is False and not fields.get("is_encoder_decoder"):
        overrides["is_decoder"] = True
    if fields.get(_SHARED):
        overrides[_SHARED] = sum(layer >= count - fields[_SHARED] for layer in kept)
    return overrides | _tight_periods(fields)


def _kept_part(key: str, value: Any, kept: Sequence[int], count: int) -> Overrides:
    if _is_index_list(key, value, count):
        return {key: [new for new, old in enumerate(kept) if old in value]}
    if isinstance(value, list) and len(value) == count:
        return {key: [value[layer] for layer in kept]}
    if isinstance(value, Mapping) and _is_by_layer(key, value):
        old = {int(layer): item for layer, item in value.items()}
        return {key: {str(new): old[layer] for new, layer in enumerate(kept) if layer in old}}
    return {}


def _tight_periods(fields: Fields) -> Overrides:
    """Periods of two, so that few layers have both kinds."""
    found = [(p, o) for p, o in _PERIODS if isinstance(fields.get(p), int) and isinstance(fields.get(o), int)]
    overrides: Overrides = dict(chain.from_iterable([(period, 2), (offset, 1)] for period, offset in found))
    return overrides | {name: 1 for name in _FIRST_LAYERS if fields.get(name)}


def _is_nested(key: str, value: Any) -> bool:
    return isinstance(value, Mapping) and bool(NESTED.search(key)) and not _is_by_layer(key, value)


def tiny(fields: Fields) -> Overrides:
    """Overrides that make a model of some ten thousand parameters with one layer of each kind."""
    return {"max_position_embeddings": POSITIONS} | _tiny(fields)


def _tiny(fields: Fields) -> Overrides:
    overrides = layers_only(fields)
    hidden = next((fields[name] for name in _HIDDEN if isinstance(fields.get(name), int)), None)
    for key, value in fields.items():
        if _is_nested(key, value):
            overrides[key] = _tiny(value)
        elif key in _SPECIAL_TOKENS and value is not None:
            overrides[key] = _SPECIAL_TOKENS[key]
        elif type(value) is int and hidden and _RATIO.match(key):
            overrides[key] = max(1, WIDTH * value // hidden)
        elif type(value) is int and value > 0:
            overrides.update(_tiny_value(key, value, fields))
        elif isinstance(value, list) and value and all(type(item) is int for item in value):
            small = _tiny_value(key, value[0], fields)
            overrides.update({k: [v] * len(overrides.get(key, value)) for k, v in small.items()})
        elif isinstance(value, Mapping) and _is_by_layer(key, value):
            overrides[key] = {
                layer: dict(_tiny_part(part, fields)) for layer, part in overrides.get(key, value).items()
            }
    if fields.get("qk_rope_head_dim") and fields.get("qk_rope_head_dim") == fields.get("head_dim"):
        overrides["head_dim"] = overrides["qk_rope_head_dim"]
    return overrides | _tiny_sections(fields, overrides)


def _tiny_part(part: Fields, fields: Fields) -> Iterator[tuple[str, Any]]:
    for key, value in part.items():
        yield from (_tiny_value(key, value, fields) or {key: value}).items()


def _tiny_value(key: str, value: int, fields: Fields) -> Overrides:
    small = next((small for names, small in _TINY if names.match(key)), None)
    if small is None:
        return {}
    if small == 2 and "key_value" in key and value in _head_counts(fields):
        small = HEADS  # every query head has keys of its own
    return {key: min(small, value)}


def _head_counts(fields: Fields) -> set[Any]:
    return {fields.get(name) for name in ("num_attention_heads", "n_head", "n_heads")}


def _tiny_sections(fields: Fields, overrides: Overrides) -> Overrides:
    """Sections of multi-part rotary positions add up to half of the rotated width."""
    rope = fields.get("rope_parameters")
    if not isinstance(rope, Mapping) or "mrope_section" not in rope:
        return {}
    width = overrides.get("head_dim", WIDTH // HEADS) * rope.get("partial_rotary_factor", 1.0)
    third = int(width) // 2 // 3
    return {"rope_parameters": {**rope, "mrope_section": [int(width) // 2 - 2 * third, third, third]}}
