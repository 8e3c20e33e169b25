"""transformers: parts that may change between versions, by the vbrt feature that uses them.

| feature | without it |
| --- | --- |
| `DRAFTS` | `generate(speculate=...)` decodes without drafts; `seed` raises |
| `UNIVERSAL` | `generate(assistant_model=...)` with another tokenizer decodes without its drafts |
| `ROWS` | `generate(speculate=...)` drafts with `exactness="distribution"` only |
| `CACHES` | decode steps are not captured |
| `KV_CACHE` | `vbrt.KVCache` raises |
| `EXPERTS` | routed experts are computed one by one |
| `CHECKPOINTS` | checkpoints that need renamed or merged tensors raise |
| `LOADING` | `from_pretrained` with `vbrt.QuantizationConfig` raises |
| `GGUF` | GGUF files raise |

The classes, functions and tables of a feature can be imported from here by name:
`from vbrt.libraries.transformers_api import ConversionOps`. Importing this module does not import transformers.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vbrt.libraries.probe import Feature, find, loaded

__all__ = [
    "CACHES",
    "CACHE_ARGUMENTS",
    "CHANGED_BY_STEPS",
    "CHECKPOINTS",
    "CHECKPOINT_FUNCTION",
    "DRAFTS",
    "EXPERTS",
    "FEATURES",
    "GGUF",
    "KV_CACHE",
    "LOADING",
    "ROWS",
    "UNIVERSAL",
    "adapters_only",
    "as_generate_names_it",
    "attention_of",
    "cache_argument",
    "cache_kinds",
    "cache_of",
    "cached_directory",
    "checkpointed_blocks",
    "checkpointing_name",
    "checkpointing_switch",
    "experts_function",
    "experts_implementation",
    "generation_mixin",
    "ignored_patterns",
    "is_cache",
    "is_pretrained",
    "keep_loading_attributes_of",
    "loaded_part",
    "newer_gguf_architectures",
    "newer_gguf_rules",
    "own_dtypes_of",
    "replace_capture_query",
    "rules_of",
    "set_attention",
    "stop_keeping_past",
    "with_cache",
]

_NAME = "transformers"
_MIXIN = "generation.utils:GenerationMixin"
_TRANSLATED = "generation.candidate_generator:AssistedCandidateGeneratorDifferentTokenizers"

DRAFTS = Feature(
    _NAME,
    (
        f"{_MIXIN}._prepare_generation_config(generation_config)",
        f"{_MIXIN}._prefill(input_ids, generation_config, model_kwargs)",
        f"{_MIXIN}._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder)",
        f"{_MIXIN}.prepare_inputs_for_generation(input_ids, next_sequence_length)",
        "generation.utils:GenerateDecoderOnlyOutput",
        "generation.stopping_criteria:StopStringCriteria",
    ),
    without="generate() of a wrapped model supports neither drafts (speculate=) nor seeded sampling (seed=)",
)
UNIVERSAL = Feature(
    _NAME,
    (
        f"{_TRANSLATED}.get_candidates(input_ids)",
        f"{_TRANSLATED}(assistant_model, target_tokenizer, assistant_tokenizer, generation_config)",
    ),
    without="generate(assistant_model=...) with another tokenizer decodes without its drafts",
)
ROWS = Feature(
    _NAME,
    (
        "masking_utils:AttentionMaskInterface.register(key, value)",
        "masking_utils:ALL_MASK_ATTENTION_FUNCTIONS",
        "modeling_utils:AttentionInterface._global_mapping",
        "modeling_utils:AttentionInterface.register(key, value)",
        "modeling_utils:ALL_ATTENTION_FUNCTIONS",
        "configuration_utils:PreTrainedConfig._attn_implementation",
    ),
    without='generate(speculate=...) drafts with exactness="distribution" only',
)
CACHES = Feature(
    _NAME,
    (
        "cache_utils:Cache",
        "cache_utils:DynamicLayer.lazy_initialization",
        "cache_utils:DynamicLayer.update",
        "cache_utils:DynamicLayer.get_seq_length",
        "cache_utils:DynamicLayer.get_mask_sizes",
        "cache_utils:DynamicSlidingWindowLayer",
        "cache_utils:LinearAttentionLayer",
    ),
    without="decode steps of generate() are not captured",
)
KV_CACHE = Feature(
    _NAME,
    (
        "cache_utils:Cache",
        "cache_utils:CacheLayerMixin.get_max_length",
        "cache_utils:DynamicCache",
        "cache_utils:DynamicLayer",
        "cache_utils:DynamicSlidingWindowLayer",
        "cache_utils:EncoderDecoderCache",
    ),
    without="vbrt.KVCache has no base class; use transformers' own caches",
)
EXPERTS = Feature(
    _NAME,
    ("integrations.moe:ALL_EXPERTS_FUNCTIONS",),
    without="routed experts are computed one by one, as their module's own forward does",
)
CHECKPOINTS = Feature(
    _NAME,
    (
        "core_model_loading:WeightRenaming",
        "core_model_loading:WeightConverter",
        "core_model_loading:rename_source_key",
        "core_model_loading:dot_natural_key",
        "core_model_loading:build_glob_alternation",
        "conversion_mapping:get_model_conversion_mapping",
    ),
    without="tensors of checkpoints are read by their names in the files, as in this version's from_pretrained",
)
LOADING = Feature(
    _NAME,
    (
        "core_model_loading:ConversionOps",
        "core_model_loading:WeightConverter.force_cpu",
        "core_model_loading:WeightTransform",
        "core_model_loading:build_glob_alternation",
        "quantizers:HfQuantizer",
        "quantizers.auto:AUTO_QUANTIZATION_CONFIG_MAPPING",
        "quantizers.auto:AUTO_QUANTIZER_MAPPING",
        "quantizers.auto:LOADING_ATTRIBUTES_CONFIG_TYPES",
        "utils.quantization_config:QuantizationConfigMixin",
        "modeling_utils:PreTrainedModel._get_dtype_plan(dtype)",
    ),
    without="from_pretrained(quantization_config=vbrt.QuantizationConfig(...)) needs another version; vbrt.load, and "
    "vbrt.wrap on a loaded model, work with this one",
)
GGUF = Feature(
    _NAME,
    (
        "integrations.ggml:GGUF_CONFIG_MAPPING",
        "modeling_gguf_pytorch_utils:GGUF_SUPPORTED_ARCHITECTURES",
        "modeling_gguf_pytorch_utils:TENSOR_PROCESSORS",
        "modeling_gguf_pytorch_utils:TensorProcessor",
        "modeling_gguf_pytorch_utils:get_gguf_hf_weights_map",
    ),
    without="GGUF files need another version",
)
#: classes and tables that vbrt uses if they exist
OTHERS = Feature(
    _NAME,
    (
        "pytorch_utils:Conv1D",
        "models.falcon.modeling_falcon:FalconLinear",
        "models.esm.modeling_esmfold:EsmFoldLinear",
        "models.auto.modeling_auto:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "utils:logging",
    ),
    without="models of these classes cannot be swapped",
)
FEATURES = (DRAFTS, UNIVERSAL, ROWS, CACHES, KV_CACHE, EXPERTS, CHECKPOINTS, LOADING, GGUF, OTHERS)


def _of_module(ask: str) -> str:
    """Reduce an ask to `module:Name`."""
    module, _, names = ask.partition("(")[0].partition(":")
    return f"{module}:{names.partition('.')[0]}"


_PARTS = {path.rpartition(":")[2]: (path, feature) for feature in FEATURES for path in map(_of_module, feature.asks)}


def __getattr__(name: str) -> Any:
    """A part that a feature needs. Raises LibraryError, with version and consequence, if it is missing."""
    if name not in _PARTS:
        raise AttributeError(name)
    path, feature = _PARTS[name]
    return feature.part(path)


# -- models -----------------------------------------------------------------------------------------------------------


def is_pretrained(model: nn.Module) -> bool:
    """True for a transformers model."""
    library = loaded(_NAME)  # must be loaded if it made the model
    return library is not None and isinstance(model, library.PreTrainedModel)


def ignored_patterns(model: nn.Module) -> Collection[str]:
    """Patterns of checkpoint names that a model ignores."""
    return getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()


def adapters_only(model: nn.Module) -> bool:
    """True if the model's `save_pretrained` writes adapters only: `add_adapter` was called."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def own_dtypes_of(model: nn.Module, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """Return a function from parameter name to the dtype that the model's class prescribes for it; None for most.

    Args:
        dtype: of the other parameters.
    """
    ask = getattr(model, "_get_dtype_plan", None)
    plan = ask(dtype) if ask is not None else {}
    if not plan:
        return lambda name: None
    pattern, groups, _ = __getattr__("build_glob_alternation")(list(plan))

    def wanted(name: str) -> torch.dtype | None:
        match = pattern.search(name)
        return None if match is None else plan[groups[match.lastgroup]]

    return wanted


_SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the second warns since 5.24


def checkpointing_switch(model: nn.Module) -> Callable[[dict[str, Any]], None] | None:
    """The model's method that enables activation checkpointing, taking options; None if it has none."""
    return next((getattr(model, name) for name in _SWITCHES if hasattr(model, name)), None)


