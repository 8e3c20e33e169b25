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
from collections.abc import Iterable, Iterator, Mapping
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
from vbrt.estimation.precision.choose_precision import confirmed
from vbrt.estimation.precision.precision_report import Way
from vbrt.estimation.precision.sensitivity import batches_of, kl_between, logits_of, rounded, rounded_weight

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


def within(choice: Precision, room: int) -> Precision:
    """A choice that has so many bytes more than 4 bits take."""
    return choice.within(room + sum(layer.coarse_bytes for layer in choice.layers))


def held_of(choice: Precision) -> dict[str, str]:
    return {layer.name: layer.held for layer in choice.layers}


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


def windows_of(calibration: int, evaluation: int) -> tuple[Tensor, Tensor]:
    """Return windows of the held-out text to choose on and to measure on, spread evenly and apart."""
    text, context = committed.held_out().long(), committed.shape().context
    windows = text[: len(text) // context * context].view(-1, context)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return windows[order[:calibration]], windows[order[calibration : calibration + evaluation]]


class Choosers:
    """The methods of `vbrt.choose_precision`, by what they have measured on text that figures are not taken of."""

    def __init__(self, model: nn.Module, seen: Tensor, losses: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
        empty = vbrt.Precision(vbrt.load_config("fp4"), layers_of(model), "kl", 0)
        self.model, self.batches, self.proxy = model, batches_of(seen, torch.device("cpu")), losses["hessian"]
        self.measured, self.hessian = (sized(with_losses(empty, losses[by]), page_bytes()) for by in ("kl", "hessian"))

    def choose(self, room: int) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield each method and what layers are held as with so many bytes more than 4 bits take."""
        chosen = within(self.measured, room)
        proxy = [self.proxy[layer.name] for layer in chosen.layers]
        yield CHOSEN, held_of(confirmed(chosen, self.model, self.batches, proxy))
        yield "diagonal Hessian", held_of(within(self.hessian, room))
        yield WITHOUT, held_of(within(without_8_bits(self.measured), room))


def layers_of(model: nn.Module) -> tuple[LayerPrecision, ...]:
    """Return the layers of a model in fp32, with how they may be held, and nothing measured."""
    swaps = vbrt.make_plan(model, vbrt.load_config("fp4")).swaps
    ways = (Way("nvfp4", 0), Way("mxint8", 0), Way("exact", 0, lossless=True))
    return tuple(LayerPrecision(swap, swap.site.parameters, ways) for swap in swaps)


def with_losses(choice: Precision, losses: Mapping[str, Mapping[str, float]]) -> Precision:
    return replace(choice, layers=tuple(layer.with_losses(losses[layer.name]) for layer in choice.layers))


def losses_of(choice: Precision) -> dict[str, dict[str, float]]:
    return {each.name: {way.held: way.loss for way in each.ways if not way.lossless} for each in choice.layers}


def measure(calibration: int, evaluation: int) -> dict:
    """All curves; `calibration`, `evaluation`: windows of the held-out text."""
    model, (seen, unseen) = committed.dense(), windows_of(calibration, evaluation)
    chosen = {by: vbrt.choose_precision(model, seen, "32 bits", method=by) for by in ("kl", "hessian")}
    losses = {by: losses_of(choice) for by, choice in chosen.items()}
    judge, choosers = Judge(model, unseen), Choosers(model, seen, losses)
    layers = choosers.measured.layers
    every, coarse, rows = judge.kl(layers, {}), sum(layer.coarse_bytes for layer in layers), []
    ranked = list(orders(model, layers))
    for more in MORE:
        room = int(more * coarse)
        ways = [*choosers.choose(room), *((name, filled(layers, by, room)) for name, by in ranked)]
        rows.extend(measured_rows(judge, layers, more, ways))
    weights, sizes = sum(layer.weights for layer in layers), page_bytes()
    bits = {held: 8 * sum(sizes[held].values()) / weights for held in ("nvfp4", "mxint8", "exact")}
    sums = {"sum_of_layers": choosers.measured.loss_in_4_bits, "together": Judge(model, seen).kl(layers, {})}
    counts = {"calibration_bytes": seen.numel(), "evaluation_bytes": unseen.numel(), "weights": weights}
    whole = {"all_in_4_bits": every, "all_in_8_bits": judge.kl(layers, {layer.name: "mxint8" for layer in layers})}
    more = {"bits": bits, "calibration": sums, **whole, "losses": losses, "rows": rows}
    return {"machine": machine(), **counts, **more}


def measured_rows(
    judge: Judge, layers: tuple[LayerPrecision, ...], more: float, ways: Iterable[tuple[str, dict[str, str]]]
) -> Iterator[dict]:
    for name, held in ways:
        row = {"method": name, "more": more, "layers": dict(Counter(held.values())), "kl": judge.kl(layers, held)}
        print(json.dumps(row), flush=True)
        yield row


def again(result: dict, parts: Iterable[float]) -> None:
    """Choose again for some parts, by the losses that are committed, and measure what is chosen; other rows stay."""
    context = committed.shape().context
    sizes = (result[f"{what}_bytes"] // context for what in ("calibration", "evaluation"))
    model, (seen, unseen) = committed.dense(), windows_of(*sizes)
    judge, choosers = Judge(model, unseen), Choosers(model, seen, result["losses"])
    layers = choosers.measured.layers
    coarse = sum(layer.coarse_bytes for layer in layers)
    for more in parts:
        for row in measured_rows(judge, layers, more, choosers.choose(int(more * coarse))):
            (at,) = [n for n, old in enumerate(result["rows"]) if (old["method"], old["more"]) == (row["method"], more)]
            result["rows"][at] = row


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
        "`vbrt.choose_precision` moves layers from nvfp4 to `mxint8` or `exact` to minimize the sum of KLs within a "
        f"budget, each layer measured alone on {result['calibration_bytes']:,} bytes of text. The KL of the "
        f"whole model to the dense one is measured on {result['evaluation_bytes']:,} other bytes, in nats a byte: "
        f"{result['all_in_4_bits']:.5f} with all layers in nvfp4, {result['all_in_8_bits']:.5f} with all in mxint8. On "
        f"the first text the KLs of single nvfp4 layers sum to {sums['sum_of_layers']:.5f}; all layers together have "
        f"{sums['together']:.5f}."
    )
    how = (
        "Budgets are the bytes of nvfp4 plus a percentage. The other orders move layers to mxint8 one by one, then to "
        "exact. Random is the mean of three orders; both texts are held out from training. If the diagonal "
        "Hessian chooses differently, both choices are measured on the first text, and the better one is used: "
        "the Hessian's at +15%."
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
    parser.add_argument("--again", type=float, nargs="*", metavar="MORE", help="choose by committed losses, for these")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.again:
        result = json.loads(RESULT.read_text())
        again(result, args.again)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    elif not args.plot:
        RESULT.write_text(json.dumps(measure(args.calibration, args.evaluation), indent=1) + "\n")
    draw()
    every = json.loads(RESULT.read_text())
    for more, gate in GATES.items():
        print(f"+{more:.0%}: KL {curves_of(every)[CHOSEN][more]:.5f}, gate {gate}")


if __name__ == "__main__":
    main()
