"""Tiny random models of every transformers architecture that can be built offline.

A builder, not a test: `scripts/sweep` runs all of them, `tests/test_sweep.py` a sample. `build(kind, name)` takes the
default config of an architecture, shrinks every size it knows by the *name of the field* (`RULES`), recursively through
text, vision and audio sub-configs, and feeds inputs chosen from the signature of `forward`. All widths shrink to the same
number, so what had to be equal stays equal without a table of relations. What names cannot tell stands in `OVERRIDES`,
as data. The road not taken: the tiny configs of transformers' own test suite are not part of its wheel.

A batch is one example: 12 tokens, an image of 64 x 64, 4 frames, 4000 samples of audio.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

__all__ = ["KINDS", "SAMPLE", "Unbuildable", "base_names", "build", "causal_lm_names", "forward", "names", "tensors"]

KINDS = ("causal", "base", "timm", "diffusers")
_MAPPINGS = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING, "base": MODEL_MAPPING}

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, POSITIONS, IMAGE, PATCH, TOKENS = 64, 4, 2, 16, 96, 256, 128, 64, 16, 12
MAX_PARAMETERS = 100_000_000


class Unbuildable(RuntimeError):
    """An architecture that does not run a forward pass on this machine; the message is the reason."""


# ---------------------------------------------------------------------------------------------------------------- names


def causal_lm_names() -> list[str]:
    """Model types that transformers maps to a causal language model, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING._model_mapping)


def base_names() -> list[str]:
    """Model types that transformers maps to a base model, sorted."""
    return sorted(MODEL_MAPPING._model_mapping)


def names(kind: str) -> list[str]:
    """The architectures of a kind; none for timm and diffusers where they do not import."""
    if kind in _MAPPINGS:
        return {"causal": causal_lm_names, "base": base_names}[kind]()
    try:
        importlib.import_module(kind)
    except (ImportError, RuntimeError):  # RuntimeError: a torchvision that was built for another torch
        return []
    return sorted({"timm": TIMM, "diffusers": DIFFUSERS}[kind])


# --------------------------------------------------------------------------------------------------------------- shrink


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
    (r"num_experts_per_tok|moe_k|moe_topk|top_k_experts|.*experts_per_tok", _to(2)),
    (r"topk_group|n_group|moe_topk_group", _to(1)),
    (r"num_shared_experts|n_shared_experts", _to(1)),
    (r".*(num_experts|n_routed_experts|num_local_experts|zero_expert_num)", _to(4)),
    (r"first_k_dense_replace|num_dense_layers|.*nextn.*", _to(1)),
    (r"decoder_sparse_step|.*interval|.*every.*", _to(2)),
    (r"depths?|stage_num_blocks|num_block_repeats|blocks_per_stage|stage_numb_of_layers", _ones),
    (
        r".*(hidden_layers|n_layers?|num_layers|_layers|layers)|num_self_attends_per_block|num_blocks|.*num_flows",
        _to(2),
    ),
    (r"mamba_d_state|state_size|ssm_state_size", _to(16)),
    (
        r"moe_intermediate_size|.*shared_expert.*size|shared_intermediate_size|expert_ffn_hidden_size|moe_hidden_size",
        _to(WIDTH),
    ),
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
    skip = {"id2label", "label2id", "ignore_keys_at_rope_validation", "stage_names"}
    return {k: v for k, v in vars(config).items() if not k.startswith("_") and k not in skip}


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
UNSET = {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}


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


# --------------------------------------------------------------------------------------------------------------- inputs


