"""Kernels compile for the GPUs that may launch them, within their shared memory, registers and a bound on spills."""

import pytest

pytest.importorskip("triton.experimental.gluon")

from scripts.compile_sweep import (
    MOST_STACK_BYTES,
    TARGETS,
    Compiled,
    amd_codes,
    amd_target,
    codes_for,
    compiled,
    faults,
)

_STRIDE = 24  # of launches in the exhaustive run: scripts/compile_sweep.py --all compiles each


def by_kernel(capability):
    found = {}
    for code in codes_for(capability):
        found.setdefault(code.name, []).append(code)
    return found


def check(codes, capability):
    for code in codes:
        assert not faults(compiled(code, capability), capability), (code.name, code.signature, code.constants)


@pytest.mark.parametrize("capability", TARGETS)
def test_kernels_compile_for_each_target_within_its_limits(capability):
    """A seventh of a target's kernels, other ones for each target."""
    turn, targets = list(TARGETS).index(capability), len(TARGETS)
    kernels = by_kernel(capability)
    mine = [codes for at, codes in enumerate(kernels[name] for name in sorted(kernels)) if at % targets == turn]
    assert len(mine) >= 2
    check([codes[(turn + 1) * len(codes) // (targets + 1)] for codes in mine], capability)


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(3))
@pytest.mark.parametrize("capability", TARGETS)
def test_launches_compile_for_each_target_within_its_limits(capability, start):
    check(codes_for(capability)[8 * start :: _STRIDE], capability)


@pytest.mark.parametrize(
    "architecture",
    [
        "gfx1100",
        pytest.param("gfx942", marks=pytest.mark.exhaustive),
        pytest.param("gfx90a", marks=pytest.mark.exhaustive),
        pytest.param("gfx1201", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_in_plain_triton_compile_for_amd(architecture, request):
    import triton

    kernels = {code.name: code for code in amd_codes(architecture)}
    assert len(kernels) >= 11
    if request.node.get_closest_marker("exhaustive") is None:
        kernels = {name: code for name, code in kernels.items() if name.startswith(("fine.", "whole."))}
    for code in kernels.values():
        source = code.kernel.ASTSource(code.kernel, code.signature, code.constants, code.attributes)
        made = triton.compile(source, target=amd_target(architecture), options=code.options)
        assert made.asm["hsaco"] and made.metadata.shared <= 64 << 10, code.name  # of a workgroup


def test_what_exceeds_a_limit_is_named():
    within = Compiled(shared_bytes=99 << 10, registers=128, stack_bytes=MOST_STACK_BYTES, threads=512)
    assert faults(within, 86) == []
    assert faults(within._replace(shared_bytes=100 << 10), 86) == [
        "102400 bytes of shared memory; expected at most 101376"
    ]
    over = within._replace(registers=129, stack_bytes=MOST_STACK_BYTES + 8)
    assert [fault.split()[1] for fault in faults(over, 80)] == ["registers", "bytes"]


def test_a_target_compiles_nothing_that_its_launches_leave_out():
    names = {capability: {code.name for code in codes_for(capability)} for capability in (75, 80, 90)}
    assert (
        not any(name.startswith("e2m1.narrow") for name in names[75]) and "fine.merge_triton.merge_kernel" in names[75]
    )
    assert any(name.startswith("e2m1.mma") for name in names[80]) and not any("fp8" in name for name in names[80])
    assert any(name.startswith("e2m1.persistent") for name in names[90])
