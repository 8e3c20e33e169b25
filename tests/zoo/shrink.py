"""Every size of a config made small, by the name of its field, through its sub-configs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from tests.zoo.overrides import (
    EXPERTS,
    HEAD_DIM,
    HEADS,
    IMAGE,
    INNER,
    KV_HEADS,
    MOE_INNER,
    OVERRIDES,
    PATCH,
    POSITIONS,
    VOCAB,
    WIDTH,
)

__all__ = ["LEVELS", "shrink"]


def _to(n: int) -> Callable[[int], int]:
    return lambda v: min(v, n)


def _stages(first: int, cap: int) -> Callable[[Any], Any]:
    """Keeps the ratios of a per-stage list, starting at `first`: (96, 192, 384) -> (32, 64, 128)."""

    def shrink(v: Any) -> Any:
        if isinstance(v, int):
            return min(v, WIDTH)
        lowest = min(v)
        if lowest <= 3:  # starts at the channels of the image
            return v
        return type(v)(min(cap, max(8, x * first // lowest)) for x in v)

    return shrink


def _ones(v: Any) -> Any:
    return type(v)(1 for _ in v) if isinstance(v, (list, tuple)) else min(v, 2)


def _head_stages(v: Any) -> Any:
    if isinstance(v, int):
        return min(v, HEADS)
    return type(v)(min(HEADS, 2**i) if v[0] == 1 or v[0] != v[-1] else min(x, HEADS) for i, x in enumerate(v))


# First match wins. A rule sees ints, and lists and tuples of ints; None in the config is left to the config.
RULES: tuple[tuple[str, Callable[[Any], Any] | None], ...] = (
    (r"type_vocab_size|num_labels|num_channels|in_channels|in_chans|audio_channels|num_mel_bins|mlp_ratio.*", None),
    (r".*token_id.*|.*token_index|.*_id|.*_ids", None),
    (r".*vocab_size.*", _to(VOCAB)),
    (r".*(num_key_value_heads|n_kv_heads|num_kv_heads|num_query_groups|key_value_attention_heads)", _to(KV_HEADS)),
    (r".*(attention_heads|num_heads|_heads|n_head|n_heads|num_head|nhead|heads)(_per_stage)?", _head_stages),
    (r"qk_head_dim", _to(2 * HEAD_DIM)),
    (r"rotary_dim", _to(8)),
    (
        r"(head_dim|d_kv|d_head|.*_head_dim|dim_head|kv_channels|mamba_d_head|key_dim|mamba_headdim|attention_head_size)",
        _to(HEAD_DIM),
    ),
    (r".*lora_rank|laurel_rank|.*lowrank|adapter_rank|time_step_rank|mamba_dt_rank|.*_rank", _to(16)),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|.*experts_per_tok", _to(2)),
    (r"topk_group|n_group|moe_topk_group", _to(1)),
    (r"num_shared_experts|n_shared_experts", _to(1)),
    (r".*(num_experts|n_routed_experts|num_local_experts|zero_expert_num)", _to(EXPERTS)),
    (r"first_k_dense_replace|num_dense_layers|.*nextn.*", _to(1)),
    (r"decoder_sparse_step|.*interval|.*every.*", _to(2)),
    (r"depths?|stage_num_blocks|num_block_repeats|blocks_per_stage|stage_numb_of_layers", _ones),
    (
        r".*(hidden_layers|n_layers?|num_layers|_layers|layers)|num_self_attends_per_block|num_blocks|.*num_flows",
        _to(2),
    ),
    (r"mamba_d_state|state_size|ssm_state_size", _to(16)),
    (r"moe_intermediate_size|expert_ffn_hidden_size", _to(MOE_INNER)),
    (r".*shared_expert.*size|shared_intermediate_size|moe_hidden_size", _to(WIDTH)),
    (
        r".*(intermediate|ffn|feed_?forward|d_ff|dff|n_inner|d_inner|dim_ff|mlp_dim|mlp_hidden|linear_units|inner_dim).*",
        _to(INNER),
    ),
    (
        r".*image_size|crop_size|input_size|(max_)?img_size",
        lambda v: type(v)(IMAGE for _ in v) if isinstance(v, (list, tuple)) else min(v, IMAGE),
    ),
    (r"patch_size", lambda v: min(v, PATCH) if isinstance(v, int) and v != 14 else (PATCH if v == 14 else v)),
    (r"max_source_positions", _to(32)),
    (
        r"(text_|max_)?(max_)?.*position_embeddings|n_positions|n_ctx|max_target_positions|max_seq_len|max_.*positions",
        _to(POSITIONS),
    ),
    (r".*sliding_window.*|attention_window.*|local_attention|attention_chunk_size|block_size", _to(8)),
    (r"window_size", lambda v: v if v > 64 else min(v, 8)),  # large windows are in pixels
    (r"chunk_size|mamba_chunk_size", _to(8)),
    (
        r"num_queries|num_query_tokens|num_denoising|two_stage_num_proposals|num_detection_tokens|latent_query_num",
        _to(16),
    ),
    (
        r"num_latents|.*num_latents(_2d)?|num_patches|canvas_length|num_prompts|max_num_bins|num_landmarks|prompt_length",
        _to(16),
    ),
    (r"stage_(in|mid|out)_channels|encoder_in_channels|layer_list_out_channels", None),  # of convolutional backbones
    (r"decoder_in_channels", lambda v: type(v)(WIDTH for _ in v)),
    (r"upsample_groups|hidden_size_global", _to(WIDTH)),
    (
        r"hidden_sizes|neck_hidden_sizes|embed_dims|embed_dim_per_stage|backbone_channel_list|.*_channels|conv_dim|out_features",
        _stages(32, 256),
    ),
    (
        r".*(hidden_size|d_model|n_embd|embed_dim|hidden_dim|_dim|width|projection_size|proj_size|embedding_size|emb_size|emb_dim|output_size|adapter_input_size|_units|_channels|_size_per_layer_input|num_filters|attn_scalar)|dim|hidden",
        _stages(WIDTH, 256),
    ),
)


# How much to shrink, tried in this order: all, only depth and vocabulary, nothing.
LEVELS = ("tiny", "shallow", "default")
_SHALLOW = re.compile(r".*vocab_size.*|.*experts.*|.*layers?|depth")


def _shrunk(name: str, value: Any, level: str = "tiny") -> Any:
    if (
        isinstance(value, bool)
        or not value
        or level == "default"
        or (level == "shallow" and not _SHALLOW.fullmatch(name))
    ):
        return value
    if not isinstance(value, int) and not (
        isinstance(value, (list, tuple)) and all(type(x) is int and x > 0 for x in value)
    ):
        return value
    for pattern, rule in RULES:
        if re.fullmatch(pattern, name):
            if rule is None:
                return value
            if isinstance(value, int):
                return rule(value) if value > 0 else value
            try:
                return rule(value)
            except TypeError:  # a scalar rule on a per-stage list
                return type(value)(rule(x) for x in value)
    return value


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
_KINDS_OF_LAYERS = re.compile(
    r".*layer_types|.*layers_block_type|indexer_types|attention_layers|block_types|mlp_layer_types"
)


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields by the names that the config's class takes, which may keep them under others."""
    skip = {"id2label", "label2id", "ignore_keys_at_rope_validation", "stage_names"}
    taken = getattr(type(config), "__dataclass_fields__", {})
    names = {kept: name for name, kept in type(config).attribute_map.items() if name in taken and kept not in taken}
    return {names.get(k, k): v for k, v in vars(config).items() if not k.startswith("_") and k not in skip}


