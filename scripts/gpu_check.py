"""Time 4-bit linears against the same GPU's bf16 matmul, beside other libraries', and write kernels-<gpu>.json.

CUDA-graph replays over enough weights to pass the second-level cache, random normal data, medians; microseconds a
call. A ratio is bf16 time / ours, of graphs replayed in turn, so that both meet the same clocks and heat; times of
different ratios were taken one after the other, and absolute times drift.

A selection is timed in seconds and goes into subset-kernels-<gpu>.json, never into the file of a whole run:

    python scripts/gpu_check.py --parts rows,epilogue --formats nvfp4 --shapes 4096x14336 --tokens 1,16,64
    python scripts/gpu_check.py --parts peers --peers "gemlite MXFP4" --peer-seconds 200
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
import torch.nn.functional as F

from scripts import scheduling
from scripts.gpu_fused import fused_rows
from scripts.gpu_timing import (
    BF16,
    CUDA,
    Shape,
    dense_weights,
    error,
    host_us,
    machine,
    plain,
    planes_of,
    say,
    side_by_side,
)
from vbrt.formats import WeightPlanes, get_format
from vbrt.host.safe_files import write_file
from vbrt.kernels import fp8_refusal, resolve
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.plain import linear as plain_linear
from vbrt.kernels.cuda.rounded import fp8 as fp8_linear
from vbrt.kernels.cuda.table import linear as table_linear
from vbrt.kernels.cuda.whole import linear as whole_linear

Case = tuple[int, int, int]  # (K, N, M)

SHAPES = ((4096, 14336), (14336, 4096), (4096, 4096), (8192, 28672))
ODD_SHAPES = ((2730, 4096), (5120, 13824), (11008, 4096), (18944, 3584), (3584, 18944), (4096, 50257), (5120, 27648))
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
PEER_TOKENS = (1, 4, 16, 64, 256, 2048)
PEER_SHAPES = ((4096, 14336), (4096, 4096))
PEER_SECONDS = 120  # for a peer's searches and timings in all; what has not been timed by then is named in "absent"
AHEAD_SHARE = 0.5  # of those seconds, for compiling ahead of the searches
AHEAD_BYTES = 4 << 30  # of GPU memory for a process that compiles ahead
EPILOGUE_TOKENS, FUSED_TOKENS, ODD_TOKENS = (1, 16, 256, 2048), (1, 4, 16), (1, 16, 64, 2048)
GRADIENT_SHAPES, GRADIENT_TOKENS = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)), (1024, 2048, 4096, 8192)
PARTS = ("rows", "dispatch", "gradients", "fused", "epilogue", "odd", "scheduling", "e2e", "peers")

# -- parts ------------------------------------------------------------------------------------------------------------


def route_of(x: torch.Tensor, planes: WeightPlanes) -> str:
    formats = {
        table_linear: table_linear.SERVED,
        whole_linear: whole_linear.FORMATS,
        plain_linear: plain_linear.FORMATS,
    }
    own = next((of for of, served in formats.items() if planes.format in served), e2m1_linear)
    return own.route(x, planes)


def linear_rows(format: str, k: int, n: int, tokens: Sequence[int]) -> Iterator[dict[str, object]]:
    dense = dense_weights(k, n)
    planes = [planes_of(format, weight) for weight in dense]
    linear = resolve("linear", "auto", CUDA, format).run
    exact = get_format(format).decode(plain(planes[0]), (n, k), torch.float64)
    for m in tokens:
        x = torch.randn(m, k, device=CUDA, dtype=BF16)
        want = x.double() @ exact.T
        calls = {"bf16": [partial(F.linear, x, w) for w in dense], "fp4": [partial(linear, x, p) for p in planes]}
        if fp8_refusal(torch.device("cuda", 0)) is None and fp8_linear.route(x, planes[0]) == "fp8":
            calls["fp8"] = [partial(fp8_linear.linear, x, p) for p in planes]
        us = dict(zip(calls, side_by_side(*calls.values()), strict=True))
        row = {
            "format": format,
            "k": k,
            "n": n,
            "m": m,
            "route": route_of(x, planes[0]),
            "bf16_us": round(us["bf16"], 2),
            "fp4_us": round(us["fp4"], 2),
            "ratio": round(us["bf16"] / us["fp4"], 3),
            "tb_s": round(sum(plane.nbytes for plane in planes[0].coarse.values()) / us["fp4"] / 1e6, 3),
            "relative_error": error(calls["fp4"][0](), want),
        }
        if "fp8" in us:
            row |= {
                "fp8_us": round(us["fp8"], 2),
                "fp8_ratio": round(us["bf16"] / us["fp8"], 3),
                "fp8_error": error(calls["fp8"][0](), want),
            }
        say(row)
        yield row


def gradient_rows(shapes: Sequence[Shape], tokens: Sequence[int]) -> Iterator[dict[str, object]]:
    """Gradients to inputs, dY W, beside bf16's matmul and beside the decoded weight's; and the forward, x Wᵀ."""
    for k, n in shapes:
        dense = dense_weights(k, n)
        planes = [planes_of("nvfp4", weight) for weight in dense]
        exact = get_format("nvfp4").decode(plain(planes[0]), (n, k), torch.float64)
        for m in tokens:
            x, dy = (torch.randn(m, width, device=CUDA, dtype=BF16) for width in (k, n))
            bf16, us, decoded, forward_bf16, forward = side_by_side(
                [partial(torch.matmul, dy, w) for w in dense],
                [partial(e2m1_linear.gradient, dy, p) for p in planes],
                [partial(decoded_gradient, dy, p) for p in planes],
                [partial(F.linear, x, w) for w in dense],
                [partial(e2m1_linear.linear, x, p) for p in planes],
            )
            row = {
                "k": k,
                "n": n,
                "m": m,
                "bf16_us": round(bf16, 2),
                "us": round(us, 2),
                "decoded_us": round(decoded, 2),
                "ratio": round(bf16 / us, 3),
                "decoded_ratio": round(bf16 / decoded, 3),
                "forward_ratio": round(forward_bf16 / forward, 3),
                "relative_error": error(e2m1_linear.gradient(dy, planes[0]), dy.double() @ exact),
            }
            say(row)
            yield row


def decoded_gradient(dy: torch.Tensor, planes: WeightPlanes) -> torch.Tensor:
    return dy @ e2m1_linear.decode_weight(planes)


def odd_rows(shapes: Sequence[Shape], tokens: Sequence[int]) -> Iterator[dict[str, object]]:
    for k, n in shapes:
        yield from linear_rows("nvfp4", k, n, tokens)


def epilogue_rows(shapes: Sequence[Shape], tokens: Sequence[int]) -> Iterator[dict[str, object]]:
    """What bias and activation add to a bare linear, in percent."""
    for k, n in shapes:
        planes = [planes_of("nvfp4", weight) for weight in dense_weights(k, n)]
        bias = torch.randn(n, device=CUDA, dtype=BF16)
        for m in tokens:
            x = torch.randn(m, k, device=CUDA, dtype=BF16)
            names = (None, "none", "gelu", "silu")
            given = [() if name is None else (bias, name) for name in names]
            taken = side_by_side(*([partial(e2m1_linear.linear, x, p, *more) for p in planes] for more in given))
            bare, *others = taken
            for activation, full in zip(names[1:], others, strict=True):
                row = {
                    "k": k,
                    "n": n,
                    "m": m,
                    "activation": activation,
                    "bare_us": round(bare, 2),
                    "full_us": round(full, 2),
                    "added_percent": round(100 * (full / bare - 1), 1),
                }
                say(row)
                yield row


def dispatch() -> dict[str, float]:
    """Host microseconds of an eager call on a tiny layer, where nothing else costs anything."""
    import vbrt

    weight = torch.randn(64, 128, device=CUDA, dtype=BF16)
    planes, x = planes_of("nvfp4", weight), torch.randn(1, 128, device=CUDA, dtype=BF16)
    layer = torch.nn.Linear(128, 64, bias=False, device=CUDA, dtype=BF16)
    vb = vbrt.wrap(torch.nn.Sequential(layer), "fp4", weights={"keep_head": False, "min_parameters": 1}).materialize()
    wrapped = vb.module[0]
    with torch.no_grad():
        wrapped(x)
        out = {
            "torch_linear_us": host_us(partial(F.linear, x, weight)),
            "fp4_linear_us": host_us(partial(e2m1_linear.linear, x, planes)),
            "wrapped_layer_us": host_us(partial(wrapped, x)),
        }
    vb.close()
    return {name: round(us, 2) for name, us in out.items()}


# -- peers ------------------------------------------------------------------------------------------------------------


def bitsandbytes_nf4(layer: torch.nn.Linear) -> torch.nn.Module:
    import bitsandbytes as bnb

    made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=BF16, quant_type="nf4")
    made.weight = bnb.nn.Params4bit(
        layer.weight.data.cpu(), requires_grad=False, quant_type="nf4", blocksize=64, compress_statistics=False
    )
    return made.to(CUDA)


def torchao_int4(layer: torch.nn.Linear) -> torch.nn.Module:
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    made = torch.nn.Sequential(layer)
    quantize_(made, Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))
    return made


def gemlite_mxfp4(layer: torch.nn.Linear) -> torch.nn.Module:
    from gemlite import helper

    return helper.A16W4_MXFP(device="cuda", dtype=BF16).from_linear(layer)


class Peer(NamedTuple):
    """Another library's layer: its package, and what makes it out of an nn.Linear.

    searches: how it searches for a configuration at the first call of a shape and number of tokens, if it does.
    """

    package: str
    make: Callable[[torch.nn.Linear], torch.nn.Module]
    searches: str = ""


#: name in the table -> the peer. gemlite's modes are "max", "fast" (its default, what stands here) and "default", which
#: takes the better of two. It brings configurations that it found on other GPUs, none for this format (0.6.0.post2).
PEERS = {
    "bitsandbytes NF4": Peer("bitsandbytes", bitsandbytes_nf4),
    "torchao int4 g128": Peer("torchao", torchao_int4),
    "gemlite MXFP4": Peer("gemlite", gemlite_mxfp4, 'its own search in mode "fast", its default'),
}


class OutOfTime(BaseException):
    """A peer's seconds are over; no Exception, so that no library takes it for a configuration that failed."""


