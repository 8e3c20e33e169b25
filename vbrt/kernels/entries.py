"""Kernel table: every implementation in the package as one record; answers "which kernel runs?"."""

import functools
from collections.abc import Callable
from typing import Any

from vbrt.formats import code_fine, split_fine
from vbrt.host import accelerator
from vbrt.kernels import experts, reference, update
from vbrt.kernels.cpu import build as cpu_build
from vbrt.kernels.cpu import encode as cpu_encode
from vbrt.kernels.cpu import experts as cpu_experts
from vbrt.kernels.cpu import int8 as cpu_int8
from vbrt.kernels.cpu import linear as cpu_linear
from vbrt.kernels.cpu import small_batch_linear
from vbrt.kernels.cpu import split as cpu_split
from vbrt.kernels.cpu import trellis as cpu_trellis
from vbrt.kernels.cpu import update as cpu_update
from vbrt.kernels.cuda import devices, tuned_configs
from vbrt.kernels.cuda.e2m1 import encode as e2m1_encode
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.e2m1.tiles import FORMATS as TILE_FORMATS
from vbrt.kernels.cuda.experts import decoded_experts, expert_kernels, row_experts, token_sums
from vbrt.kernels.cuda.fine import merge
from vbrt.kernels.cuda.plain import linear as plain_linear
from vbrt.kernels.cuda.rounded import fp8 as fp8_linear
from vbrt.kernels.cuda.table import linear as table_linear
from vbrt.kernels.cuda.trellis import linear as trellis_linear
from vbrt.kernels.cuda.trellis import viterbi
from vbrt.kernels.cuda.whole import linear as whole_linear
from vbrt.kernels.ordered_columns import ordered
from vbrt.kernels.registry import EXACT, Kernel, Needs, register

__all__ = ["KERNELS", "fused_on"]


def _triton(op: str, needs: Needs = devices.TRITON, **fields: Any) -> Kernel:
    """A kernel in Triton or Gluon, on GPUs that have what it needs."""
    fields = {"rank": 1, "reads_resident_planes": True, "devices": (accelerator.CUDA,), **fields}
    return Kernel(op, "triton", needs=needs, refusal=lambda d: devices.refusal(d, needs), **fields)


_reference = functools.partial(Kernel, backend="reference", runs_unpacked=True)
_compiled = functools.partial(Kernel, backend="compiled", devices=("cpu",))
_built = functools.partial(
    _compiled,
    formats=(*cpu_linear.FORMATS, *cpu_linear.LEVELS, *cpu_linear.AFFINE, *cpu_linear.BYTES, *cpu_linear.EIGHT, EXACT),
    rank=1,
    refusal=cpu_build.refusal,
    builds=True,
    runs_unpacked=True,
    merges=lambda format, shape: True,
)
_built_experts = functools.partial(
    _compiled,
    formats=cpu_experts.FORMATS,
    rank=1,
    refusal=functools.partial(cpu_build.refusal, source="experts"),
    builds=True,
    runs_unpacked=True,
)
_built_update = functools.partial(_compiled, rank=1, refusal=cpu_update.refusal, builds=True)
_tiled = functools.partial(_triton, formats=tuple(TILE_FORMATS), page_order=e2m1_linear.packing)
_tables = functools.partial(_triton, formats=table_linear.SERVED, runs_unpacked=True)
_wholes = functools.partial(_triton, formats=whole_linear.FORMATS, runs_unpacked=True)
_trellis = functools.partial(
    _triton, needs=trellis_linear.FUSED_NEEDS, formats=trellis_linear.FORMATS, runs_unpacked=True
)
_plain = functools.partial(_triton, formats=plain_linear.FORMATS, runs_unpacked=True)
_unmeasured = functools.partial(functools.partial, tuned_configs.unmeasured)


def _decoding(record: Callable[..., Kernel], decode: Callable[..., Any]) -> tuple[Kernel, ...]:
    """MoE ops that `decode` one expert's matrices at a time."""
    functions = {"experts_up": experts.experts_up, "experts_down": experts.experts_down}
    return tuple(record(op, run=functools.partial(run, decode=decode)) for op, run in functions.items())


