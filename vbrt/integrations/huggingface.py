"""transformers: models from a directory or a config, offline, and text out of a wrapped one.

    model = meta_model("path/to/config.json")            # no weights: for a plan
    model, tokenizer = load_causal_lm("path/to/model")   # weights, for `vbrt.wrap`
    reply = generate(vb, tokenizer, "Once upon a time", max_new_tokens=64)

Nothing here reaches for the network, and no code that comes with a model is run. Importing this module imports
transformers, which vbrt does not install. A model that cannot be loaded is a `VBError` with the first line of the
reason.
"""

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, TextStreamer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from vbrt.errors import VBError, describe_os_error
from vbrt.host.files import expanded, read_bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["Reply", "generate", "load_causal_lm", "meta_model", "quiet"]

_MAX_CONFIG_BYTES = 16 << 20
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "sentencepiece.bpe.model",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars, load reports and warnings of transformers while the block runs."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


# -- models without weights -------------------------------------------------------------------------------------------


def meta_model(path: Path) -> nn.Module:
    """Build the model of a directory or a config.json on the meta device: shapes and dtypes, no weights.

    The class is the config's first architecture that transformers knows, else what its auto classes make of it; the
    dtype is the config's, else that of the weights beside it, else float32.

    Raises:
        VBError: no such file, not a config, or one that this version of transformers cannot build.
    """
    file = _config_file(path)
    config = _config(file)
    dtype = config.dtype or _dtype_of_weights(file.parent) or torch.float32
    with quiet(), torch.device("meta"), _loading(f"{file}: transformers cannot build this model"):
        make = _model_class(config, file)
        return make(config, dtype=dtype)


def _config_file(path: Path) -> Path:
    path, is_directory = _looked_at(path)
    if is_directory:
        if (path / "config.json").exists():
            return path / "config.json"
        raise VBError(f"{path}: no config.json in this directory; expected a model as save_pretrained() writes it")
    if not path.exists():
        is_hub_name = not path.is_absolute() and len(path.parts) == 2 and not path.parent.exists()
        hint = f"; to fetch a model of that name: hf download {path} --local-dir {path.name}" if is_hub_name else ""
        raise VBError(f"{path}: no such file or directory; expected a model directory or a config.json{hint}")
    return path


def _looked_at(path: Path) -> tuple[Path, bool]:
    """Return the path without "~", and True if it is a directory. Raises VBError: it cannot be read."""
    try:
        path = expanded(path)
        is_directory = path.is_dir()
        (path / "config.json" if is_directory else path).exists()  # raises where nobody may look
        return path, is_directory
    except OSError as error:
        raise VBError(
            f"{error.filename}: cannot be read: {describe_os_error(error)}; expected a model directory or a config.json"
        ) from error


def _config(file: Path) -> PreTrainedConfig:
    try:
        data = json.loads(read_bounded(file, _MAX_CONFIG_BYTES).decode())
    except OSError as error:
        raise VBError(f"{file}: cannot be read: {describe_os_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise VBError(f"{file}: not valid JSON ({error}); expected the config.json of a model") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise VBError(f'{file}: no "model_type" in it; expected the config.json of a transformers model')
    with quiet(), _loading(f"{file}: transformers {transformers.__version__} does not take this config"):
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
    """Return the dtype of the first floating tensor in a directory's safetensors, as `from_pretrained` does."""
    for file in sorted(directory.glob("*.safetensors")):
        with _loading(f"{file}: cannot be read"), safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                part = tensors.get_slice(name)
                if part.get_shape() and part[:0].dtype.is_floating_point:
                    return part[:0].dtype
    return None


# -- models with weights ----------------------------------------------------------------------------------------------


def load_causal_lm(
    path: Path, *, warn: Callable[[str], object] = warnings.warn
) -> tuple[nn.Module, "PreTrainedTokenizerBase"]:
    """Load the causal language model in a directory, on the CPU in its own dtype and in eval mode, and its tokenizer.

    Args:
        path: a directory as `save_pretrained` of model and tokenizer writes it.
        warn: called with one line when weights are missing from the checkpoint and were drawn at random.

    Raises:
        VBError: a part of the model is missing, named; or transformers cannot load it.
    """
    path, is_directory = _looked_at(path)
    if not is_directory:
        _config_file(path)  # names a missing one
        raise VBError(f"{path}: not a directory; expected a model directory with weights and tokenizer")
    config = _config(_config_file(path))
    _check_causal(config, path)
    _check_regular(path)
    _check_has(path, _WEIGHTS, "weights")
    _check_has(path, _TOKENIZERS, "tokenizer")
    with quiet(), _loading(f"{path}: transformers cannot load it"):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        warn(f"{path}: {len(missing)} weights are not in the checkpoint and were drawn at random: {shown}")
    return model.eval(), tokenizer


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
    """Raise VBError for files that are not regular: opening a FIFO would never return."""
    for file in sorted(path.iterdir()):
        if file.is_fifo() or file.is_socket() or file.is_char_device() or file.is_block_device():
            raise VBError(f"{file}: neither a file nor a directory; remove it from the model's directory")


@contextlib.contextmanager
def _loading(what: str) -> Iterator[None]:
    """Turn what transformers raises in the block into a VBError: `what`, and the first lines of the reason."""
    try:
        yield
    except VBError:
        raise
    except Exception as error:  # files are anybody's, and so is what the libraries behind it raise for them
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        until = next((n for n, line in enumerate(lines) if not line.endswith(":")), 0)
        raise VBError(f"{what}: {' '.join(lines[: until + 1]) or type(error).__name__}") from error


# -- text -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """A generated text without its prompt, the tokens of both, and the seconds that it took."""

    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float


class _Listener(TextStreamer):
    """Pass text to a callback as words are complete."""

    def __init__(self, tokenizer: Any, say: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._say = say

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._say(text)


def generate(
    vb: "VBModelWrapper",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    *,
    max_new_tokens: int,
    say: Callable[[str], object] | None = None,
) -> Reply:
    """Continue a prompt, greedily, so that two runs give the same text.

    Args:
        vb: a wrapped causal language model.
        prompt: taken as it is, without a chat template.
        max_new_tokens: 1 or more; the model may stop earlier.
        say: called with pieces of the text as they are written.

    Raises:
        VBError: the prompt has no tokens, or tokens that the model does not know.
    """
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    ids = inputs["input_ids"]
    if ids.numel() == 0:
        raise VBError("the prompt has no tokens; expected some text")
    rows = vb.model.get_input_embeddings().num_embeddings
    if int(ids.max()) >= rows:
        raise VBError(
            f"the tokenizer gives token {int(ids.max())}, the model knows {rows}: they do not belong together"
        )
    start = time.perf_counter()
    with quiet(), torch.inference_mode():
        out = vb.generate(
            **inputs.to(vb.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            streamer=_Listener(tokenizer, say) if say else None,
        )
    new = out[0, ids.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    return Reply(text, ids.shape[1], new.numel(), time.perf_counter() - start)
