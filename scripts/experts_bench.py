"""Time layers of routed experts on this machine's GPU: benchmarks/results/experts-<gpu>.json.

Ours on pages of 4 and 8 bits beside transformers' batched_mm and grouped_mm in bf16, all as CUDA graphs that take
turns, on layers enough to leave the second-level cache. Routing is random: tokens go to different experts, all alike.
What is timed is a layer's whole work between the router and the residual sum.

    python3 scripts/experts_bench.py [--tokens 1 64] [--only qwen3-30b-a3b] [--formats nvfp4] [--out results.json]
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.gpu_timing import BF16, CUDA, ROOT, machine, say, side_by_side
from vbrt.formats import get_format
from vbrt.formats.joint_planes import join_fields, join_layouts
from vbrt.formats.page import new_page, pack, unpack
from vbrt.kernels import resolve
from vbrt.kernels.experts import ExpertPages, Gate, apply_gate, part_planes

TOKENS = (1, 4, 16, 64, 512, 4096)
IMPLEMENTATIONS = ("batched_mm", "grouped_mm")
GATE = Gate("silu")
_TOUCHED_BYTES = 400 << 20  # that a turn around the layers reads at least
_CHECKED = 64  # tokens compared with float64
_COPIED_TOKENS = 64  # up to which batched_mm, which copies the experts of each token, has the memory


class Shape(NamedTuple):
    """A layer: experts, hidden, inner, experts a token, format."""

    name: str
    experts: int
    hidden: int
    inner: int
    k: int
    format: str


SHAPES = (
    Shape("qwen3-30b-a3b", 128, 2048, 768, 8, "nvfp4"),
    Shape("gpt-oss", 32, 2880, 2880, 4, "mxfp4"),
    Shape("mixtral-8x7b", 8, 4096, 14336, 2, "nvfp4"),
)
#: formats whose pages have the order of rows
ROWS = (
    *("nf4", "symmetric128-float16", "zeros128-float16", "affine32-float16", "superblock32", "levels32-float16"),
    *("mxint8", "bytes32-float16", "superbytes16", "floatbytes128-float32", "floatzeros64-float16"),
)


# -- layers -----------------------------------------------------------------------------------------------------------


def random_pages(shape: Shape) -> ExpertPages:
    """The pages of random experts: random codes, block scales within a factor of two."""
    packing = resolve("experts_up", "auto", CUDA, shape.format).page_order(shape.format)
    parts = {"up": (2 * shape.inner, shape.hidden), "down": (shape.hidden, shape.inner)}
    if packing is None:
        return _pages_of_rows(shape, parts)
    layout = join_layouts({part: packing.layout(size) for part, size in parts.items()})
    pages = torch.randint(0, 256, (shape.experts, layout.nbytes), dtype=torch.uint8, device=CUDA)
    e8m0 = shape.format == "mxfp4"
    for page in pages:
        for name, field in unpack(page, layout).items():
            if name.endswith("tensor_scale"):
                field.fill_(2.0**-7)
            else:  # scales behind the 256 words of codes of each tile
                scales = field[..., 256:].view(torch.uint8)
                low = 238 if e8m0 else 0x34
                scales.copy_(torch.randint(low, low + (2 if e8m0 else 8), scales.shape, dtype=torch.uint8, device=CUDA))
    addresses = pages.data_ptr() + layout.nbytes * torch.arange(shape.experts, dtype=torch.int64, device=CUDA)
    return ExpertPages(shape.format, BF16, parts, layout, list(pages), addresses)


def _pages_of_rows(shape: Shape, parts: dict[str, tuple[int, int]]) -> ExpertPages:
    """Pages with the codes of one random expert each: a page's time does not depend on its numbers."""
    fmt = get_format(shape.format)
    weights = {part: torch.randn(size, device=CUDA, dtype=BF16) * 0.02 for part, size in parts.items()}
    layout = join_layouts({part: fmt.layout(size, BF16) for part, size in parts.items()})
    page = pack(join_fields({part: fmt.encode(w) for part, w in weights.items()}), layout, new_page(layout, CUDA))
    pages = page.repeat(shape.experts, 1)
    addresses = pages.data_ptr() + layout.nbytes * torch.arange(shape.experts, dtype=torch.int64, device=CUDA)
    return ExpertPages(shape.format, BF16, parts, layout, list(pages), addresses)


