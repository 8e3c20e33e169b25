"""What a trained language model loses at the bytes of nvfp4 and a part more, spent on layers that
`vbrt.choose_precision` chooses and on others: KL to the dense model on text that neither training nor the choice has
seen.

benchmarks/results/precision-lm.json has the figures; scripts/accuracy.py writes them into docs/accuracy.md.
"""

import argparse
import contextlib
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor, nn

import vbrt
from scripts import committed
from scripts.calibrated import GATES, page_bytes
from scripts.measuring import machine
from vbrt import LayerPrecision, Precision
from vbrt.estimation.calibration import batches_of, kl_between, logits_of, rounded, rounded_weight

RESULT = ROOT / "benchmarks" / "results" / "precision-lm.json"
PLOT = ROOT / "docs" / "precision-lm.svg"
#: of the bytes of all layers in nvfp4, that may be spent beside them
MORE = (0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75)
CHOSEN = "measured KL"
WITHOUT = "measured KL, no 8 bits"
RANDOM = "random"


def sized(choice: Precision, sizes: Mapping[str, Mapping[str, int]]) -> Precision:
    """Return a choice of an fp32 model with the pages that its layers have in bf16, by format and name."""
    layers = []
    for layer in choice.layers:
        *lossy, last = layer.ways
        ways = [replace(way, nbytes=sizes[way.held][layer.name]) for way in lossy]
        ways.append(replace(last, held="exact", nbytes=sizes["exact"][layer.name]))
        layers.append(replace(layer, ways=tuple(ways)))
    return replace(choice, layers=tuple(layers))


def without_8_bits(choice: Precision) -> Precision:
    """Return a choice whose layers are in 4 bits or lossless."""
    return replace(choice, layers=tuple(replace(each, ways=(each.ways[0], each.ways[-1])) for each in choice.layers))


