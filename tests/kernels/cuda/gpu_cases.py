"""What the GPU tests of the kernels share: weights in tile order, poisoned memory, errors, offline compilation."""

import torch

from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels.cuda.e2m1.linear import packing
from vbrt.libraries.triton_api import fp_fusion


def tiled(name, shape, dtype=torch.bfloat16, device="cuda"):
    """(planes in tile order, the weight they stand for in float64)."""
    fmt = get_format(name)
    coarse = fmt.encode(torch.randn(shape, device=device) * 0.03)
    if name == "nvfp4":
        coarse["tensor_scale"] *= 1.2345  # published checkpoints: not a power of two
    planes = WeightPlanes(name, shape, dtype, packing(name).pack(coarse, shape))
    return planes, fmt.decode(coarse, shape, torch.float64)


def poison():
    """Fill what the allocator will hand out next with NaN."""
    torch.full((1 << 24,), float("nan"), device="cuda")


def replayed(call):
    """The result of a call from a graph of it that is replayed, not from its capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    result.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()  # the graph goes with this call
    return result


def error(y, want):
    return ((y.double() - want).norm() / want.norm()).item()


def compiled(kernel, types, constants, capability, *, warps=4, aligned=(), gluon=True, fused=True):
    """A kernel compiled for a GPU that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kinds, names = {**types, **dict.fromkeys(constants, "constexpr")}, kernel.arg_names
    source = (GluonASTSource if gluon else ASTSource)(
        fn=kernel,
        signature={name: kinds[name] for name in names},
        constexprs={(names.index(key),): value for key, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, **fp_fusion(fused)}
    )


def compiled_gated(capability, groups, squares, warps, format="nvfp4"):
    """The kernel of a gated pair for `groups` of 8 tokens; with `squares` it also applies a norm's factor."""
    from vbrt.kernels.cuda.e2m1 import fused_linear_gluon

    types = {
        "x_ptr": "*bf16",
        "tile_ptr": "*i32",
        "scale_ptr": "*fp32",
        "other_ptr": "*i32",
        "other_scale_ptr": "*fp32",
        "square_ptr": "*fp32",
        "y_ptr": "*bf16",
    }
    types |= {**dict.fromkeys(("M", "N", "K", "columns", "x_stride", "y_stride"), "i32"), "eps": "fp32"}
    constants = {
        "ROW_TILES": 1,
        "TOKEN_GROUPS": groups,
        "K_WARPS": warps,
        "PREFETCH": True,
        "E8M0_SCALES": format == "mxfp4",
        "ALL_TOKENS": False,
        "K_TAIL": False,
        "ACTIVATION": "silu",
        "SQUARES": squares,
        "DEPENDENT": capability >= 90,
    }
    aligned = ("x_ptr", "tile_ptr", "other_ptr", "y_ptr", "K", "x_stride", "y_stride")
    return compiled(fused_linear_gluon.gated_kernel, types, constants, capability, warps=warps, aligned=aligned)
