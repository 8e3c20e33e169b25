import math

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cuda.gpu_cases import compiled, error, poison, replayed
from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import KERNELS, reference, resolve
from vbrt.kernels.cuda.table import linear as table_linear

NAMES = table_linear.FORMATS
LEVELS = ("levels16-float16", "levels32-float16", "levels64-float32", "levels128-bfloat16")
SYMMETRIC = ("symmetric16-float16", "symmetric32-float16", "symmetric128-bfloat16", "symmetric64-float32")
AFFINE = (
    "superblock32",
    "affine16-bfloat16",
    "affine32-float16",
    "affine64-float32",
    "signed32-bfloat16",
    "signed64-float32",
    "zeros64-float32",
    "zeros128-float16",
)
SERVED = (*NAMES, *LEVELS, *SYMMETRIC, *AFFINE)


def case(name, shape, dtype=torch.bfloat16, device="cuda"):
    fmt = get_format(name)
    coarse = fmt.encode(torch.randn(shape, device=device) * 0.03)
    return WeightPlanes(name, shape, dtype, coarse), fmt.decode(coarse, shape, torch.float64)


@pytest.mark.parametrize("name", SERVED)
def test_without_a_gpu_tables_go_through_the_reference(name):
    planes, _ = case(name, (24, 200), torch.float32, "cpu")
    x = torch.randn(3, 200)
    assert table_linear.route(x, planes) == "reference"
    assert torch.equal(table_linear.decode_weight(planes), reference.decode_weight(planes))
    assert torch.equal(table_linear.linear(x, planes, None, "silu"), reference.linear(x, planes, None, "silu"))


def test_table_formats_keep_their_pages_as_they_are():
    (kernel,) = (kernel for kernel in KERNELS if kernel.run is table_linear.linear)
    for name in SERVED:
        assert name in kernel.formats and kernel.runs_unpacked and kernel.page_order(name) is None


@matrix(signed=dict(zip(NAMES, [False, True], strict=True)), capability=[80, 100, 90, 120], at_most=1)
def test_the_table_decoder_compiles_with_wide_stores(capability, signed):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.table import decode_triton as table_triton

    types = {"code_ptr": "*u8", "block_ptr": "*u8", "offset_ptr": "*u8", "w_ptr": "*bf16"}
    types |= dict.fromkeys(("level_ptr", "scale_ptr", "least_ptr"), "*fp32") | dict.fromkeys(
        ("N", "K", "blocks"), "i32"
    )
    constants = {"ROWS": 1, "BLOCKS": 64, "BLOCK": 64, "SIGNED": signed, "OFFSETS": "none"}
    binary = compiled(
        table_triton.decode_kernel, types, constants, capability, aligned=("code_ptr", "w_ptr", "K"), gluon=False
    )
    assert binary.asm["ptx"].count("st.global.v4") == 4


def fused_ptx(capability, constants, **types):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.table import linear_gluon as table_gluon

    types = {
        "x_ptr": "*bf16",
        "code_ptr": "*i32",
        "block_ptr": "*u8",
        "level_ptr": "*fp32",
        "scale_ptr": "*fp32",
        "offset_ptr": "*u8",
        "least_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "y_ptr": "*bf16",
        **dict.fromkeys(("M", "N", "K", "blocks"), "i32"),
        "x_stride": "i32",
        "y_stride": "i32",
        **types,
    }
    constants = {
        "TOKEN_GROUPS": 2,
        "ROW_TILES": 1,
        "K_WARPS": 8,
        "SIGNED": False,
        "RAGGED": False,
        "K_TAIL": True,
        "SPREAD": False,
        "DEPENDENT": capability >= 90,
        "ACTIVATION": "gelu",
        "HAS_BIAS": True,
        **constants,
    }
    aligned = ("x_ptr", "code_ptr", "y_ptr", "K", "x_stride", "y_stride")
    return compiled(table_gluon.linear_kernel, types, constants, capability, warps=8, aligned=aligned).asm["ptx"]


@matrix(signed=dict(zip(NAMES, [False, True], strict=True)), capability=[80, 100, 90, 120], at_most=1)
def test_the_fused_table_kernel_compiles(capability, signed):
    ptx = fused_ptx(capability, {"BLOCK": 64, "OFFSETS": "none", "SIGNED": signed})
    assert ptx.count("mma.sync") == 16 and ptx.count("prmt.b32") >= 2 * 8 * 8