@contextlib.contextmanager
def limited(until: float) -> Iterator[None]:
    """Raises OutOfTime in the block at that time of `time.perf_counter`, also inside a search."""

    def over(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, over)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(1e-6, until - time.perf_counter()))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peer_layer(name: str, weight: torch.Tensor) -> torch.nn.Module:
    n, k = weight.shape
    layer = torch.nn.Linear(k, n, bias=False, device=CUDA, dtype=BF16)
    layer.weight.data.copy_(weight)
    return PEERS[name].make(layer)


@torch.no_grad()
def first_call(name: str, case: Case) -> None:
    k, n, m = case
    layer = peer_layer(name, torch.randn(n, k, device=CUDA, dtype=BF16) * 0.02)
    layer(torch.randn(m, k, device=CUDA, dtype=BF16))
    torch.cuda.synchronize()


def compile_ahead(name: str, cases: Sequence[Case], until: float) -> None:
    """First calls in processes of their own, all cores at a time, for the kernels that they leave in Triton's cache.

    What they find is thrown away, for they disturb each other: the search that counts runs later, alone, and is spared
    the compiling only, which is most of it (gemlite: some 15 configurations a case, 10 s on one core). A process that
    fails leaves everything to that search.
    """

    def call(case: Case) -> None:
        began = time.perf_counter()
        command = [sys.executable, str(Path(__file__).resolve()), "--first-call", name, *map(str, case)]
        try:
            left = max(0.1, until - began)
            done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
            how = "done" if done.returncode == 0 else f"failed: {(done.stderr.splitlines() or ['no reason'])[-1][:200]}"
        except subprocess.TimeoutExpired:
            how = "stopped"
        print(f"# {name}, compiled ahead, {named([case])}: {how}, {time.perf_counter() - began:.0f} s", flush=True)

    torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info()[0] // AHEAD_BYTES
    with ThreadPoolExecutor(max(1, min(len(os.sched_getaffinity(0)), room))) as pool:
        list(pool.map(call, cases))


