"""What the GPU tests of the kernels share: weights in tile order, poisoned memory, errors, offline compilation."""

import torch

from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels.cuda.e2m1.linear import packing


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


def error(y, want):
    return ((y.double() - want).norm() / want.norm()).item()


def compiled(kernel, types, constants, capability, *, warps=4, aligned=(), gluon=True):
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
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
