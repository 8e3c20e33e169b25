"""The kernels of resident tables compile; what they decide is tested with device caches (`tests/layers/experts`)."""

import pytest

from tests.kernels.cuda.gpu_cases import compiled
from tests.matrix import matrix
from vbrt.kernels.cuda.experts.residency import _BLOCK, _PROGRAMS, _WARPS, _power_of_two, _starts


@matrix(capability=[90, 80, 120], at_most=1)
def test_the_kernel_that_fetches_loads_16_bytes_a_thread(capability):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.experts.fetch_triton import fetch_kernel

    types = {"fetch_ptr": "*i64", "arena_ptr": "*i64", "units": "i32"}
    constants = {"PAGES": 128, "BLOCK": _BLOCK, "PROGRAMS": _PROGRAMS}
    done = compiled(
        fetch_kernel, types, constants, capability, warps=_WARPS, aligned=("fetch_ptr", "arena_ptr"), gluon=False
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
