"""Time 4-bit linears against the same GPU's bf16 matmul, beside other libraries', and write kernels-<gpu>.json.

CUDA-graph replays over enough weights to pass the second-level cache, random normal data, medians; microseconds a
call. A ratio is bf16 time / ours. Everything is timed in one run, in turn; absolute times drift between machines.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  # after the checkout is on the path
import torch.nn.functional as F  # noqa: E402

from vbrt.formats import WeightPlanes, get_format  # noqa: E402
from vbrt.kernels import (  # noqa: E402
    Norm,
    fp4_linear,
    fp4_refusal,
    fp4_scaled,
    fp8_linear,
    fp8_refusal,
    page_packing,
    resolve,
    table_linear,
)
from vbrt.kernels.tuning import graph_us  # noqa: E402

SHAPES = ((4096, 14336), (14336, 4096), (4096, 4096), (8192, 28672))  # (K, N)
ODD_SHAPES = ((2730, 4096), (5120, 13824), (11008, 4096), (18944, 3584), (3584, 18944), (4096, 50257), (5120, 27648))
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
PEER_TOKENS = (1, 4, 16, 64, 256, 2048)
PEER_SHAPES = ((4096, 14336), (4096, 4096))
PEER_SECONDS = 25  # a peer that searches at its first calls for longer than this is left out of what follows
ROTATED_BYTES = 300 << 20
CUDA = torch.device("cuda")
BF16 = torch.bfloat16

# -- timing -----------------------------------------------------------------------------------------------------------


def replay_us(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Median time of one call, in a graph that runs them all."""

    def all_of_them() -> None:
        for call in calls:
            call()

    all_of_them()
    return graph_us(all_of_them, repeats) / len(calls)