def _tree(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The config and its sub-configs, breadth first."""
    queue = [config]
    while queue:
        c = queue.pop(0)
        yield c
        queue += [v for v in vars(c).values() if isinstance(v, PreTrainedConfig)]


def _find(config: PreTrainedConfig, *wanted: str, default: Any = None) -> Any:
    for c in _tree(config):
        for name in wanted:
            v = vars(c).get(name)
            if v is not None and not isinstance(v, bool):
                return v
    return default


def _size(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class _Inputs:
    """Deterministic inputs for one model; every method returns one tensor."""

    def __init__(self, config: PreTrainedConfig, seed: int, dtype: torch.dtype):
        self.config, self.dtype = config, dtype
        self.generator = torch.Generator().manual_seed(seed + 1)

    def ints(self, *shape: int, high: int | None = None, low: int = 3) -> Tensor:
        vocab = _find(self.config, "vocab_size", "decoder_vocab_size", default=VOCAB)
        top = min(VOCAB // 2, vocab) if high is None else high
        return torch.randint(min(low, top - 1), top, shape, generator=self.generator)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def image(self, *lead: int) -> Tensor:
        channels = _find(self.config, "num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        h, w = _size(_find(self.config, "image_size", "img_size", "crop_size", default=IMAGE))
        return self.floats(*(lead or (1,)), channels, h, w)

    def make(self, name: str, variant: int, wanted: Mapping[str, Any]) -> Any:
        """One argument of forward, by its name; None when the name says nothing. `variant` 1 is the other usual layout."""
        c = self.config
        mels = _find(
            c, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size", default=80
        )
        match name:
            case "input_ids" | "decoder_input_ids":
                return self.ints(1, TOKENS)
            case "hidden_states" | "pixel_values" if "grid_thw" in wanted or "image_grid_thw" in wanted:
                patch = _find(c, "patch_size", default=PATCH)
                h, w = _size(patch)
                frames = _find(c, "temporal_patch_size", default=1)
                return self.floats(16, _find(c, "num_channels", "in_channels", "in_chans", default=3) * frames * h * w)
            case "grid_thw" | "image_grid_thw":
                return torch.tensor([[1, 4, 4]])
            case "pixel_values" if variant:
                return self.image(1, _find(c, "num_frames", "frames_per_clip", default=4))
            case "pixel_values":
                return self.image(1)
            case "pixel_values_videos" | "pixel_values_images":
                return self.image(1, _find(c, "num_frames", "frames_per_clip", default=4))
            case "input_features" if variant:
                return self.floats(1, mels, 2 * _find(c, "max_source_positions", default=32))
            case "input_features":
                return self.floats(1, 64, mels)
            case "input_values" if variant:
                return self.floats(1, 1, 4000)
            case "input_values":
                return self.floats(1, 4000)
            case "bbox":
                return self.ints(1, TOKENS, 4, high=16).sort(-1).values
            case "inputs_embeds" | "hidden_states" | "query_embeds":
                return self.floats(1, TOKENS, WIDTH)
            case "input_features_mask" | "feature_attention_mask":
                return torch.ones(1, 64, dtype=torch.long)
        return None


def _inputs(model: nn.Module, spec: Mapping[str, Any], rung: str, variant: int, make: _Inputs) -> dict[str, Any]:
    signature = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) else main[0]
    wanted = [
        n for n, p in signature.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    for name in (main, "input_ids", "decoder_input_ids", "pixel_values", "image_grid_thw", "bbox"):
        if name not in signature or name in wanted:
            continue
        text_only = rung == "text" and "input_ids" in signature and name in ("pixel_values", "image_grid_thw")
        decoder_free = name == "decoder_input_ids" and not getattr(model.config, "is_encoder_decoder", False)
        if not text_only and not decoder_free:
            wanted.append(name)
    given = {n: _realise(v, make) for n, v in spec.items() if v is not None}
    out = {n: v for n in wanted if n not in spec and (v := make.make(n, variant, signature)) is not None}
    return {**out, **given}


def _realise(value: Any, make: _Inputs) -> Any:
    """Input data of OVERRIDES: ("f", shape) floats, ("i", shape, high) integers, ("ones", shape), ("=", nested list)."""
    match value:
        case ("f", tuple(shape)):
            return make.floats(*shape)
        case ("i", tuple(shape), int(high)):
            return make.ints(*shape, high=high, low=0)
        case ("ones", tuple(shape)):
            return torch.ones(shape, dtype=torch.long)
        case ("=", data):
            return torch.tensor(data)
        case ("ids", int(length), int(token), int(count)):
            ids = make.ints(1, length)
            ids[0, 1 : 1 + count] = token
            return ids
    return value


# ---------------------------------------------------------------------------------------------------------------- build


def tensors(value: Any, prefix: str = "out") -> dict[str, Tensor]:
    """Every tensor in a model's output by path: dicts, dataclasses, tuples and caches are walked."""
    if isinstance(value, Tensor):
        return {prefix: value}
    found: dict[str, Tensor] = {}
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, PreTrainedConfig)):
        items = vars(value).items()
    else:
        return found
    for key, item in items:
        found.update(tensors(item, f"{prefix}.{key}"))
    return found


