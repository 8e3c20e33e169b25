"""Families of kernels with a choice of launches: what `tuning` times for a plan's layers.

| family | layers | launches |
| --- | --- | --- |
| `linear` | nvfp4, mxfp4 | narrow up to 16 tokens; beyond, those of the lowest estimates |
| `table` | nf4, quantile, levels, affine | rows and warps of the fused kernel, up to 32 tokens |
| `table wide` | levels and affine in blocks of 128 columns | the same |
| `whole` | mxint8 | its warps |
| `expert rows`, `expert sums` | experts in nvfp4, mxfp4 | those of the kernels for few tokens |
| `expert blocks` | the same, on sm_90 | pairs that the grouped kernel takes at a time |

Fine planes are merged by a kernel with one launch.

Legend: N outputs, K inputs, E experts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.joint_planes import join_layouts
from vbrt.formats.page import new_page, unpack
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.e2m1.tiles import (
    CODE_WORDS,
    COLUMNS,
    FORMATS,
    ROWS,
    TOP_FIELD,
    TiledWeight,
    tile_layout,
    tile_shape,
)
from vbrt.kernels.cuda.experts import few_tokens, many_tokens
from vbrt.kernels.cuda.launch_table import (
    WIDE,
    GroupedLaunch,
    Launch,
    Matmul,
    RowsLaunch,
    TokenLaunch,
    are_few,
    choices,
    choose,
    grouped_for,
    grouped_sizes,
    launch_for,
    pairs_are_alone,
    rows_for,
    token_for,
)
from vbrt.kernels.cuda.table import linear as table_linear
from vbrt.kernels.cuda.tuned_configs import Key, most_tokens
from vbrt.kernels.cuda.whole import linear as whole_linear
from vbrt.kernels.experts import ExpertPages, Gate
from vbrt.residency.plan import Plan

__all__ = ["NARROW", "NEEDS", "Case", "cases_of", "fill_tiles"]

NEEDS = devices.BF16
_READS = ((True, True), (True, False), (False, False))  # prefetch, carry_pointers
NARROW = tuple(Launch(rows, warps, *reads) for rows in (1, 2, 4) for warps in (4, 8, 16) for reads in _READS)
_ROWS = tuple(Launch(rows, warps, True) for rows in (1, 2, 4) for warps in (4, 8, 16) if rows * warps <= 16)
_ESTIMATED = 8  # launches for many tokens, of the lowest estimates
_FEW = 16  # tokens of the narrow kernel's search
_BEYOND_CACHE = 300 << 20  # bytes of weights, to exceed the cache
_MOST_BYTES = 2 << 30  # of a layer's experts; beyond, several share a page
_GATE = Gate("silu")
_ONE_E4M3 = 0x38  # the byte of 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """A search: a family's kernel for a number of tokens and a weight (n, k) in a format.

    Attributes:
        key: of its result.
        table: the launch without one.
        candidates: launches to try besides.
        calls: makes inputs and weights on the current CUDA device; returns a function of as many products as are in the
            second item. Not compared.
    """

    family: str
    n: int
    k: int
    format: str
    tokens: int
    key: Key
    table: Any
    candidates: tuple[Any, ...]
    calls: Callable[[], tuple[Callable[[], Any], int]]


def cases_of(plan: Plan, tokens: Sequence[int], device: int) -> Iterator[Case]:
    """Searches for a plan's layers, each key once."""
    # training multiplies by rounded dense weights, and a fine plane is merged into one
    swaps = [swap for swap in plan.swaps if swap.fine == "none"] if plan.mode == "infer" else []
    layers = {(swap.shape, swap.format) for swap in swaps if not swap.experts}
    experts = {
        (tuple(site.shape for site in (swap.site, *swap.parts)), swap.format, swap.experts, swap.top_k)
        for swap in swaps
        if swap.experts and swap.format in FORMATS
    }
    met: set[Key] = set()
    for cases in (
        *(_layer_cases(*layer, m, device) for layer in sorted(layers) for m in dict.fromkeys(tokens)),
        *(_expert_cases(*layer, m, device) for layer in sorted(experts) for m in dict.fromkeys(tokens)),
    ):
        for case in cases:
            if case.key not in met:
                met.add(case.key)
                yield case


