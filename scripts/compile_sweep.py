"""Compile the kernels of launches for GPUs that need not be there, check what they take of one, and write the table.

    python scripts/compile_sweep.py --all               # every launch of `_cases`: an hour and more of CPU time
    python scripts/compile_sweep.py --stride 16 80 120  # every sixteenth launch, for two targets

Launches are vbrt's own, on tensors without memory, as on a GPU of each target, of representative shapes, numbers of
tokens, dtypes and epilogues in every family of kernels; Triton decides by their arguments which code they need, and
compiles it to machine code, which takes no instruction that the target lacks. benchmarks/results/compile-sweep.json has
a row for each target, and says how many of its launches were compiled; `--all` compiles all. A target with code that
exceeds a limit has no row: its faults are printed, and the exit status is 1, once all targets were tried.

Legend: M tokens, N outputs, K inputs, E experts.
"""

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.block_formats import Range
from vbrt.formats.fine_coding import coded_fields
from vbrt.formats.joint_planes import join_layouts
from vbrt.kernels.cuda import devices, kv_pages, launcher, step_ops, tuned_configs
from vbrt.kernels.cuda.e2m1 import encode, fused_linear, launches
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.e2m1.tiles import FORMATS as TILED
from vbrt.kernels.cuda.e2m1.tiles import TiledWeight, tile_layout, tile_shape
from vbrt.kernels.cuda.experts import (
    decoded_experts,
    few_tokens,
    gated_rows,
    many_tokens,
    pairs,
    residency,
    row_experts,
    token_sums,
)
from vbrt.kernels.cuda.fine import merge
from vbrt.kernels.cuda.launch_table import WIDE, Gpu
from vbrt.kernels.cuda.rounded import fp8
from vbrt.kernels.cuda.table import linear as table_linear
from vbrt.kernels.cuda.trellis import linear as trellis_linear
from vbrt.kernels.cuda.whole import linear as whole_linear
from vbrt.kernels.experts import ExpertPages, Gate
from vbrt.kernels.step_rules import NormRule, Part, RouteRule

__all__ = [
    "MOST_STACK_BYTES",
    "TARGETS",
    "Code",
    "Compiled",
    "Fault",
    "amd_codes",
    "amd_target",
    "codes_for",
    "compiled",
    "faults",
    "main",
    "report",
]

RESULT = ROOT / "benchmarks" / "results" / "compile-sweep.json"
#: capability -> a GPU of it
TARGETS = {
    75: Gpu(7, 40, 64 << 10, 64 << 10, 0.29e6, 1400, 460, 460),  # T4
    80: Gpu(8, 108, 164 << 10, 163 << 10, 1.4e6, 1270, 920, 920),  # A100
    86: Gpu(8, 28, 100 << 10, 99 << 10, 0.32e6, 1600, 230, 230),  # RTX 3060
    89: Gpu(8, 128, 100 << 10, 99 << 10, 0.9e6, 2270, 230, 230),  # RTX 4090
    90: Gpu(9, 132),  # H100
    100: Gpu(10, 148, 228 << 10, 227 << 10, 7.2e6, 1700, 920, 3700),  # B200
    120: Gpu(12, 170, 100 << 10, 99 << 10, 1.6e6, 2170, 230, 230),  # RTX 5090
}
_REGISTERS = 65536  # of a program: a multiprocessor's
#: bytes of a thread's stack, which has what was spilled from registers: as many as the persistent kernel may have
MOST_STACK_BYTES = 96
_META = torch.device("meta")
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


class Code(NamedTuple):
    """A kernel's specialization, as Triton asks to compile it."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Family, file and function of the kernel."""
        return f"{self.kernel.fn.__module__.removeprefix('vbrt.kernels.cuda.')}.{self.kernel.fn.__name__}"

    @property
    def arguments(self) -> str:
        """Constants and pointers' dtypes by name, and warps."""
        names = list(self.signature)
        constants = {names[at[0]]: value for at, value in self.constants.items()}
        pointers = {name: type for name, type in self.signature.items() if str(type).startswith("*")}
        return f"{constants} {pointers} warps: {self.options['num_warps']}"