def peer_rows(name: str, cases: Sequence[Case], seconds: float, absent: dict[str, str]) -> Iterator[dict[str, object]]:
    """Times of a peer's layers. Its first calls, searches included, count in `seconds` and in no time of a row."""
    peer = PEERS[name]
    if importlib.util.find_spec(peer.package) is None:
        absent[name] = "not installed"
        return
    absent[name] = "the run was ended before all of it was timed"
    until = time.perf_counter() + seconds
    missing: dict[str, list[Case]] = {}
    if peer.searches:
        compile_ahead(name, cases, until - (1 - AHEAD_SHARE) * seconds)
    shape, dense, layers = None, [], []
    for index, case in enumerate(cases):
        k, n, m = case
        began = time.perf_counter()
        print(f"# {name}, first call, {named([case])}, {until - began:.0f} s left", flush=True)
        try:
            with limited(until):
                if shape != (k, n):
                    shape, layers = None, []  # gone before the next ones come
                    dense = dense_weights(k, n)
                    layers = [peer_layer(name, weight) for weight in dense]
                    shape = k, n
                x = torch.randn(m, k, device=CUDA, dtype=BF16)
                built = time.perf_counter()
                layers[0](x)
                torch.cuda.synchronize()
            first = time.perf_counter() - built
            calls = [partial(F.linear, x, w) for w in dense], [partial(layer, x) for layer in layers]
            bf16, us = side_by_side(*calls)
        except OutOfTime:
            missing[f"not timed within {seconds:.0f} s"] = list(cases[index:])
            break
        except Exception as error:  # noqa: BLE001  # whatever another library raises becomes a line of the table
            why = (str(error).splitlines() or [""])[0][:120]
            missing.setdefault(f"{type(error).__name__}: {why}", []).append(case)
            continue
        row = {
            "peer": name,
            "k": k,
            "n": n,
            "m": m,
            "bf16_us": round(bf16, 2),
            "us": round(us, 2),
            "ratio": round(bf16 / us, 3),
            "first_call_s": round(first, 2),
        }
        row |= {"tuned": peer.searches} if peer.searches else {}
        say(row)
        yield row
    del absent[name]
    if missing:
        absent[name] = "; ".join(f"{named(rest)}: {why}" for why, rest in missing.items())
        print(f"# {name}, absent: {absent[name]}", flush=True)


