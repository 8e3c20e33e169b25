"""Kernels for weights in tile order compile, for GPUs that need not be there, to what they were written for."""

import itertools
import re
import subprocess
from pathlib import Path

import pytest

from tests.kernels.cuda.gpu_cases import compiled, compiled_gated
from tests.matrix import matrix
from vbrt.kernels.cuda.launch_table import _MMA_LAUNCHES, RULES, Gpu, launch_for, wide_for

NAMES = ("nvfp4", "mxfp4")


@matrix(
    rule={"first": RULES["linear"][9, 0][0], "last": RULES["linear"][9, 0][-1]},
    loose=[False, True],
    capability=[80, 100, 90, 120],
    at_most=2,
)
def test_the_fused_kernel_compiles_with_wide_loads(capability, rule, loose):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import narrow_gluon

    config, groups = rule.launch, rule.tokens // 8
    pointers = {"x_ptr": "*bf16", "tile_ptr": "*i32", "scale_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    numbers = dict.fromkeys(("M", "N", "K", "columns", "x_stride", "y_stride"), "i32")
    constants = {
        "ROW_TILES": config.row_tiles,
        "TOKEN_GROUPS": groups,
        "K_WARPS": config.k_warps,
        "PREFETCH": config.prefetch,
        "CARRY_POINTERS": False,
        "E8M0_SCALES": False,
        "ALL_TOKENS": False,
        "K_TAIL": False,
        "ACTIVATION": "gelu",
        "HAS_BIAS": True,
        "WORD_LOADS": loose,
        "DEPENDENT": capability >= 90,
    }
    binary = compiled(
        narrow_gluon.linear_kernel,
        {**pointers, **numbers},
        constants,
        capability,
        warps=config.k_warps,
        aligned=("x_ptr", "tile_ptr", "y_ptr", "K", "x_stride", "y_stride"),
    )
    ptx = binary.asm["ptx"]
    wide = ptx.count("ld.global.v4") + ptx.count("ld.global.cg.v4")
    assert ptx.count("mma.sync") == 8 * config.row_tiles * groups
    assert wide >= (2 if config.prefetch else 1) * 2 * config.row_tiles + (0 if loose else 4 * groups)
    assert ("griddepcontrol.wait" in ptx) == (capability >= 90)


@matrix(name=NAMES, capability=[100, 90, 80, 120], at_most=1)
def test_carried_pointers_keep_wide_loads_and_need_no_zeros(name, capability):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import narrow_gluon

    config = launch_for("linear", Gpu(9, 132), 16, 896, 32)
    assert config.carry_pointers and config.prefetch
    pointers = {"x_ptr": "*bf16", "tile_ptr": "*i32", "scale_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    numbers = dict.fromkeys(("M", "N", "K", "columns", "x_stride", "y_stride"), "i32")
    constants = {
        "ROW_TILES": config.row_tiles,
        "TOKEN_GROUPS": 2,
        "K_WARPS": config.k_warps,
        "PREFETCH": True,
        "CARRY_POINTERS": True,
        "E8M0_SCALES": name == "mxfp4",
        "ALL_TOKENS": True,
        "K_TAIL": False,
        "ACTIVATION": "none",
        "HAS_BIAS": False,
        "WORD_LOADS": False,
        "DEPENDENT": capability >= 90,
    }
    aligned = ("x_ptr", "tile_ptr", "y_ptr", "K", "x_stride", "y_stride")
    binary = compiled(
        narrow_gluon.linear_kernel,
        {**pointers, **numbers},
        constants,
        capability,
        warps=config.k_warps,
        aligned=aligned,
    )
    ptx = binary.asm["ptx"]
    assert ptx.count("ld.global.v4") + ptx.count("ld.global.cg.v4") == 2 * 2 * config.row_tiles + 4 * 2
    assert ptx.count("mma.sync") == 8 * config.row_tiles * 2


#: what codes are -> bytes of a block scale and its columns, words of a tile
CODES = {
    "e4m3": ("*fp32", 0, 288),
    "table": ("*u8", 64, 256),
    "int8": ("*u8", 32, 512),
    "magnitudes": ("*fp16", 16, 256),
    "e8m0": ("*fp32", 0, 272),
}


@matrix(codes=CODES, capability=[86, 120, 80, 89, 100], launch=_MMA_LAUNCHES, at_most=3)
def test_the_kernel_with_mma_sync_compiles_without_spills_and_with_wide_copies(codes, capability, launch):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import mma_gluon

    tokens, warps, row_tiles, _, ring = launch
    scales, block, words = codes
    (kind,) = (name for name, of in CODES.items() if of is codes)
    types = {
        "x_ptr": "*bf16",
        "code_ptr": "*i32",
        "block_ptr": scales,
        "level_ptr": scales if kind == "int8" else "*fp32",
        "scale_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "y_ptr": "*bf16",
    }
    numbers = ("M", "N", "K", "columns", "per_split", "splits", "blocks", "line", "x_stride", "y_stride")
    constants = {
        "TOKENS": tokens,
        "WARPS": warps,
        "ROW_TILES": row_tiles,
        "PARTIAL": False,
        "RING": ring,
        "CODES": kind,
        "BLOCK": block,
        "K_TAIL": False,
        "ACTIVATION": "none",
        "HAS_BIAS": True,
    }
    binary = compiled(
        mma_gluon.mma_kernel,
        types | dict.fromkeys(numbers, "i32"),
        constants,
        capability,
        warps=warps,
        aligned=("x_ptr", "code_ptr", "y_ptr", "N", "K", "x_stride", "y_stride"),
    )
    ptx = binary.asm["ptx"]
    assert ptx.count("mma.sync") == ring * 8 * row_tiles * tokens // 8
    assert binary.metadata.shared <= launch.shared_bytes(words) + 1024 <= 99 << 10
    assert ".local" not in ptx and "cp.async.cg.shared.global" in ptx
    assert ptx.count("ld.shared.v4") >= ring * 4 * tokens // 8  # 16 bytes a lane: four loads of eight tokens a column


@matrix(squares=[0, 256], capability=[100, 90, 80, 120], at_most=2)
def test_the_siblings_kernel_compiles_with_wide_loads(capability, squares):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import fused_linear_gluon

    one = {"tile{}_ptr": "*i32", "scale{}_ptr": "*fp32", "y{}_ptr": "*bf16"}
    types = {"x_ptr": "*bf16", **{name.format(i): kind for i in range(3) for name, kind in one.items()}}
    types |= {"square_ptr": "*fp32", **dict.fromkeys(("M", "N0", "N1", "N2", "K", "columns", "x_stride"), "i32")}
    types["eps"] = "fp32"
    constants = {
        "ROW_TILES": 1,
        "K_WARPS": 8,
        "PREFETCH": True,
        "CARRY_POINTERS": False,
        "E8M0_SCALES": False,
        "K_TAIL": False,
        "WORD_LOADS": False,
        "SQUARES": squares,
        "DEPENDENT": capability >= 90,
    }
    aligned = [*(name for name in types if name.endswith("_ptr")), "K", "x_stride"]
    ptx = compiled(fused_linear_gluon.siblings_kernel, types, constants, capability, warps=8, aligned=aligned).asm[
        "ptx"
    ]
    assert ptx.count("ld.global.v4") + ptx.count("ld.global.cg.v4") >= 2 * 2 + 4
    assert ("rsqrt" in ptx) is (squares > 0)


@matrix(name=NAMES, capability=[90, 100, 80, 120], at_most=1)
def test_the_residual_kernel_compiles_with_wide_loads(name, capability):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import fused_linear_gluon

    types = {"x_ptr": "*bf16", "tile_ptr": "*i32", "scale_ptr": "*fp32"}
    types |= dict.fromkeys(("other_ptr", "gain_ptr", "total_ptr", "y_ptr"), "*bf16") | {"square_ptr": "*fp32"}
    aligned = [*types, "N", "K"]
    types |= dict.fromkeys(("N", "K", "columns"), "i32")
    config = launch_for("linear", Gpu(9, 132), 1, 256, 32)
    constants = {
        "ROW_TILES": config.row_tiles,
        "K_WARPS": config.k_warps,
        "PREFETCH": config.prefetch,
        "CARRY_POINTERS": False,
        "E8M0_SCALES": name == "mxfp4",
        "K_TAIL": False,
        "WORD_LOADS": False,
        "DEPENDENT": capability >= 90,
    }
    ptx = compiled(
        fused_linear_gluon.residual_kernel, types, constants, capability, warps=config.k_warps, aligned=aligned
    ).asm["ptx"]
    assert ptx.count("ld.global.v4") + ptx.count("ld.global.cg.v4") >= 2 * 2 * config.row_tiles + 4


@matrix(case=[(1, 0), (1, 256), (2, 0)], capability=[80, 90, 100, 120], at_most=2)
def test_the_gated_kernel_compiles_to_matrix_instructions(case, capability):
    pytest.importorskip("triton.experimental.gluon")
    groups, squares = case
    ptx = compiled_gated(capability, groups, squares, 8).asm["ptx"]
    assert ptx.count("mma.sync") == 8 * groups * 2 and ("rsqrt" in ptx) is (squares > 0)


@matrix(capability=[80, 90, 100, 120], at_most=1)
def test_the_norm_kernel_compiles_with_wide_loads(capability):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import fused_linear_gluon

    pointers = ("x_ptr", "other_ptr", "gain_ptr", "sum_ptr", "y_ptr")
    types = {**dict.fromkeys(pointers, "*bf16"), "eps": "fp32", "K": "i32", "x_stride": "i32", "other_stride": "i32"}
    constants = {"BLOCK": 4096, "WARPS": 8, "DEPENDENT": capability >= 90}
    aligned = (*pointers, "K", "x_stride", "other_stride")
    ptx = compiled(fused_linear_gluon.norm_kernel, types, constants, capability, warps=8, aligned=aligned).asm["ptx"]
    assert ptx.count("ld.global.v4") == 6 and ptx.count("st.global.v4") == 4


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
    from vbrt.kernels.cuda.e2m1 import wide_gluon

    config = wide_for(9, tokens, row_tiles, columns)
    partial = config.splits > 1 and not config.reduces_itself
    assert partial is (columns == 112)
    pointers = {
        "x_ptr": "*bf16",
        "tile_ptr": "*i32",
        "scale_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "part_ptr": "*fp32",
        "counter_ptr": "*i32",
    }
    numbers = dict.fromkeys(("M", "N", "columns", "per_split", "y_stride"), "i32")
    constants = {
        **{name.upper(): value for name, value in config._asdict().items()},
        "PARTIAL": partial,
        "E8M0_SCALES": name == "mxfp4",
        "ACTIVATION": "none",
        "HAS_BIAS": not partial,
    }
    binary = compiled(
        wide_gluon.wgmma_kernel,
        {**pointers, "y_ptr": "*fp32" if partial else "*bf16", **numbers},
        constants,
        90,
        warps=config.warps,
        aligned=("x_ptr", "tile_ptr", "part_ptr", "y_ptr", "N", "y_stride"),
    )
    ptx = binary.asm["ptx"]
    assert ptx.count("wgmma.mma_async") == 8 * config.ring
    assert "local" not in ptx and binary.metadata.shared <= 227 << 10


@pytest.mark.parametrize(
    ("name", "bias", "tokens", "pieces", "ordered"),
    [
        ("nvfp4", False, 256, 1, False),
        ("mxfp4", True, 256, 1, False),
        ("nvfp4", False, 192, 2, False),
        ("nvfp4", False, 224, 3, False),
        ("nvfp4", False, 192, 2, True),
    ],
)
@pytest.mark.exhaustive  # each takes ten seconds; the emulator runs the kernel by default
def test_the_persistent_kernel_keeps_instructions_in_flight(name, bias, tokens, pieces, ordered, tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    from triton.experimental.gluon.language import NVMMASharedLayout

    from vbrt.kernels.cuda.e2m1 import persistent_gluon

    types = {
        "tile_ptr": "*i32",
        "block_ptr": "*fp32",
        "level_ptr": "*fp32",
        "scale_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "part_ptr": "*fp32",
        "flag_ptr": "*i64",
        "y_ptr": "*bf16",
        "x_desc": f"tensordesc<bf16[{persistent_gluon.box_of(tokens)}, 64],{NVMMASharedLayout(128, 16, 2)!r}>",
        **dict.fromkeys(("M", "N", "columns", "blocks", "y_stride", "split", "ticket"), "i32"),
    }
    activation = "gelu" if bias else "none"
    constants = {
        "TOKENS": tokens,
        "CUT_TILES": not bias,
        "CODES": "e8m0" if name == "mxfp4" else "e4m3",
        "ORDERED": ordered,
        "ACTIVATION": activation,
        "HAS_BIAS": bias,
        "DEPENDENT": True,
    }
    aligned = ("tile_ptr", "bias_ptr", "part_ptr", "flag_ptr", "y_ptr", "N", "y_stride")
    binary = compiled(persistent_gluon.persistent_kernel, types, constants, 90, aligned=aligned)
    ptx = binary.asm["ptx"]
    assert ptx.count("wgmma.mma_async") == 32 * pieces
    assert ptx.count("stmatrix") == (16 if bias else tokens // 8)
    _is_assembled_well(binary, tmp_path)


@pytest.mark.parametrize(("name", "tokens", "pieces"), [("nvfp4", 256, 1), ("mxfp4", 128, 1), ("nvfp4", 192, 2)])
@pytest.mark.exhaustive
def test_the_kernel_of_gradients_keeps_instructions_in_flight(name, tokens, pieces, tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    from triton.experimental.gluon.language import NVMMASharedLayout

    from vbrt.kernels.cuda.e2m1 import persistent_gluon, turned_gluon

    types = {
        "tile_ptr": "*i32",
        "scale_ptr": "*fp32",
        "part_ptr": "*fp32",
        "flag_ptr": "*i64",
        "y_ptr": "*bf16",
        "x_desc": f"tensordesc<bf16[{persistent_gluon.box_of(tokens)}, 64],{NVMMASharedLayout(128, 16, 2)!r}>",
        **dict.fromkeys(("M", "N", "columns", "row_tiles", "split", "ticket"), "i32"),
    }
    codes = "e8m0" if name == "mxfp4" else "e4m3"
    constants = {"TOKENS": tokens, "CUT_TILES": True, "CODES": codes, "DEPENDENT": True}
    aligned = ("tile_ptr", "part_ptr", "flag_ptr", "y_ptr", "N")
    binary = compiled(turned_gluon.turned_kernel, types, constants, 90, aligned=aligned)
    ptx = binary.asm["ptx"]
    assert ptx.count("wgmma.mma_async") == 32 * pieces and ptx.count("stmatrix") == tokens // 8
    _is_assembled_well(binary, tmp_path)


def _is_assembled_well(binary, tmp_path):
    """Nothing waits for an instruction at once, and few registers are spilled."""
    import triton

    assert binary.metadata.shared <= 227 << 10
    source, tools = tmp_path / "kernel.ptx", Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    source.write_text(binary.asm["ptx"])
    commands = [[tool, "-v", "-arch=sm_90a", source, "-o", tmp_path / "kernel.cubin"] for tool in tools.glob("ptxas*")]
    said = [subprocess.run(command, capture_output=True, text=True).stderr for command in commands]
    said = [text for text in said if "Unsupported .version" not in text]  # one of them is for other GPUs
    assert said and not any("serialized" in text for text in said)
    assert all(int(re.search(r"(\d+) bytes spill stores", text)[1]) <= 96 for text in said)


@pytest.mark.parametrize(
    ("programs", "cut", "pairs", "tiles"),
    [
        (132, 112, 16, 112),
        (132, 184, 16, 448),
        (132, 64, 56, 64),
        (132, 0, 16, 896),
        (7, 7, 1, 9),
        (5, 3, 4, 3),
        (48, 6, 8, 6),
        (3, 4, 2, 11),
        (132, 32, 56, 32),
    ],
)
def test_programs_share_tiles_without_gaps_and_wait_only_for_earlier_ones(programs, cut, pairs, tiles, monkeypatch):
    """The persistent kernel's division of labour, as plain Python."""
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import persistent_gluon

    class Language:
        minimum, maximum = staticmethod(min), staticmethod(max)
        where = staticmethod(lambda condition, a, b: a if condition else b)
        num_programs = staticmethod(lambda axis: programs)
        program_id = staticmethod(lambda axis: program)

    for name in ("share_of", "parts_of", "part_at"):
        monkeypatch.setattr(persistent_gluon, name, getattr(persistent_gluon, name).fn)
    monkeypatch.setattr(persistent_gluon, "gl", Language)
    ends, owners, seen = {}, {}, []  # (program, what its sums are of), (tile: program, the pair behind its own)
    for program in range(programs):
        begin, end, shared, parts = persistent_gluon.parts_of(cut, pairs, tiles)
        for i in range(parts):
            tile, first, last = persistent_gluon.part_at(i, begin, end, shared, cut, pairs)
            assert 0 <= first < last <= pairs and (tile < cut) == (i < shared)
            seen += [(tile, pair) for pair in range(first, last)]
            if first:
                assert i == 0 and program not in ends  # one place for sums, written once, before all else
                ends[program] = tile, first, last
            else:
                owners[tile] = program, last
    assert sorted(seen) == list(itertools.product(range(tiles), range(pairs)))
    for tile, (program, behind) in owners.items():  # as `add_partial_sums` goes
        while behind < pairs:
            program -= 1
            until = persistent_gluon.share_of(program, programs, cut, pairs)[1] - tile * pairs
            assert ends.pop(program) == (tile, behind, min(pairs, until))
            behind = until
    assert not ends and sorted(owners) == list(range(tiles))


@pytest.mark.parametrize("summands", [1, 3])
def test_the_kernels_around_the_hopper_kernel_compile(summands):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import wide_gluon

    dtype = "*bf16" if summands == 1 else "*fp32"
    types = {
        "x_ptr": dtype,
        "o_ptr": "*bf16",
        "counter_ptr": "*i32",
        **dict.fromkeys(("M", "K", "columns", "x_stride"), "i32"),
    }
    constants = {"k_stride": 1, "SUMMANDS": summands, "COUNTERS": 64 if summands == 1 else 0, "WARPS": 2}
    aligned = ("x_ptr", "o_ptr", "K", "x_stride")
    binary = compiled(wide_gluon.order_kernel, types, constants, 90, warps=2, aligned=aligned)
    assert binary.asm["ptx"].count("ld.global.v4") >= 4 and binary.asm["ptx"].count("st.global.v4") == 4 * summands
    types = {"part_ptr": "*fp32", "bias_ptr": dtype, "y_ptr": dtype, "M": "i32", "N": "i32"}
    constants = {"PARTS": 2 * summands, "ACTIVATION": "silu", "HAS_BIAS": True, "WARPS": 4, "DEPENDENT": True}
    aligned = ("part_ptr", "bias_ptr", "y_ptr", "N")
    binary = compiled(wide_gluon.reduce_kernel, types, constants, 90, aligned=aligned)
    assert binary.asm["ptx"].count("ld.global.v4") >= 2 * summands


@matrix(dtype=["bf16", "fp16", "fp32"], capability=[80, 100, 90, 120], at_most=1)
def test_the_decode_kernel_compiles_with_wide_stores(capability, dtype):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.e2m1 import narrow_gluon

    types = {"tile_ptr": "*i32", "scale_ptr": "*fp32", "w_ptr": f"*{dtype}", "N": "i32", "K": "i32", "columns": "i32"}
    constants = {"E8M0_SCALES": capability == 90, "WARPS": 4}
    aligned = ("tile_ptr", "w_ptr", "K")
    binary = compiled(narrow_gluon.decode_kernel, types, constants, capability, aligned=aligned)
    assert binary.asm["ptx"].count("st.global.v4") == (16 if dtype == "fp32" else 8)
