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

from transformers import GenerationConfig

from vbrt.config import VBConfig
from vbrt.errors import VBError
from vbrt.integrations.huggingface import loading, meta_model, method_of, model_config, quiet
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
    **overrides: Any,
) -> VBModelWrapper:
    """Build the model of a directory, fill it from its files weight by weight, and return it wrapped, in eval mode.

    Weights that others have quantized go into pages as they are where their layout is one of vbrt's formats; other
    layouts are decoded, one weight at a time, and `plan.notes` and a warning say so. What such a checkpoint has left
    dense stays dense.

    Args:
        directory: with config.json, and safetensors files or what `vb.save` or `save_pretrained` wrote.
        config: as `vbrt.wrap` takes it; by default that of saved planes, "exact" for a checkpoint that others have
            quantized, and "fp4" for a dense one.
        runtime: `vb.runtime` of another model, which shares its tiers, budgets and policy.
        **overrides: sections of the config, merged key by key.

    Raises:
        CheckpointError: files missing, damaged, of another model, or of a layout that vbrt does not read.
        ConfigError, FormatError, TierError: as from `vbrt.load`.
        VBError: a config.json that is missing, damaged, or of a model that transformers cannot build.
    """
    path = Path(directory).expanduser()
    if method_of(model_config(path)) == _OWN:
        return _of_planes(path, type(meta_model(path)), config, runtime, overrides)
    source = open_source(path)
    with reading_ahead(source.files):
        model = meta_model(path).eval()
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # the layers are no longer those of the library that it names
        vb = load_from(source, model, config, runtime=runtime, **overrides)
    if (path / "generation_config.json").exists() and hasattr(model, "generation_config"):
        with quiet(), loading(f"{path}: transformers does not take its generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
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
