"""Causal language models with their tokenizers, from directories, for commands; weights as in `pretrained.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig

from vbrt.config import VBConfig
from vbrt.errors import VBError
from vbrt.host.safe_files import read_bounded, write_file
from vbrt.integrations.gguf_models import TOKENIZERS, gguf_tokenizer
from vbrt.integrations.hf_configs import gguf_at, loading, meta_model, model_config, quiet
from vbrt.integrations.model_paths import looked_at
from vbrt.integrations.pretrained import WEIGHTS, Reader, load_by_transformers
from vbrt.libraries.transformers_api import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vbrt.saves.files.safetensors_file import TensorInfo, TensorWriter
from vbrt.saves.load.sources import open_source
from vbrt.wrapper.wrapper import VBModelWrapper

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["companions_of", "decode_gguf", "load_dense", "load_wrapped"]

_GENERATION = "generation_config.json"
_MAX_CONFIG_BYTES = 16 << 20


def load_wrapped(
    path: Path, config: VBConfig | None, *, dtype: torch.dtype | None = None
) -> tuple[VBModelWrapper, "PreTrainedTokenizerBase"]:
    """Load the causal language model in a directory or GGUF file like `vbrt.from_pretrained`, and its tokenizer.

    Args:
        dtype: compute dtype of a GGUF file's model; see `vbrt.from_pretrained`.

    Raises:
        VBError: a part of the model is missing, named; as from `vbrt.from_pretrained`.
    """
    gguf = gguf_at(path)
    path = _checked(path) if gguf is None else _checked_gguf(gguf)
    tokenizer = _tokenizer(path) if gguf is None else _gguf_tokenizer(gguf)
    return Reader(path, dtype).read(config), tokenizer


def load_dense(path: Path) -> tuple[nn.Module, "PreTrainedTokenizerBase"]:
    """Load the dense causal language model in a directory with transformers, in its files' dtype, and its tokenizer.

    Raises:
        CheckpointError: files that do not fit the model.
        VBError: a part of the model is missing, named; or transformers cannot load it.
    """
    path = _checked(path)
    model, refusal = load_by_transformers(AutoModelForCausalLM, path)
    if refusal is not None:
        raise refusal
    return model.eval(), _tokenizer(path)


def decode_gguf(file: Path, directory: Path, dtype: torch.dtype) -> "PreTrainedTokenizerBase":
    """Write a GGUF file's model as transformers keeps one, weight by weight, decoded to a dtype; return its tokenizer.

    Raises VBError: as `load_wrapped`.
    """
    outline, source = meta_model(file, dtype), open_source(file)
    source.outline_(outline)
    infos = [TensorInfo(name, dtype, tuple(weight.shape)) for name, weight in outline.named_parameters()]
    directory.mkdir(parents=True, exist_ok=True)
    with TensorWriter(directory / "model.safetensors", infos) as writer:
        for info in infos:
            writer.write(info.name, source.read(info.name).to(dtype).view(info.shape))
    outline.config.update({"dtype": dtype, "architectures": [type(outline).__name__]})
    outline.config.save_pretrained(directory)
    GenerationConfig.from_model_config(outline.config).save_pretrained(directory)
    tokenizer = _gguf_tokenizer(file)
    tokenizer.save_pretrained(directory)
    return tokenizer


def companions_of(path: Path, config: PreTrainedConfig) -> Callable[[Path], None]:
    """Return a function that writes a GGUF file's config and tokenizer into a directory; a no-op for other models,
    whose companions are files.

    Raises VBError: transformers cannot make its tokenizer.
    """
    gguf = gguf_at(path)
    if gguf is None:
        return lambda directory: None
    tokenizer, beside = _gguf_tokenizer(gguf), gguf.parent / _GENERATION

    def write(directory: Path) -> None:
        config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        if beside.exists():
            write_file(directory / _GENERATION, read_bounded(beside, _MAX_CONFIG_BYTES))

    return write


def _checked(path: Path) -> Path:
    """Return the directory of a causal language model. Raises VBError: parts are missing."""
    path, is_directory = looked_at(path)
    config = model_config(path)
    if not is_directory:
        raise VBError(f"{path}: not a directory; expected a model directory with weights and tokenizer")
    _check_causal(config, path)
    _check_regular(path)
    _check_has(path, WEIGHTS, "weights")
    _check_has(path, TOKENIZERS, "tokenizer")
    return path


def _checked_gguf(file: Path) -> Path:
    _check_causal(meta_model(file).config, file)
    return file


def _gguf_tokenizer(file: Path) -> "PreTrainedTokenizerBase":
    with quiet(), loading(f"{file}: transformers cannot make its tokenizer"):
        return gguf_tokenizer(file)


def _tokenizer(path: Path) -> "PreTrainedTokenizerBase":
    with quiet(), loading(f"{path}: transformers cannot load it"):
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _check_causal(config: PreTrainedConfig, path: Path) -> None:
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    named = config.architectures or []
    if named and not causal.intersection(named):
        raise VBError(
            f"{path}: architectures = {named}; expected a causal language model, such as LlamaForCausalLM "
            "(in Python, vbrt.wrap takes any module)"
        )
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise VBError(
            f"{path}: model_type = {config.model_type!r} has no causal language model in transformers "
            f"{transformers.__version__}"
        )


def _check_has(path: Path, names: tuple[str, ...], what: str) -> None:
    if not any((path / name).is_file() for name in names):
        raise VBError(f"{path}: no {what} in this directory; expected one of {', '.join(names)}")


def _check_regular(path: Path) -> None:
    """Raise VBError for special files: opening a FIFO would block for ever."""
    for file in sorted(path.iterdir()):
        if file.is_fifo() or file.is_socket() or file.is_char_device() or file.is_block_device():
            raise VBError(f"{file}: neither a file nor a directory; remove it from the model's directory")
