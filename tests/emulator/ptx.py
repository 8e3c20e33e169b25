"""Runs what Triton compiles for a GPU on the CPU: PTX, a warp at a time, its 32 lanes in numpy.

Triton's interpreter knows no inline assembly, and no Gluon. This knows the instructions that our kernels are compiled
to by the versions of Triton in `TRITON`, `wgmma` and the copy engine among them, and stops at any other with an
`UnknownInstruction`; `test_instructions.py` compares each class of them with a GPU. It is stricter than a GPU: an
access outside of what was allocated, or at an address that is no multiple of its size, is an error, and so are warps
that wait for each other; shared memory begins as NaN, and so does what `Machine.empty` gives. A `wgmma` reads shared
memory at the last moment, when it is waited for; copies write it then or, with `Machine.late` False, at once: so a wait
that is missing shows. Warps run until they wait and programs until they end, so a barrier that is missing between them
may not.

    machine = Machine()
    y = machine.empty(4, 16, dtype=torch.bfloat16)
    machine.run(compiled(...).asm["ptx"], (2, 1), [machine.put(x), y, 4, 16])
    machine.get(y)

Semantics: the PTX ISA, chapter 9.7: which lane has what of a matrix (`mma`, `ldmatrix`, `wgmma`), matrix descriptors
and swizzles of 128 bytes, barriers and their phases.

    ptx.py            this front
    parser.py         text to instructions
    machine.py        memory, programs, warps that wait; kernels launched on tensors of the CPU
    lanes.py          the registers of a warp, which the instructions of three files work on:
    arithmetic.py     numbers, bits, conversions, what lanes tell each other
    transfers.py      loads, stores, atomics, asynchronous copies, barriers
    matrices.py       mma and wgmma
    memory.py         tensors at addresses, barriers, what was begun and is waited for
    values.py         types and rounding
"""

from tests.emulator.machine import TRITON, Machine, UnknownInstruction, launched
from tests.emulator.memory import Buffer, Described

__all__ = ["TRITON", "Buffer", "Described", "Machine", "UnknownInstruction", "launched"]
