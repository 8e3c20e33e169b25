"""What a trained language model loses when a part of its layers is lossless, chosen by `vbrt.choose_precision` and
otherwise: KL to the dense model on text that neither training nor the choice has seen.

benchmarks/results/precision-lm.json has the figures; scripts/accuracy.py writes them into docs/accuracy.md.
"""

import argparse
import contextlib
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor, nn

import vbrt
from scripts import committed
from scripts.measuring import machine
from vbrt import LayerPrecision, Precision
from vbrt.estimation.calibration import batches_of, kl_between, logits_of, rounded, rounded_weight

RESULT = ROOT / "benchmarks" / "results" / "precision-lm.json"
PLOT = ROOT / "docs" / "precision-lm.svg"
#: of the weights that may be lossless; the pages of exact layers are three times those in nvfp4
SHARES = (0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75)
#: KL that shares of lossless weights may cost at most
GATES = {0.1: 0.0076, 0.25: 0.0052, 0.5: 0.0027}
CHOSEN = "measured KL"
RANDOM = "random"


def orders(model: nn.Module, layers: tuple[LayerPrecision, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield other ways to rank layers, the most urgent one first."""
    names = [layer.name for layer in layers]
    yield "first layers first", names
    yield "last layers first", names[::-1]
    yield "weight error", [layer.name for layer in sorted(layers, key=lambda layer: -weight_error(model, layer))]
    for seed in range(3):
        yield RANDOM, random.Random(seed).sample(names, len(names))


def weight_error(model: nn.Module, layer: LayerPrecision) -> float:
    """The squared error of a weight in 4 bits, a byte."""
    weight = model.get_parameter(layer.swap.site.tensor).detach()
    error = rounded_weight(weight, layer.swap.site, layer.swap.format) - weight
    return error.square().sum().item() / layer.extra_bytes


def filled(layers: Iterable[LayerPrecision], order: list[str], room: int) -> set[str]:
    """The layers that are lossless when each in turn is, as far as there is room."""
    extra, taken = {layer.name: layer.extra_bytes for layer in layers}, set()
    for name in order:
        if extra[name] <= room:
            room -= extra[name]
            taken.add(name)
    return taken


class Judge:
    """Measures the KL of a model whose other layers are in 4 bits."""

    def __init__(self, model: nn.Module, text: Tensor) -> None:
        self.model, self.batches = model, batches_of(text, torch.device("cpu"))
        self.references = [logits_of(model, batch) for batch in self.batches]

    def kl(self, layers: Iterable[LayerPrecision], lossless: set[str]) -> float:
        """In nats a byte."""
        with contextlib.ExitStack() as stack:
            for layer in layers:
                if layer.name not in lossless:
                    stack.enter_context(rounded(self.model, layer.swap, layer.swap.format))
            return kl_between(self.model, self.batches, self.references)


def measure(calibration: int, evaluation: int) -> dict:
    """All curves; `calibration`, `evaluation`: windows of the held-out text, spread evenly and apart."""
    model, context = committed.dense(), committed.shape().context
    text = committed.held_out().long()
    windows = text[: len(text) // context * context].view(-1, context)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    seen, unseen = windows[order[:calibration]], windows[order[calibration : calibration + evaluation]]
    judge = Judge(model, unseen)
    chosen = {
        CHOSEN: vbrt.choose_precision(model, seen, "32 bits"),
        "diagonal Hessian": vbrt.choose_precision(model, seen, "32 bits", method="hessian"),
    }
    layers = chosen[CHOSEN].layers
    curves = [(name, lambda room, by=by: lossless_of(by, room)) for name, by in chosen.items()]
    curves += [(name, lambda room, by=by: filled(layers, by, room)) for name, by in orders(model, layers)]
    every, rows = judge.kl(layers, set()), []
    for share in SHARES:
        room = int(share * sum(layer.extra_bytes for layer in layers))
        for name, take in curves:
            lossless = take(room)
            weights = sum(layer.weights for layer in layers if layer.name in lossless)
            rows.append({"method": name, "share": share, "lossless": weights, "kl": judge.kl(layers, lossless)})
            print(json.dumps(rows[-1]), flush=True)
    sizes = {"weights": sum(layer.weights for layer in layers), "bits": bits_of_formats()}
    sums = {"sum_of_layers": chosen[CHOSEN].loss_in_4_bits, "together": Judge(model, seen).kl(layers, set())}
    counts = {"calibration_bytes": seen.numel(), "evaluation_bytes": unseen.numel()}
    return {"machine": machine(), **counts, **sizes, "calibration": sums, "all_in_4_bits": every, "rows": rows}


def lossless_of(choice: Precision, room: int) -> set[str]:
    """The lossless layers of a choice that has so many bytes more than 4 bits take."""
    within = choice.within(room + sum(layer.coarse_bytes for layer in choice.layers))
    return {layer.name for layer in within.layers if layer.lossless}


def bits_of_formats() -> dict[str, float]:
    """Bits a weight of the pages of the model in bf16."""
    plans = {name: vbrt.make_plan(committed.dense(torch.bfloat16), vbrt.load_config(name)) for name in ("fp4", "exact")}
    return {
        name: 8 * plan.page_bytes / sum(swap.site.parameters for swap in plan.swaps) for name, plan in plans.items()
    }


def curves_of(result: dict) -> dict[str, dict[float, float]]:
    """Share -> KL, by method; the mean of the random orders."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in result["rows"]:
        found.setdefault(row["method"], {}).setdefault(row["share"], []).append(row["kl"])
    return {method: {share: sum(kls) / len(kls) for share, kls in curve.items()} for method, curve in found.items()}


def section() -> list[str]:
    """The section of docs/accuracy.md."""
    result = json.loads(RESULT.read_text())
    curves, bits = curves_of(result), result["bits"]
    sums, every = result["calibration"], result["all_in_4_bits"]
    what = (
        "`vbrt.choose_precision` makes the layers lossless that lose the most KL a byte, each measured alone in nvfp4 "
        f"on {result['calibration_bytes']:,} bytes of text; the KL of the whole to the dense model is measured on "
        f"{result['evaluation_bytes']:,} others, in nats a byte: {every:.5f} with all layers in nvfp4. On the first "
        f"text the single KLs sum to {sums['sum_of_layers']:.5f}, and all layers together have {sums['together']:.5f}."
    )
    how = (
        "Shares are of the weights of the linear layers; bits a weight are those of bf16 weights in `nvfp4` and "
        "`exact`. Random is the mean of three orders; both texts are held out from training."
    )
    head = ["| lossless | bits a weight | " + " | ".join(curves) + " |", "| --- " * (2 + len(curves)) + "|"]
    table = [
        f"| {share:.0%} | {bits['fp4'] + share * (bits['exact'] - bits['fp4']):.2f} | "
        + " | ".join(f"{curve[share]:.5f}" for curve in curves.values())
        + " |"
        for share in SHARES
    ]
    plot = f"![KL by the share of lossless weights, for each method]({PLOT.name})"
    return ["## Some layers lossless", "", what, "", how, "", *head, *table, "", plot, ""]


def draw() -> None:
    """Write the plot."""
    from scripts.plots import Labels, line_plot  # matplotlib is for whoever draws

    result = json.loads(RESULT.read_text())
    curves = {
        name: {0: result["all_in_4_bits"] * 1000} | {100 * share: 1000 * kl for share, kl in curve.items()}
        for name, curve in curves_of(result).items()
    }
    labels = Labels("Which layers are lossless, the others in nvfp4", "% of weights lossless", "KL, millinats a byte")
    line_plot(PLOT, curves, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=int, default=16, help="windows that the choice is measured on")
    parser.add_argument("--evaluation", type=int, default=24, help="windows that the KL is measured on")
    parser.add_argument("--plot", action="store_true", help="draw again, measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.plot:
        RESULT.write_text(json.dumps(measure(args.calibration, args.evaluation), indent=1) + "\n")
    draw()
    every = json.loads(RESULT.read_text())
    for share, gate in GATES.items():
        print(f"{share:.0%} lossless: KL {curves_of(every)[CHOSEN][share]:.5f}, gate {gate}")


if __name__ == "__main__":
    main()
