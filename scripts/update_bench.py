"""How fast weights are updated on the CPU: in one pass over halves, beside torch's fused AdamW on the same numbers.

    python -m scripts.update_bench [--parameters 67108864] [--threads 1 2] [--out FILE]

Reports, for each number of threads, parameters and bytes a second (those that an update has to read and write), beside
what memory gives to an in-place sum of two arrays. First the bits of all rules are compared with torch's.

    python -m scripts.update_bench --beside [--weight 3145728]

Reports what updates of weights of that size and a main thread that calls small layers, as one that launches a GPU's
work does, cost each other: both alone, and beside each other.

    python -m scripts.update_bench --clip [--weight 4194304]

Reports milliseconds of torch's own clip_grad_norm_ over eight weights in the tiers, with accelerate's reads of their
gradients before it, and of the step behind it: with a norm that clips nothing, and one that scales.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import vbrt
from scripts.measuring import interleaved, machine, seconds
from vbrt.kernels import update as reference
from vbrt.kernels.cpu import update as compiled
from vbrt.kernels.update import Halves, Step, Updated
from vbrt.training.full.update_threads import Helpers, cores

ADAMW = Step("adam", 10, 1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True)
SGD = Step("sgd", 10, 1e-3, 0.9, weight_decay=0.01)
LION = Step("lion", 10, 1e-4, 0.9, 0.99, weight_decay=0.1)
HALVES = 2 * (2 + 2)  # bytes a parameter, read and written


def normal(count: int, scale: float) -> Tensor:
    """Numbers of one tile, over and over: drawing as many as are updated would take longer than the measurement."""
    drawn = torch.randn(1 << 16, dtype=torch.float32) * scale
    return drawn.repeat(-(-count // drawn.numel()))[:count]


class Arrays:
    """What is updated: halves and moments of one weight, and the fp32 master of the same numbers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.master = normal(count, 0.02)
        self.halves = Halves(*reference.split_master(self.master))
        self.first, self.second = normal(count, 1e-4), normal(count, 1e-4).square()
        self.coded = {"first": reference.encode_first(self.first), "second": reference.encode_second(self.second)}
        self.gradient = normal(count, 1e-3).bfloat16()
        self.whole = self.gradient.float()
        self.steps = torch.tensor(10.0)

    def ours(self, step: Step, helpers: Helpers, moments: dict, gradient: Tensor) -> Callable[[], None]:
        def run() -> None:
            helpers.run(self.count, compiled.update(self.halves, moments, gradient, step))

        return run

    def ahead(self, step: Step, helpers: Helpers) -> Callable[[], None]:
        """Out of place, as ahead of a step."""
        moments = {"first": self.first, "second": self.second}
        out = Updated(Halves(*map(torch.zeros_like, self.halves)), {n: torch.zeros_like(m) for n, m in moments.items()})

        def run() -> None:
            helpers.run(self.count, compiled.update(self.halves, moments, self.gradient, step, out))

        return run

    def one_by_one(self, helpers: Helpers, size: int) -> Callable[[], None]:
        """AdamW of weights of `size` parameters, one after the other."""

        def run() -> None:
            for at in range(0, self.count, size):
                of = slice(at, at + size)
                halves = self.halves.part(at, at + size)
                moments = {"first": self.first[of], "second": self.second[of]}
                helpers.run(halves.high.numel(), compiled.update(halves, moments, self.gradient[of], ADAMW))

        return run

    def torchs(self) -> None:
        self._fused(self.master)

    def _fused(self, master: Tensor) -> None:
        torch._fused_adamw_(
            [master], [self.whole], [self.first], [self.second], [], [self.steps], lr=1e-3, beta1=0.9, beta2=0.999,
            weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def joined(self) -> None:
        """Join, torch's step, split: the plain way."""
        master = reference.join_master(self.halves)
        self._fused(master)
        for half, new in zip(self.halves, reference.split_master(master), strict=True):
            half.copy_(new)

    def added(self) -> None:
        """What memory gives: 12 bytes a parameter, of which 4 are written to where they were read."""
        self.master.add_(self.whole)


def cases(arrays: Arrays, helpers: Helpers) -> dict[str, tuple[Callable[[], None], float]]:
    """Return by name what is timed, and the bytes a parameter that it has to move."""
    both, first = {"first": arrays.first, "second": arrays.second}, {"first": arrays.first}
    coded = arrays.coded
    scales = 2 * 4 / reference.BLOCK
    bf16, fp32 = arrays.gradient, arrays.whole
    return {
        "memory": (arrays.added, 12),
        "AdamW, bf16 gradient": (arrays.ours(ADAMW, helpers, both, bf16), HALVES + 16 + 2),
        "AdamW, out of place": (arrays.ahead(ADAMW, helpers), HALVES + 16 + 2),
        "AdamW, fp32 gradient": (arrays.ours(ADAMW, helpers, both, fp32), HALVES + 16 + 4),
        "AdamW, 8-bit moments": (arrays.ours(ADAMW, helpers, coded, bf16), HALVES + 2 * (2 + scales) + 2),
        "SGD, momentum": (arrays.ours(SGD, helpers, first, bf16), HALVES + 8 + 2),
        "Lion": (arrays.ours(LION, helpers, first, bf16), HALVES + 8 + 2),
        "Lion, 8-bit moment": (arrays.ours(LION, helpers, {"first": coded["first"]}, bf16), HALVES + 2 + scales + 2),
        "torch AdamW(fused=True)": (arrays.torchs, 8 + 16 + 4),
    }


def norms(arrays: Arrays, helpers: Helpers, weights: int = 32) -> Callable[[], None]:
    """The norms of a gradient, as of so many weights."""
    parts = [lambda part=part: compiled.gradient_norm(part) for part in arrays.gradient.chunk(weights)]
    return lambda: helpers.each(parts)


def sums(arrays: Arrays, helpers: Helpers) -> dict[str, tuple[Callable[[], None], float]]:
    """Sums of gradients of several passes, ours and torch's: by name what is timed, and the bytes a parameter."""
    more, half, whole = arrays.gradient, arrays.gradient.clone(), torch.zeros(arrays.count)

    def ours(held: Tensor, out: Tensor) -> Callable[[], None]:
        return lambda: helpers.run(arrays.count, compiled.gradient_sum(held, more, out))

    return {
        "sum of bf16 gradients in fp32": (ours(half, whole), 8),
        "torch, first in fp32": (lambda: whole.copy_(half.float().add_(more)), 8),
        "bf16 gradient to a sum in fp32": (ours(whole, whole), 10),
        "torch, further in fp32": (lambda: whole.add_(more), 10),
        "bf16 gradient to a sum in bf16": (ours(half, half), 6),
        "torch, in bf16": (lambda: half.add_(more), 6),
    }


def measure(arrays: Arrays, threads: int, times: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(threads)
    helpers = Helpers(threads)
    known = cases(arrays, helpers) | {"gradient norms": (norms(arrays, helpers), 2)}
    known |= sums(arrays, helpers)
    taken = interleaved({name: run for name, (run, _) in known.items()}, times=times, warm=1)
    helpers.stop()
    taken["join, torch, split"] = seconds(arrays.joined)
    known["join, torch, split"] = arrays.joined, 28
    return {
        name: {"parameters_s": arrays.count / span, "bytes_s": arrays.count / span * known[name][1]}
        for name, span in taken.items()
    }


class Launcher:
    """A main thread: calls of small layers, until it is told that it is enough."""

    def __init__(self) -> None:
        self._layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(16)))
        self._x = torch.zeros(1, 16)

    @torch.no_grad()
    def calls_per_s(self, enough: Callable[[], bool]) -> float:
        calls, began = 0, time.perf_counter()
        while not enough():
            self._layers(self._x)
            calls += len(self._layers)
        return calls / (time.perf_counter() - began)


