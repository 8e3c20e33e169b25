"""Launches of the kernel with `mma.sync`, for `capability_bench.py`: all are checked, then timed in turns.

Checks run in processes of their own, so that kernels are compiled at the same time; the timings find them in Triton's
cache. What a launch computes is compared with float64 on decoded weights.
"""

import itertools
import multiprocessing
import os
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.experts_bench import GATE, SHAPES, Shape, layers_to_rotate, random_pages, routing, run_pages
from scripts.gpu_timing import BF16, CUDA, error, side_by_side
from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import experts, resolve
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1 import launches
from vbrt.kernels.cuda.e2m1.linear import decode_weight
from vbrt.kernels.cuda.experts import decoded_experts, few_tokens, many_tokens
from vbrt.kernels.cuda.experts.pairs import Groups, group_pairs
from vbrt.kernels.cuda.launch_table import MmaLaunch
from vbrt.kernels.cuda.table import linear as table_linear
from vbrt.kernels.cuda.whole import linear as whole_linear
from vbrt.kernels.experts import ExpertPages

Capability = tuple[int, int]

LAYERS = (Shape("olmoe", 64, 2048, 1024, 8, "nvfp4"), *(shape for shape in SHAPES if shape.name != "gpt-oss"))
EXPERT_TOKENS = (64, 256, 1024, 4096)
HALVES = [MmaLaunch(32, 4, 2, 1, 4), MmaLaunch(32, 8, 2, 1, 3), MmaLaunch(64, 4, 2, 1, 3), MmaLaunch(64, 8, 2, 1, 2)]
ROWS = [*HALVES, MmaLaunch(32, 4, 1, 1, 4), MmaLaunch(64, 4, 1, 1, 3), MmaLaunch(64, 8, 1, 1, 3)]

FORMATS = ("nf4", "quantile", "mxint8", "levels32-float16")
FORMAT_SHAPES = [(2048, 5632), (4096, 14336), (14336, 4096)]  # (K, N)
FORMAT_TOKENS = (33, 64, 100, 200, 320, 777, 2048)
LAUNCHES = [*ROWS[4:6], HALVES[0], MmaLaunch(32, 4, 2, 1, 3), HALVES[2]]
SPLITS = (1, 2, 4)
_MOST_ERROR = 5e-3
_MOST_FEW = 40  # mean pairs of an expert for which the kernels for few tokens are timed


class Check(NamedTuple):
    """A launch, of a part of experts ("up", "down") or of a linear layer ("linear"), in a format."""

    part: str
    format: str
    launch: MmaLaunch


def checks(parts: Sequence[str]) -> list[Check]:
    """All launches that the parts "grouped" and "formats" time, and those of the other format of experts."""
    found = []
    if "grouped" in parts:
        for format in ("nvfp4", "mxfp4"):
            found += [Check("up", format, launch) for launch in (HALVES if format == "nvfp4" else HALVES[2:3])]
            found += [Check("down", format, launch) for launch in (ROWS if format == "nvfp4" else ROWS[2:3])]
    if "formats" in parts:
        split = [launch._replace(splits=2) for launch in LAUNCHES]
        found += [Check("linear", *case) for case in itertools.product(FORMATS, [*LAUNCHES, *split])]
    return found


def failed_checks(parts: Sequence[str], taken: Capability) -> dict[Check, str]:
    """Launches that compute something else or do not run, and what was found."""
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        running = {case: pool.submit(error_of, taken, case) for case in checks(parts)}
    failed = {case: repr(run.exception()) for case, run in running.items() if run.exception()}
    found = {case: run.result() for case, run in running.items() if case not in failed}
    print(f"{len(found)} launches ran; largest relative error {max(found.values(), default=0):.2e}", flush=True)
    return failed | {case: f"error {e:.2e}" for case, e in found.items() if not e < _MOST_ERROR}


def error_of(taken: Capability, case: Check) -> float:
    """The relative error of a launch, with odd numbers of tokens."""
    devices.taken_for(taken)
    torch.manual_seed(0)
    with torch.no_grad():
        return _linear_error(case) if case.part == "linear" else _experts_error(case)