class Compiled(NamedTuple):
    """Resources of machine code: of a program shared memory, of a thread registers and stack; threads of a program."""

    shared_bytes: int
    registers: int
    stack_bytes: int
    threads: int


# -- launches on a GPU that is not there ------------------------------------------------------------------------------


def codes_for(capability: int) -> list[Code]:
    """Return the code that launches on a GPU of this capability need, each once, in order of the first launch."""
    codes: dict[Any, Code] = {}
    with _noted(capability, codes):
        for case in _cases(capability):
            case()
    return list(codes.values())


def amd_codes(architecture: str) -> list[Code]:
    """Return the code that launches of plain Triton need on an AMD GPU, such as gfx942, each once."""
    codes: dict[Any, Code] = {}
    with _noted(75, codes, amd_target(architecture)):
        for family in _FAMILIES[devices.TRITON]:
            for case in family(75):
                case()
    return list(codes.values())


def amd_target(architecture: str) -> Any:
    """Triton's target; CDNA has wavefronts of 64 lanes, RDNA of 32."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)


@contextlib.contextmanager
def _noted(capability: int, codes: dict[Any, Code], target: Any = None) -> Iterator[None]:
    """Note what launches in the block would compile, for another target than NVIDIA's if given; they run nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target = target or GPUTarget("cuda", capability, 32)
    number = hash(target)  # as Triton knows the device: its caches of a kernel are per device
    active = SimpleNamespace(
        get_current_device=lambda: number, get_current_stream=lambda *_: 0, get_current_target=lambda: target
    )

    def note(kernel, key, signature, device, constants, options, attributes, warmup):  # type: ignore[no-untyped-def]
        code = Code(kernel, signature, constants, attributes, options.__dict__)
        codes.setdefault((code.name, str(key)), code)

    def launch(self, device, grid, tensors, numbers, *, warps, registers=None, specialized=(), **constants):  # type: ignore[no-untyped-def]
        self._check(constants)
        self._kernel[grid](*tensors, *numbers, **self._with_options(constants, warps, registers))

    def launch_on_gpu(self, programs, tensors, numbers, *, warps, **constants):  # type: ignore[no-untyped-def]
        launch(self._launcher, 0, (programs, 1), tensors, numbers, warps=warps, **constants)

    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (driver, "_active", active),
            (JITFunction, "_do_compile", note),
            (launcher.Launcher, "__call__", launch),
            (residency._Launch, "__call__", launch_on_gpu),
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
            (devices, "capability", lambda index: divmod(capability, 10)),
            (devices, "gpu", lambda index: TARGETS[capability]),
            (tuned_configs, "tuned", lambda index: {}),
            (table_linear, "nf4_levels", lambda index: _empty(16, dtype=_FP32)),
            (table_linear, "int4_levels", lambda index: _empty(16, dtype=_FP32)),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        yield


def _empty(*shape: int, dtype: torch.dtype = _BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=_META)


def _tiled(format: str, n: int, k: int) -> TiledWeight:
    return TiledWeight(_empty(*tile_shape(format, (n, k)), dtype=torch.int32), _empty(1, dtype=_FP32), format, n, k)


_SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 2048), (1000, 330))
_TOKENS = (1, 2, 8, 13, 16, 33, 64, 100, 320, 1000)
_EPILOGUES = (("none", False), ("gelu", True), ("silu", False))


def _cases(capability: int) -> Iterator[Callable[[], Any]]:
    """Launches of every family that a GPU of this capability runs."""
    for needs, families in _FAMILIES.items():
        for family in families if divmod(capability, 10) >= needs.capability else ():
            yield from family(capability)