def named(cases: Sequence[Case]) -> str:
    """4096→14336 M=16,64, 4096→4096 M=1"""
    tokens: dict[Shape, list[int]] = {}
    for k, n, m in cases:
        tokens.setdefault((k, n), []).append(m)
    return ", ".join(f"{k}→{n} M={','.join(map(str, ms))}" for (k, n), ms in tokens.items())


# -- running and writing ----------------------------------------------------------------------------------------------


def said(rows: Iterator[dict[str, object]]) -> Iterator[dict[str, object]]:
    for row in rows:
        say(row)
        yield row


def timed(result: dict[str, Any], part: str, rows: Iterator[dict[str, object]]) -> Iterator[dict[str, Any]]:
    """The result with each row that is added to a part, so that a run that is ended leaves what it has."""
    started = time.perf_counter()
    found = result.setdefault(part, [])
    for row in rows:
        found.append(row)
        yield result
    print(f"# {part}: {time.perf_counter() - started:.0f} s", flush=True)


class Selection(NamedTuple):
    """What is timed; None: what the part takes of itself."""

    parts: tuple[str, ...]
    formats: tuple[str, ...]
    shapes: tuple[Shape, ...] | None
    tokens: tuple[int, ...] | None
    peers: tuple[str, ...]
    layers: int  # of the model that e2e decodes with


ROWS = ("nvfp4", "mxfp4", "nf4", "quantile", "mxint8", "superblock32", "zeros128-float16", "affine32-float16")
WHOLE = Selection(PARTS, ROWS, None, None, tuple(PEERS), 32)


def path_of(folder: Path, selection: Selection) -> Path:
    """The file of a whole run, or the one beside it that no table is made of."""
    gpu = torch.cuda.get_device_name().lower().replace(" ", "-")
    return folder / f"{'' if selection == WHOLE else 'subset-'}kernels-{gpu}.json"


