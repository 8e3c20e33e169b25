"""The kernel of routed experts for many tokens compiles to what it was written for, on GPUs that need not be there."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.kernels.cuda.gpu_cases import compiled
from tests.matrix import matrix
from vbrt.kernels.cuda.launch_table import _GROUPED_MMA, grouped_stages

LAUNCHES = [*_GROUPED_MMA.values(), _GROUPED_MMA[32]._replace(ring=3)]


@matrix(gate=["apart", "interleaved", "none"], capability=[86, 120, 80], launch=LAUNCHES, at_most=1)
def test_the_grouped_kernel_with_mma_sync_compiles_with_wide_copies_and_stores(gate, capability, launch):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.experts import grouped_mma_gluon

    tokens, warps, row_tiles, _, ring = launch
    types = {"x_ptr": "*bf16", "address_ptr": "*i64", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    types |= dict.fromkeys(("order_ptr", "offset_ptr", "expert_ptr", "first_ptr"), "*i32")
    aligned = (*types, "tile_offset", "scale_offset", "N", "K", "n_out", "x_stride")
    types |= dict.fromkeys((*aligned[len(types) :], "columns", "row_blocks", "experts", "k"), "i32")
    constants = {
        "TOKENS": tokens,
        "WARPS": warps,
        "ROW_TILES": row_tiles,
        "RING": ring,
        "CODES": "e4m3",
        "K_TAIL": False,
        "HAS_BIAS": False,
        "FUNCTION": "none" if gate == "none" else "silu",
        "GATED": gate != "none",
        "INTERLEAVED": gate == "interleaved",
        "ALPHA": 1.0,
        "LIMIT": None,
        "SHIFT": 0.0,
    }
    binary = compiled(grouped_mma_gluon.grouped_mma_kernel, types, constants, capability, warps=warps, aligned=aligned)
    ptx = binary.asm["ptx"]
    assert ptx.count("mma.sync") == ring * 8 * row_tiles * tokens // 8
    assert binary.metadata.shared <= launch.shared_bytes(288) + 1024 <= 99 << 10
    assert ".local" not in ptx and "cp.async.cg.shared.global" in ptx
    stored = 16 * warps * row_tiles * tokens * 2 // (2 if gate != "none" else 1) // (32 * warps)  # bytes a lane
    wide, lane = ("st.global.v2", 8) if gate == "interleaved" else ("st.global.v4", 16)
    assert ptx.count(wide) >= stored // lane


@pytest.mark.exhaustive  # each takes seconds; the emulator runs the kernel by default
@pytest.mark.parametrize(
    ("format", "gated", "block", "ahead"),
    [("nvfp4", True, 128, 2), ("mxfp4", True, 128, 2), ("nvfp4", False, 128, 2), ("mxfp4", False, 64, 1)],
)
def test_the_grouped_kernel_keeps_instructions_in_flight(format, gated, block, ahead, tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    import triton
    from triton.experimental.gluon.language import NVMMASharedLayout

    from vbrt.kernels.cuda.experts import grouped_gluon

    box = min(64, block)
    types = {
        "table_ptr": "*i64",
        "pair_ptr": "*i32",
        "bias_ptr": "*bf16",
        "y_ptr": "*bf16",
        "x_desc": f"tensordesc<bf16{[box, 64]},{NVMMASharedLayout(128, 16, 2)!r}>",
        **dict.fromkeys(("tile_offset", "scale_offset", "N", "blocks", "row_blocks", "columns", "n_out"), "i32"),
    }
    constants = {
        "TOKENS": block,
        "BOX": box,
        "STAGES": grouped_stages(block),
        "AHEAD": ahead,
        "E8M0_SCALES": format == "mxfp4",
        "HAS_BIAS": gated,
        "FUNCTION": "silu" if gated else "none",
        "GATED": gated,
        "INTERLEAVED": format == "mxfp4",
        "ALPHA": 1.702,
        "LIMIT": 7.0,
        "SHIFT": 1.0,
    }
    aligned = ("table_ptr", "pair_ptr", "bias_ptr", "y_ptr", "tile_offset", "scale_offset")
    binary = compiled(grouped_gluon.grouped_kernel, types, constants, 90, aligned=aligned)
    ptx = binary.asm["ptx"]
    assert ptx.count("wgmma.mma_async") == 2 * 16
    # two warpgroups read two columns of tiles for each pair ahead, and two more in the loop, by two loads each
    assert ptx.count("ld.global.cg.v4") + ptx.count("ld.global.v4") == 2 * 2 * 2 * (ahead + 1)
    assert binary.metadata.shared <= 227 << 10
    source, tools = tmp_path / "kernel.ptx", Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    source.write_text(ptx)
    commands = [[tool, "-v", "-arch=sm_90a", source, "-o", tmp_path / "kernel.cubin"] for tool in tools.glob("ptxas*")]
    said = [subprocess.run(command, capture_output=True, text=True).stderr for command in commands]
    said = [text for text in said if "Unsupported .version" not in text]  # one of them is for other GPUs
    assert said and not any("serialized" in text for text in said)
    assert all(int(re.search(r"(\d+) bytes spill stores", text)[1]) == 0 for text in said)