def _linears(capability: int) -> Iterator[Callable[[], Any]]:
    for format, (n, k) in itertools.product(TILED, _SHAPES):
        weight = _tiled(format, n, k)
        tokens = [*((m, _BF16) for m in _TOKENS), *((m, dtype) for m in (1, 13, 100) for dtype in (_FP16, _FP32))]
        for (m, dtype), (activation, biased) in zip(tokens, itertools.cycle(_EPILOGUES), strict=False):
            bias = _empty(n, dtype=dtype) if biased else None
            yield partial(e2m1_linear.multiply, _empty(m, k, dtype=dtype), weight, bias, activation)
        for dtype in (_BF16, _FP16, _FP32):
            yield partial(launches.decode, weight, dtype)
        yield from _fused(format, n, k)


def _fused(format: str, n: int, k: int) -> Iterator[Callable[[], Any]]:
    for tokens in (1, 5, 16):
        gate, up, x = _tiled(format, n, k), _tiled(format, n, k), _empty(1, tokens, k)
        yield partial(fused_linear.siblings, x, [gate, up])
        if fused_linear.gates_in_one(_BF16, tokens, n, k):
            yield partial(fused_linear.gated, x, gate, up, "silu")
        if tokens == 1 and k % 8 == 0:
            norm = fused_linear.Norm(_empty(-(-k // 16), dtype=_FP32), 1e-5)
            yield partial(fused_linear.siblings, x, [gate, up, up], norm)
            yield partial(fused_linear.gated, x, gate, up, "silu", norm)
            yield partial(fused_linear.residual, x, gate, _empty(1, 1, n), _empty(n))
            yield partial(fused_linear.normed_sum, x, x, _empty(k), 1e-5)


def _coarse(format: str, n: int, k: int) -> dict[str, torch.Tensor]:
    fields = get_format(format).layout((n, k), _BF16).fields
    return {field.name: _empty(*field.shape, dtype=getattr(torch, field.dtype)) for field in fields}


def _decoders(capability: int) -> Iterator[Callable[[], Any]]:
    for (n, k), dtype in itertools.product(_SHAPES[-2:], (_BF16, _FP16, _FP32)):
        for format in table_linear.SERVED:
            yield partial(table_linear._decode_rows, *table_linear.weight_of(_coarse(format, n, k)), k, dtype)
        for format in whole_linear.FORMATS:
            planes = _coarse(format, n, k)
            yield partial(whole_linear._decode_codes, planes["codes"], planes["scales"], k, dtype)


def _products(capability: int) -> Iterator[Callable[[], Any]]:
    epilogues = itertools.cycle(_EPILOGUES)
    for (n, k), tokens in itertools.product((*_SHAPES[:1], *_SHAPES[-2:]), (1, 13, 32, 100, 320)):
        for format in table_linear.SERVED:
            activation, biased = next(epilogues)
            weight, bias = table_linear.weight_of(_coarse(format, n, k)), _empty(n) if biased else None
            yield partial(table_linear._product, _empty(tokens, k), *weight, bias, activation)
        for format in whole_linear.FORMATS:
            activation, biased = next(epilogues)
            planes, bias = _coarse(format, n, k), _empty(n) if biased else None
            yield partial(whole_linear._product, _empty(tokens, k), planes["codes"], planes["scales"], bias, activation)


def _trellis(capability: int) -> Iterator[Callable[[], Any]]:
    for (n, k), tokens in itertools.product((*_SHAPES[:1], *_SHAPES[-2:]), (1, 13, 32, 100)):
        coarse = _coarse("t3", n, k)
        yield partial(trellis_linear._product, _empty(tokens, k), *coarse.values(), None, "silu")
    for dtype in (_BF16, _FP16, _FP32):
        yield partial(trellis_linear._decode_codes, *coarse.values(), k, dtype)


def _merges(capability: int) -> Iterator[Callable[[], Any]]:
    n, k = shape = 1024, 2048
    sizes = {"low": (n, k), "nibbles": (n, k // 2), "side": (n,), "escapes": (n,), "starts": (n * k // 4096, 2)}
    types = {"low": torch.uint8, "nibbles": torch.uint8, "side": torch.int8, "escapes": torch.int16}
    for format, dtype in itertools.product((*TILED, *table_linear.FORMATS), (_BF16, _FP16)):
        fine = {name: _empty(*size, dtype=types.get(name, torch.int32)) for name, size in sizes.items()}
        yield partial(merge.merge, WeightPlanes(format, shape, dtype, _coarse(format, n, k), fine))
        if format in TILED:
            weight = _tiled(format, n, k)
            tiles = {e2m1_linear.TILES: weight.tiles, "tensor_scale": weight.scale}
            yield partial(merge.merge, WeightPlanes(format, shape, dtype, tiles, fine))
    for format in (*TILED, *table_linear.FORMATS):
        fields, lists = coded_fields(shape, get_format(format)), {"extra": (n,), "escapes": (n,)}
        fine = {
            name: _empty(*lists.get(name, size), dtype=getattr(torch, dtype)) for name, (dtype, size) in fields.items()
        }
        yield partial(merge.merge, WeightPlanes(format, shape, _BF16, _coarse(format, n, k), fine))
        if format in TILED:
            weight = _tiled(format, n, k)
            tiles = {e2m1_linear.TILES: weight.tiles, "tensor_scale": weight.scale}
            yield partial(merge.merge, WeightPlanes(format, shape, _BF16, tiles, fine))


def _encoders(capability: int) -> Iterator[Callable[[], Any]]:
    known = Range(3.0e38, 1.0)
    for format, dtype in itertools.product(TILED, (_BF16, _FP16, _FP32)):
        squares = _empty(1, 2048, dtype=_FP32)
        for given in (None, squares):
            yield partial(encode.launch_encode, get_format(format), _empty(1024, 2048, dtype=dtype), known, given)
    for format in TILED:
        coarse, weight = _coarse(format, 1024, 2048), _tiled(format, 1024, 2048)
        top = _empty(1, dtype=torch.uint8) if TILED[format].e8m0_scales else None
        yield partial(encode.launch_pack, coarse["codes"], coarse["scales"].view(torch.uint8), weight.tiles, top, 239)


def _fp8(capability: int) -> Iterator[Callable[[], Any]]:
    for format in TILED:
        yield partial(fp8.decode8, _tiled(format, 4096, 4096))
    for k in (330, 4096, 14336, 65536):
        yield partial(fp8.quantize, _empty(1000, k))


_GATES = (Gate("silu"), Gate("silu", interleaved=True, alpha=1.702, limit=7.0, shift=1.0), Gate("relu2", gated=False))


def _pages(format: str, shapes: dict[str, tuple[int, int]], experts: int) -> ExpertPages:
    layout = join_layouts({part: tile_layout(format, shape) for part, shape in shapes.items()})
    page, addresses = _empty(layout.nbytes, dtype=torch.uint8), _empty(experts, dtype=torch.int64)
    return ExpertPages(format, _BF16, shapes, layout, [page] * experts, addresses)


def _experts(capability: int) -> Iterator[Callable[[], Any]]:
    layers = ((128, 8, 2048, 768), (32, 4, 2880, 2880), (8, 2, 4096, 14336))
    for format, ((experts, k, hidden, inner), gate) in itertools.product(TILED, zip(layers, _GATES, strict=True)):
        rows = 2 * inner if gate.gated else inner
        pages = _pages(format, {"up": (rows, hidden), "down": (hidden, inner)}, experts)
        biased = gate.interleaved
        bias_up = _empty(experts, rows) if biased else None
        bias_down = _empty(experts, hidden) if biased else None
        for tokens, dtype in ((1, _BF16), (4, _BF16), (64, _BF16), (512, _BF16), (8, _FP16), (8, _FP32)):
            x, h = _empty(tokens, hidden, dtype=dtype), _empty(tokens * k, inner, dtype=dtype)
            ids, weights = _empty(tokens, k, dtype=torch.int64), _empty(tokens, k, dtype=dtype)
            yield partial(few_tokens.up, x, ids, pages, "up", gate, bias_up)
            yield partial(few_tokens.down, h, ids, weights, pages, "down", bias_down)
            if capability // 10 in WIDE:
                yield partial(many_tokens.up, x, ids, pages, part="up", gate=gate, bias_EN=bias_up)
                yield partial(many_tokens.down, h, ids, weights, pages, part="down", bias_EN=bias_down)
        yield partial(decoded_experts._decode, pages, "up", _empty(8, dtype=torch.int32), 0, 2)


def _row_experts(capability: int) -> Iterator[Callable[[], Any]]:
    formats, sizes = row_experts.FORMATS, itertools.cycle(((2048, 768), (2880, 2880)))
    for format, (hidden, inner) in zip(formats, sizes, strict=False):
        shapes = {"up": (2 * inner, hidden), "down": (hidden, inner)}
        layout = join_layouts({part: get_format(format).layout(shape, _BF16) for part, shape in shapes.items()})
        pages = ExpertPages(format, _BF16, shapes, layout, [None] * 32, _empty(32, dtype=torch.int64))
        for tokens, dtype in ((1, _BF16), (64, _BF16), (512, _BF16), (8, _FP32)):
            x, ids = _empty(tokens, hidden, dtype=dtype), _empty(tokens, 4, dtype=torch.int64)
            yield partial(row_experts._rows, x, ids, pages, "up", None, 4)
        yield partial(row_experts._decode_pages, pages, "down", _empty(64, dtype=torch.int32), 0, 2)
    for gate, dtype in itertools.product((Gate("silu"), Gate("gelu", interleaved=True)), (_BF16, _FP16, _FP32)):
        yield partial(gated_rows.gated_rows, _empty(64, 1536, dtype=_FP32), gate, dtype)


def _sums(capability: int) -> Iterator[Callable[[], Any]]:
    for dtype in (_BF16, _FP16, _FP32):
        ids, weights = _empty(64, 8, dtype=torch.int64), _empty(64, 8, dtype=dtype)
        yield partial(token_sums.weighted_sums, _empty(512, 2048, dtype=dtype), ids, weights, 64)


def _residency(capability: int) -> Iterator[Callable[[], Any]]:
    for experts, tokens in itertools.product((8, 64, 512), (16, 4096)):
        yield partial(pairs.group_pairs, _empty(tokens, 8, dtype=torch.int32), experts, 64)
    for experts, slots, planes in ((64, 16, 1), (128, 100, 2), (512, 256, 1)):
        room = residency.PoolRoom(slots, 1 << 20, 64)
        layers = [residency.Experts(experts, 0)]
        sources = [[residency.Source(0, (1 << 20) // planes)] * planes] * experts
        tables = residency.ResidentTables(layers, [room], _empty(1).device, sources, one=4096)
        for tokens, scan in ((1, False), (64, False), (2048, True)):
            yield partial(tables.decide, 0, _empty(tokens, 8, dtype=torch.int64), scan=scan)
        for tokens in (1, 8):
            ids = _empty(tokens, 8, dtype=torch.int64)
            shares = residency.Shares(_empty(experts + 1, dtype=torch.int64), torch.empty_like(ids))
            yield partial(tables.decide, 0, ids, shares=shares)
        yield partial(tables.fetch, 0, 8)


def _kv(capability: int) -> Iterator[Callable[[], Any]]:
    for dtype, head in itertools.product((_BF16, _FP16), (64, 128, 256)):
        out = _empty(2, 8, 512, head, dtype=dtype)
        rows = _empty(2, dtype=torch.int64)
        for given in (None, rows):
            yield partial(
                kv_pages.copy, torch.empty(4, 2, 8, 128, head, dtype=dtype), torch.empty_like(out, device="cpu"), given
            )
            for bits, groups in itertools.product((8, 4), ((64, 1), (1, 32))):
                codes = _empty(4, 2, 8, 128, head * bits // 8, dtype=torch.uint8)
                bounds = _empty(4, 2, 2, 8, 128 // groups[0], head // groups[1])
                yield partial(kv_pages.decode, codes, bounds, kv_pages.Groups(*groups, bits), out, given)
        numbers = _empty(5, dtype=torch.int64)
        for bits, groups in itertools.product((8, 4), ((64, 1), (1, 64))):
            codes = _empty(4, 1, 8, 256, head * bits // 8, dtype=torch.uint8)
            bounds = _empty(4, 2, 1, 8, 256 // groups[0], head // groups[1])
            tokens = _empty(5, 8, head, dtype=dtype)
            yield partial(kv_pages.gather, codes, bounds, kv_pages.Groups(*groups, bits), tokens, numbers, numbers)


def _step(capability: int) -> Iterator[Callable[[], Any]]:
    for dtype in (_BF16, _FP16, _FP32):
        for k in (64, 4096, 14336):
            x = _empty(1, 1, k, dtype=dtype)
            for gain, rounds in ((None, True), (_empty(k, dtype=dtype), True), (_empty(k, dtype=dtype), False)):
                for other in (None, x):
                    yield partial(step_ops.norm_rows, x, other, NormRule(gain, 1e-5, 0.0, rounds))
        for head, turned, normed in ((64, 64, False), (128, 128, False), (128, 128, True), (96, 32, False)):
            query, key, value = (_empty(1, 1, heads, head, dtype=dtype).transpose(1, 2) for heads in (32, 8, 8))
            cos, keys = _empty(1, 1, turned, dtype=dtype), _empty(1, 8, 1024, head, dtype=dtype)
            norm = NormRule(_empty(head, dtype=dtype), 1e-6) if normed else None
            parts, at = [Part(query, norm), Part(key, norm)], _empty(1, dtype=torch.int64)
            yield partial(step_ops.rotate, parts, cos, cos)
            yield partial(step_ops.rotate, parts, cos, cos, step_ops.Store(value, keys, keys, at))
        for experts, rule in ((64, RouteRule(8, True, False, dtype)), (128, RouteRule(8, False, True, _FP32))):
            yield partial(step_ops.route, _empty(1, experts, dtype=dtype), rule)
        for head, length in itertools.product((64, 96, 128, 256, 512), (4096, 16384)):
            q, k = _empty(1, 32, 1, head, dtype=dtype), _empty(1, 8, length, head, dtype=dtype)
            mask = _empty(1, 1, 1, length, dtype=torch.bool) if length == 4096 else None
            yield partial(step_ops.attend, q, k, k, mask, 0.1)


_FAMILIES = {
    devices.TRITON: (_decoders, _merges, _encoders, _residency, _kv),
    devices.PTX: (_sums, _step),
    devices.BF16: (_linears, _products, _trellis, _experts, _row_experts),
    devices.E4M3: (_fp8,),
}


# -- compiling --------------------------------------------------------------------------------------------------------


def compiled(code: Code, capability: int) -> Compiled:
    """Compile to machine code. Raises what Triton does if the target lacks an instruction."""
    import triton
    from triton.backends.compiler import GPUTarget

    source = code.kernel.ASTSource(code.kernel, code.signature, code.constants, code.attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=code.options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"\b{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))
    threads = re.search(r"\.(?:maxntid|reqntid) (\d+)", binary.asm["ptx"])
    return Compiled(binary.metadata.shared, registers, stack, int(threads[1]))


class Fault(NamedTuple):
    """A limit that machine code exceeds, and how many times; or, infinitely, that there is none."""

    said: str
    times: float


def faults(found: Compiled | BaseException, capability: int) -> list[Fault]:
    """Return which limits machine code exceeds, or why there is none."""
    if isinstance(found, BaseException):
        return [Fault(f"{type(found).__name__}: {found}", math.inf)]
    limits = (
        (found.shared_bytes, TARGETS[capability].most_shared_bytes, "bytes of shared memory"),
        (found.registers * found.threads, _REGISTERS, "registers of a program"),
        (found.stack_bytes, MOST_STACK_BYTES, "bytes of stack of a thread"),
    )
    return [
        Fault(f"{taken} {what}; expected at most {most}", taken / most) for taken, most, what in limits if taken > most
    ]


# -- the table --------------------------------------------------------------------------------------------------------

_TO_COMPILE: list[Code] = []  # inherited by forked processes: a kernel cannot be pickled


def _compile(at: int, capability: int) -> Compiled:
    return compiled(_TO_COMPILE[at], capability)


def _compile_all(codes: Sequence[Code], capability: int, jobs: int) -> list[Compiled | BaseException]:
    """Compile in processes; stops early if one of them ends."""
    _TO_COMPILE[:] = codes
    found: list[Compiled | BaseException] = []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        for each in [pool.submit(_compile, at, capability) for at in range(len(codes))]:
            error = each.exception()
            found.append(each.result() if error is None else error)
            if isinstance(error, BrokenProcessPool):  # LLVM ends the process if it cannot select an instruction
                found[-1] = BrokenProcessPool("a process ended while this or a later launch compiled")
                break
    return found


def report(codes: Sequence[Code], found: Sequence[Compiled | BaseException], capability: int) -> list[str]:
    """Return two lines for each kernel with faults: in how many launches, and the worst of them."""
    wrong: dict[str, list[tuple[float, str]]] = {}
    for code, each in zip(codes, found, strict=False):
        if exceeded := faults(each, capability):
            said = "; ".join(fault.said for fault in exceeded)
            case = max(fault.times for fault in exceeded), f"{said}\n    {code.arguments}"
            wrong.setdefault(code.name, []).append(case)
    start = f"sm_{capability}: "
    return [f"{start}{name}: {len(cases)} launches, at worst {max(cases)[1]}" for name, cases in wrong.items()]


def _row(capability: int, launches: int, codes: Sequence[Code], found: Sequence[Any]) -> dict[str, Any]:
    """A target's row: of its launches, those compiled."""
    import triton

    return {
        "target": f"sm_{capability}",
        "launches": launches,
        "compiled": len(found),
        "kernels": len({code.name for code in codes}),
        "max_shared_bytes": max(each.shared_bytes for each in found),
        "shared_limit_bytes": TARGETS[capability].most_shared_bytes,
        "max_registers": max(each.registers for each in found),
        "max_registers_of_a_program": max(each.registers * each.threads for each in found),
        "with_stack": sum(each.stack_bytes > 0 for each in found),
        "max_stack_bytes": max(each.stack_bytes for each in found),
        "triton": triton.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "targets", metavar="80", type=int, nargs="*", default=list(TARGETS), help="all, if none is named"
    )
    parser.add_argument("--stride", metavar="N", type=int, default=16, help="compile every N-th launch (16)")
    parser.add_argument("--all", action="store_true", help="compile every launch")
    parser.add_argument("--jobs", metavar="N", type=int, default=os.cpu_count(), help="processes (one for each core)")
    args = parser.parse_args()
    rows = {row["target"]: row for row in json.loads(RESULT.read_text())["rows"]} if RESULT.exists() else {}
    wrong = False
    for capability in args.targets:
        codes = codes_for(capability)
        some = codes[:: 1 if args.all else args.stride]
        found = _compile_all(some, capability, args.jobs)
        rows.pop(f"sm_{capability}", None)
        if lines := report(some, found, capability):
            wrong = True
            print(*lines, sep="\n", flush=True)
        else:
            row = _row(capability, len(codes), some, found)
            print(json.dumps(row), flush=True)
            rows[row["target"]] = row
        ordered = sorted(rows.values(), key=lambda row: int(row["target"].removeprefix("sm_")))
        RESULT.write_text(json.dumps({"stack_limit_bytes": MOST_STACK_BYTES, "rows": ordered}, indent=1) + "\n")
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