@torch.no_grad()
def measured(chosen: Selection, *, peer_seconds: float) -> Iterator[dict[str, object]]:
    """The results so far, after each row."""
    result: dict[str, Any] = machine()
    if chosen != WHOLE:
        result["only"] = chosen._asdict()

    def shapes(own: Sequence[Shape]) -> Sequence[Shape]:
        return own if chosen.shapes is None else chosen.shapes

    def tokens(own: Sequence[int]) -> Sequence[int]:
        return own if chosen.tokens is None else chosen.tokens

    if "rows" in chosen.parts:
        for format in chosen.formats:
            for k, n in shapes(SHAPES if e2m1_linear.packing(format) else PEER_SHAPES):
                yield from timed(result, "rows", linear_rows(format, k, n, tokens(TOKENS)))
    if "dispatch" in chosen.parts:
        result["dispatch"] = dispatch()
        print(result["dispatch"])
        yield result
    if "gradients" in chosen.parts:
        rows = gradient_rows(shapes(GRADIENT_SHAPES), tokens(GRADIENT_TOKENS))
        yield from timed(result, "gradients", rows)
    if "fused" in chosen.parts:
        yield from timed(result, "fused", fused_rows(shapes((*SHAPES, (4096, 6144))), tokens(FUSED_TOKENS)))
    if "epilogue" in chosen.parts:
        yield from timed(result, "epilogue", epilogue_rows(shapes(SHAPES[:2]), tokens(EPILOGUE_TOKENS)))
    if "odd" in chosen.parts:
        yield from timed(result, "odd", odd_rows(shapes(ODD_SHAPES), tokens(ODD_TOKENS)))
    if "scheduling" in chosen.parts:
        yield from timed(result, "scheduling", said(scheduling.rows()))
    if "e2e" in chosen.parts:
        import gpu_e2e

        result["e2e"] = gpu_e2e.measure(chosen.layers)
        print(result["e2e"])
        yield result
    if "peers" in chosen.parts:
        result["absent"] = {}
        cases = [(k, n, m) for k, n in shapes(PEER_SHAPES) for m in tokens(PEER_TOKENS)]
        for name in chosen.peers:
            yield from timed(result, "peers", peer_rows(name, cases, peer_seconds, result["absent"]))
            yield result


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with `selection` made of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def option(name: str, one: Callable[[str], object], help: str, among: Sequence[str] = ()) -> None:
        def several(text: str) -> list[object]:
            if among and (unknown := set(text.split(",")) - set(among)):
                raise argparse.ArgumentTypeError(f"{sorted(unknown)}; expected some of {', '.join(among)}")
            return [one(part) for part in text.split(",")]

        several.__name__ = f"list for {name}"
        parser.add_argument(name, nargs="+", type=several, metavar="A,B", help=help)

    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    option("--parts", str, f"some of {', '.join(PARTS)}", PARTS)
    option("--formats", str, "of the part rows", WHOLE.formats)
    option("--shapes", shape_of, "KxN, e.g. 4096x14336; in every part but dispatch and e2e")
    option("--tokens", int, "in every part but dispatch and e2e")
    option("--peers", str, "other libraries' layers", WHOLE.peers)
    parser.add_argument(
        "--peer-seconds",
        type=float,
        metavar="S",
        default=PEER_SECONDS,
        help=f"for each peer, its search included ({PEER_SECONDS})",
    )
    parser.add_argument(
        "--e2e",
        type=int,
        nargs="?",
        const=32,
        metavar="LAYERS",
        help="also decode with a Llama-8B-shaped model of so many layers (32): the part e2e",
    )
    parser.add_argument("--first-call", nargs=4, help=argparse.SUPPRESS)  # what compile_ahead runs
    options = parser.parse_args(arguments)
    fields = [field for field in Selection._fields if getattr(options, field, None) is not None]
    given = {field: tuple(value for values in getattr(options, field) for value in values) for field in fields}
    parts = given.get("parts", tuple(part for part in PARTS if part != "e2e"))
    wanted = {*parts, "e2e"} if options.e2e is not None else set(parts)
    given["parts"] = tuple(part for part in PARTS if part in wanted)
    options.selection = WHOLE._replace(**given, layers=WHOLE.layers if options.e2e is None else options.e2e)
    return options


def shape_of(text: str) -> Shape:
    k, n = map(int, text.split("x"))
    return k, n


def main() -> None:
    options = parsed()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    if options.first_call:
        name, *numbers = options.first_call
        k, n, m = map(int, numbers)
        first_call(name, (k, n, m))
        return
    warnings.filterwarnings("ignore", module="torch._dynamo")
    path = path_of(options.out, options.selection)
    options.out.mkdir(parents=True, exist_ok=True)
    for result in measured(options.selection, peer_seconds=options.peer_seconds):
        write_file(path, (json.dumps(result, indent=1) + "\n").encode())
    print(path)


if __name__ == "__main__":
    main()
