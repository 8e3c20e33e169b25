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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn

import vbrt
from scripts import accuracy_packages, accuracy_smollm2, calibrated, coarse_bits, committed, precision
from scripts.committed import LM, filled
from scripts.lm import LanguageModel, Shape, loss_of, read_text
from scripts.measuring import bits_a_weight, machine, named_machine
from scripts.train_files import Checkpoint, write_tensors

RESULT = ROOT / "benchmarks" / "results" / "accuracy-lm.json"
EXPERTS_RESULT = ROOT / "benchmarks" / "results" / "accuracy-experts.json"
DOCS = ROOT / "docs" / "accuracy.md"
FORMATS = ("nvfp4", "mxfp4", "nf4", "quantile")


# -- the committed models ---------------------------------------------------------------------------------------------


def pack(run: Path, longer: Path, qat: Path) -> None:
    """Make tests/data/lm of three finished runs: dense, dense for as long as QAT took in addition, and QAT."""
    trained = {
        name: Checkpoint(folder / "checkpoint.safetensors").state["config"]
        for name, folder in (("dense", run), ("longer", longer), ("qat", qat))
    }
    model = LanguageModel(Shape(**trained["dense"]["shape"]))
    text = read_text(None, model.shape.context)
    LM.mkdir(parents=True, exist_ok=True)
    (LM / "held_out.txt.xz").write_bytes(lzma.compress(text.held_out.numpy().tobytes(), preset=9))
    weights = {name: p.data.bfloat16() for name, p in filled(model, run / "model.safetensors").named_parameters()}
    write_tensors(LM / "dense.safetensors", weights)
    shutil.rmtree(LM / "qat", ignore_errors=True)
    shutil.copytree(qat / "planes", LM / "qat")
    filled(model, longer / "model.safetensors").to(device())
    for config in trained.values():
        config["init"] = "the dense run" if config["init"] else None  # and not where it lay
    about = {
        "shape": asdict(model.shape),
        "text": text.source,
        "training": trained,
        "longer_loss": loss_of(model, text.held_out, model.shape.context),
    }
    (LM / "run.json").write_text(json.dumps(about, indent=1) + "\n")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# -- measuring --------------------------------------------------------------------------------------------------------


def models() -> Iterator[tuple[str, nn.Module, float]]:
    """Name, model and bits a weight of its linear layers."""
    yield from in_each_format(committed.dense)
    qat = committed.after_qat().materialize()
    yield "nvfp4 after QAT", qat, bits_a_weight(qat)


def in_each_format(make: Callable[..., nn.Module], **chosen: object) -> Iterator[tuple[str, nn.Module, float]]:
    """The models of `models`, of one that is made anew for each; `chosen`: more keys of the config's weights."""
    yield "dense, fp32 arithmetic", make().to(device()), 16.0
    yield "dense, bf16 arithmetic", make(torch.bfloat16).to(device()), 16.0
    exact = vbrt.wrap(make(torch.bfloat16), "exact", weights=chosen).materialize()
    yield "exact, bf16 arithmetic", exact, bits_a_weight(exact)
    for format in FORMATS:
        vb = vbrt.wrap(make(), "fp4", weights={"format": format, **chosen}).materialize()
        yield format, vb, bits_a_weight(vb)


def rows(models: Iterable[tuple[str, nn.Module, float]], context: int) -> dict:
    """Each model's loss on the held-out text."""
    text, found = committed.held_out(), []
    for name, model, width in models:
        row = {"format": name, "bits_a_weight": width, "loss": loss_of(model, text, context)}
        print(json.dumps(row), flush=True)
        found.append(row)
    return {"machine": machine(), "text_bytes": len(text), "context": context, "rows": found}


def measure() -> dict:
    """The dense model and its twin, all linear layers."""
    return rows(models(), committed.shape().context) | {"longer_loss": committed.about(LM)["longer_loss"]}


def measure_experts() -> dict:
    """The model with routed experts: the experts alone, all else as it is."""
    context = committed.about(committed.EXPERTS)["shape"]["context"]
    return rows(in_each_format(committed.with_experts, include=["*.experts"]), context)


# -- the page ---------------------------------------------------------------------------------------------------------