def checkpointing_name() -> str:
    """Name of that method in this version."""
    module = loaded(_NAME, "modeling_utils")
    return _SWITCHES[0] if hasattr(getattr(module, "PreTrainedModel", None), _SWITCHES[0]) else _SWITCHES[1]


#: attribute of a block: the function that computes its activations again, with its forward and what that takes
CHECKPOINT_FUNCTION = "_gradient_checkpointing_func"


def checkpointed_blocks(model: nn.Module) -> list[nn.Module]:
    """A model's blocks of which transformers checkpoints the activations, in training."""
    kind = getattr(loaded(_NAME, "modeling_layers"), "GradientCheckpointingLayer", None)
    if kind is None:
        return []
    found = (module for module in model.modules() if isinstance(module, kind))
    return [block for block in found if block.gradient_checkpointing and block.training]


# -- generate ---------------------------------------------------------------------------------------------------------

#: names of the KV cache argument, in forwards, blocks, outputs and `generate`
CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")


def generation_mixin() -> type | None:
    """The class that provides `generate`; None before a model has imported it."""
    module = loaded(_NAME, "generation.utils")
    return None if module is None else getattr(module, "GenerationMixin", None)


def cache_of(holder: Any) -> Any:
    """The cache in a pass's arguments (a mapping) or a model's outputs; None if there is none."""
    if isinstance(holder, Mapping) and not hasattr(holder, "to_tuple"):
        return next((holder[name] for name in CACHE_ARGUMENTS if holder.get(name) is not None), None)
    found = (vars(holder).get(name) for name in CACHE_ARGUMENTS)  # properties of older names warn
    return next((cache for cache in found if cache is not None), None)