def _linear_error(case: Check) -> float:
    planes = planes_of_rows(case.format, 1024, 528)
    x = torch.randn(205, 1024, device=CUDA, dtype=BF16)
    weight = get_format(case.format).decode(planes.coarse, planes.shape, torch.float64)
    return error(with_launch(case.launch, planes, x), x.double() @ weight.T)


def _experts_error(case: Check) -> float:
    shape = Shape("small", 5, 512, 384, 3, case.format)
    pages, (ids, _) = random_pages(shape), routing(shape, 200)
    up = case.part == "up"
    x = torch.randn(200 if up else 600, shape.hidden if up else shape.inner, device=CUDA, dtype=BF16)
    gate, ids = (GATE, ids) if up else (None, ids.view(-1, 1))
    ids.view(-1)[::7] = shape.experts  # sentinels
    y = product_with(case.launch, x, group_pairs(ids, shape.experts, case.launch.tokens), pages, case.part, gate)
    want = experts.experts_up(x.double(), ids, pages, part=case.part, gate=gate, decode=decode_weight)
    return error(y, want)


# -- routed experts ----------------------------------------------------------------------------------------------------


def product_with(
    launch: MmaLaunch, x: Tensor, groups: Groups, pages: ExpertPages, part: str, gate: experts.Gate | None
) -> Tensor:
    with mock.patch.object(many_tokens, "grouped_mma_for", lambda *_: launch):
        return many_tokens.products(x, groups, pages, part=part, gate=gate, bias_EN=None)


def as_for(capability: Capability | None, run: Callable[..., Tensor], *args: object) -> Tensor:
    devices.taken_for(capability)
    return run(*args)