def page() -> str:
    """docs/accuracy.md, from the committed results."""
    head = ["# Accuracy", "", "Generated by `scripts/accuracy` from committed results; do not edit.", ""]
    return "\n".join(
        [
            *head,
            *accuracy_smollm2.section(),
            *_dense_section(),
            *precision.section(),
            *calibrated.section(),
            *coarse_bits.section(),
            *_experts_section(),
            *accuracy_packages.section(),
        ]
    )


def _dense_section() -> list[str]:
    result, about = json.loads(RESULT.read_text()), committed.about(LM)
    trained, lm, base = about["training"], Shape(**about["shape"]), result["rows"][0]["loss"]
    what = (
        f"A byte-level GPT of {lm.parameters:,} parameters ({lm.layers} layers of width {lm.width}, context "
        f"{lm.context}), trained by `scripts/train` on {about['text']}: {trained['dense']['steps']:,} steps of "
        f"{trained['dense']['batch']} × {lm.context} bytes. Perplexity on {result['text_bytes']:,} bytes of "
        "held-out modules. Weights are rounded to bf16 once, then encoded in each format. "
        "The embedding, tied to the head, stays dense."
    )
    qat, longer = trained["qat"], result["longer_loss"]
    more = (
        f"QAT: {qat['steps']:,} more steps through NVFP4 weights (`--use-fp4 --init`) with a learning rate from "
        f"{qat['lr']:g} down. The dense model, trained for as many more steps in the same way, reaches "
        f"{math.exp(longer):.4f} ({math.exp(longer - base):.4f}×), the fair baseline for QAT."
    )
    four = next(math.exp(4 * (row["loss"] - base)) for row in result["rows"] if row["format"] == "nvfp4")
    scale = (
        f"Perplexity a byte is smaller than perplexity a token: a ratio r a byte is r⁴ for tokens of four bytes, "
        f"{four:.3f}× for `nvfp4`."
    )
    table = _table("linear layers", result["rows"])
    return ["## A language model", "", what, "", *table, "", more, "", scale, "", named_machine(result["machine"]), ""]


def _experts_section() -> list[str]:
    result, about = json.loads(EXPERTS_RESULT.read_text()), committed.about(committed.EXPERTS)
    lm, trained = Shape(**about["shape"]), about["training"]["balanced"]
    routed = lm.layers * lm.experts * 3 * lm.inner * lm.width
    what = (
        f"A byte-level Qwen3-MoE of {lm.parameters:,} parameters ({lm.layers} layers of width {lm.width}, "
        f"{lm.active} of {lm.experts} experts of width {lm.inner} for each byte, context {lm.context}), trained by "
        f"`scripts/train --experts` on the same text: {trained['steps']:,} steps of {trained['batch']} × "
        f"{lm.context} bytes, with load balancing. Only the experts are encoded, {routed / lm.parameters:.0%} of the "
        "parameters, in pages so small that padding counts; the same text is held out. Lossless formats run "
        "transformers' `grouped_mm` on the original weights."
    )
    table = _table("routed experts", result["rows"])
    return ["## A language model with routed experts", "", what, "", *table, "", named_machine(result["machine"]), ""]


def _table(what: str, rows: list[dict]) -> list[str]:
    """Bits and perplexity of each format, beside the first row's."""
    head = [f"| {what} | bits a weight | perplexity a byte | over dense | bits a byte |", "| --- " * 5 + "|"]
    base = rows[0]["loss"]
    return head + [
        f"| {row['format']} | {row['bits_a_weight']:.2f} | {math.exp(row['loss']):.4f} | "
        f"{math.exp(row['loss'] - base):.4f}× | {row['loss'] / math.log(2):.4f} |"
        for row in rows
    ]


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
    parser.add_argument("--only", choices=("dense", "experts"), help="measure one of the two models")
    args = parser.parse_args()
    if args.pack:
        pack(*args.pack)
    for name, path, measured in (("dense", RESULT, measure), ("experts", EXPERTS_RESULT, measure_experts)):
        if not args.tables and args.only in (None, name):
            path.write_text(json.dumps(measured(), indent=1) + "\n")
    DOCS.write_text(page())


if __name__ == "__main__":
    main()