def host_us(call: Callable[[], object], calls: int = 500) -> float:
    """Median host time of an asynchronous call, the GPU never being waited for."""
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 9):
            call()
        times.append((time.perf_counter() - start) / (calls // 9) * 1e6)
    torch.cuda.synchronize()
    return sorted(times)[len(times) // 2]


def copy_tb_s() -> float:
    """Bytes read and written a second by a kernel that copies: the roofline of this GPU's memory."""
    source = torch.randn(1 << 29, dtype=BF16, device=CUDA)
    target = torch.empty_like(source)
    return 4 * source.numel() / replay_us([partial(torch.neg, source, out=target)]) / 1e6


# -- weights ----------------------------------------------------------------------------------------------------------


def dense_weights(k: int, n: int) -> list[torch.Tensor]:
    copies = max(2, min(8, ROTATED_BYTES // (k * n // 2) + 1))
    return [torch.randn(n, k, device=CUDA, dtype=BF16) * 0.02 for _ in range(copies)]


def planes_of(format: str, weight: torch.Tensor) -> WeightPlanes:
    """As a page holds them."""
    shape = tuple(weight.shape)
    coarse = get_format(format).encode(weight)
    packing = page_packing(resolve("linear", "auto", CUDA, format), format)
    return WeightPlanes(format, shape, BF16, packing.pack(coarse, shape) if packing else coarse)


def plain(planes: WeightPlanes) -> dict[str, torch.Tensor]:
    packing = fp4_linear.packing(planes.format)
    return packing.unpack(planes.coarse, planes.shape) if packing else planes.coarse


def error(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


# -- parts ------------------------------------------------------------------------------------------------------------


def route_of(x: torch.Tensor, planes: WeightPlanes) -> str:
    own = table_linear if planes.format in table_linear.FORMATS else fp4_linear
    return own.route(x, planes)


def linear_rows(format: str, k: int, n: int, tokens: Sequence[int]) -> Iterator[dict[str, object]]:
    dense = dense_weights(k, n)
    planes = [planes_of(format, weight) for weight in dense]
    linear = resolve("linear", "auto", CUDA, format)
    exact = get_format(format).decode(plain(planes[0]), (n, k), torch.float64)
    for m in tokens:
        x = torch.randn(m, k, device=CUDA, dtype=BF16)
        want = x.double() @ exact.T
        bf16 = replay_us([partial(F.linear, x, w) for w in dense])
        ours = replay_us([partial(linear, x, p) for p in planes])
        row = {"format": format, "k": k, "n": n, "m": m, "route": route_of(x, planes[0]), "bf16_us": round(bf16, 2),
               "fp4_us": round(ours, 2), "ratio": round(bf16 / ours, 3),
               "relative_error": error(linear(x, planes[0]), want)}
        if fp8_refusal(torch.device("cuda", 0)) is None and fp8_linear.route(x, planes[0]) == "fp8":
            us = replay_us([partial(fp8_linear.linear, x, p) for p in planes])
            row |= {"fp8_us": round(us, 2), "fp8_ratio": round(bf16 / us, 3),
                    "fp8_error": error(fp8_linear.linear(x, planes[0]), want)}
        if fp4_refusal(torch.device("cuda", 0)) is None and fp4_scaled.route(x, planes[0]) == "fp4":
            us = replay_us([partial(fp4_scaled.linear, x, p) for p in planes])
            row |= {"scaled_us": round(us, 2), "scaled_ratio": round(bf16 / us, 3),
                    "scaled_error": error(fp4_scaled.linear(x, planes[0]), want)}
        say(row)
        yield row


def odd_rows(tokens: Sequence[int] = (1, 16, 2048)) -> Iterator[dict[str, object]]:
    for k, n in ODD_SHAPES:
        yield from linear_rows("nvfp4", k, n, tokens)


def epilogue_rows() -> Iterator[dict[str, object]]:
    """What bias and activation add to a bare linear, in percent."""
    for k, n in SHAPES[:2]:
        planes = [planes_of("nvfp4", weight) for weight in dense_weights(k, n)]
        bias = torch.randn(n, device=CUDA, dtype=BF16)
        for m in (1, 16, 2048):
            x = torch.randn(m, k, device=CUDA, dtype=BF16)
            bare = replay_us([partial(fp4_linear.linear, x, p) for p in planes])
            for activation in ("none", "gelu", "silu"):
                full = replay_us([partial(fp4_linear.linear, x, p, bias, activation) for p in planes])
                row = {"k": k, "n": n, "m": m, "activation": activation, "bare_us": round(bare, 2),
                       "full_us": round(full, 2), "added_percent": round(100 * (full / bare - 1), 1)}
                say(row)
                yield row


def fused_rows() -> Iterator[dict[str, object]]:
    """norm_linear beside norm then linear, gated_linear beside two linears (and the product)."""
    norm_linear, gated_linear = (resolve(op, "auto", CUDA) for op in ("norm_linear", "gated_linear"))
    for k, n in (*SHAPES, (4096, 6144)):
        planes = [planes_of("nvfp4", weight) for weight in dense_weights(k, n)]
        pairs = list(zip(planes, planes[1:] + planes[:1], strict=True))
        gain = torch.randn(k, device=CUDA, dtype=BF16)
        rms, layer = Norm("rms", gain), Norm("layer", gain, gain)
        for m in (1, 4, 16):
            x = torch.randn(m, k, device=CUDA, dtype=BF16)
            cases = {
                "rms": ([partial(norm_linear, x, p, rms) for p in planes],
                        [partial(separate_norm, x, p, rms) for p in planes]),
                "layer": ([partial(norm_linear, x, p, layer) for p in planes],
                          [partial(separate_norm, x, p, layer) for p in planes]),
                "gated": ([partial(gated_linear, x, a, b) for a, b in pairs],
                          [partial(two_launches, x, a, b) for a, b in pairs]),
                "rms gated": ([partial(gated_linear, x, a, b, rms) for a, b in pairs],
                              [partial(separate_gate, x, a, b, rms) for a, b in pairs]),
            }
            for name, (fused, separate) in cases.items():
                apart, together = replay_us(separate), replay_us(fused)
                row = {"what": name, "k": k, "n": n, "m": m, "separate_us": round(apart, 2),
                       "fused_us": round(together, 2), "ratio": round(apart / together, 3)}
                say(row)
                yield row


def separate_norm(x: torch.Tensor, planes: WeightPlanes, norm: Norm) -> torch.Tensor:
    return fp4_linear.linear(norm(x), planes)


def two_launches(x: torch.Tensor, gate: WeightPlanes, up: WeightPlanes) -> tuple[torch.Tensor, torch.Tensor]:
    """Without the product that `gated_linear` also computes."""
    return fp4_linear.linear(x, gate, None, "silu"), fp4_linear.linear(x, up)


def separate_gate(x: torch.Tensor, gate: WeightPlanes, up: WeightPlanes, norm: Norm) -> torch.Tensor:
    x = norm(x)
    return fp4_linear.linear(x, gate, None, "silu") * fp4_linear.linear(x, up)


def dispatch() -> dict[str, float]:
    """Host microseconds of an eager call on a tiny layer, where nothing else costs anything."""
    import vbrt

    weight = torch.randn(64, 128, device=CUDA, dtype=BF16)
    planes, x = planes_of("nvfp4", weight), torch.randn(1, 128, device=CUDA, dtype=BF16)
    layer = torch.nn.Linear(128, 64, bias=False, device=CUDA, dtype=BF16)
    vb = vbrt.wrap(torch.nn.Sequential(layer), "fp4", weights={"keep_head": False, "min_parameters": 1}).materialize()
    wrapped = vb.model[0]
    with torch.no_grad():
        wrapped(x)
        out = {"torch_linear_us": host_us(partial(F.linear, x, weight)),
               "fp4_linear_us": host_us(partial(fp4_linear.linear, x, planes)),
               "wrapped_layer_us": host_us(partial(wrapped, x))}
    vb.close()
    return {name: round(us, 2) for name, us in out.items()}


# -- peers ------------------------------------------------------------------------------------------------------------


def bitsandbytes_nf4(layer: torch.nn.Linear) -> torch.nn.Module:
    import bitsandbytes as bnb

    made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=BF16, quant_type="nf4")
    made.weight = bnb.nn.Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4", blocksize=64,
                                    compress_statistics=False)
    return made.to(CUDA)


def torchao_int4(layer: torch.nn.Linear) -> torch.nn.Module:
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    made = torch.nn.Sequential(layer)
    quantize_(made, Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))
    return made


def gemlite_mxfp4(layer: torch.nn.Linear) -> torch.nn.Module:
    from gemlite import helper

    return helper.A16W4_MXFP(device="cuda", dtype=BF16).from_linear(layer)


#: name in the table -> (package, what makes a layer of theirs out of an nn.Linear)
PEERS = {
    "bitsandbytes NF4": ("bitsandbytes", bitsandbytes_nf4),
    "torchao int4 g128": ("torchao", torchao_int4),
    "gemlite MXFP4": ("gemlite", gemlite_mxfp4),
}


def peer_rows(name: str, absent: dict[str, str]) -> Iterator[dict[str, object]]:
    package, make = PEERS[name]
    if importlib.util.find_spec(package) is None:
        absent[name] = "not installed"
        return
    began = time.perf_counter()
    for k, n in PEER_SHAPES:
        dense = dense_weights(k, n)
        layers = []
        try:
            for weight in dense:
                layer = torch.nn.Linear(k, n, bias=False, device=CUDA, dtype=BF16)
                layer.weight.data.copy_(weight)
                layers.append(make(layer))
            for m in PEER_TOKENS:
                if time.perf_counter() - began > PEER_SECONDS:
                    absent[name] = f"searched for more than {PEER_SECONDS} s, before {k}->{n} M={m}"
                    return
                x = torch.randn(m, k, device=CUDA, dtype=BF16)
                bf16 = replay_us([partial(F.linear, x, w) for w in dense])
                us = replay_us([partial(layer, x) for layer in layers])
                row = {"peer": name, "k": k, "n": n, "m": m, "bf16_us": round(bf16, 2), "us": round(us, 2),
                       "ratio": round(bf16 / us, 3)}
                say(row)
                yield row
        except Exception as error:  # noqa: BLE001  # whatever another library raises becomes a line of the table
            absent[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
            return


# -- running and writing ----------------------------------------------------------------------------------------------


def say(row: dict[str, object]) -> None:
    print("  ".join(f"{name} {value:.2e}" if "error" in name else f"{name} {value}" for name, value in row.items()),
          flush=True)


def machine() -> dict[str, object]:
    asked = ["git", "-c", "safe.directory=*", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    versions = {}
    for package in ("torch", "triton", "transformers", "bitsandbytes", "torchao", "gemlite"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {"gpu": torch.cuda.get_device_name(), "capability": list(torch.cuda.get_device_capability()),
            "torch": torch.__version__, "cuda": torch.version.cuda, "commit": commit.stdout.strip() or None,
            "versions": versions, "copy_tb_s": round(copy_tb_s(), 2)}


def timed(result: dict[str, object], part: str, rows: Iterator[dict[str, object]]) -> None:
    started = time.perf_counter()
    result[part] = [*result.get(part, []), *rows]
    print(f"# {part}: {time.perf_counter() - started:.0f} s", flush=True)


@torch.no_grad()
def measured(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """The results so far, after each part."""
    result: dict[str, object] = machine()
    for format in options.formats:
        for k, n in SHAPES if fp4_linear.packing(format) else PEER_SHAPES:
            timed(result, "rows", linear_rows(format, k, n, options.tokens))
    result["dispatch"] = dispatch()
    print(result["dispatch"])
    yield result
    timed(result, "fused", fused_rows())
    timed(result, "epilogue", epilogue_rows())
    timed(result, "odd", odd_rows())
    yield result
    if options.e2e:
        import gpu_e2e

        result["e2e"] = gpu_e2e.measure(options.e2e)
        print(result["e2e"])
        yield result
    result["absent"] = {}
    for name in options.peers:
        timed(result, "peers", peer_rows(name, result["absent"]))
        yield result
    yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--formats", nargs="*", default=["nvfp4", "mxfp4", "nf4", "quantile"])
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--e2e", type=int, nargs="?", const=32, metavar="LAYERS",
                        help="also decode with a Llama-8B-shaped model of so many layers (32)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    warnings.filterwarnings("ignore", module="torch._dynamo")
    path = options.out / f"kernels-{torch.cuda.get_device_name().lower().replace(' ', '-')}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    for result in measured(options):
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