def is_cache(value: Any) -> bool:
    """True for a KV cache, by its methods."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def with_cache(kwargs: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """A pass's arguments with another cache, under the same name."""
    (name,) = (name for name in CACHE_ARGUMENTS if name in kwargs)
    return {**kwargs, name: cache}


def cache_argument(function: Callable[..., Any]) -> str:
    """Name of a forward's cache argument."""
    known = inspect.signature(function).parameters
    return next((name for name in CACHE_ARGUMENTS if name in known), CACHE_ARGUMENTS[1])


@functools.cache
def _name_in_generate(mixin: type) -> str:
    return cache_argument(mixin.prepare_inputs_for_generation)


def as_generate_names_it(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Rename `generate`'s cache argument to this version's: "cache" since 5.24, "past_key_values" before."""
    mixin = generation_mixin()
    given = [name for name in CACHE_ARGUMENTS[:2] if name in kwargs]
    if mixin is None or len(given) != 1:
        return dict(kwargs)
    name = _name_in_generate(mixin)
    return {name if key == given[0] else key: value for key, value in kwargs.items()}


@functools.cache
def cache_kinds(*names: str) -> frozenset[type]:
    """Cache layer classes of these names, as far as they exist."""
    return frozenset(kind for name in names if (kind := find(_NAME, f"cache_utils:{name}")) is not None)


def stop_keeping_past(cache: Any) -> None:
    """End past recording on a cache, as `generate` does once it need not rewind."""
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False


#: config attributes that transformers changes between a prompt and the first step, on devices other than CPUs
CHANGED_BY_STEPS = ("_experts_implementation_internal",)


def replace_capture_query(replaced: Callable[[Callable[[], bool]], Callable[[], bool]]) -> None:
    """Replace the function by which transformers detects CUDA graph capture."""
    module = loaded(_NAME, "utils.import_utils")
    asked = getattr(module, "is_cuda_stream_capturing", None)
    if asked is not None:
        setattr(module, "is_cuda_stream_capturing", replaced(asked))  # noqa: B010 (the module's own name)


# -- attention and experts --------------------------------------------------------------------------------------------


def attention_of(config: Any) -> str | None:
    """Name of the config's attention implementation."""
    return getattr(config, "_attn_implementation", None)


def set_attention(config: Any, name: str) -> None:
    """Set the config's attention implementation, unchecked."""
    config._attn_implementation_internal = name


def experts_implementation(config: Any) -> str | None:
    """Name of the config's implementation of routed experts."""
    return getattr(config, "_experts_implementation", None)


def experts_function(name: str | None) -> Callable[..., Any] | None:
    """Implementation of routed experts by name; None if this version has none."""
    module = loaded(_NAME, "integrations.moe")  # imported with any class of experts
    table = getattr(module, "ALL_EXPERTS_FUNCTIONS", ())
    if module is not None and not table:
        EXPERTS.is_there()  # reports that it is missing
    return table[name] if name in table else None


def loaded_part(module: str, name: str) -> Any:
    """An attribute of a module that this process has imported; else None."""
    return getattr(loaded(_NAME, module), name, None)


# -- from_pretrained --------------------------------------------------------------------------------------------------


def keep_loading_attributes_of(config: type) -> None:
    """Merge `from_pretrained` arguments of this config class into the config in a directory."""
    LOADING.check()
    auto = find(_NAME, "quantizers.auto")
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, config)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def cached_directory(name: str, revision: str | None) -> Path | None:
    """Directory of a Hub model in the local cache; None if it is not there. Does not access the network."""
    cached = find(_NAME, "utils.hub:cached_file")
    if cached is None:
        return None
    silent = dict.fromkeys(("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"), False)
    file = cached(name, "config.json", revision=revision, local_files_only=True, **silent)
    return None if file is None else Path(file).parent


def rules_of(mapping: Collection[Any]) -> tuple[list[Any], list[Any]]:
    """Split into renaming and converting rules."""
    renaming, converting = __getattr__("WeightRenaming"), __getattr__("WeightConverter")
    of_kind = ([rule for rule in mapping if isinstance(rule, kind)] for kind in (renaming, converting))
    return next(of_kind), next(of_kind)


# -- GGUF -------------------------------------------------------------------------------------------------------------


def newer_gguf_architectures() -> Collection[str]:
    """Architectures whose config this version builds from GGUF metadata without the vocabulary."""
    return find(_NAME, "integrations.gguf:GGUF_CONFIG_ARCHS", ())


def newer_gguf_rules(architecture: str, config: Any) -> list[Any] | None:
    """Conversion rules of an architecture; None if this version has none."""
    known = find(_NAME, "integrations.gguf.utils:is_gguf_arch_supported")
    if known is None or not known(architecture):
        return None
    return find(_NAME, "integrations.gguf.utils:get_gguf_conversion_mapping")(architecture, config)
