"""The kernels of resident tables compile; what they decide is tested with device caches (`tests/layers/experts`)."""

import pytest

from tests.kernels.cuda.gpu_cases import compiled
from tests.matrix import matrix
from vbrt.kernels.cuda.experts.residency import _BLOCK, _PROGRAMS, _WARPS, _power_of_two, _starts


@matrix(capability=[90, 80, 120], at_most=1)
def test_the_kernel_that_fetches_loads_16_bytes_a_thread(capability):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.experts.fetch_triton import fetch_kernel

    types = {"fetch_ptr": "*i64", "base_ptr": "*i64", "units": "i32"}
    constants = {"PAGES": 128, "BLOCK": _BLOCK, "PROGRAMS": _PROGRAMS}
    done = compiled(
        fetch_kernel, types, constants, capability, warps=_WARPS, aligned=("fetch_ptr", "base_ptr"), gluon=False
    )
    wide = _BLOCK // (32 * _WARPS * 2)
    assert done.asm["ptx"].count("ld.global.v2.b64") == done.asm["ptx"].count("st.global.v2.b64") == wide


def test_tables_are_cut_at_sums_and_powers_of_two():
    assert _starts([3, 0, 4]) == [0, 3, 3, 7]
    assert [_power_of_two(n) for n in (0, 1, 2, 3, 128, 129)] == [1, 1, 2, 4, 128, 256]


@matrix(capability=[90, 75, 120], at_most=1)
@pytest.mark.parametrize("planes", [1, 2])
def test_the_kernel_that_leaves_misses_to_the_host_compiles(capability, planes):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.experts.resolve_triton import resolve_kernel

    names = list(resolve_kernel.arg_names)
    numbers = names.index("P")
    types = dict.fromkeys(names[:numbers], "*i64") | dict.fromkeys(names[numbers:], "i32")
    constants = {"EXPERTS": 128, "SLOTS": 16, "IDS": 8, "ONE": 1 << 12, "SCAN": False, "HOSTS": True, "PLANES": planes}
    assert compiled(resolve_kernel, types, constants, capability, warps=1, aligned=(), gluon=False).asm["ptx"]


@matrix(capability=[90, 75, 120], at_most=1)
@pytest.mark.parametrize("first", [True, False])
def test_the_kernels_that_fetch_from_a_drive_compile_and_load_16_bytes_a_thread(capability, first):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.experts import drive_triton

    words = {"POST": 0, "COUNT": 24, "LIST": 32, "PAGES": 256}
    types = dict.fromkeys(("fetch_ptr", "rank_ptr", "words_ptr", "state_ptr"), "*i64") | {"first": "i32", "most": "i32"}
    asks = compiled(drive_triton.ask_kernel, types, words, capability, warps=2, aligned=(), gluon=False)
    assert asks.asm["ptx"].count("st.release.sys") == 1
    pointers = ("fetch_ptr", "rank_ptr", "base_ptr", "words_ptr", "state_ptr")
    types = dict.fromkeys(pointers, "*i64") | {"units": "i32", "wait_us": "i32"}
    words = {"ANSWER": 8, "GAVE_UP": 16, "ADDRESSES": 64, "FIRST": first, "PAGES": 256}
    words |= {"BLOCK": _BLOCK, "PROGRAMS": _PROGRAMS}
    done = compiled(drive_triton.bring_kernel, types, words, capability, warps=_WARPS, aligned=pointers, gluon=False)
    wide = _BLOCK // (32 * _WARPS * 2) * (2 if first else 1)
    ptx = done.asm["ptx"]
    assert ptx.count("ld.global.v2.b64") == ptx.count("st.global.v2.b64") == wide and "ld.acquire.sys" in ptx
