import textwrap
from dataclasses import replace

import pytest
import torch

from tests import forked
from tests.kernels.cuda.gpu_cases import compiled
from tests.matrix import matrix
from vbrt.formats import WeightPlanes, code_fine, get_format, merge_fine, split_fine
from vbrt.formats.fine_plane import SPAN
from vbrt.kernels import resolve
from vbrt.kernels.cuda.e2m1.tiles import FORMATS as TILED
from vbrt.kernels.cuda.e2m1.tiles import pack_tiles
from vbrt.kernels.cuda.fine import merge
from vbrt.libraries.triton_api import fp_fusion

FORMATS = ("nvfp4", "mxfp4", "nf4", "quantile")


def planes_of(w, name, *, coded=False):
    coarse = get_format(name).encode(w)
    fine = (code_fine if coded else split_fine)(w, coarse, get_format(name))
    return WeightPlanes(name, tuple(w.shape), w.dtype, coarse, fine)


def tiled(planes):
    """The same weight with its coarse plane in the order of the fused kernels, where the format has one."""
    if planes.format not in TILED:
        return None
    return replace(planes, coarse=pack_tiles(planes.format, planes.coarse, planes.shape))


def test_starts_count_the_lists_entries_before_each_span():
    torch.manual_seed(0)
    w = (torch.randn(96, 128) * torch.exp(3 * torch.randn(96, 1))).bfloat16()
    planes = planes_of(w, "nf4")
    fine = planes.fine
    assert fine["starts"].shape == (3, 2) and not fine["starts"][0].any()
    for span in range(1, 3):
        codes = planes.coarse["codes"].view(-1)[: span * SPAN // 2]
        wide = ((codes & 15) == 7).sum() + ((codes >> 4) == 7).sum()
        assert int(fine["starts"][span, 0]) == int(wide) > 0
    low = fine["low"].view(-1)
    codes = torch.stack((planes.coarse["codes"] & 15, planes.coarse["codes"] >> 4), -1).view(-1)
    escaped = (low == 128) & (codes != 7)
    assert fine["starts"][1:, 1].tolist() == [int(escaped[: SPAN * span].sum()) for span in (1, 2)]
    assert int(escaped.sum()) == len(fine["escapes"]) > 0


def test_the_kernel_gives_every_bit_back_in_the_interpreter():
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    code = """
        import torch
        from tests.kernels.cuda.test_merge import FORMATS, TILED, planes_of, tiled
        from vbrt.kernels.cuda.fine import merge
        torch.manual_seed(0)
        for name in FORMATS:
            for dtype in (torch.bfloat16, torch.float16):
                w = (torch.randn(33, 640) * torch.exp(3 * torch.randn(33, 1))).to(dtype)
                w[0, :7], w[1, 5], w[2, 3], w[3, 0] = 0, -0.0, 1e-30, 6e-8
                planes = planes_of(w, name)
                for planes in (planes, tiled(planes))[: 1 + (name in TILED)]:
                    out = torch.full_like(w, float("nan"))
                    merge.launch(planes, out)
                    assert torch.equal(out.view(torch.int16), w.view(torch.int16)), (name, dtype)
        print("same bits")
    """
    done = forked.run(textwrap.dedent(code), interpreted=True)
    assert done.stdout.strip() == "same bits", done.stderr


def test_the_kernel_of_coded_planes_gives_every_bit_back_in_the_interpreter():
    pytest.importorskip("triton")
    code = """
        import torch
        from tests.kernels.cuda.test_merge import FORMATS, TILED, planes_of, tiled
        from vbrt.kernels.cuda.fine import merge
        torch.manual_seed(0)
        for name in FORMATS:
            for shape in ((33, 640), (32, 1024)):
                w = (torch.randn(shape) * torch.exp(3 * torch.randn(shape[0], 1))).bfloat16()
                w[0, :7], w[1, 5], w[2, 3], w[3, 0] = 0, -0.0, 1e-30, 6e-8
                planes = planes_of(w, name, coded=True)
                assert len(planes.fine["escapes"])
                for planes in (planes, tiled(planes))[: 1 + (name in TILED)]:
                    for read in merge.READS:
                        out = torch.full_like(w, float("nan"))
                        merge.launch_coded(planes, out, read=read)
                        assert torch.equal(out.view(torch.int16), w.view(torch.int16)), (name, shape, read)
        print("same bits")
    """
    done = forked.run(textwrap.dedent(code), interpreted=True)
    assert done.stdout.strip() == "same bits", done.stderr


def places_of(weights, name, *, coded=False):
    """The planes of some weights, and where their fields lie, behind two columns of another matrix."""
    planes = [planes_of(w, name, coded=coded) for w in weights]
    rows, tensors = [], []
    for each in planes:
        levels, values, scale = get_format(name).tables(each.coarse)
        fields = {**each.coarse, **each.fine, "tensor_scale": scale, "levels": levels, "values": values}
        own = [fields.get(field, fields["starts"]) for field in (merge.CODED_FIELDS if coded else merge.FIELDS)]
        tensors.append(own)
        rows.append([0, 0, *(tensor.data_ptr() for tensor in own)])
    return tensors, torch.tensor(rows, device=weights[0].device)


def test_the_kernel_merges_many_experts_in_one_launch_in_the_interpreter():
    pytest.importorskip("triton")
    code = """
        import torch
        from tests.kernels.cuda.test_merge import FORMATS, places_of
        from vbrt.kernels.cuda.fine import merge
        torch.manual_seed(0)
        for name in FORMATS:
            for dtype, coded in ((torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)):
                w = (torch.randn(3, 32, 640) * torch.exp(3 * torch.randn(3, 32, 1))).to(dtype)
                held, places = places_of(w, name, coded=coded)
                experts, shape = torch.tensor([2, -1, 0]), (32, 640)
                out = merge.merge_experts(places, experts, shape, dtype, name, first=2, coded=coded)
                want = torch.stack((w[2], torch.zeros_like(w[1]), w[0]))
                assert torch.equal(out.view(torch.int16), want.view(torch.int16)), (name, dtype)
        print("same bits")
    """
    done = forked.run(textwrap.dedent(code), interpreted=True)
    assert done.stdout.strip() == "same bits", done.stderr


@matrix(width=[8, 12], capability=[80, 75, 90, 120], at_most=1)
def test_the_kernel_of_many_experts_compiles(capability, width):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.fine.merge_triton import merge_experts_kernel

    types = {"place_ptr": "*i64", "expert_ptr": "*i64", "out_ptr": "*i16"}
    types |= dict.fromkeys(("total", "columns", "first", "fields"), "i32")
    constants = {"SPAN": SPAN, "BLOCK": 16, "WIDE_CODES": 0x101, "WIDTH": width, "E2M1": True, "WHOLE": True}
    aligned = ("out_ptr", "total", "columns")
    done = compiled(merge_experts_kernel, types, constants, capability, warps=8, aligned=aligned, gluon=False)
    assert "ld.global.v4.b32" in done.asm["ptx"] and "st.global.v4.b32" in done.asm["ptx"]


@matrix(capability=[90, 80, 75, 120], at_most=1)
def test_the_kernel_of_many_coded_experts_compiles(capability):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.fine.coded_triton import coded_experts_kernel

    types = {"place_ptr": "*i64", "expert_ptr": "*i64", "out_ptr": "*i16"}
    types |= dict.fromkeys(("total", "columns", "first", "fields"), "i32")
    constants = merge._coded_constants("nvfp4", SPAN)
    aligned = ("out_ptr", "total", "columns")
    done = compiled(coded_experts_kernel, types, constants, capability, aligned=aligned, gluon=False)
    assert "st.global.v4.b32" in done.asm["ptx"]


@matrix(width=[8, 12], words=[0, 288], capability=[80, 100, 90, 120], at_most=3)
def test_the_kernel_compiles(capability, width, words):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from vbrt.kernels.cuda.fine.merge_triton import merge_kernel

    types = {
        "code_ptr": "*i32" if words else "*u8",
        "scale_ptr": "*u8",
        "tensor_scale_ptr": "*fp32",
        "level_ptr": "*fp32",
        "value_ptr": "*fp32",
        "low_ptr": "*u8",
        "nibble_ptr": "*u8",
        "side_ptr": "*i8",
        "escape_ptr": "*i16",
        "start_ptr": "*i32",
        "out_ptr": "*i16",
        "total": "i32",
        "columns": "i32",
    }
    constants = {
        "SPAN": SPAN,
        "BLOCK": 16,
        "WIDE_CODES": 0x101,
        "WIDTH": width,
        "TILE_WORDS": words,
        "E2M1": width == 8,
        "WHOLE": words == 0,
    }
    source = triton.compiler.ASTSource(
        fn=merge_kernel, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(fp_fusion(True)))
    assert "st.global" in compiled.asm["ptx"]


@matrix(read=merge.READS, words=[0, 288], capability=[90, 80, 100, 120], at_most=3)
def test_the_kernel_of_coded_planes_compiles(capability, words, read):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.fine.coded_triton import coded_kernel

    types = {"code_ptr": "*i32", "scale_ptr": "*u8", "tensor_scale_ptr": "*fp32", "four_ptr": "*i32"}
    types |= {"pair_ptr": "*i16", "extra_ptr": "*i32", "escape_ptr": "*i16", "start_ptr": "*i32", "cell_ptr": "*i32"}
    types |= {"out_ptr": "*i16", "total": "i32", "columns": "i32"}
    constants = {"SPAN": SPAN, "BLOCK": 16, "MANTISSAS": 8, "TILE_WORDS": words, "TOP_FIELD": 0, "SIGNED": False}
    constants |= {"WHOLE": words == 0, "READ": read}
    done = compiled(coded_kernel, types, constants, capability, aligned=tuple(types), gluon=False)
    assert "st.global.v4.b32" in done.asm["ptx"]


def test_what_the_kernel_does_not_serve_goes_to_the_reference():
    w = torch.randn(4, 128).bfloat16()
    assert not merge.serves(planes_of(w, "nvfp4"))  # on a CPU
    assert not merge.serves(WeightPlanes("dense", (4, 128), w.dtype, {"weight": w}, None))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 4096), (1, 64), (1000, 2752), (33, 100)])