KERNELS = (
    _reference("codec", run=reference.codec),
    _compiled("codec", run=reference.codec),
    _compiled("codec", run=cpu_encode.codec, formats=cpu_encode.FORMATS, rank=1),
    _compiled("codec", run=cpu_trellis.codec, formats=cpu_trellis.FORMATS, rank=1),
    _triton("codec", run=reference.codec),
    _triton("codec", run=viterbi.codec, formats=trellis_linear.FORMATS),
    _reference("split_fine", run=split_fine),
    _compiled("split_fine", run=cpu_split.split, rank=1),
    _triton("split_fine", run=split_fine),
    _reference("code_fine", run=code_fine),
    _compiled("code_fine", run=cpu_split.code, rank=1),
    _triton("code_fine", run=code_fine),
    _reference("encode_many", run=reference.encode_many),
    _compiled("encode_many", run=reference.encode_many),
    _compiled("encode_many", run=cpu_encode.encode_many, formats=cpu_encode.FORMATS, rank=1),
    _compiled("encode_many", run=cpu_trellis.encode_many, formats=cpu_trellis.FORMATS, rank=1),
    _triton("encode_many", run=reference.encode_many),
    _triton("encode_many", run=viterbi.encode_many, formats=trellis_linear.FORMATS),
    _tiled("encode_many", run=e2m1_encode.encode_many),
    _reference("decode_weight", run=reference.decode_weight),
    _reference("linear", run=reference.linear),
    _built("decode_weight", run=cpu_linear.decode_weight, turned=cpu_linear.decode_turned, rows=cpu_linear.decode_rows),
    _built("linear", run=cpu_linear.linear, rounded={"int8": cpu_int8.linear}, few=small_batch_linear.few),
    _built_experts("experts_up", run=cpu_experts.experts_up, rounded={"int8": cpu_int8.experts_up}),
    _built_experts("experts_down", run=cpu_experts.experts_down, rounded={"int8": cpu_int8.experts_down}),
    # nothing to decode or build: torch's matmul
    _compiled("decode_weight", run=reference.decode_weight, formats=("dense",), rank=-1),
    _compiled("linear", run=reference.linear, formats=("dense",), rank=-1),
    # EXACT merges both planes; for what is in none of these formats it is the reference's product
    _triton("decode_weight", run=e2m1_linear.decode_weight),
    _triton("linear", run=e2m1_linear.linear, merges=merge.serves_shape),
    _tiled("decode_weight", e2m1_linear.NEEDS, run=e2m1_linear.decode_weight),
    _tiled(
        "linear",
        e2m1_linear.NEEDS,
        run=e2m1_linear.linear,
        gradient=e2m1_linear.gradient,
        rounded={"fp8": fp8_linear.linear},
        code_of=e2m1_linear.code_of,
        unmeasured=_unmeasured("linear", "4-bit kernels"),
    ),
    _tables("decode_weight", run=table_linear.decode_weight),
    _tables(
        "linear",
        run=table_linear.linear,
        prepare=table_linear.prepare,
        fused_needs=table_linear.FUSED_NEEDS,
        unmeasured=_unmeasured("table", "kernels of levels"),
    ),
    _wholes("decode_weight", run=whole_linear.decode_weight),
    _wholes(
        "linear",
        run=whole_linear.linear,
        fused_needs=whole_linear.FUSED_NEEDS,
        unmeasured=_unmeasured("whole", "8-bit kernels"),
    ),
    _trellis("decode_weight", run=trellis_linear.decode_weight),
    _trellis("linear", run=trellis_linear.linear),
    _plain("decode_weight", run=plain_linear.decode_weight),
    _plain("linear", run=plain_linear.linear, fused_needs=plain_linear.FUSED_NEEDS),
    *_decoding(_reference, reference.decode_weight),
    *_decoding(_triton, e2m1_linear.decode_weight),
    *(
        _triton(
            op,
            run=run,
            formats=row_experts.FORMATS,
            runs_unpacked=True,
            prepare=table_linear.prepare,
            by_address=row_experts.takes_addresses,
            decode_pages=row_experts.decode_pages,
        )
        for op, run in (("experts_up", row_experts.up), ("experts_down", row_experts.down))
    ),
    _tiled(
        "experts_up",
        expert_kernels.NEEDS,
        run=expert_kernels.up,
        by_address=expert_kernels.takes_addresses,
        decode_pages=decoded_experts.decode_pages,
        unmeasured=_unmeasured("expert", "expert kernels"),
    ),
    _tiled("experts_down", expert_kernels.NEEDS, run=expert_kernels.down),
    _reference("experts_sum", run=experts.weigh_and_sum),
    _built_experts("experts_sum", run=cpu_experts.weigh_and_sum),
    _tiled("experts_sum", token_sums.NEEDS, run=expert_kernels.weigh_and_sum),
    _reference("update", run=update.update),
    _reference("gradient_norm", run=update.gradient_norm),
    _built_update("update", run=cpu_update.update),
    _built_update("gradient_norm", run=cpu_update.gradient_norm),
    _reference("gradient_sum", run=update.gradient_sum),
    _built_update("gradient_sum", run=cpu_update.gradient_sum),
)

KERNELS += tuple(kernel for kernel in map(ordered, KERNELS) if kernel is not None)

for _kernel in KERNELS:
    register(_kernel)


def fused_on(format: str) -> frozenset[str]:
    """Return the device types, "cpu" or "cuda", with fused linear layers on a format."""
    own = [kernel for kernel in KERNELS if kernel.op == "linear" and format in (kernel.formats or ())]
    return frozenset(device for kernel in own for device in kernel.devices or ())
