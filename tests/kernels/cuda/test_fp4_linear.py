import itertools
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.kernels.cuda.gpu_cases import compiled, error, poison
from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import reference, resolve
from vbrt.kernels.cuda.e2m1 import linear as fp4_linear
from vbrt.kernels.cuda.e2m1 import tiles as fp4_tiles
from vbrt.kernels.cuda.e2m1.launch_table import (
    DEFAULT,
    FAMILIES,
    cut_tiles,
    fused_limit,
    launch_for,
    persists,
    wide_for,
)

NAMES = ("nvfp4", "mxfp4")
SHAPES = [(16, 128), (1, 16), (33, 200), (200, 416), (5, 2730), (129, 1000)]


def raw(tensor):
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_tiles_hold_every_code_and_scale(name, shape):
    torch.manual_seed(0)
    coarse = get_format(name).encode(torch.randn(shape) * 0.05)
    packing = fp4_linear.packing(name)
    tensors = packing.pack(coarse, shape)
    fields = {f.name: (f.dtype, f.shape) for f in packing.layout(shape).fields}
    assert fields == {k: (str(v.dtype).removeprefix("torch."), tuple(v.shape)) for k, v in tensors.items()}
    back = packing.unpack(tensors, shape)
    assert back.keys() == coarse.keys()
    for key, value in coarse.items():
        assert torch.equal(raw(back[key]), raw(value)), key


def test_tiles_cost_what_the_format_promises():
    assert fp4_tiles.tile_layout("nvfp4", (4096, 4096)).nbytes * 8 / 4096**2 == pytest.approx(4.5, abs=0.01)
    assert fp4_tiles.tile_layout("mxfp4", (4096, 4096)).nbytes * 8 / 4096**2 == pytest.approx(4.25, abs=0.01)


def test_masked_pairs_are_levels_in_bf16():
    torch.manual_seed(0)
    word = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32)
    pairs = torch.stack(fp4_tiles.decode_words(word)).to(torch.int64) & 0xFFFFFFFF
    assert not (pairs & ~0x81C081C0).any()
    halves = torch.stack((pairs & 0xFFFF, pairs >> 16)).to(torch.int32)
    bf16 = torch.where(halves > 0x7FFF, halves - 0x10000, halves).to(torch.int16).view(torch.bfloat16)
    magnitudes = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
    assert set((bf16.double() * 2.0**126).abs().unique().tolist()) == magnitudes