def forward(model: nn.Module, inputs: Mapping[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """One forward pass without gradients; models that draw random numbers draw the same ones every time."""
    torch.manual_seed(seed)
    with torch.no_grad():
        out = tensors(model(**copy.deepcopy(dict(inputs))))
    return {path: tensor.clone() for path, tensor in out.items()}  # some models return tensors that they write again


def _reseed_(model: nn.Module, generator: torch.Generator) -> None:
    """Uninitialised and constant matrices become small random ones, so that equal outputs mean something."""
    with torch.no_grad():
        for p in model.parameters():
            if not p.is_floating_point() or p.numel() == 0:
                continue
            broken = not bool(torch.isfinite(p).all()) or float(p.abs().max()) > 1e3
            if broken or (p.ndim >= 2 and bool((p == p.flatten()[0]).all())):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.02)


def _construct(
    kind: str, model_type: str, spec: Mapping[str, Any], level: str, seed: int, dtype: torch.dtype
) -> nn.Module:
    config = shrink(CONFIG_MAPPING[model_type](), spec.get("config", {}), level=level)
    if kind == "causal" and "is_decoder" in vars(config) and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = True
    cls = _MAPPINGS[kind][type(config)]
    cls = cls[0] if isinstance(cls, (tuple, list)) else cls
    if not isinstance(config, cls.config_class):  # the language model of a composite config
        config = next((c for c in _tree(config) if isinstance(c, cls.config_class)), config)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls._from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise Unbuildable(f"{count / 1e6:.0f} M parameters after shrinking")
    torch.manual_seed(seed)
    model = cls._from_config(config, dtype=dtype).eval()
    _reseed_(model, torch.Generator().manual_seed(seed))
    return model


_MISMATCH = re.compile(r"tokens?\D{0,12}(\d+)\D{1,30}features?\D{0,12}(\d+)", re.I)


def _place_image_tokens(inputs: dict[str, Any], model: nn.Module, message: str) -> dict[str, Any] | None:
    """Models count their placeholder tokens and say how many they want: puts that many into input_ids."""
    token = _find(model.config, "image_token_id", "image_token_index", "audio_token_id")
    found = _MISMATCH.search(message)
    if not found or not isinstance(token, int) or "input_ids" not in inputs or (count := int(found[2])) > POSITIONS - 4:
        return None
    ids = inputs["input_ids"]
    placed = torch.cat([ids[:, :2], torch.full((1, count), token), ids[:, 2:4]], 1)
    kinds = {"mm_token_type_ids": (placed == token).long()}
    return {
        **inputs,
        "input_ids": placed,
        **{k: v for k, v in kinds.items() if k in inspect.signature(model.forward).parameters},
    }


def build(
    kind: str, model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny random model in eval mode and inputs on which `model(**inputs)` runs.

    Args:
        kind: one of KINDS. model_type: one of `names(kind)`.
        seed: the same one gives the same bits. dtype: of the parameters and of floating inputs.

    Raises:
        Unbuildable: with what each attempt ran into.
    """
    if kind in ("timm", "diffusers"):
        return _build_other(kind, model_type, seed, dtype)
    spec = OVERRIDES.get(model_type, {})
    if "skip" in spec:
        raise Unbuildable(spec["skip"])
    reasons = []
    for level in spec.get("levels", LEVELS):
        try:
            model = _construct(kind, model_type, spec, level, seed, dtype)
        except Exception as e:  # noqa: BLE001 - whatever a config or model raises is the reason that is reported
            reasons.append(f"{level}: {_first_line(e)}")
            continue
        tried: list[dict[str, Any]] = []
        for rung, variant in (("towers", 0), ("towers", 1), ("text", 0)):
            inputs = _inputs(model, spec.get("inputs", {}), rung, variant, _Inputs(model.config, seed, dtype))
            shapes = {k: getattr(v, "shape", v) for k, v in inputs.items()}
            if shapes in tried:
                continue
            tried.append(shapes)
            try:
                return model, _run(model, inputs)
            except Exception as e:  # noqa: BLE001 - the same
                reasons.append(f"{level} {rung}: {_first_line(e)}")
    raise Unbuildable("; ".join(dict.fromkeys(reasons)))


def _build_other(kind: str, name: str, seed: int, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    make = _Inputs(PreTrainedConfig(), seed, dtype)
    library = importlib.import_module(kind)
    torch.manual_seed(seed)
    if kind == "timm":
        model, spec = library.create_model(name, pretrained=False, **TIMM[name]), {"x": ("f", (1, 3, 224, 224))}
    else:
        cls, config, spec = DIFFUSERS[name]
        model = getattr(library, cls)(**config)
    model = model.eval().to(dtype)
    _reseed_(model, torch.Generator().manual_seed(seed))
    inputs = {n: _realise(v, make) for n, v in spec.items()}
    forward(model, inputs)
    return model, inputs


def _run(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, with placeholder tokens where the model asks for them, after a forward pass that succeeded."""
    try:
        forward(model, inputs)
    except ValueError as e:
        placed = _place_image_tokens(inputs, model, str(e))
        if placed is None:
            raise
        forward(model, placed)
        return placed
    return inputs


def _first_line(e: BaseException) -> str:
    return f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"[:300]


# ------------------------------------------------------------------------------------------------------------ overrides


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    return {
        "config": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section), **more}
        }
    }