def orders(model: nn.Module, layers: tuple[LayerPrecision, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield other ways to rank layers, the most urgent one first."""
    names = [layer.name for layer in layers]
    yield "first layers first", names
    yield "last layers first", names[::-1]
    yield "weight error", [layer.name for layer in sorted(layers, key=lambda layer: -weight_error(model, layer))]
    for seed in range(3):
        yield RANDOM, random.Random(seed).sample(names, len(names))


def weight_error(model: nn.Module, layer: LayerPrecision) -> float:
    """The squared error of a weight in 4 bits, a byte that 8 take more."""
    weight = model.get_parameter(layer.swap.site.tensor).detach()
    error = rounded_weight(weight, layer.swap.site, layer.swap.format) - weight
    return error.square().sum().item() / (layer.ways[1].nbytes - layer.coarse_bytes)


def filled(layers: Iterable[LayerPrecision], order: list[str], room: int) -> dict[str, str]:
    """What layers are held as when each in turn takes 8 bits, as far as there is room, and then is lossless."""
    by_name, at = {layer.name: layer for layer in layers}, dict.fromkeys(order, 0)
    for step in range(1, 3):
        for name in order:
            ways = by_name[name].ways
            more = ways[step].nbytes - ways[at[name]].nbytes
            if more <= room:
                room, at[name] = room - more, step
    return {name: by_name[name].ways[step].held for name, step in at.items()}


def chosen_within(choice: Precision, room: int) -> dict[str, str]:
    """What layers are held as in a choice that has so many bytes more than 4 bits take."""
    within = choice.within(room + sum(layer.coarse_bytes for layer in choice.layers))
    return {layer.name: layer.held for layer in within.layers}


class Judge:
    """Measures the KL of a model whose layers are held in some way."""

    def __init__(self, model: nn.Module, text: Tensor) -> None:
        self.model, self.batches = model, batches_of(text, torch.device("cpu"))
        self.references = [logits_of(model, batch) for batch in self.batches]

    def kl(self, layers: Iterable[LayerPrecision], held: Mapping[str, str]) -> float:
        """In nats a byte. `held`: by name of the layer; nvfp4 where it says nothing."""
        with contextlib.ExitStack() as stack:
            for layer in layers:
                format = held.get(layer.name, layer.swap.format)
                if format != "exact":
                    stack.enter_context(rounded(self.model, layer.swap, format))
            return kl_between(self.model, self.batches, self.references)


def measure(calibration: int, evaluation: int) -> dict:
    """All curves; `calibration`, `evaluation`: windows of the held-out text, spread evenly and apart."""
    model, context = committed.dense(), committed.shape().context
    text = committed.held_out().long()
    windows = text[: len(text) // context * context].view(-1, context)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    seen, unseen = windows[order[:calibration]], windows[order[calibration : calibration + evaluation]]
    judge, sizes = Judge(model, unseen), page_bytes()
    measured = sized(vbrt.choose_precision(model, seen, "32 bits"), sizes)
    hessian = sized(vbrt.choose_precision(model, seen, "32 bits", method="hessian"), sizes)
    layers = measured.layers
    ways: list[tuple[str, Callable[[int], dict[str, str]]]] = [
        (name, lambda room, by=by: chosen_within(by, room))
        for name, by in ((CHOSEN, measured), ("diagonal Hessian", hessian), (WITHOUT, without_8_bits(measured)))
    ]
    ways += [(name, lambda room, by=by: filled(layers, by, room)) for name, by in orders(model, layers)]
    every, coarse, rows = judge.kl(layers, {}), sum(layer.coarse_bytes for layer in layers), []
    for more in MORE:
        for name, take in ways:
            held = take(int(more * coarse))
            counts = dict(Counter(held.values()))
            rows.append({"method": name, "more": more, "layers": counts, "kl": judge.kl(layers, held)})
            print(json.dumps(rows[-1]), flush=True)
    weights = sum(layer.weights for layer in layers)
    bits = {held: 8 * sum(sizes[held].values()) / weights for held in ("nvfp4", "mxint8", "exact")}
    sums = {"sum_of_layers": measured.loss_in_4_bits, "together": Judge(model, seen).kl(layers, {})}
    counts = {"calibration_bytes": seen.numel(), "evaluation_bytes": unseen.numel(), "weights": weights}
    whole = {"all_in_4_bits": every, "all_in_8_bits": judge.kl(layers, {layer.name: "mxint8" for layer in layers})}
    return {"machine": machine(), **counts, "bits": bits, "calibration": sums, **whole, "rows": rows}


def curves_of(result: dict) -> dict[str, dict[float, float]]:
    """Part more -> KL, by method; the mean of the random orders."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in result["rows"]:
        found.setdefault(row["method"], {}).setdefault(row["more"], []).append(row["kl"])
    return {method: {more: sum(kls) / len(kls) for more, kls in curve.items()} for method, curve in found.items()}


def section() -> list[str]:
    """The section of docs/accuracy.md."""
    result = json.loads(RESULT.read_text())
    curves, bits = curves_of(result), result["bits"]
    sums = result["calibration"]
    what = (
        "`vbrt.choose_precision` spends bytes where a byte saves the most KL, on layers in `mxint8` or `exact` instead "
        f"of nvfp4, each measured alone on {result['calibration_bytes']:,} bytes of text; the KL of the whole to the "
        f"dense model is measured on {result['evaluation_bytes']:,} others, in nats a byte: "
        f"{result['all_in_4_bits']:.5f} with all layers in nvfp4, {result['all_in_8_bits']:.5f} with all in mxint8. On "
        f"the first text the single KLs of nvfp4 sum to {sums['sum_of_layers']:.5f}, and all layers together have "
        f"{sums['together']:.5f}."
    )
    how = (
        "Budgets are the bytes of nvfp4 and a part more. Other orders put layers into mxint8 one by one, and then make "
        "them exact. Random is the mean of three orders; both texts are held out from training."
    )
    head = ["| more | bits a weight | " + " | ".join(curves) + " |", "| --- " * (2 + len(curves)) + "|"]
    table = [
        f"| +{more:.0%} | {bits['nvfp4'] * (1 + more):.2f} | "
        + " | ".join(f"{curve[more]:.5f}" for curve in curves.values())
        + " |"
        for more in MORE
    ]
    plot = f"![KL by the bytes spent beside nvfp4's, for each method]({PLOT.name})"
    return ["## Some layers in 8 bits or lossless", "", what, "", how, "", *head, *table, "", plot, ""]


def draw() -> None:
    """Write the plot."""
    from scripts.plots import Labels, line_plot  # matplotlib is for whoever draws

    result = json.loads(RESULT.read_text())
    curves = {
        name: {0: result["all_in_4_bits"] * 1000} | {100 * more: 1000 * kl for more, kl in curve.items()}
        for name, curve in curves_of(result).items()
    }
    labels = Labels("What bytes beside those of nvfp4 save", "% more bytes than nvfp4", "KL, millinats a byte")
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
    for more, gate in GATES.items():
        print(f"+{more:.0%}: KL {curves_of(every)[CHOSEN][more]:.5f}, gate {gate}")


if __name__ == "__main__":
    main()
