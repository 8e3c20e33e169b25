"""What the machine runs, and what it stops at."""

import pytest
import torch

from tests.emulator.ptx import Machine, UnknownInstruction

KERNEL = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 64
{
	.reg .b32 	%r<4>;
	.reg .b64 	%rd<4>;
	ld.param.b64 	%rd1, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.s32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	BODY
	ret;
}
"""


def ran(body, words):
    machine = Machine()
    out = machine.empty(words, dtype=torch.int32)
    machine.run(KERNEL.replace("BODY", body), (1, 1), [out])
    return machine.get(out)


def test_the_machine_runs_two_warps():
    assert torch.equal(ran("st.global.b32 [%rd3+0], %r1;", 64), torch.arange(64, dtype=torch.int32))
    assert (ran("ld.shared.b32 %r2, [0]; st.global.b32 [%rd3], %r2;", 64) == -1).all()


REFUSED = {
    "an access behind the end": ("st.global.b32 [%rd3], %r1;", IndexError, "outside"),
    "an access before the start": ("st.global.b32 [%rd3+-4], %r1;", IndexError, "outside"),
    "an odd address": ("ld.global.b32 %r2, [%rd3+2];", IndexError, "no multiple of 4"),
    "an unknown instruction": ("popc.b32 %r2, %r1;", UnknownInstruction, "popc.b32 .*knows the PTX of Triton 3"),
    "an unknown modifier": ("add.sat.s32 %r2, %r1, %r1;", UnknownInstruction, "add.sat"),
    "an unknown product": ("mad.rn.f32 %r2, %r1, %r1, %r1;", UnknownInstruction, "mad.rn"),
    "an unknown rounding": ("cvt.rni.s32.f32 %r2, %r1;", UnknownInstruction, "cvt.rni"),
    "a barrier that nobody made": ("mbarrier.arrive.shared::cta.b64 _, [0];", IndexError, "no barrier was initialized"),
    "lanes that part": ("setp.lt.s32 %p1, %r1, 7; @%p1 bra $L; $L: mov.u32 %r2, 0;", AssertionError, "part"),
    "a loop without an end": ("$L: bra $L;", TimeoutError, "does not end"),
    "a wait for a warp that has ended": (
        "setp.lt.s32 %p1, %r1, 32; @%p1 bra $L; bar.sync 0; $L: mov.u32 %r2, 0;", TimeoutError, "wait for each other"),
    "a wait for what nobody sends": (
        "mbarrier.init.shared::cta.b64 [0], 1; $L: mbarrier.try_wait.parity.shared::cta.b64 p, [0], 0; @!p bra $L;",
        TimeoutError, "wait for each other"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_the_machine_stops_at(case):
    body, error_type, match = REFUSED[case]
    with pytest.raises(error_type, match=match):
        ran(body, 63)