_SERIES = {
    "config": {"prediction_length": 4, "context_length": 8, "num_time_features": 1, "lags_sequence": [1, 2, 3]},
    "inputs": {
        "past_values": ("f", (1, 11)),
        "past_time_features": ("f", (1, 11, 1)),
        "past_observed_mask": ("ones", (1, 11)),
        "future_values": ("f", (1, 4)),
        "future_time_features": ("f", (1, 4, 1)),
    },
}
_SHARED_KV = {
    "config": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    }
}
_CODES = {"inputs": {"input_ids": ("i", (4, TOKENS), 64)}}
_PAIR = {"inputs": {"pixel_values": ("f", (1, 2, 3, IMAGE, IMAGE))}}
_QFORMER = {
    "config": {"image_token_index": VOCAB - 1},
    "inputs": {"qformer_input_ids": ("i", (1, TOKENS), 64), "input_ids": ("ids", 24, VOCAB - 1, 16)},
}
_NO_SESSION = {"skip": "forward takes a video inference session, not tensors"}
_NO_FORWARD = {"skip": "the model class has no forward"}
_LAYOUT = {"inputs": {"bbox": ("=", [[[1, 2, 3, 4]] * TOKENS])}}

# Data only: "config" sets fields by dotted path (also where the type is a sub-config of another one), "inputs" replaces
# inputs (see _realise; None removes one), "levels" are those to try, "skip" is a reason not to try at all.
OVERRIDES: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"inputs": {"input_values": ("f", (1, 1024, 128))}},
    "audioflamingo3_encoder": {
        "inputs": {"input_features": ("f", (1, 128, 64)), "input_features_mask": ("ones", (1, 64))}
    },
    "autoformer": {**_SERIES, "config": {**_SERIES["config"], "moving_average": 3}},
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "bamba": {"config": {"mamba_d_head": 32, "attn_layer_indices": [1]}},
    "granitemoehybrid": {"config": {"mamba_d_head": 32, "layer_types": ["mamba", "attention"]}},
    "bark": _NO_FORWARD,
    "glm_image_vqmodel": _NO_FORWARD,
    "blip-2": {"config": {"image_token_index": VOCAB - 1}, "inputs": {"input_ids": ("ids", 24, VOCAB - 1, 16)}},
    "blip_2_qformer": {"inputs": {"encoder_hidden_states": ("f", (1, 8, WIDTH))}},
    "blt": {"config": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 2}},
    "bros": _LAYOUT,
    "chameleon": {"config": {"vocabulary_map": {"<image>": 7}}},
    "clap": {
        "inputs": {"input_features": ("f", (1, 1, 1024, 64)), "is_longer": ("=", [[False]])},
        "levels": ("shallow",),
    },
    "clvp": {"inputs": {"input_features": ("f", (1, 80, 64))}},
    "cohere_compass_text": {
        "config": {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
            }
        }
    },
    "dbrx": {"config": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0}},
    "decision_transformer": {
        "inputs": {
            "states": ("f", (1, 4, 17)),
            "actions": ("f", (1, 4, 4)),
            "rewards": ("f", (1, 4, 1)),
            "returns_to_go": ("f", (1, 4, 1)),
            "timesteps": ("=", [[0, 1, 2, 3]]),
            "attention_mask": ("ones", (1, 4)),
        },
        "config": {"act_dim": 4, "state_dim": 17},
    },
    "deepseek_ocr2_text": {"config": {"mlp_layer_types": ["dense", "sparse"]}},
    "dia": {"inputs": {"decoder_input_ids": ("i", (1, TOKENS, 9), 64)}},
    "diffusion_gemma_text": {"config": {"num_experts": 4, "top_k_experts": 2}},
    "dots1": {"config": {"n_routed_experts": 4, "n_shared_experts": 1}},
    "efficientloftr": _PAIR,
    "lightglue": _PAIR,
    "edgetam_video": _NO_SESSION,
    "sam2_video": _NO_SESSION,
    "sam3_tracker_video": _NO_SESSION,
    "sam3_video": _NO_SESSION,
    "encodec": {"inputs": {"input_values": ("f", (1, 1, 640))}},
    "emu3": {"config": {"vocabulary_map": {"<image>": 7, "<|extra_200|>": 8, "<|image token|>": 9}}},
    "ernie4_5_vl_moe_text": _mrope(3, 3, 2),
    "esm": {"config": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}},
    "fun_asr_nano_encoder": {
        "inputs": {"input_features": ("f", (1, 64, 560)), "input_features_mask": ("ones", (1, 64))}
    },
    "gemma3n_text": {
        "config": {
            **_SHARED_KV["config"],
            "intermediate_size": INNER,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        }
    },
    "gemma3n_audio": {"inputs": {"audio_mel": ("f", (1, 64, 128)), "audio_mel_mask": ("=", [[False] * 64])}},
    "gemma4_audio": {"inputs": {"input_features": ("f", (1, 64, 128)), "attention_mask": ("=", [[True] * 64])}},
    "gemma4_vision": {
        "inputs": {
            "pixel_values": ("f", (1, 16, 768)),
            "pixel_position_ids": ("=", [[[x, y] for y in range(4) for x in range(4)]]),
        }
    },
    "glm4v_text": _mrope(2, 3, 3),
    "glm4v_moe_text": _mrope(1, 1, 2, partial_rotary_factor=0.5),
    "glm_image_text": _mrope(2, 3, 3),
    "glm_ocr_text": _mrope(2, 3, 3),
    "granite4_vision": {"config": {"deepstack_layer_map": [[1, 0]]}},
    "granite_speech5_encoder": {"inputs": {"input_features": ("f", (1, 16, 320))}},
    "granite_speech5_ctc": {"inputs": {"input_features": ("f", (1, 16, 320))}},
    "grounding-dino": {"config": {"num_queries": 4}},
    "mm-grounding-dino": {"config": {"num_queries": 4}},
    "hunyuan_vl_text": _mrope(2, 2, 2, 2),
    "idefics": {
        "inputs": {"pixel_values": ("f", (1, 1, 3, IMAGE, IMAGE)), "image_attention_mask": ("ones", (1, TOKENS, 1))}
    },
    "inkling2_vision": {"inputs": {"pixel_values": ("f", (16, 16, 16, 3))}},
    "instructblip": _QFORMER,
    "instructblipvideo": {
        "config": {"video_token_index": VOCAB - 1},
        "inputs": {
            "qformer_input_ids": ("i", (4, TOKENS), 64),
            "input_ids": ("ids", 72, VOCAB - 1, 64),
            "pixel_values": ("f", (1, 4, 3, IMAGE, IMAGE)),
        },
    },
    "jamba": {
        "config": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    },
    "kimi_k25_vision": {"inputs": {"pixel_values": ("f", (16, 3, 16, 16))}},
    "kosmos-2": {
        "inputs": {
            "image_embeds_position_mask": ("=", [[False, *[True] * 16, *[False] * 7]]),
            "input_ids": ("i", (1, 24), 64),
        }
    },
    "kyutai_speech_to_text": {"inputs": {"input_ids": ("i", (1, TOKENS, 33), 64)}},
    "layoutlm": _LAYOUT,
    "lfm2_moe": {"config": {"layer_types": ["conv", "full_attention"]}},
    "lxmert": {"inputs": {"visual_feats": ("f", (1, 4, WIDTH)), "visual_pos": ("f", (1, 4, 4))}},
    "mamba2": {"config": {"head_dim": 32, "n_groups": 2}},
    "minicpm_ocr_vision": {"inputs": {"target_sizes": ("=", [[4, 4]])}},
    "minicpmv4_7_vision": {"inputs": {"target_sizes": ("=", [[4, 4]])}},
    "molmo2": {"config": {"adapter_config.vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"config": {"num_key_value_heads": HEADS}},
    "muse_glimmer_assistant": {
        "inputs": {"noise_embeds": ("f", (1, TOKENS, WIDTH)), "context_hidden_states": ("f", (1, TOKENS, 2 * WIDTH))}
    },
    "muse_glimmer_vision": {"inputs": {"pixel_values": ("f", (16, 1536))}},
    "muse_spark_vision": {"inputs": {"pixel_values": ("f", (16, 1536))}},
    "muse_spark_audio": {"config": {"num_hidden_layers": 4}, "inputs": {"input_values": ("f", (1, 3840))}},
    "musicgen": _CODES,
    "musicgen_melody": _CODES,
    "nemotron3_5_asr": {"inputs": {"prompt_ids": ("=", [1])}},
    "nemotron_h": {"config": {"n_groups": 2}},
    "oneformer": {"inputs": {"task_inputs": ("i", (1, 77), 64)}},
    "paddleocr_vl_text": _mrope(2, 3, 3),
    "patchtsmixer": {"inputs": {"past_values": ("f", (1, 32, 1))}},
    "patchtst": {"inputs": {"past_values": ("f", (1, 32, 1))}},
    "perceiver": {"inputs": {"inputs": ("f", (1, TOKENS, WIDTH))}, "config": {"d_model": WIDTH}},
    "pi0": {
        "inputs": {
            "pixel_values": ("f", (1, 1, 3, IMAGE, IMAGE)),
            "pixel_attention_mask": ("=", [[True]]),
            "action_embeds": ("f", (1, 4, WIDTH)),
        }
    },
    "qwen2_5_omni_text": _mrope(2, 3, 3),
    "qwen2_5_vl_text": _mrope(2, 3, 3),
    "qwen2_vl_text": _mrope(2, 3, 3),
    "qwen3_asr_encoder": {
        "inputs": {"input_features": ("f", (1, 128, 100)), "input_features_mask": ("ones", (1, 100))}
    },
    "qwen4_exp_text": {
        "config": {
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
            "indexer_n_heads": HEADS,
            "indexer_head_dim": HEAD_DIM,
            "indexer_kv_heads": 1,
        }
    },
    "recurrent_gemma": {"config": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]}},
    "reformer": {
        "config": {
            "axial_pos_shape": (8, 16),
            "axial_pos_embds_dim": (32, 32),
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 4,
            "attn_layers": ["local", "lsh"],
        }
    },
    "seggpt": {
        "config": {"image_size": [2 * IMAGE, IMAGE]},
        "inputs": {
            "pixel_values": ("f", (1, 3, IMAGE, IMAGE)),
            "prompt_pixel_values": ("f", (1, 3, IMAGE, IMAGE)),
            "prompt_masks": ("f", (1, 3, IMAGE, IMAGE)),
        },
    },
    "siglip2": {
        "inputs": {
            "pixel_values": ("f", (1, 16, 768)),
            "pixel_attention_mask": ("ones", (1, 16)),
            "spatial_shapes": ("=", [[4, 4]]),
        }
    },
    "siglip2_vision_model": {
        "inputs": {
            "pixel_values": ("f", (1, 16, 768)),
            "pixel_attention_mask": ("ones", (1, 16)),
            "spatial_shapes": ("=", [[4, 4]]),
        }
    },
    "speecht5": {
        "inputs": {"input_values": ("f", (1, TOKENS, WIDTH)), "decoder_input_values": ("f", (1, TOKENS, WIDTH))}
    },
    "t5gemma2_encoder": {"skip": "its default config lacks the fields its model reads"},
    "timesfm": {
        "inputs": {"past_values": ("f", (1, 64)), "past_values_padding": ("=", [[0] * 64]), "freq": ("=", [[0]])}
    },
    "timesfm2_5": {"inputs": {"past_values": ("f", (1, 64)), "past_values_padding": ("=", [[0] * 64])}},
    "udop": _LAYOUT,
    "vibevoice_acoustic_tokenizer_decoder": {
        "config": {"num_filters": 4},
        "inputs": {"hidden_states": ("f", (1, WIDTH, 4))},
    },
    "vibevoice_acoustic_tokenizer_encoder": {
        "config": {"num_filters": 4},
        "inputs": {"hidden_states": ("f", (1, 1, 3200))},
    },
    "video_llama_3_vision": {"inputs": {"merge_sizes": ("=", [1])}},
    "voxtral_realtime_text": {"skip": "transformers maps it to a class that it does not have"},
    "tvp": {"config": {"visual_prompt_size": 8}},
    "vibevoice_acoustic_tokenizer": {"config": {"num_filters": 4}},
    "align": {"levels": ("shallow",), "inputs": {"pixel_values": ("f", (1, 3, IMAGE, IMAGE))}},
    "hgnet_v2": {"config": {"hidden_sizes": [256, 512, 1024, 2048]}},
    "d_fine": {"config": {"num_queries": 16}},
    "deimv2": {"config": {"num_queries": 16}},
    "pp_doclayout_v3": {"config": {"num_queries": 16}},
    "pp_doclayout_v4": {"config": {"num_queries": 16}},
    "xlstm": {"config": {"qk_dim_factor": 1.0}},
    "xmod": {"config": {"default_language": "en_XX"}},
    "efficientnet": {"levels": ("default",), "inputs": {"pixel_values": ("f", (1, 3, IMAGE, IMAGE))}},
    "sam2_hiera_det_model": {
        "config": {
            "hidden_size": 32,
            "embed_dim_per_stage": [32, 64, 128, 256],
            "num_attention_heads_per_stage": [1, 2, 4, 4],
            "image_size": [IMAGE, IMAGE],
            "blocks_per_stage": [1, 1, 2, 1],
            "global_attention_blocks": [3],
            "window_size_per_stage": [8, 8, 4, 4],
            "window_positional_embedding_background_size": [4, 4],
        }
    },
    "sam2_vision_model": {
        "config": {"backbone_channel_list": [256, 128, 64, 32], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}
    },
    "sam3_vision_model": {"config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}},
    "step3p7": {"config": {"text_config.sliding_window": 8}},
    "mimi_decoder": {"inputs": {"latents": ("f", (1, WIDTH, 8))}},
    "pocket_tts_audio_tokenizer_decoder": {"inputs": {"latents": ("f", (1, WIDTH, 8))}},
    "pp_ocrv5_mobile_rec": {"inputs": {"pixel_values": ("f", (1, 3, 96, 160))}},
    "pp_ocrv6_small_rec": {"inputs": {"pixel_values": ("f", (1, 3, 96, 160))}},
    "voxtral_realtime": {"inputs": {"input_features": ("f", (1, 128, 8 * TOKENS))}},
    "gemma4_unified_assistant": {"skip": "drafts for another model and needs its key-value states"},
    "gemma4_assistant": {"skip": "drafts for another model and needs its key-value states"},
    "zamba": {
        "config": {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        }
    },
}