def beside(arrays: Arrays, threads: int, weight: int, times: int) -> dict[str, float]:
    """Medians of updates and of a main thread, alone and beside each other, taking turns."""
    torch.set_num_threads(1)
    helpers, launcher = Helpers(threads), Launcher()
    update, found = arrays.one_by_one(helpers, weight), []
    update()
    for _ in range(times):
        row = {"update alone, s": seconds(update)}
        until = time.perf_counter() + row["update alone, s"]
        row["calls a second alone"] = launcher.calls_per_s(lambda until=until: time.perf_counter() > until)
        spans: list[float] = []
        updating = threading.Thread(target=lambda spans=spans: spans.append(seconds(update)))
        updating.start()
        row["calls a second beside"] = launcher.calls_per_s(lambda thread=updating: not thread.is_alive())
        row["update beside, s"] = spans[0]
        found.append(row)
    helpers.stop()
    return {name: statistics.median(row[name] for row in found) for name in found[0]}


def clipped(weight: int, limit: float, times: int) -> dict[str, float]:
    """Medians of clipping as Trainer does it, and of the step behind it."""
    width = int(weight**0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    optimizer, x, found = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), torch.randn(8, width), []
    with vbrt.wrap(model, "full", optimizer=optimizer) as vb:
        parameters = list(vb.parameters())

        def clip() -> None:
            assert all(p.grad is not None for p in parameters)
            torch.nn.utils.clip_grad_norm_(parameters, limit)

        def step() -> None:
            optimizer.step()
            vb.settle()

        for _ in range(times + 1):
            with torch.autocast("cpu", torch.bfloat16):
                loss = vb(x).float().square().mean()
            loss.backward()
            found.append({"clip, ms": 1e3 * seconds(clip), "step, ms": 1e3 * seconds(step)})
            vb.zero_grad()
    return {name: statistics.median(row[name] for row in found[1:]) for name in found[0]}