@matrix(capability=[80, 100, 90, 120], at_most=1)
def test_codes_with_offsets_compile_to_few_instructions(capability):
    ptx = fused_ptx(capability, {"BLOCK": 32, "OFFSETS": "superblock"}, scale_ptr="*fp16", least_ptr="*fp16")
    # products, and sums of x; a permutation and a logical operation for two weights, in eight words of codes
    assert ptx.count("mma.sync") == 2 * 16 and ptx.count("0x43004300, 0xEA") == 8 * 4
    assert ptx.count("ld.global.v4") == 8  # of activations: two token groups, two groups of columns, two blocks


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_table_decoded_weights_are_the_references_bits(name, dtype):
    for shape in ((256, 512), (77, 2730), (300, 1000), (3, 20)):
        planes, _ = case(name, shape, dtype)
        poison()
        assert torch.equal(table_linear.decode_weight(planes), reference.decode_weight(planes))


def bound(roundings):
    """Largest relative error of norms after so many roundings to bf16, taken as independent.

    One is at most uniform within 2^-8 of a value, of mantissas just above a power of two: an RMS of 2^-8 / sqrt(3).
    """
    return 2**-8 * math.sqrt(roundings / 3)


def roundings(tokens, route, activation):
    """What is rounded to bf16: of fp32 sums only the result, whatever the epilogue."""
    if route != "decode+matmul":
        return 2 if tokens <= table_linear.FUSED_TOKENS else 4  # level and result; also scale, and their product
    # weight, the library's partial sums where it splits K, product, product with bias; then the activation
    return 4 if activation == "none" else 5


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(200, 416), (256, 512), (77, 2730), (1024, 4096), (4160, 1024)], ids=str)
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("capability", [None, (8, 0)], indirect=True)
def test_table_linear_matches_float64(name, shape, capability):
    planes, weight = case(name, shape)
    for tokens in (1, 3, 8, 9, 16, 21, 32, 33, 64, 300):
        x = torch.randn(tokens, 2 * shape[1], device="cuda", dtype=torch.bfloat16)
        x = x[:, ::2] if tokens % 2 else x[:, : shape[1]]
        bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
        want, route = x.double() @ weight.T + bias.double(), table_linear.route(x, planes)
        for activation, exact in (("none", want), ("silu", F.silu(want))):
            poison()
            y = table_linear.linear(x, planes, bias, activation)
            assert error(y, exact) < bound(roundings(tokens, route, activation)), (tokens, route, activation)


@pytest.mark.gpu
def test_table_linear_refuses_what_makes_no_sense():
    planes, _ = case("nf4", (200, 416))
    x = torch.randn(2, 416, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(KernelError, match="expected"):
        table_linear.linear(x[:, :400], planes)
    with pytest.raises(KernelError, match="swish"):
        table_linear.linear(x, planes, None, "swish")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED)
def test_table_gradients_graphs_and_compile(name):
    planes, weight = case(name, (256, 512))
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    table_linear.linear(x, planes).backward(dy)
    assert error(x.grad, dy.double() @ weight) < 4e-3
    with torch.no_grad():
        want = table_linear.linear(x, planes, None, "gelu")
        assert torch.equal(replayed(lambda: table_linear.linear(x, planes, None, "gelu")), want)
        assert all(torch.equal(table_linear.linear(x, planes, None, "gelu"), want) for _ in range(10))
        args = tuple(table_linear.weight_of(planes.coarse))
        torch.library.opcheck(torch.ops.vbrt.table_linear, (x.detach(), *args, None, "gelu"))
        torch.library.opcheck(torch.ops.vbrt.table_decode, (*args, 512, torch.bfloat16))
        torch.compiler.reset()  # one case of this code each: together they exceed Dynamo's limit
        run = torch.compile(lambda v: table_linear.linear(v, planes, None, "gelu"), fullgraph=True)
        torch.testing.assert_close(run(x), want, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED)
def test_a_gpu_resolves_table_formats_to_their_kernels(name):
    assert resolve("linear", "auto", torch.device("cuda"), name).run is table_linear.linear
    assert resolve("decode_weight", "auto", torch.device("cuda"), name).run is table_linear.decode_weight