def test_decode_on_a_gpu_gives_every_bit_back_without_a_synchronization(name, dtype, shape):
    torch.manual_seed(0)
    spread = torch.exp(2 * torch.randn(shape[0], 1, device="cuda"))
    w = (torch.randn(shape, device="cuda") * spread).to(dtype)
    planes = planes_of(w, name)
    decode = resolve("decode_weight", "auto", w.device)
    assert torch.equal(decode(planes).view(torch.int16), w.view(torch.int16))
    assert torch.equal(
        merge_fine(planes.coarse, planes.fine, get_format(name), shape, dtype).view(torch.int16), w.view(torch.int16)
    )
    if name in TILED and merge.serves(planes):
        assert torch.equal(decode(tiled(planes)).view(torch.int16), w.view(torch.int16))
    if merge.serves(planes):
        torch.cuda.set_sync_debug_mode("error")
        try:
            decode(planes)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        assert shape[1] % get_format(name).block


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(64, 4096), (1, 64), (1000, 2752), (33, 100), (4097, 4096)])
def test_a_coded_plane_on_a_gpu_gives_every_bit_back_without_a_synchronization(name, shape):
    torch.manual_seed(0)
    spread = torch.exp(2 * torch.randn(shape[0], 1, device="cuda"))
    w = (torch.randn(shape, device="cuda") * spread).bfloat16()
    planes = planes_of(w, name, coded=True)
    on_cpu = code_fine(w.cpu(), {field: t.cpu() for field, t in planes.coarse.items()}, get_format(name))
    assert all(torch.equal(planes.fine[field].cpu(), on_cpu[field]) for field in on_cpu)
    decode = resolve("decode_weight", "auto", w.device)
    for each in (planes, tiled(planes))[: 1 + (name in TILED and merge.serves(planes))]:
        assert torch.equal(decode(each).view(torch.int16), w.view(torch.int16))
        if merge.serves(each):
            torch.cuda.set_sync_debug_mode("error")
            try:
                decode(each)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(64, 4096), (33, 128), (1536, 2048)])
@pytest.mark.parametrize("coded", [False, True])
def test_many_experts_on_a_gpu_have_every_bit_without_a_synchronization(name, shape, coded):
    torch.manual_seed(0)
    w = (torch.randn(5, *shape, device="cuda") * torch.exp(torch.randn(5, shape[0], 1, device="cuda"))).bfloat16()
    held, places = places_of(w, name, coded=coded)
    experts = torch.tensor([4, 0, -1, 2], device="cuda")
    merge.merge_experts(places, experts, shape, w.dtype, name, first=2, coded=coded)  # which compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = merge.merge_experts(places, experts, shape, w.dtype, name, first=2, coded=coded)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = torch.stack((w[4], w[0], torch.zeros_like(w[1]), w[2]))
    assert held and torch.equal(out.view(torch.int16), want.view(torch.int16))
