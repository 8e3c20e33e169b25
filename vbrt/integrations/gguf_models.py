"""Config and tokenizer of a GGUF file: from the files next to it, else from its metadata by transformers.

The file's header is validated before transformers follows any count in it. Importing this module imports transformers.
"""

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from vbrt.integrations.gguf_rope import scale_rope_
from vbrt.libraries.transformers_api import GGUF_CONFIG_MAPPING, newer_gguf_architectures
from vbrt.saves.files.gguf_file import ArrayOf
from vbrt.saves.published.gguf_checkpoint import GGUFTensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TOKENIZERS", "gguf_config", "gguf_tokenizer"]

#: files that suffice for a tokenizer, each alone
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "sentencepiece.bpe.model",
)
#: metadata sizes that transformers ignores for most architectures, taking a config class's defaults
_LEFT_OUT = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
#: architectures with tied embeddings, always
_TIED = ("falcon", "bloom")


def gguf_config(tensors: GGUFTensors) -> PreTrainedConfig:
    """Return transformers' config from a file's metadata, with sizes that transformers leaves out."""
    config = _config_of(tensors)
    metadata, taken = tensors.files[0].metadata, _taken(config, tensors)
    vocabulary, size = metadata.get("tokenizer.ggml.tokens"), f"{tensors.architecture}.vocab_size"
    if isinstance(vocabulary, ArrayOf) and not ("vocab_size" in taken and size in metadata):
        config.vocab_size = vocabulary.count
    for key, attribute in _LEFT_OUT.items():
        value = metadata.get(f"{tensors.architecture}.{key}")
        if isinstance(value, int) and key not in taken and hasattr(config, attribute):
            setattr(config, attribute, value)
    scale_rope_(config, tensors)
    if tensors.architecture not in _TIED:  # transformers reads only a split file's first part
        config.tie_word_embeddings = "output.weight" not in tensors.infos
    return config


def _config_of(tensors: GGUFTensors) -> PreTrainedConfig:
    """Make a config with transformers. For most architectures it spends seconds on the vocabulary and needs only its
    length, so it gets a file without one."""
    path = tensors.path
    if tensors.architecture in newer_gguf_architectures():
        return _config_in(path)
    with tempfile.TemporaryDirectory(prefix="vbrt-gguf-") as directory:
        short = Path(directory) / path.name
        short.write_bytes(tensors.files[0].without_vocabulary(tensors.infos))
        return _config_in(short)


def _config_in(path: Path) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False)


def _taken(config: PreTrainedConfig, tensors: GGUFTensors) -> Collection[str]:
    """Return the metadata keys from which transformers makes this config."""
    names = (config.model_type, config.model_type.removesuffix("_text"), tensors.architecture)
    return next((GGUF_CONFIG_MAPPING[name] for name in names if name in GGUF_CONFIG_MAPPING), ())


def gguf_tokenizer(file: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer next to a GGUF file, or transformers' from its metadata."""
    if any((file.parent / name).is_file() for name in TOKENIZERS):
        given: dict[str, Any] = {}
    else:
        given = {"gguf_file": file.name}
    return AutoTokenizer.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False, **given)
