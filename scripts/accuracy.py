"""What each format costs a trained language model: perplexity a byte on text that it has never seen.

The model, its twin after quantization-aware training, and the text are committed in tests/data/lm; scripts/train made
them, and `--pack` put them there. docs/accuracy.md is generated from benchmarks/results/accuracy-lm.json alone.
"""

import argparse
import json
import lzma
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor, nn

import vbrt
from scripts.lm import LanguageModel, Shape, loss_of, read_text
from scripts.measuring import machine
from scripts.train_files import Checkpoint, write_tensors
from vbrt.saves.tensorfile import TensorFile

DATA = ROOT / "tests" / "data" / "lm"
RESULT = ROOT / "benchmarks" / "results" / "accuracy-lm.json"
DOCS = ROOT / "docs" / "accuracy.md"
FORMATS = ("nvfp4", "mxfp4", "nf4", "quantile")


# -- the committed model ----------------------------------------------------------------------------------------------


def shape() -> Shape:
    return Shape(**json.loads((DATA / "run.json").read_text())["shape"])


def held_out() -> Tensor:
    """The committed text, uint8."""
    return torch.frombuffer(bytearray(lzma.decompress((DATA / "held_out.txt.xz").read_bytes())), dtype=torch.uint8)


def dense(dtype: torch.dtype = torch.float32) -> LanguageModel:
    """The trained model; its weights are stored in bf16."""
    return filled(LanguageModel(shape()), DATA / "dense.safetensors").to(dtype).eval()


def after_qat() -> vbrt.VBModelWrapper:
    """The twin, with the planes as they were saved."""
    return vbrt.load(DATA / "qat", LanguageModel(shape()).eval())


def filled(model: LanguageModel, path: Path) -> LanguageModel:
    file = TensorFile(path)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(file.read(name))
    return model


def pack(run: Path, longer: Path, qat: Path) -> None:
    """Make tests/data/lm of three finished runs: dense, dense for as long as QAT took in addition, and QAT."""
    trained = {
        name: Checkpoint(folder / "checkpoint.safetensors").state["config"]
        for name, folder in (("dense", run), ("longer", longer), ("qat", qat))
    }
    model = LanguageModel(Shape(**trained["dense"]["shape"]))
    text = read_text(None, model.shape.context)
    DATA.mkdir(parents=True, exist_ok=True)
    (DATA / "held_out.txt.xz").write_bytes(lzma.compress(text.held_out.numpy().tobytes(), preset=9))
    weights = {name: p.data.bfloat16() for name, p in filled(model, run / "model.safetensors").named_parameters()}
    write_tensors(DATA / "dense.safetensors", weights)
    shutil.rmtree(DATA / "qat", ignore_errors=True)
    shutil.copytree(qat / "planes", DATA / "qat")
    filled(model, longer / "model.safetensors").to(device())
    for config in trained.values():
        config["init"] = "the dense run" if config["init"] else None  # and not where it lay
    about = {
        "shape": asdict(model.shape),
        "text": text.source,
        "training": trained,
        "longer_loss": loss_of(model, text.held_out, model.shape.context),
    }
    (DATA / "run.json").write_text(json.dumps(about, indent=1) + "\n")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# -- measuring --------------------------------------------------------------------------------------------------------


def models() -> Iterator[tuple[str, nn.Module, float]]:
    """Name, model and bits a weight of its linear layers."""
    yield "dense, fp32 arithmetic", dense().to(device()), 16.0
    yield "dense, bf16 arithmetic", dense(torch.bfloat16).to(device()), 16.0
    exact = vbrt.wrap(dense(torch.bfloat16), "exact").materialize()
    yield "exact, bf16 arithmetic", exact, bits(exact)
    for format in FORMATS:
        vb = vbrt.wrap(dense(), "fp4", weights={"format": format}).materialize()
        yield format, vb, bits(vb)
    qat = after_qat().materialize()
    yield "nvfp4 after QAT", qat, bits(qat)


def bits(vb: vbrt.VBModelWrapper) -> float:
    swaps = vb.plan.swaps
    return 8 * vb.plan.page_bytes / sum(swap.shape[0] * swap.shape[1] for swap in swaps)


def measure() -> dict:
    text, context, about = held_out(), shape().context, json.loads((DATA / "run.json").read_text())
    found = []
    for name, model, bits_a_weight in models():
        row = {"format": name, "bits_a_weight": bits_a_weight, "loss": loss_of(model, text, context)}
        print(json.dumps(row), flush=True)
        found.append(row)
    return {
        "machine": machine(),
        "text_bytes": len(text),
        "context": context,
        "longer_loss": about["longer_loss"],
        "rows": found,
    }


# -- the page ---------------------------------------------------------------------------------------------------------


def page() -> str:
    """docs/accuracy.md, from the committed results."""
    result, about = json.loads(RESULT.read_text()), json.loads((DATA / "run.json").read_text())
    trained, lm = about["training"], Shape(**about["shape"])
    rows, where, base = result["rows"], result["machine"], result["rows"][0]["loss"]
    what = (
        f"A GPT of {lm.parameters:,} parameters over bytes ({lm.layers} layers of width {lm.width}, context "
        f"{lm.context}), trained by `scripts/train` on {about['text']}: {trained['dense']['steps']:,} steps of "
        f"{trained['dense']['batch']} × {lm.context} bytes. Perplexity on {result['text_bytes']:,} bytes of "
        "modules that it was never trained on. Weights are rounded to bf16 once, and every format encodes those. "
        "The embedding, which is the head too, stays dense."
    )
    qat, longer = trained["qat"], result["longer_loss"]
    more = (
        f"QAT: {qat['steps']:,} more steps through NVFP4 weights (`--use-fp4 --init`) with a learning rate from "
        f"{qat['lr']:g} down. The dense model, trained on for as many steps in the same way, comes to "
        f"{math.exp(longer):.4f} ({math.exp(longer - base):.4f}×): measure QAT against that too."
    )
    four = next(math.exp(4 * (row["loss"] - base)) for row in rows if row["format"] == "nvfp4")
    scale = (
        f"Perplexity a byte is small where a token is a byte: r for bytes is r⁴ for tokens of four bytes, "
        f"{four:.3f}× for `nvfp4`."
    )
    lines = [
        "# Accuracy",
        "",
        "Generated by `scripts/accuracy` from committed results; do not edit.",
        "",
        "## A language model",
        "",
        what,
        "",
        "| linear layers | bits a weight | perplexity a byte | over dense | bits a byte |",
        "| --- " * 5 + "|",
    ]
    for row in rows:
        lines.append(
            f"| {row['format']} | {row['bits_a_weight']:.2f} | {math.exp(row['loss']):.4f} | "
            f"{math.exp(row['loss'] - base):.4f}× | {row['loss'] / math.log(2):.4f} |"
        )
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    named = f"{where['gpu'] or where['cpu']}, {versions}, Python {where['python']}, commit {where['commit']}."
    return "\n".join([*lines, "", more, "", scale, "", named, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="write docs/accuracy.md again, measure nothing")
    parser.add_argument(
        "--pack",
        nargs=3,
        type=Path,
        metavar=("RUN", "LONGER", "QAT"),
        help="make tests/data/lm of three runs of scripts/train first",
    )
    args = parser.parse_args()
    if args.pack:
        pack(*args.pack)
    if not args.tables:
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n")
    DOCS.write_text(page())


if __name__ == "__main__":
    main()
