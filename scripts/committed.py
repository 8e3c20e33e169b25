"""The models, the text and the traces of routing that are committed in tests/data.

`scripts/accuracy.py --pack` and `scripts/routing.py --pack` put them there; scripts/train made the models.
"""

import json
import lzma
from pathlib import Path

import torch
from torch import Tensor, nn

import vbrt
from scripts.lm import LanguageModel, Options, Shape, build
from vbrt.saves.files.safetensors_file import TensorFile

LM = Path(__file__).resolve().parent.parent / "tests" / "data" / "lm"
EXPERTS = LM.parent / "experts"


def about(folder: Path) -> dict:
    """Shape and training of the models of a folder."""
    return json.loads((folder / "run.json").read_text())


def shape() -> Shape:
    """Of the dense model."""
    return Shape(**about(LM)["shape"])


def held_out() -> Tensor:
    """The text that no model was trained on, uint8."""
    return torch.frombuffer(bytearray(lzma.decompress((LM / "held_out.txt.xz").read_bytes())), dtype=torch.uint8)


def filled(model: nn.Module, path: Path) -> nn.Module:
    """The model with the weights of a file."""
    file = TensorFile(path)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(file.read(name))
    return model


def dense(dtype: torch.dtype = torch.float32) -> LanguageModel:
    """The trained dense model; its weights are stored in bf16."""
    return filled(LanguageModel(shape()), LM / "dense.safetensors").to(dtype).eval()


def after_qat() -> vbrt.VBModelWrapper:
    """Its twin after quantization-aware training, with the planes as they were saved."""
    return vbrt.load(LM / "qat", LanguageModel(shape()).eval())


def with_experts(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The trained model with routed experts; its weights are stored in bf16."""
    plain = build(Shape(**about(EXPERTS)["shape"]), Options("vbrt"), torch.device("cpu"))
    plain.config._experts_implementation = "grouped_mm"  # as transformers runs it
    return filled(plain, EXPERTS / "model.safetensors").to(dtype).eval()