def decoded(pages: ExpertPages, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    h = decoded_experts.products(x, ids, pages, part="up", gate=GATE, bias_EN=None)
    rows = decoded_experts.products(h, ids.reshape(-1, 1), pages, part="down", gate=None, bias_EN=None)
    return resolve("experts_sum", "auto", CUDA, pages.format).run(rows, ids, weights, pages.experts)


def few(pages: ExpertPages, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return few_tokens.down(few_tokens.up(x, ids, pages, "up", GATE, None), ids, weights, pages, "down", None)


def grouped_rows(taken: Capability, left_out: Container[Check]) -> Iterator[dict]:
    """Microseconds of a layer by route, and of both products by launch, for each layer and number of tokens."""
    for shape in LAYERS:
        pages = [random_pages(shape) for _ in range(layers_to_rotate(shape, 4.5))]
        for tokens in EXPERT_TOKENS:
            some, pairs = pages[: layers_to_rotate(shape, 4.5, tokens)], tokens * shape.k
            routed = [routing(shape, tokens) for _ in some]
            x = torch.randn(tokens, shape.hidden, device=CUDA, dtype=BF16)
            h = torch.randn(pairs, shape.inner, device=CUDA, dtype=BF16)
            layer = [(p, x, *r) for p, r in zip(some, routed, strict=True)]
            sets = {
                "taken": [partial(as_for, taken, run_pages, *args) for args in layer],
                "decoded": [partial(as_for, taken, decoded, *args) for args in layer],
            }
            if pairs <= _MOST_FEW * shape.experts:
                sets["few"] = [partial(as_for, taken, few, *args) for args in layer]
            for part, of, choices, gate in (("up", x, HALVES, GATE), ("down", h, ROWS, None)):
                for launch in (own for own in choices if Check(part, "nvfp4", own) not in left_out):
                    groups = [group_pairs(ids, shape.experts, launch.tokens) for ids, _ in routed]
                    sets[f"{part} {_name(launch)}"] = [
                        partial(as_for, taken, product_with, launch, of, g, p, part, gate)
                        for g, p in zip(groups, some, strict=True)
                    ]
            us = dict(zip(sets, side_by_side(*sets.values(), repeats=7), strict=True))
            row = {"layer": shape.name, "tokens": tokens, "mean_pairs": pairs / shape.experts}
            yield row | {"us": {name: round(t, 1) for name, t in us.items()}}
            ratios = ", ".join(f"{name} {us[name] / us['taken']:.2f}" for name in ("decoded", "few") if name in us)
            best = {part: min((t, n) for n, t in us.items() if n.startswith(f"{part} "))[1] for part in ("up", "down")}
            print(shape.name, tokens, f"{us['taken']:.0f} us; of that {ratios}; best {best}", flush=True)
        del pages
        torch.cuda.empty_cache()


# -- formats of rows of codes ------------------------------------------------------------------------------------------


def planes_of_rows(format: str, k: int, n: int) -> WeightPlanes:
    """A weight of some random rows, repeated: a codebook is fitted to few."""
    few_rows = torch.randn(16, k, device=CUDA) * 0.02
    coarse = get_format(format).encode(few_rows)
    for name in ("codes", "scales"):
        coarse[name] = coarse[name].repeat(n // 16, 1)
    return WeightPlanes(format, (n, k), BF16, coarse)


def module_of(format: str):
    return whole_linear if format in whole_linear.FORMATS else table_linear


def with_launch(launch: MmaLaunch, planes: WeightPlanes, x: Tensor) -> Tensor:
    return launches.mma(x, module_of(planes.format).codes_of(planes.coarse), None, "none", launch)


def decode_and_multiply(planes: WeightPlanes, x: Tensor) -> Tensor:
    return F.linear(x, module_of(planes.format).decode_weight(planes))


def format_rows(taken: Capability, left_out: Container[Check]) -> Iterator[dict]:
    """Microseconds of a linear layer by kernel and by launch, for each format, shape and number of tokens."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for format, (k, n) in itertools.product(FORMATS, FORMAT_SHAPES):
        planes = [planes_of_rows(format, k, n) for _ in range(max(3, min(8, (200 << 20) // (k * n))))]
        dense = [torch.randn(n, k, device=CUDA, dtype=BF16) for _ in planes]
        module = module_of(format)
        for tokens in FORMAT_TOKENS:
            x = torch.randn(tokens, k, device=CUDA, dtype=BF16)
            sets = {
                "bf16": [partial(F.linear, x, w) for w in dense],
                "taken": [partial(as_for, taken, module.linear, x, p) for p in planes],
                "decoded": [partial(as_for, taken, decode_and_multiply, p, x) for p in planes],
            }
            if format not in table_linear.FORMATS:  # the others have another kernel on Hopper, which is not at issue
                sets["own"] = [partial(as_for, None, module.linear, x, p) for p in planes]
            for launch, splits in itertools.product(LAUNCHES, SPLITS):
                programs = -(-tokens // launch.tokens) * -(-n // (16 * launch.row_tiles * launch.warps))
                fits = splits == 1 or (splits * programs <= 4 * processors and k >= 512 * splits)
                if fits and Check("linear", format, launch._replace(splits=min(splits, 2))) not in left_out:
                    whole = launch._replace(splits=splits)
                    sets[_name(whole)] = [partial(as_for, taken, with_launch, whole, p, x) for p in planes]
            us = dict(zip(sets, side_by_side(*sets.values(), repeats=5), strict=True))
            devices.taken_for(taken)
            route = module.route(x, planes[0])
            row = {"format": format, "k": k, "n": n, "tokens": tokens, "route": route}
            yield row | {"us": {name: round(t, 2) for name, t in us.items()}}
            t, best = min((t, name) for name, t in us.items() if "x" in name)
            print(
                format, k, n, tokens, f"{route} {us['taken']:.1f} us; of that",
                ", ".join(f"{name} {us[name] / us['taken']:.2f}" for name in ("bf16", "decoded", "own") if name in us),
                f"; best launch {best} {t / us['taken']:.2f}", flush=True,
            )  # fmt: skip
        del planes, dense


def _name(launch: MmaLaunch) -> str:
    """Tokens x warps x row tiles, splits, ring."""
    return f"{launch.tokens}x{launch.warps}x{launch.row_tiles}/{launch.splits} ring {launch.ring}"