def same_bits() -> dict[str, bool]:
    """Compare a step of each rule with torch's own, at lengths with all rests."""
    same = {}
    for name, step in (("AdamW", ADAMW), ("SGD", SGD), ("Lion", LION)):
        same[name] = all(_same(step, count) for count in (*range(1, 40), 100_003))
    return same


def _same(step: Step, count: int) -> bool:
    master, gradient, first, second = torch.randn(4, count).unbind()
    results = []
    for module in (compiled, reference):
        halves, moments = reference.split_master(master), {"first": first.clone(), "second": second.square()}
        moments = moments if step.rule == "adam" else {"first": moments["first"]}
        module.update(halves, moments, gradient, step)(0, count)
        results += [[part.view(torch.uint8) for part in (*halves, *moments.values())]]
    return all(map(torch.equal, *results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, nargs="*", default=[cores()])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--beside", action="store_true", help="time updates and a main thread beside each other")
    parser.add_argument("--clip", action="store_true", help="time clipping by torch, and the step behind it")
    parser.add_argument("--weight", type=int, default=3 << 20, help="parameters of a weight, of --beside and --clip")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.clip:
        for name, limit in (("clips nothing", 1e9), ("scales", 1e-3)):
            figures = clipped(options.weight, limit, options.times)
            print(name, "  ".join(f"{name} {one:.1f}" for name, one in figures.items()))
        return
    refused = compiled.refusal(torch.device("cpu"))
    result = {
        "machine": machine(), "refused": refused, "same bits as torch": same_bits() if refused is None else {},
        "parameters": options.parameters, "threads": {},
    }  # fmt: skip
    print(f"refused: {refused}; same bits: {result['same bits as torch']}")
    arrays = Arrays(options.parameters)
    for threads in options.threads:
        if options.beside:
            figures = result["threads"][threads] = beside(arrays, threads, options.weight, options.times)
            print(f"{threads:3} threads  " + "  ".join(f"{name} {one:.4g}" for name, one in figures.items()))
            continue
        figures = result["threads"][threads] = measure(arrays, threads, options.times)
        for name, one in figures.items():
            rates = f"{one['parameters_s'] / 1e9:7.2f} G parameters/s {one['bytes_s'] / 1e9:7.1f} GB/s"
            print(f"{threads:3} threads  {name:26}{rates}")
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
