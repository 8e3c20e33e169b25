"""transformers configs, and models without weights, from a directory or GGUF file, offline.

    model = meta_model("path/to/config.json")                 # no weights: for a plan

`pretrained.py` loads weights, `causal_models.py` language models with their tokenizers, `text_generation.py` generates
text.

Nothing here accesses the network or runs code that comes with a model. Importing this module imports transformers,
which vbrt does not install. A model that cannot be built is a `VBError` with the first line of the reason.
"""

import contextlib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from vbrt.errors import ConfigError, VBError, describe_os_error
from vbrt.host.safe_files import read_bounded
from vbrt.integrations.model_paths import EXPECTED, looked_at, model_path
from vbrt.integrations.register_hooks import Deferred
from vbrt.libraries.transformers_api import logging as transformers_logging
from vbrt.saves.files.checkpoint_paths import GGUF_SUFFIX, gguf_file

__all__ = [
    "gguf_at",
    "loading",
    "meta_model",
    "method_of",
    "model_config",
    "no_dtype",
    "quiet",
    "take_generation_config_",
    "unadvised",
]

_MAX_CONFIG_BYTES = 16 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
# weight readers take as long to import as a model to build, and a config.json needs none
_gguf_config = Deferred("vbrt.integrations.gguf_models", "gguf_config")
_gguf_tensors = Deferred("vbrt.saves.published.gguf_checkpoint", "GGUFTensors")


@contextlib.contextmanager
def unadvised() -> Iterator[None]:
    """Hide transformers' and PEFT's messages about calls that are not the user's during the block."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(transformers|peft)\.")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextlib.contextmanager
def quiet(*, but: str = "") -> Iterator[None]:
    """Hide transformers' progress bars, load reports and warnings during the block; not warnings that begin so."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f"(?!{re.escape(but)})" if but else "")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


# -- models without weights -------------------------------------------------------------------------------------------


def meta_model(path: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the model of a directory, config.json or GGUF file on the meta device: shapes and dtypes, no weights.

    The class is the config's first architecture that transformers knows, else its auto class's; the dtype is the given
    one, else the config's, else that of the weights next to it, else float32. A GGUF file's config is the one next to
    it, else made of its metadata.

    Raises:
        ConfigError: a dtype for files other than GGUF, which have their own.
        VBError: no such file, not a config, or one that this version of transformers cannot build.
    """
    gguf = gguf_at(path)
    if dtype is not None and gguf is None:
        raise no_dtype(path, dtype)
    file = _config_file(path) if gguf is None else _config_beside(gguf)
    if file is not None:
        config = _config(file)
        dtype = dtype or config.dtype or _dtype_of_weights(file.parent)
    else:
        tensors, file = _gguf_tensors(gguf), gguf
        what = f"transformers {transformers.__version__} cannot make a config of its metadata"
        with quiet(), loading(f"{gguf}: {what}; put the model's config.json next to the file"):
            config = _gguf_config(tensors)
        dtype = dtype or tensors.dtype
    dtype = dtype or torch.float32
    with quiet(), torch.device("meta"), loading(f"{file}: transformers cannot build this model"):
        make = _model_class(config, file)
        return make(config, dtype=dtype)


def no_dtype(path: Path, dtype: torch.dtype) -> ConfigError:
    """Return the error for a dtype given for files with dtypes of their own."""
    return ConfigError(f"{path}: dtype={dtype}, and these files have dtypes of their own; leave it out")


def model_config(path: Path) -> PreTrainedConfig:
    """Return the config of a directory or a config.json. Raises VBError as `meta_model`."""
    return _config(_config_file(path))


def gguf_at(path: Path) -> Path | None:
    """Return the GGUF file of a path; None for other models. Raises VBError: it cannot be read."""
    path, is_directory = looked_at(path)
    return gguf_file(path) if is_directory or (path.suffix == GGUF_SUFFIX and path.exists()) else None


def method_of(config: PreTrainedConfig) -> str:
    """Return the quantization method of a model's checkpoint, from its config; "" for a dense one."""
    given = getattr(config, "quantization_config", None) or {}
    return str(given.get("quant_method", "") if isinstance(given, dict) else given.quant_method)


def _config_file(path: Path) -> Path:
    path = model_path(path)
    if path.is_dir():
        if (path / "config.json").exists():
            return path / "config.json"
        raise VBError(f"{path}: no config.json in this directory; expected a model as save_pretrained() writes it")
    if path.suffix in _WEIGHTS:
        raise VBError(f"{path}: a file of weights; expected {EXPECTED}, e.g. {path.parent}")
    return path


def _config_beside(file: Path) -> Path | None:
    """Return the config.json next to a GGUF file, unless it is a stub with a model_type only."""
    path = file.parent / "config.json"
    try:
        data = json.loads(read_bounded(path, _MAX_CONFIG_BYTES).decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return path  # its reader reports what is wrong
    return path if isinstance(data, dict) and data.get("architectures") else None


def _config(file: Path) -> PreTrainedConfig:
    try:
        data = json.loads(read_bounded(file, _MAX_CONFIG_BYTES).decode())
    except OSError as error:
        raise VBError(f"{file}: cannot be read: {describe_os_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise VBError(f"{file}: not valid JSON ({error}); expected the config.json of a model") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise VBError(f'{file}: no "model_type" in it; expected the config.json of a transformers model')
    with quiet(), loading(f"{file}: transformers {transformers.__version__} does not take this config"):
        return AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)


def _model_class(config: PreTrainedConfig, file: Path) -> Callable[..., nn.Module]:
    for name in config.architectures or ():
        known = getattr(transformers, name, None)
        if known is not None:
            return known._from_config
    for auto in (AutoModelForCausalLM, AutoModel):
        if type(config) in auto._model_mapping:
            return auto.from_config
    raise VBError(
        f"{file}: architectures = {config.architectures}, model_type = {config.model_type!r}; transformers "
        f"{transformers.__version__} has no model for that (code that comes with a model is not run)"
    )


def _dtype_of_weights(directory: Path) -> torch.dtype | None:
    """Return the dtype of the first floating-point tensor in a directory's safetensors, as `from_pretrained` does."""
    for file in sorted(directory.glob("*.safetensors")):
        with loading(f"{file}: cannot be read"), safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                part = tensors.get_slice(name)
                if part.get_shape() and part[:0].dtype.is_floating_point:
                    return part[:0].dtype
    return None


def take_generation_config_(model: nn.Module, path: Path) -> None:
    """Load a model's generation_config.json from its directory, or from next to its GGUF file, if there is one.

    Raises VBError: transformers rejects it.
    """
    directory = path if path.is_dir() else path.parent
    if (directory / "generation_config.json").exists() and hasattr(model, "generation_config"):
        with quiet(), loading(f"{directory}: transformers does not take its generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn exceptions of transformers in the block into a VBError: `what`, and the first lines of the reason."""
    try:
        yield
    except VBError:
        raise
    except Exception as error:  # with untrusted files, libraries may raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        until = next((n for n, line in enumerate(lines) if not line.endswith(":")), 0)
        raise VBError(f"{what}: {' '.join(lines[: until + 1]) or type(error).__name__}") from error