def dense_layer(shape: Shape) -> torch.nn.Module:
    """The experts of transformers' Qwen3-MoE, with random weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.inner,
        num_experts=shape.experts,
        num_experts_per_tok=shape.k,
    )
    with torch.device(CUDA):
        layer = Qwen3MoeExperts(config).to(BF16)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.02)
    return layer.requires_grad_(False)


def run_dense(layer: torch.nn.Module, implementation: str, *args: torch.Tensor) -> torch.Tensor:
    layer.config._experts_implementation = implementation
    return layer(*args)


def run_pages(pages: ExpertPages, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer's output by addresses, as where the GPU decides which pages there are."""
    pages = replace(pages, pages=[None] * pages.experts)
    up, down = (resolve(f"experts_{part}", "auto", CUDA, pages.format).run for part in ("up", "down"))
    return down(up(x, ids, pages, gate=GATE), ids, weights, pages)


def routing(shape: Shape, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand(tokens, shape.experts, device=CUDA).argsort(dim=1)[:, : shape.k].contiguous()
    return ids, torch.rand(tokens, shape.k, device=CUDA).softmax(-1).to(BF16)


def layers_to_rotate(shape: Shape, bits: float, tokens: int = 1) -> int:
    """So many that a turn around them reads more than the second-level cache holds."""
    experts = min(shape.experts, tokens * shape.k)
    touched = experts * 3 * shape.hidden * shape.inner * bits / 8
    return max(2, -(-_TOUCHED_BYTES // int(touched)))


# -- figures ----------------------------------------------------------------------------------------------------------


def wanted(pages: ExpertPages, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer's result in float64 for a few tokens, expert by expert."""
    decode = resolve("decode_weight", "auto", CUDA, pages.format).run
    y = torch.zeros(x.shape, dtype=torch.float64, device=CUDA)
    for expert in ids.unique().tolist():
        at, j = torch.where(ids == expert)
        up, down = (decode(part_planes(pages, expert, part)).double() for part in ("up", "down"))
        rows = apply_gate(x[at].double() @ up.T, GATE) @ down.T
        y.index_add_(0, at, rows * weights[at, j].double()[:, None])
    return y


def error(pages: ExpertPages, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> float:
    """The relative error of our layer for some of the tokens."""
    some = torch.randperm(len(x), device=CUDA)[:_CHECKED]
    want = wanted(pages, x[some], ids[some], weights[some])
    return float((run_pages(pages, x, ids, weights)[some].double() - want).norm() / want.norm())


def rows(shape: Shape, tokens: Sequence[int]) -> Iterator[dict[str, object]]:
    bits = 4.5 if shape.format not in ROWS else get_format(shape.format).record.bits
    pages = [random_pages(shape) for _ in range(layers_to_rotate(shape, bits))]
    dense = [dense_layer(shape) for _ in range(layers_to_rotate(shape, 16))]
    for t in tokens:
        x = torch.randn(t, shape.hidden, device=CUDA, dtype=BF16)
        routed = [routing(shape, t) for _ in pages]
        some = pages[: layers_to_rotate(shape, bits, t)]
        sets: dict[str, list[Callable[[], object]]] = {
            "ours": [partial(run_pages, p, x, *r) for p, r in zip(some, routed, strict=False)]
        }
        for name in IMPLEMENTATIONS[t > _COPIED_TOKENS :]:
            pairs = zip(dense[: layers_to_rotate(shape, 16, t)], routed, strict=False)
            sets[name] = [partial(run_dense, layer, name, x, *r) for layer, r in pairs]
        taken = dict(zip(sets, side_by_side(*sets.values(), repeats=11), strict=True))
        ours, best = taken.pop("ours"), min(taken.values())
        row = {
            "layer": shape.name,
            "format": shape.format,
            "tokens": t,
            "us": round(ours, 1),
            **{f"{name}_us": round(us, 1) for name, us in taken.items()},
            "ratio": round(best / ours, 2),
            "relative_error": error(pages[0], x, *routed[0]),
        }
        say(row)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--only", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--formats", nargs="+", default=[*dict.fromkeys(shape.format for shape in SHAPES), *ROWS])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, object] = {**machine(), "rows": []}
    with torch.no_grad():
        for shape in (*SHAPES, *(SHAPES[0]._replace(format=format) for format in ROWS)):
            if shape.name in asked.only and shape.format in asked.formats:
                result["rows"] += rows(shape, asked.tokens)
                torch.cuda.empty_cache()
    slug = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    out = asked.out or ROOT / "benchmarks" / "results" / f"experts-{slug}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    bad = [row for row in result["rows"] if not row["relative_error"] < 1e-2]
    print(f"{out}; {len(bad)} rows with a relative error of 1 % or more", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