_HEADS = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM}
_LATENT = ("f", (1, 4, 8, 8))
_TIME = ("=", [1])

# timm: arguments of create_model. diffusers: class, arguments, inputs.
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {},
    "mixer_s32_224": {},
    "swin_tiny_patch4_window7_224": {},
    "convnext_atto": {},
    "levit_128s": {},
}
DIFFUSERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "unet2d_condition": (
        "UNet2DConditionModel",
        {
            "sample_size": 8,
            "block_out_channels": (32, 64),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": WIDTH,
            "layers_per_block": 1,
            "attention_head_dim": 8,
        },
        {"sample": _LATENT, "timestep": _TIME, "encoder_hidden_states": ("f", (1, TOKENS, WIDTH))},
    ),
    "dit": (
        "DiTTransformer2DModel",
        {**_HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2},
        {"hidden_states": _LATENT, "timestep": _TIME, "class_labels": ("=", [3])},
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **_HEADS,
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": WIDTH,
            "pooled_projection_dim": WIDTH,
            "pos_embed_max_size": 16,
        },
        {
            "hidden_states": _LATENT,
            "timestep": _TIME,
            "encoder_hidden_states": ("f", (1, TOKENS, WIDTH)),
            "pooled_projections": ("f", (1, WIDTH)),
        },
    ),
    "autoencoder_kl": (
        "AutoencoderKL",
        {"block_out_channels": (32,), "norm_num_groups": 8},
        {"sample": ("f", (1, 3, 16, 16))},
    ),
}

# What each is there for: see the table "how swap nn.Linear breaks" in docs/design.md.
SAMPLE: tuple[tuple[str, str], ...] = (
    ("causal", "llama"),
    ("causal", "gpt2"),  # Conv1D, tied head
    ("causal", "openai-gpt"),  # Conv1D with another MLP
    ("causal", "opt"),
    ("causal", "bloom"),
    ("causal", "gpt_neox"),
    ("causal", "gemma"),
    ("causal", "mamba"),  # dt_proj.weight is read, never called
    ("causal", "mixtral"),  # routed experts as 3-D parameters
    ("causal", "qwen2_moe"),
    ("causal", "deepseek_v3"),  # latent attention, grouped routing
    ("causal", "nemotron_h"),
    ("causal", "jamba"),
    ("causal", "xlnet"),
    ("causal", "recurrent_gemma"),
    ("base", "albert"),  # one layer called many times
    ("base", "bert"),
    ("base", "t5"),  # wo.weight.dtype is read
    ("base", "bart"),
    ("base", "whisper"),
    ("base", "vit"),
    ("base", "clip"),
    ("base", "llava"),
    ("base", "qwen2_5_vl"),
    ("base", "zamba"),  # layers that share all of their weights
    ("base", "dinov2"),
)