def _layer_cases(shape: tuple[int, int], format: str, tokens: int, device: int) -> Iterator[Case]:
    (n, k), gpu = shape, devices.gpu(device)
    if format in FORMATS:
        rows, columns, _ = tile_shape(format, shape)
        candidates = choices(gpu, tokens, n, columns)[:_ESTIMATED] if tokens > _FEW else NARROW
        table = choose(gpu, tokens, 1, n, columns) or Matmul()
        key = "linear", most_tokens(tokens), rows, columns
        yield Case("linear", n, k, format, tokens, key, table, candidates, partial(_tiled, n, k, format, tokens))
    rows = -(-n // ROWS), -(-k // 64)
    if format in table_linear.SERVED and tokens <= table_linear.FUSED_TOKENS:
        family, calls = table_linear.family_of(get_format(format).block), partial(_planes, table_linear.linear)
        table = launch_for(family, gpu, tokens, *rows)
        key = family, most_tokens(tokens), *rows
        yield Case(family, n, k, format, tokens, key, table, _ROWS, partial(calls, n, k, format, tokens))
    if format in whole_linear.FORMATS and tokens <= whole_linear.FUSED_TOKENS:
        table, key = whole_linear.LAUNCH, ("whole", most_tokens(tokens), *rows)
        warps, calls = tuple(table._replace(k_warps=count) for count in (4, 8)), partial(_planes, whole_linear.linear)
        yield Case("whole", n, k, format, tokens, key, table, warps, partial(calls, n, k, format, tokens))


def _expert_cases(
    shapes: tuple[tuple[int, int], ...], format: str, experts: int, k: int, tokens: int, device: int
) -> Iterator[Case]:
    """Of the layer's first matrix, with a gate of halves where it fits, and the last, which sums over experts."""
    pairs, (up, down) = tokens * k, (shapes[0], shapes[-1])
    make = partial(_experts, up, down, format, experts, k, tokens)
    if not are_few(pairs, experts, devices.gpu(device)):
        if devices.major(device) in WIDE:
            key = "expert blocks", most_tokens(pairs), experts
            table = GroupedLaunch(grouped_for(pairs, experts))
            candidates = tuple(map(GroupedLaunch, grouped_sizes()))
            yield Case("expert blocks", *up, format, tokens, key, table, candidates, partial(make, many_tokens, "up"))
        return
    alone = pairs_are_alone(tokens, pairs, experts)
    for (n, width), part in ((up, "up"), (down, "down")):
        matrices = 2 if part == "up" and n % (2 * ROWS) == 0 else 1
        row_tiles, columns = -(-n // matrices // ROWS), -(-width // COLUMNS)
        calls = partial(make, few_tokens, part)
        if part == "down" and alone:
            key, table = ("expert sums", most_tokens(tokens), k, columns), token_for(k, columns)
            candidates = tuple(TokenLaunch(table.side_by_side, *rest) for rest in ((1, 16, 1), (2, 16, 2)))
            yield Case("expert sums", n, width, format, tokens, key, table, candidates, calls)
        else:
            key = "expert rows", most_tokens(pairs), experts, row_tiles, columns, matrices
            table = rows_for(pairs, experts, row_tiles, columns, matrices)
            groups = (1,) if alone else (1, 2, 4)
            candidates = tuple(RowsLaunch(table.row_tiles, g, warps) for g in groups for warps in (2, 4, 8))
            yield Case("expert rows", n, width, format, tokens, key, table, candidates, calls)


# -- calls ------------------------------------------------------------------------------------------------------------


def _input(tokens: int, k: int) -> Tensor:
    return torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)


def _copies(nbytes: int) -> int:
    """Number of weights that exceed the cache together."""
    return min(64, 1 + _BEYOND_CACHE // nbytes)


def fill_tiles(tiles: Tensor, format: str) -> Tensor:
    """Fill tiles with random codes and block scales of 1, and return them: random scales may be NaN."""
    tiles.random_(-(1 << 31), 1 << 31)
    tiles[..., CODE_WORDS:].view(torch.uint8).fill_(TOP_FIELD if FORMATS[format].e8m0_scales else _ONE_E4M3)
    return tiles


def _tiled(n: int, k: int, format: str, tokens: int) -> tuple[Callable[[], Any], int]:
    """Products of tiles of random codes and scale 1."""
    shape, x = tile_shape(format, (n, k)), _input(tokens, k)
    one = torch.ones((), dtype=torch.float32, device="cuda")
    count = _copies(4 * shape[0] * shape[1] * shape[2])
    empty = partial(torch.empty, shape, dtype=torch.int32, device="cuda")
    weights = [TiledWeight(fill_tiles(empty(), format), one, format, n, k) for _ in range(count)]
    return lambda: [e2m1_linear.multiply(x, weight, None, "none") for weight in weights], count


def _planes(linear: Callable[..., Tensor], n: int, k: int, format: str, tokens: int) -> tuple[Callable[[], Any], int]:
    """Products of random weights in the format's order."""
    x, weight = _input(tokens, k), torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    coarse = get_format(format).encode(weight)
    nbytes = sum(tensor.nbytes for tensor in coarse.values())
    copies = [{name: tensor.clone() for name, tensor in coarse.items()} for _ in range(_copies(nbytes))]
    planes = [WeightPlanes(format, (n, k), torch.bfloat16, tensors) for tensors in copies]
    return lambda: [linear(x, each) for each in planes], len(planes)


def _experts(
    up: tuple[int, int], down: tuple[int, int], format: str, experts: int, k: int, tokens: int, module: Any, part: str
) -> tuple[Callable[[], Any], int]:
    """One product of a layer's experts, on random codes and random routing."""
    shapes = {"up": up, "down": down}
    layout = join_layouts({name: tile_layout(format, shape) for name, shape in shapes.items()})
    pages = [new_page(layout, torch.device("cuda")) for _ in range(min(experts, max(k, _MOST_BYTES // layout.nbytes)))]
    for page in pages:
        for name, field in unpack(page, layout).items():
            field.fill_(1) if name.endswith("tensor_scale") else fill_tiles(field, format)
    shared = [pages[expert % len(pages)] for expert in range(experts)]
    addresses = torch.tensor([page.data_ptr() for page in shared], dtype=torch.int64, device="cuda")
    layer = ExpertPages(format, torch.bfloat16, shapes, layout, shared, addresses)
    ids = torch.rand(tokens, experts, device="cuda", dtype=torch.float32).argsort(1)[:, :k].contiguous()
    if part == "up":
        gate = _GATE if up[0] % (2 * ROWS) == 0 else None
        x = _input(tokens, up[1])
        return lambda: module.up(x, ids, layer, part="up", gate=gate, bias_EN=None), 1
    h, weights = _input(tokens * k, down[1]), torch.full((tokens, k), 1 / k, device="cuda", dtype=torch.float32)
    return lambda: module.down(h, ids, weights, layer, part="down", bias_EN=None), 1
