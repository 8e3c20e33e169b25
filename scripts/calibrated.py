"""What calibration is worth, on the trained language model: the KL of each 4-bit format to the dense model, and of
automatic precision at the bytes of nvfp4 and a part more.

Two texts that training has not seen, the first 4,096 bytes of the committed ones and their last, and 2,048 bytes apart
from both to calibrate and to choose on. benchmarks/results/calibrated-lm.json has the figures; scripts/accuracy.py
writes them into docs/accuracy.md.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor

import vbrt
from scripts import committed
from scripts.measuring import machine
from vbrt.estimation.precision.calibration_data import Text
from vbrt.estimation.precision.input_statistics import input_statistics
from vbrt.estimation.precision.knapsack import least_loss
from vbrt.estimation.precision.sensitivity import batches_of, kl_between, logits_of, rounded
from vbrt.formats.error_feedback import Inputs
from vbrt.residency.plan import Swap

RESULT = ROOT / "benchmarks" / "results" / "calibrated-lm.json"
FORMATS = ("nvfp4", "mxfp4", "nf4", "quantile")
EIGHT, THREE = "mxint8", "t3"
#: how far encoders look at inputs
WAYS = ("not calibrated", "scales", "scales and codes")
#: KL that may be had on the first text for so much more than the bytes of nvfp4
GATES = {0.1: 0.0076, 0.25: 0.0052, 0.5: 0.0027}
_BYTES, _CALIBRATION = 4096, slice(8192, 8192 + 2048)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Texts:
    """Windows of the held-out text, [N, S] each."""

    first: Tensor
    last: Tensor
    calibration: Tensor

    @classmethod
    def read(cls) -> "Texts":
        """Those that figures are committed of."""
        text, context = committed.held_out().long(), committed.shape().context
        cut = (text[:_BYTES], text[-_BYTES:], text[_CALIBRATION])
        return cls(*(part.view(-1, context) for part in cut))


class Judge:
    """Measures models that differ from the dense one in how some weights are held.

    Attributes:
        model: the dense one, in bf16 as it is committed, computing in fp32.
        swaps: its linear layers in nvfp4.
    """

    def __init__(self, texts: Texts) -> None:
        self.model = committed.dense()
        plan = vbrt.make_plan(committed.dense(torch.bfloat16), vbrt.load_config("fp4"))
        self.swaps = plan.swaps
        self.inputs = input_statistics(self.model, self.swaps, Text("", "", (texts.calibration,)), device=_CPU)
        windows = {"first": texts.first, "last": texts.last, "calibration": texts.calibration}
        self._batches = {name: batches_of(text, _CPU) for name, text in windows.items()}
        self._references = {
            name: [logits_of(self.model, batch) for batch in batches] for name, batches in self._batches.items()
        }

    def swap(self, swap: Swap, way: str) -> Swap:
        """A swap whose encoder looks at inputs in one of `WAYS`."""
        (known,) = self.inputs[swap.name]
        if way == "not calibrated":
            return replace(swap, inputs=())
        return replace(swap, inputs=(known if way == "scales and codes" else Inputs(known.squares),))

    @contextlib.contextmanager
    def held(self, formats: Mapping[str, str], way: str) -> Any:
        """Within: the model has the weights of some swaps, by name, as formats give them back; "exact": as they are."""
        with contextlib.ExitStack() as stack:
            for swap in self.swaps:
                if formats.get(swap.name, "exact") != "exact":
                    stack.enter_context(rounded(self.model, self.swap(swap, way), formats[swap.name]))
            yield

    def kl(self, texts: Iterable[str]) -> list[float]:
        """Of the model as it is now, in nats a byte."""
        return [kl_between(self.model, self._batches[text], self._references[text]) for text in texts]


def measure_formats(judge: Judge) -> list[dict]:
    """Every layer in one format, for each way."""
    rows = []
    for format in (*FORMATS, EIGHT, THREE):
        for way in WAYS:
            with judge.held({swap.name: format for swap in judge.swaps}, way):
                first, last = judge.kl(("first", "last"))
            rows.append({"format": format, "way": way, "first": first, "last": last})
            print(json.dumps(rows[-1]), flush=True)
    return rows


# -- at the bytes of nvfp4 and a part more ----------------------------------------------------------------------------


def page_bytes() -> dict[str, dict[str, int]]:
    """Of each weight of the model in bf16, by format and name."""
    found = {}
    for held in (*FORMATS, EIGHT, "exact"):
        weights = {"format": "nvfp4", "fine": "exact"} if held == "exact" else {"format": held}
        plan = vbrt.make_plan(committed.dense(torch.bfloat16), vbrt.load_config("fp4", weights=weights))
        found[held] = {swap.name: swap.page_bytes for swap in plan.swaps}
    return found


def losses_alone(judge: Judge, format: str, way: str) -> dict[str, float]:
    """KL on the calibration text of each weight alone in a format, by name."""
    found = {}
    for swap in judge.swaps:
        with judge.held({swap.name: format}, way):
            (found[swap.name],) = judge.kl(("calibration",))
    return found


def spent(
    losses: Mapping[str, Mapping[str, float]], sizes: Mapping[str, Mapping[str, int]], room: int
) -> dict[str, str]:
    """Return the format of each weight, so that the sum of losses is least within a room in bytes."""
    losses = {**losses, "exact": dict.fromkeys(sizes["exact"], 0.0)}
    ways = [sorted((sizes[f][name], loss[name], f) for f, loss in losses.items()) for name in sizes["exact"]]
    held = least_loss([[(size, loss) for size, loss, _ in row] for row in ways], room)
    return {name: row[at][2] for name, row, at in zip(sizes["exact"], ways, held, strict=True)}


def measure_budgets(judge: Judge) -> list[dict]:
    """The KL of automatic precision for each of `GATES`, on both texts, for some sets of candidates."""
    sizes, rows = page_bytes(), []
    every, alone = sum(sizes["nvfp4"].values()), cache(partial(losses_alone, judge))
    for name, formats, way in (
        ("nvfp4 and exact", ("nvfp4",), "not calibrated"),
        ("nvfp4 and exact, calibrated", ("nvfp4",), "scales and codes"),
        ("nvfp4, mxint8 and exact", ("nvfp4", EIGHT), "not calibrated"),
        ("nvfp4, mxint8 and exact, calibrated", ("nvfp4", EIGHT), "scales and codes"),
        ("all 4-bit formats, mxint8 and exact, calibrated", (*FORMATS, EIGHT), "scales and codes"),
    ):
        losses = {format: alone(format, way) for format in formats}
        for more in (0.0, *GATES):
            held = spent(losses, sizes, int((1 + more) * every))
            with judge.held(held, way):
                first, last = judge.kl(("first", "last"))
            taken = sum(sizes[format][one] for one, format in held.items()) / every - 1
            counts = {format: list(held.values()).count(format) for format in sorted(set(held.values()))}
            rows.append({"method": name, "more": more, "taken": taken, "first": first, "last": last, "layers": counts})
            print(json.dumps(rows[-1]), flush=True)
    return rows


# -- which 8 bits -----------------------------------------------------------------------------------------------------

#: what was weighed against mxint8, which is not here: bits a weight, and what it makes of a matrix
OTHERS: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "MXFP8": (8.25, lambda w_NK: _rounded_in_blocks(w_NK, 32, 448.0, _e4m3, _power_of_two)),
    "int8, 16-bit scales of 32": (8.5, lambda w_NK: _rounded_in_blocks(w_NK, 32, 127.0, torch.round, _bf16)),
    "int8, 16-bit scales of 64": (8.25, lambda w_NK: _rounded_in_blocks(w_NK, 64, 127.0, torch.round, _bf16)),
}


def _rounded_in_blocks(
    w_NK: Tensor, block: int, top: float, nearest: Callable[[Tensor], Tensor], scale_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """A matrix whose blocks are rounded in units of a scale, under which their largest weight is about `top`."""
    x_NBb = w_NK.float().unflatten(1, (-1, block))
    scale_NB1 = scale_of(x_NBb.abs().amax(-1, keepdim=True).clamp(min=1e-30) / top)
    return (nearest((x_NBb / scale_NB1).clamp(-top, top)) * scale_NB1).flatten(1).to(w_NK.dtype)


def _e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def _power_of_two(scale: Tensor) -> Tensor:
    return scale.log2().ceil().exp2()


def _bf16(scale: Tensor) -> Tensor:
    return scale.bfloat16().float()


def measure_eight_bits(judge: Judge) -> list[dict]:
    """Every layer in 8 bits of some kind."""
    rows = []
    with judge.held({swap.name: EIGHT for swap in judge.swaps}, "not calibrated"):
        first, last = judge.kl(("first", "last"))
    rows.append({"kind": EIGHT, "bits": 8.25, "first": first, "last": last})
    weights = [judge.model.get_parameter(swap.site.tensor) for swap in judge.swaps]
    for name, (bits, round_) in OTHERS.items():
        own = [weight.data for weight in weights]
        for weight in weights:
            weight.data = round_(weight.data)
        first, last = judge.kl(("first", "last"))
        for weight, data in zip(weights, own, strict=True):
            weight.data = data
        rows.append({"kind": name, "bits": bits, "first": first, "last": last})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def measure() -> dict:
    """All figures."""
    texts = Texts.read()
    judge = Judge(texts)
    parts: dict[str, Callable[[Judge], list[dict]]] = {
        "formats": measure_formats,
        "budgets": measure_budgets,
        "eight_bits": measure_eight_bits,
    }
    counts = {"calibration_bytes": texts.calibration.numel(), "evaluation_bytes": texts.first.numel()}
    return {"machine": machine(), **counts, **{name: part(judge) for name, part in parts.items()}}


# -- the page ---------------------------------------------------------------------------------------------------------


def section() -> list[str]:
    """The section of docs/accuracy.md."""
    result = json.loads(RESULT.read_text())
    text, seen = f"{result['evaluation_bytes']:,}", f"{result['calibration_bytes']:,}"
    what = (
        f"`weights.calibrate`, on {seen} bytes: scales are searched with errors weighted by squared inputs, and codes "
        f"compensate each other's errors. KL to the dense model in nats a byte, on the first and the last {text} bytes "
        "of the held-out text, all linear layers in one format. Scales alone gain little here; codes matter."
    )
    head = ["| format | " + " | ".join(f"{way}: first, last" for way in WAYS) + " |", "| --- " * (1 + len(WAYS)) + "|"]
    found = {(row["format"], row["way"]): f"{row['first']:.5f}, {row['last']:.5f}" for row in result["formats"]}
    rows = ((format, [found[format, way] for way in WAYS]) for format in (*FORMATS, EIGHT, THREE))
    table = [f"| {format} | {' | '.join(cells)} |" for format, cells in rows]
    return ["## Calibrated", "", what, "", *head, *table, "", *_budgets(result)]


def _budgets(result: dict) -> list[str]:
    what = (
        "Bytes beyond all layers in nvfp4 are spent where a byte reduces KL most, with this model's page sizes; KL on "
        "the first text. Pages in mxint8 take 1.8 times the bytes of nvfp4, exact ones three times."
    )
    head = ["| candidates | " + " | ".join(f"+{more:.0%}" for more in GATES) + " |", "| --- " * (1 + len(GATES)) + "|"]
    rows: dict[str, list[str]] = {}
    for row in result["budgets"]:
        if row["more"]:
            rows.setdefault(row["method"], []).append(f"{row['first']:.4f}")
    table = [f"| {name} | {' | '.join(kls)} |" for name, kls in rows.items()]
    return [what, "", *head, *table, "", *_eight_bits(result)]


def _eight_bits(result: dict) -> list[str]:
    what = "8-bit formats compared when `mxint8` was chosen, all linear layers in each, not calibrated:"
    head = ["| 8 bits | bits a weight | KL: first, last |", "| --- | --- | --- |"]
    rows = [f"| {r['kind']} | {r['bits']} | {r['first']:.5f}, {r['last']:.5f} |" for r in result["eight_bits"]]
    return [what, "", *head, *rows, ""]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    RESULT.write_text(json.dumps(measure(), indent=1) + "\n")


if __name__ == "__main__":
    main()