def _distinct(values: list[Any], length: int) -> list[Any]:
    kinds = list(dict.fromkeys(values))
    return kinds + kinds[-1:] * (length - len(kinds))


def _tiny_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """One layer of every kind, two at least; every per-layer list is cut to the same length."""
    key = next((k for k in _LAYERS if isinstance(fields.get(k), int)), None)
    if key is None or "depths" in fields:  # depths: lists are per stage, not per layer
        return {}
    old = fields[key]
    lists = {k: list(v) for k, v in fields.items() if isinstance(v, (list, tuple)) and len(v) == old and old > 0}
    kinds = {k: v for k, v in lists.items() if _KINDS_OF_LAYERS.fullmatch(k)}
    new = min(old, max([2, *(len(set(v)) for v in kinds.values())]))
    out: dict[str, Any] = {key: new}
    for k, v in lists.items():
        out[k] = _distinct(v, new) if k in kinds else v[:new]
    return out


def _tiny_rope(rope: Any, fields: Mapping[str, Any]) -> Any:
    """Rescales the sections of a multi-axis rotary embedding to the shrunk head."""
    if not isinstance(rope, dict) or not isinstance(rope.get("mrope_section"), (list, tuple)):
        return rope
    head = fields.get("head_dim") or WIDTH // HEADS
    pairs = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    section = rope["mrope_section"]
    new = [max(1, x * pairs // sum(section)) for x in section]
    new[-1] += pairs - sum(new)
    return {**rope, "mrope_section": new}


def _token_ids(fields: Mapping[str, Any], taken: dict[str, int]) -> dict[str, Any]:
    """Special tokens get ids at the top of the shrunk vocabulary, the same id for the same name everywhere."""
    out = {}
    for k, v in fields.items():
        if re.fullmatch(r".*(token_id|token_index)", k) and type(v) is int and v >= VOCAB // 2:
            out[k] = taken.setdefault(k.replace("_index", "_id"), VOCAB - 1 - len(taken))
        elif (
            re.fullmatch(r".*(token_id|token_ids)", k)
            and isinstance(v, (list, tuple))
            and v
            and all(type(x) is int for x in v)
        ):
            if any(x >= VOCAB // 2 for x in v):
                out[k] = type(v)(taken.setdefault(f"{k}.{i}", VOCAB - 1 - len(taken)) for i in range(len(v)))
    return out


# What a config may leave open but a model does not.
UNSET = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": HEADS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": MOE_INNER,
}


def shrink(
    config: PreTrainedConfig,
    overrides: Mapping[str, Any],
    *,
    level: str = "tiny",
    taken: dict[str, int] | None = None,
    path: str = "",
) -> PreTrainedConfig:
    """A config of the same class with every known size made tiny. `overrides` maps dotted field paths to values."""
    taken = {} if taken is None else taken
    cls = type(config)
    fields = _fields(config)
    try:
        default = _fields(cls())
    except Exception:  # noqa: BLE001 - a config without defaults raises anything: then everything counts as changed
        default = {}
    raw = {n: f.default for n, f in getattr(cls, "__dataclass_fields__", {}).items()}
    plain = {k: v for k, v in fields.items() if k in raw and not isinstance(v, PreTrainedConfig)}
    changed: dict[str, Any] = {k: v for k, v in plain.items() if k not in default or default[k] != v}
    changed.update({k: UNSET[k] for k, v in plain.items() if v is None and k in UNSET})
    if level != "default":
        changed.update(_tiny_layers(fields))
        changed.update(_token_ids(fields, taken))
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            changed[name] = shrink(value, overrides, level=level, taken=taken, path=f"{path}{name}.")
        elif name not in _LAYERS or name not in changed:
            new = _shrunk(name, changed.get(name, value), level)
            if new != value and (raw.get(name) is not None or name in changed):
                changed[name] = new
    kv, heads = (
        next((n for n in x if n in fields), "")
        for x in (("num_key_value_heads",), ("num_attention_heads", "num_heads", "n_head"))
    )
    if level == "tiny" and kv and heads and fields[kv] == fields[heads] and isinstance(fields[kv], int):
        changed[kv] = min(fields[kv], HEADS)  # multi-head stays multi-head: latent attention requires it
    rope = changed.get("rope_parameters", fields.get("rope_parameters"))
    if level == "tiny" and rope != (tiny_rope := _tiny_rope(rope, {**fields, **changed})):
        changed["rope_parameters"] = tiny_rope
    stages = getattr(config, "_out_indices", None)
    if stages is not None and list(stages) != list(getattr(cls(), "_out_indices", None) or ()):
        changed["out_indices"] = sorted(
            {min(i, next((changed[k] for k in _LAYERS if k in changed), i)) for i in stages}
        )
    if level == "tiny":
        own = OVERRIDES.get(cls.model_type, {}).get("config", {}) if path else {}
        changed.update({k: v for k, v in own.items() if "." not in k})
        for dotted, value in overrides.items():
            where, _, name = dotted.rpartition(".")
            if where == path.rstrip("."):
                changed[name] = value
    return cls(**changed)