@pytest.mark.parametrize("name", NAMES)
def test_a_lane_multiplies_each_weight_with_its_own_column(name):
    """The kernel's walk in plain torch: lane, instruction and pair give row and column, the sum is x @ w.T."""
    torch.manual_seed(0)
    n, k = 40, 300
    coarse = get_format(name).encode(torch.randn(n, k))
    want = get_format(name).decode(coarse, (n, k), torch.float64)
    tensors = fp4_linear.packing(name).pack(coarse, (n, k))
    tiles, scale = tensors[fp4_tiles.TILES], tensors["tensor_scale"].double()
    got = torch.zeros(tiles.shape[0] * 16, tiles.shape[1] * 128, dtype=torch.float64)
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    for tile in range(tiles.shape[0]):
        for column in range(tiles.shape[1]):
            words, tail = tiles[tile, column, :256].view(2, 32, 4), tiles[tile, column, 256:].contiguous()
            scale_bytes = tail.view(torch.uint8).view(32, 2, -1)  # lane, row half, block
            if name == "nvfp4":
                scales = scale_bytes.view(torch.float8_e4m3fn).double()
            else:
                scales = torch.exp2(scale_bytes.double() - 239)
            pairs = torch.stack(fp4_tiles.decode_words(words))  # pair, part, lane, word
            for lane in range(32):
                g, t = divmod(lane, 4)
                for pair in range(4):
                    half, c = pair % 2, pair // 2
                    for part in range(2):
                        for word in range(4):
                            bits = int(pairs[pair, part, lane, word]) & 0xFFFFFFFF
                            p = 2 * part + word // 2
                            first = 128 * column + 32 * t + 8 * (p ^ (t // 2)) + 4 * (word % 2) + 2 * c
                            s = scales[lane, half, part if name == "nvfp4" else 0]
                            for e, code in enumerate((bits & 0xFFFF, bits >> 16)):
                                value = levels[(code >> 6) & 7] * (-1 if code >> 15 else 1)
                                got[16 * tile + 8 * half + g, first + e] = value * s
    assert torch.equal(got[:n, :k] * scale, want)
    assert not got[n:].any() and not got[:, -(-k // 32) * 32 :].any()


def test_scales_too_far_apart_stay_as_they_are():
    coarse = {
        "codes": torch.full((1, 32), 0x22, dtype=torch.uint8),
        "scales": torch.tensor([[0, 200]], dtype=torch.uint8),
    }
    assert fp4_linear.packing("mxfp4").pack(coarse, (1, 64)) is None
    with pytest.raises(KernelError, match="plain coarse plane"):
        fp4_tiles.pack_tiles("mxfp4", coarse, (1, 64))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_tiles_are_computed_by_the_reference(name):
    torch.manual_seed(0)
    shape = (24, 200)
    coarse = get_format(name).encode(torch.randn(shape))
    plain = WeightPlanes(name, shape, torch.float32, coarse)
    tiled = WeightPlanes(name, shape, torch.float32, fp4_linear.packing(name).pack(coarse, shape))
    x = torch.randn(3, 200)
    assert fp4_linear.route(x, tiled) == "reference"
    assert torch.equal(fp4_linear.decode_weight(tiled), reference.decode_weight(plain))
    assert torch.equal(fp4_linear.linear(x, tiled, None, "silu"), reference.linear(x, plain, None, "silu"))


def test_the_cpu_keeps_the_reference():
    kernel = resolve("linear", "auto", torch.device("cpu"))
    assert kernel.run is reference.linear and kernel.page_order("nvfp4") is None
    assert fp4_linear.packing("nf4") is None


@pytest.mark.parametrize("major", [*FAMILIES, 12])
def test_every_size_has_a_launch(major):
    for tokens in range(1, fused_limit(major) + 1):
        for row_tiles, columns in itertools.product((1, 256, 512, 513, 1280, 100_000), (32, 64)):
            wide = wide_for(major, tokens, row_tiles, columns)
            if wide is None:
                launch = launch_for(major, tokens, row_tiles, columns)
                assert launch.R in (1, 2, 4) and launch.WK in (4, 8, 16)
            else:
                assert wide.TOKENS in (16, 32, 64, 128) and wide.WARPS in (4, 8, 16)
                assert wide.RING >= 3 and wide.RING * (wide.WARPS * 32 * 36 + wide.TOKENS * 256) <= 227 << 10
    assert wide_for(major, fused_limit(major) + 1, 1, 1) is None
    with pytest.raises(ValueError, match="at most"):
        launch_for(major, fused_limit(major) + 1, 1, 1)


@matrix(rule={"first": DEFAULT[0], "last": DEFAULT[-1]}, loose=[False, True], capability=[80, 90, 100, 120])
def test_the_fused_kernel_compiles_with_wide_loads(capability, rule, loose):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import narrow_gluon as fp4_gluon

    config, groups = rule.launch, rule.tokens // 8
    pointers = {"x_ptr": "*bf16", "tile_ptr": "*i32", "scale_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    numbers = dict.fromkeys(("M", "N", "K", "columns", "x_stride", "y_stride"), "i32")
    constants = {
        "R": config.R, "NT": groups, "WK": config.WK, "PREFETCH": config.PREFETCH, "CARRY": False,
        "E8": False, "FULL": False, "TAIL": False,
        "ACTIVATION": "gelu", "BIAS": True, "LOOSE": loose, "EARLY": capability >= 90,
    }  # fmt: skip
    binary = compiled(
        fp4_gluon.linear_kernel, {**pointers, **numbers}, constants, capability, warps=config.WK,
        aligned=("x_ptr", "tile_ptr", "y_ptr", "K", "x_stride", "y_stride"),
    )  # fmt: skip
    ptx = binary.asm["ptx"]
    wide = ptx.count("ld.global.v4") + ptx.count("ld.global.cg.v4")
    assert ptx.count("mma.sync") == 8 * config.R * groups
    assert wide >= (2 if config.PREFETCH else 1) * 2 * config.R + (0 if loose else 4 * groups)
    assert ("griddepcontrol.wait" in ptx) == (capability >= 90)


@matrix(name=NAMES, capability=[90, 80, 100, 120])
def test_carried_pointers_keep_wide_loads_and_need_no_zeros(name, capability):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import narrow_gluon as fp4_gluon

    config = launch_for(9, 16, 896, 32)
    assert config.CARRY and config.PREFETCH
    pointers = {"x_ptr": "*bf16", "tile_ptr": "*i32", "scale_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    numbers = dict.fromkeys(("M", "N", "K", "columns", "x_stride", "y_stride"), "i32")
    constants = {
        "R": config.R, "NT": 2, "WK": config.WK, "PREFETCH": True, "CARRY": True, "E8": name == "mxfp4", "FULL": True,
        "TAIL": False, "ACTIVATION": "none", "BIAS": False, "LOOSE": False, "EARLY": capability >= 90,
    }  # fmt: skip
    aligned = ("x_ptr", "tile_ptr", "y_ptr", "K", "x_stride", "y_stride")
    binary = compiled(
        fp4_gluon.linear_kernel, {**pointers, **numbers}, constants, capability, warps=config.WK, aligned=aligned
    )  # fmt: skip
    ptx = binary.asm["ptx"]
    assert ptx.count("ld.global.v4") + ptx.count("ld.global.cg.v4") == 2 * 2 * config.R + 4 * 2
    assert ptx.count("mma.sync") == 8 * config.R * 2


@matrix(squares=[0, 256], capability=[90, 80, 100, 120])
def test_the_siblings_kernel_compiles_with_wide_loads(capability, squares):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import narrow_gluon as fp4_gluon

    one = {"tile{}_ptr": "*i32", "scale{}_ptr": "*fp32", "y{}_ptr": "*bf16"}
    types = {"x_ptr": "*bf16", **{name.format(i): kind for i in range(3) for name, kind in one.items()}}
    types |= {"square_ptr": "*fp32", **dict.fromkeys(("M", "N0", "N1", "N2", "K", "columns", "x_stride"), "i32")}
    types["eps"] = "fp32"
    constants = {
        "R": 1, "WK": 8, "PREFETCH": True, "CARRY": False, "E8": False, "TAIL": False, "LOOSE": False,
        "SQUARES": squares, "EARLY": capability >= 90,
    }  # fmt: skip
    aligned = [*(name for name in types if name.endswith("_ptr")), "K", "x_stride"]
    ptx = compiled(fp4_gluon.siblings_kernel, types, constants, capability, warps=8, aligned=aligned).asm["ptx"]
    assert ptx.count("ld.global.v4") + ptx.count("ld.global.cg.v4") >= 2 * 2 + 4
    assert ("rsqrt" in ptx) is (squares > 0)


@matrix(name=NAMES, capability=[90, 80, 100, 120])
def test_the_residual_kernel_compiles_with_wide_loads(name, capability):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import narrow_gluon as fp4_gluon

    types = {"x_ptr": "*bf16", "tile_ptr": "*i32", "scale_ptr": "*fp32"}
    types |= dict.fromkeys(("other_ptr", "gain_ptr", "total_ptr", "y_ptr"), "*bf16") | {"square_ptr": "*fp32"}
    aligned = [*types, "N", "K"]
    types |= dict.fromkeys(("N", "K", "columns"), "i32")
    config = launch_for(9, 1, 256, 32)
    constants = {
        "R": config.R, "WK": config.WK, "PREFETCH": config.PREFETCH, "CARRY": False, "E8": name == "mxfp4",
        "TAIL": False, "LOOSE": False, "EARLY": capability >= 90,
    }  # fmt: skip
    ptx = compiled(fp4_gluon.residual_kernel, types, constants, capability, warps=config.WK, aligned=aligned).asm["ptx"]
    assert ptx.count("ld.global.v4") + ptx.count("ld.global.cg.v4") >= 2 * 2 * config.R + 4


@pytest.mark.parametrize(
    ("tokens", "row_tiles", "columns"),
    [
        (17, 256, 32),
        (64, 256, 112),
        pytest.param(64, 256, 32, marks=pytest.mark.exhaustive),
        pytest.param(256, 896, 32, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("name", ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.exhaustive)])
def test_the_hopper_kernel_compiles_to_warpgroup_instructions(name, tokens, row_tiles, columns):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import wide_gluon as fp4_wgmma

    config = wide_for(9, tokens, row_tiles, columns)
    partial = config.SPLITS > 1 and not config.meets
    assert partial is (columns == 112)
    pointers = {
        "x_ptr": "*bf16",
        "tile_ptr": "*i32",
        "scale_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "part_ptr": "*fp32",
        "count_ptr": "*i32",
    }
    numbers = dict.fromkeys(("M", "N", "columns", "per_split", "y_stride"), "i32")
    constants = {
        **config._asdict(), "PARTIAL": partial, "E8": name == "mxfp4", "ACTIVATION": "none", "BIAS": not partial,
    }  # fmt: skip
    binary = compiled(
        fp4_wgmma.wgmma_kernel, {**pointers, "y_ptr": "*fp32" if partial else "*bf16", **numbers}, constants, 90,
        warps=config.WARPS, aligned=("x_ptr", "tile_ptr", "part_ptr", "y_ptr", "N", "y_stride"),
    )  # fmt: skip
    ptx = binary.asm["ptx"]
    assert ptx.count("wgmma.mma_async") == 8 * config.RING
    assert "local" not in ptx and binary.metadata.shared <= 227 << 10


@pytest.mark.parametrize(
    ("name", "bias"), [("nvfp4", False), pytest.param("mxfp4", True, marks=pytest.mark.exhaustive)]
)
def test_the_persistent_kernel_keeps_instructions_in_flight(name, bias, tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    import triton
    from triton.experimental.gluon.language import NVMMASharedLayout

    from vbrt.kernels.cuda.e2m1 import persistent_gluon as fp4_persistent

    types = {
        "tile_ptr": "*i32", "scale_ptr": "*fp32", "bias_ptr": "*bf16", "part_ptr": "*fp32", "flag_ptr": "*i32",
        "y_ptr": "*bf16", "x_desc": f"tensordesc<bf16[64, 64],{NVMMASharedLayout(128, 16, 2)!r}>",
        **dict.fromkeys(("M", "N", "columns", "y_stride", "split"), "i32"),
    }  # fmt: skip
    activation = "gelu" if bias else "none"
    constants = {"SPLITS": not bias, "E8": name == "mxfp4", "ACTIVATION": activation, "BIAS": bias, "EARLY": True}
    aligned = ("tile_ptr", "bias_ptr", "part_ptr", "flag_ptr", "y_ptr", "N", "y_stride")
    binary = compiled(fp4_persistent.persistent_kernel, types, constants, 90, aligned=aligned)
    ptx = binary.asm["ptx"]
    assert ptx.count("wgmma.mma_async") == 32 and ptx.count("stmatrix") == (16 if bias else 32)
    assert binary.metadata.shared <= 227 << 10
    source, tools = tmp_path / "kernel.ptx", Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    source.write_text(ptx)
    commands = [[tool, "-v", "-arch=sm_90a", source, "-o", tmp_path / "kernel.cubin"] for tool in tools.glob("ptxas*")]
    said = [subprocess.run(command, capture_output=True, text=True).stderr for command in commands]
    said = [text for text in said if "Unsupported .version" not in text]  # one of them is for other GPUs
    assert said and not any("serialized" in text for text in said)
    assert all(int(re.search(r"(\d+) bytes spill stores", text)[1]) <= 64 for text in said)


@pytest.mark.parametrize(
    ("tokens", "n", "k", "warps", "splits", "ring"),
    [(64, 14336, 4096, 8, 1, 8), (64, 4096, 14336, 8, 4, 7), (64, 28672, 8192, 16, 1, 4), (32, 14336, 4096, 4, 1, 8),
     (64, 8192, 2048, 4, 1, 8), (64, 8192, 8192, 8, 2, 8),  # rows short enough for no split
     (64, 18944, 3584, 8, 1, 4), (32, 18944, 3584, 8, 1, 4), (32, 28672, 8192, 8, 1, 4),  # more than stand in a row
     (32, 4096, 14336, 8, 4, 7), (32, 4096, 4096, 4, 4, 8), (16, 4096, 14336, 8, 4, 7), (9, 28672, 8192, 16, 1, 6)],
)  # fmt: skip
def test_programs_that_would_wait_for_others_to_end_take_less_memory(tokens, n, k, warps, splits, ring):
    assert wide_for(9, tokens, n // 16, k // 128)[1:] == (warps, splits, ring)


def test_at_sixteen_tokens_all_programs_stand_beside_each_other():
    for n, k, rows, most in ((14336, 4096, 2, 4), (18944, 3584, 4, 3), (24576, 3584, 4, 3), (27648, 5120, 4, 4)):
        assert wide_for(9, 16, n // 16, k // 128) is None
        assert launch_for(9, 16, n // 16, k // 128).R == rows and n / 16 / rows <= 132 * most


def test_tiles_of_the_persistent_kernel_fill_the_gpu_or_others_serve():
    for tokens, n, k, wanted in (
        (256, 14336, 4096, True), (256, 4096, 4096, False), (256, 4096, 14336, False), (384, 28672, 8192, False),
        (512, 14336, 4096, True), (512, 4096, 4096, False), (512, 4096, 14336, True), (768, 6144, 4096, True),
        (1024, 4096, 4096, True), (1536, 4096, 2736, False), (2048, 4096, 4096, True), (2048, 28672, 8192, True),
        (4096, 14336, 4096, True), (8192, 14336, 4096, False), (1, 1, 1, False), (0, 4096, 4096, False),
    ):  # fmt: skip
        assert persists(9, tokens, n, k // 128) == wanted, (tokens, n, k)
    assert not any(persists(major, 2048, 4096, 32) for major in (8, 10, 12))


@pytest.mark.parametrize(
    ("programs", "cut", "pairs", "tiles"),
    [(132, 112, 16, 112), (132, 184, 16, 448), (132, 64, 56, 64), (132, 0, 16, 896), (7, 7, 1, 9), (5, 3, 4, 3),
     (48, 6, 8, 6), (3, 4, 2, 11), (132, 32, 56, 32)],
)  # fmt: skip
def test_programs_share_tiles_without_gaps_and_wait_only_for_earlier_ones(programs, cut, pairs, tiles, monkeypatch):
    """The persistent kernel's division of labour, as plain Python."""
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import persistent_gluon as fp4_persistent

    class Language:
        minimum, maximum = staticmethod(min), staticmethod(max)
        where = staticmethod(lambda condition, a, b: a if condition else b)
        num_programs = staticmethod(lambda axis: programs)
        program_id = staticmethod(lambda axis: program)

    for name in ("share_of", "parts_of", "part_at"):
        monkeypatch.setattr(fp4_persistent, name, getattr(fp4_persistent, name).fn)
    monkeypatch.setattr(fp4_persistent, "gl", Language)
    ends, owners, seen = {}, {}, []  # (program, what its sums are of), (tile: program, the pair behind its own)
    for program in range(programs):
        begin, end, shared, parts = fp4_persistent.parts_of(cut, pairs, tiles)
        for i in range(parts):
            tile, first, last = fp4_persistent.part_at(i, begin, end, shared, cut, pairs)
            assert 0 <= first < last <= pairs and (tile < cut) == (i < shared)
            seen += [(tile, pair) for pair in range(first, last)]
            if first:
                assert i == 0 and program not in ends  # one place for sums, written once, before all else
                ends[program] = tile, first, last
            else:
                owners[tile] = program, last
    assert sorted(seen) == list(itertools.product(range(tiles), range(pairs)))
    for tile, (program, behind) in owners.items():  # as `add_others` goes
        while behind < pairs:
            program -= 1
            until = fp4_persistent.share_of(program, programs, cut, pairs)[1] - tile * pairs
            assert ends.pop(program) == (tile, behind, min(pairs, until))
            behind = until
    assert not ends and sorted(owners) == list(range(tiles))


def test_tiles_are_cut_where_the_last_round_would_be_short():
    assert cut_tiles(256, 14336, 32, 132) == 0  # 112 tiles: 20 multiprocessors idle for a short time
    assert cut_tiles(1024, 14336, 32, 132) == 448 % 132 + 132  # a whole round and what is left
    assert cut_tiles(512, 4096, 112, 132) == 64  # every one, by two programs or three
    assert cut_tiles(2048, 4096, 32, 128) == 0  # two full rounds
    assert cut_tiles(3072, 6144, 112, 132) == 0  # activations that would be read from memory by each program


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_the_padding_kernel_compiles(capability):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import narrow_gluon as fp4_gluon

    types = {"x_ptr": "*bf16", "o_ptr": "*bf16", **dict.fromkeys(("K", "width", "x_stride", "k_stride"), "i32")}
    compiled(
        fp4_gluon.pad_kernel,
        types,
        {"WARPS": 4, "SPAN": 1024, "EARLY": capability >= 90},
        capability,
        aligned=("o_ptr",),
    )


@pytest.mark.parametrize("summands", [1, 3])
def test_the_kernels_around_the_hopper_kernel_compile(summands):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import wide_gluon as fp4_wgmma

    dtype = "*bf16" if summands == 1 else "*fp32"
    types = {
        "x_ptr": dtype,
        "o_ptr": "*bf16",
        "count_ptr": "*i32",
        **dict.fromkeys(("M", "K", "columns", "x_stride"), "i32"),
    }
    constants = {"k_stride": 1, "SUMMANDS": summands, "COUNTS": 64 if summands == 1 else 0, "WARPS": 2}
    aligned = ("x_ptr", "o_ptr", "K", "x_stride")
    binary = compiled(fp4_wgmma.order_kernel, types, constants, 90, warps=2, aligned=aligned)
    assert binary.asm["ptx"].count("ld.global.v4") >= 4 and binary.asm["ptx"].count("st.global.v4") == 4 * summands
    types = {"part_ptr": "*fp32", "bias_ptr": dtype, "y_ptr": dtype, "M": "i32", "N": "i32"}
    constants = {"PARTS": 2 * summands, "ACTIVATION": "silu", "BIAS": True, "WARPS": 4}
    aligned = ("part_ptr", "bias_ptr", "y_ptr", "N")
    binary = compiled(fp4_wgmma.reduce_kernel, types, constants, 90, aligned=aligned)
    assert binary.asm["ptx"].count("ld.global.v4") >= 2 * summands


@matrix(dtype=["bf16", "fp16", "fp32"], capability=[80, 90, 100, 120])
def test_the_decode_kernel_compiles_with_wide_stores(capability, dtype):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import narrow_gluon as fp4_gluon

    types = {"tile_ptr": "*i32", "scale_ptr": "*fp32", "w_ptr": f"*{dtype}", "N": "i32", "K": "i32", "columns": "i32"}
    constants = {"E8": capability == 90, "WARPS": 4}
    aligned = ("tile_ptr", "w_ptr", "K")
    binary = compiled(fp4_gluon.decode_kernel, types, constants, capability, aligned=aligned)
    assert binary.asm["ptx"].count("st.global.v4") == (16 if dtype == "fp32" else 8)


@pytest.mark.parametrize(
    "shape",
    [(16, 64), (4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (50257, 2730), (40000, 1024)],
    ids=str,
)
def test_slices_are_few_and_end_on_whole_blocks(shape):
    tiles = -(-shape[0] // 16)
    step = fp4_linear.slice_tiles(tiles, 2 * shape[1], 2048)
    slices = -(-tiles // step)
    assert step * 16 % 256 == 0 and slices <= 4
    assert (slices == 1) == (shape[0] * shape[1] * 2 <= 64 << 20)
    assert slices == 4 or step * 16 * shape[1] * 2 <= (64 << 20) + 256 * shape[1] * 2
    assert fp4_linear.slice_tiles(tiles, 2 * shape[1], 2047) == tiles


def test_a_compiled_graph_holds_one_op_for_any_number_of_tokens(monkeypatch):
    coarse = get_format("nvfp4").encode(torch.randn(32, 128))
    planes = WeightPlanes("nvfp4", (32, 128), torch.bfloat16, fp4_linear.packing("nvfp4").pack(coarse, (32, 128)))
    monkeypatch.setattr(fp4_linear, "serves", lambda planes: True)
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return lambda *args: (torch.zeros(1),)

    torch.compiler.reset()
    run = torch.compile(lambda x: fp4_linear.linear(x, planes), backend=keep, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (3, 40, 300, 3000, 9000):
            run(torch.empty(tokens, 128, dtype=torch.bfloat16))
    assert graphs == [["vbrt.fp4_linear.default"]]


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def case(name, shape, dtype=torch.bfloat16):
    fmt = get_format(name)
    coarse = fmt.encode(torch.randn(shape, device="cuda") * 0.03)
    if name == "nvfp4":
        coarse["tensor_scale"] *= 1.2345  # published checkpoints: not a power of two
    tiled = WeightPlanes(name, shape, dtype, fp4_linear.packing(name).pack(coarse, shape))
    return tiled, WeightPlanes(name, shape, dtype, coarse), fmt.decode(coarse, shape, torch.float64)


TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 1e-3, torch.float32: 1e-5}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(256, 512), (200, 416), (77, 2730), (1024, 4096), (4160, 1024)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_linear_matches_float64(name, shape, dtype):
    planes, _, weight = case(name, shape, dtype)
    for tokens in (1, 2, 7, 8, 9, 16, 21, 30, 48, 64, 65, 200, 300):
        x = torch.randn(tokens, shape[1], device="cuda", dtype=dtype)
        bias = torch.randn(shape[0], device="cuda", dtype=dtype) if tokens % 2 else None
        fused = fp4_linear.route(x, planes) == "fused"  # else the decoded weight is rounded to x's dtype first
        want = x.double() @ (weight if fused else weight.to(dtype).double()).T + (0 if bias is None else bias.double())
        poison()
        y = fp4_linear.linear(x, planes, bias)
        assert y.dtype is dtype and y.shape == (tokens, shape[0])
        assert error(y, want) < TOLERANCE[dtype], (tokens, fp4_linear.route(x, planes))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8320, 512), (8230, 1030), (20480, 1536), (9000, 2730)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_carried_pointers_match_float64(name, shape):
    planes, _, weight = case(name, shape)
    for tokens in (9, 12, 16):
        x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16)
        poison()
        assert error(fp4_linear.linear(x, planes), x.double() @ weight.T) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16896, 2048), (16890, 1032), (33000, 392), (33792, 2730)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_persistent_kernel_matches_float64(name, shape):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for sm_90")
    planes, _, weight = case(name, shape)
    n, k = shape
    for tokens, activation in ((500, "none"), (505, "gelu"), (1003, "none"), (4096, "relu")):
        wide = torch.randn(tokens, k + 24, device="cuda", dtype=torch.bfloat16)
        x, bias = wide[:, 8 : k + 8], torch.randn(n, device="cuda", dtype=torch.bfloat16)
        assert fp4_linear.route(x, planes) == "persistent"
        poison()
        y = fp4_linear.linear(x, planes, bias, activation)
        want = reference.ACTIVATIONS[activation](x.double() @ weight.T + bias.double())
        assert y.shape == (tokens, n) and error(y, want) < 3e-3, (tokens, activation)
        assert torch.equal(y, fp4_linear.linear(x, planes, bias, activation))
    bare = torch.randn(2, 255, k, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    for x in (bare, bare[:1, :1].expand(255, 2, k)):
        assert error(fp4_linear.linear(x, planes), x.double() @ weight.T) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(700, 2000), (256, 16384), (1030, 1032), (4096, 130), (5000, 4096)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_tiles_of_the_persistent_kernel_that_are_cut(name, shape, monkeypatch):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for sm_90")
    planes, _, weight = case(name, shape)
    monkeypatch.setattr(fp4_linear, "persists", lambda *_: True)
    for tokens, cut in itertools.product((3, 130, 700, 2049), (1, 2)):
        tiles = -(-tokens // 256) * -(-shape[0] // 128)
        monkeypatch.setattr(fp4_linear, "cut_tiles", lambda *_, number=tiles // cut: number)
        x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
        poison()
        y = fp4_linear.linear(x, planes, bias, "silu")
        assert error(y, torch.nn.functional.silu(x.double() @ weight.T + bias.double())) < 3e-3, (tokens, cut)
        assert all(torch.equal(y, fp4_linear.linear(x, planes, bias, "silu")) for _ in range(10))


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [False, True])
def test_the_persistent_kernel_in_graphs_and_compiled(cut, monkeypatch):
    planes, _, weight = case("nvfp4", (16896, 2048))
    if cut:
        monkeypatch.setattr(fp4_linear, "cut_tiles", lambda *_: 100)
    x = torch.randn(500, 2048, device="cuda", dtype=torch.bfloat16)
    assert fp4_linear.route(x, planes) == "persistent"
    want = fp4_linear.linear(x, planes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = fp4_linear.linear(x, planes)
    recorded.fill_(float("nan"))
    graph.replay()
    assert torch.equal(recorded, want)
    torch.compiler.reset()
    run = torch.compile(lambda x: fp4_linear.linear(x, planes), fullgraph=True, dynamic=True)
    assert torch.equal(run(x), want)
    for tokens in (5, 60, 700, 5000):
        other = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(run(other), fp4_linear.linear(other, planes))
    x = x.requires_grad_()
    fp4_linear.linear(x, planes).float().pow(2).sum().backward()
    assert error(x.grad, 2 * (x.detach().double() @ weight.T) @ weight) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2048, 3000])
@pytest.mark.parametrize("shape", [(14336, 4096), (9000, 14336), (50257, 2730)], ids=str)
def test_large_weights_are_decoded_in_slices(shape, tokens):
    planes, _, weight = case("nvfp4", shape)
    assert fp4_linear.slice_tiles(-(-shape[0] // 16), 2 * shape[1], tokens) * 16 < shape[0]
    x = torch.randn(2, tokens // 2, shape[1], device="cuda", dtype=torch.float16)
    bias = torch.randn(shape[0], device="cuda", dtype=torch.float16)
    assert fp4_linear.route(x, planes) == "decode+matmul"
    for added in (None, bias):
        want = torch.nn.functional.linear(x.double(), weight, None if added is None else added.double())
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = fp4_linear.linear(x, planes, added)
        scratch = torch.cuda.max_memory_allocated() - before - y.numel() * 2
        assert error(y, want) < 3e-3
        assert (scratch < 0.6 * weight.numel() * 2) == (added is None or shape[1] % 8 > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations_match_float64(activation):
    planes, _, weight = case("nvfp4", (512, 1024))
    for tokens in (3, 40, 100, 600):
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(512, device="cuda", dtype=torch.bfloat16)
        want = reference.ACTIVATIONS[activation](x.double() @ weight.T + bias.double())
        poison()
        assert error(fp4_linear.linear(x, planes, bias, activation), want) < 4e-3


@pytest.mark.gpu
def test_strided_and_batched_inputs():
    planes, _, weight = case("nvfp4", (384, 512))
    wide = torch.randn(4, 6, 1024, device="cuda", dtype=torch.bfloat16)
    for x in (wide[..., :512], wide[..., 3:515], wide[..., ::2], wide.transpose(0, 1)[..., 512:], wide[:0, :, :512]):
        y = fp4_linear.linear(x, planes)
        assert y.shape == (*x.shape[:-1], 384)
        assert not x.numel() or error(y, x.double() @ weight.T) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_decoded_weights_are_the_references_bits(name, dtype):
    for shape in ((256, 512), (77, 2730), (300, 1000)):
        tiled, plain, _ = case(name, shape, dtype)
        poison()
        assert torch.equal(fp4_linear.decode_weight(tiled), reference.decode_weight(plain))


@pytest.mark.gpu
def test_runs_are_identical():
    planes, _, _ = case("nvfp4", (4096, 4096))
    for tokens in (1, 16, 64, 200, 1024, 1536):
        x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        first = fp4_linear.linear(x, planes)
        assert all(torch.equal(first, fp4_linear.linear(x, planes)) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 128])
def test_gradients_match_float64(tokens):
    planes, _, weight = case("nvfp4", (256, 512))
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
    fp4_linear.linear(x, planes, bias, "silu").backward(dy)
    x64, bias64 = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    torch.nn.functional.silu(x64 @ weight.T + bias64).backward(dy.double())
    assert error(x.grad, x64.grad) < 1e-2 and error(bias.grad, bias64.grad) < 1e-2


@pytest.mark.gpu
def test_graphs_and_compile_give_the_eager_result():
    planes, _, _ = case("nvfp4", (512, 1024))
    x = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        want = fp4_linear.linear(x, planes, None, "gelu")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = fp4_linear.linear(x, planes, None, "gelu")
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)
        tiles, scale = planes.coarse[fp4_tiles.TILES], planes.coarse["tensor_scale"]
        args = (x, tiles, scale, None, "nvfp4", 512, 1024, "gelu")
        torch.library.opcheck(torch.ops.vbrt.fp4_linear, args)
        torch.library.opcheck(torch.ops.vbrt.fp4_decode, (tiles, scale, "nvfp4", 512, 1024, torch.bfloat16))
        compiled_fn = torch.compile(lambda v: fp4_linear.linear(v, planes, None, "gelu"), fullgraph=True)
        assert torch.equal(compiled_fn(x), want)


@pytest.mark.gpu
def test_a_gpu_resolves_to_the_kernels():
    kernel = resolve("linear", "auto", torch.device("cuda"))
    assert kernel.run is fp4_linear.linear
    assert kernel.page_order("nvfp4") == fp4_linear.packing("nvfp4")
