"""`vbrt.from_pretrained`: a model of transformers from its files, wrapped; the dense model never exists.

    vb = vbrt.from_pretrained("path/to/model")             # whatever the files hold, also weights quantized by others
    vb = vbrt.from_pretrained("path/to/model", "exact", tiers={"cpu": {"budget": "8GiB"}})

Nothing here reaches for the network, and no code that comes with a model is run. Importing this module imports
transformers.
"""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from vbrt.config import VBConfig
from vbrt.errors import ConfigError, VBError
from vbrt.integrations.huggingface import gguf_at, loading, meta_model, method_of, model_config, take_generation_config_
from vbrt.integrations.transformers_quantizer import QuantizationConfig
from vbrt.model.runtime import Runtime
from vbrt.saves.ahead import reading_ahead
from vbrt.saves.sources import open_source
from vbrt.wrapper.load import load_from
from vbrt.wrapper.of import of
from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["from_pretrained"]

_OWN = "vbrt"  # the quant_method of planes that `save_pretrained` has written


def from_pretrained(
    directory: str | PathLike,
    config: VBConfig | Mapping[str, Any] | str | PathLike | None = None,
    *,
    runtime: Runtime | None = None,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> VBModelWrapper:
    """Build the model of a directory or a GGUF file, fill it weight by weight, and return it wrapped, in eval mode.

    Weights that others have quantized go into pages as they are where their layout is one of vbrt's formats; other
    layouts are decoded, one weight at a time, and `plan.notes` and a warning say so. What such a checkpoint has left
    dense stays dense.

    Args:
        directory: with config.json, and safetensors files or what `vb.save` or `save_pretrained` wrote; or a GGUF file,
            whose config is made of its metadata if no config.json lies beside it.
        config: as `vbrt.wrap` takes it; by default that of saved planes, "exact" for a checkpoint that others have
            quantized, and "fp4" for a dense one.
        runtime: `vb.runtime` of another model, which shares its tiers, budgets and policy.
        dtype: of the model of a GGUF file, which names none: what is decoded is rounded to it. By default that of the
            config beside the file; the file's own, if none of its weights are quantized; else float32.
        **overrides: sections of the config, merged key by key.

    Raises:
        CheckpointError: files missing, damaged, of another model, or of a layout that vbrt does not read.
        ConfigError: as from `vbrt.load`; or a dtype for files that have their own.
        FormatError, TierError: as from `vbrt.load`.
        VBError: a config.json that is missing, damaged, or of a model that transformers cannot build.
    """
    path = Path(directory).expanduser()
    gguf = gguf_at(path)
    if dtype is not None and gguf is None:
        raise ConfigError(f"{path}: dtype={dtype}, and these files have dtypes of their own; leave it out")
    if gguf is None and method_of(model_config(path)) == _OWN:
        return _of_planes(path, type(meta_model(path)), config, runtime, overrides)
    source = open_source(path)
    with reading_ahead(source.files):
        model = meta_model(path, dtype).eval()
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # the layers are no longer those of the library that it names
        vb = load_from(source, model, config, runtime=runtime, **overrides)
    take_generation_config_(model, path)
    return vb


def _of_planes(path: Path, kind: type, config: Any, runtime: Runtime | None, overrides: Mapping[str, Any]):
    """Load what `save_pretrained` of a wrapped model wrote."""
    if runtime is not None:
        raise VBError(
            f"{path}: planes that save_pretrained() wrote get a runtime of their own; save the model with vb.save() "
            "to load it into another's"
        )
    asked = {} if config is None and not overrides else {"quantization_config": QuantizationConfig(config, **overrides)}
    with loading(f"{path}: transformers cannot load it"):
        return of(kind.from_pretrained(path, dtype="auto", local_files_only=True, **asked).eval())
