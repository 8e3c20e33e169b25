"""What `scripts/scheduling.py` reads from machine code."""

import pytest

from scripts.scheduling import Instruction, main_loop, products_before_a_wait

CODE = [
    Instruction(0, "LDG.E.128.STRONG R0", 3, 0),
    Instruction(16, "HMMA.16816 R1", 7, 0),
    Instruction(32, "LDG.E.128.STRONG R4", 2, 0),
    Instruction(48, "HMMA.16816 R2", 7, 1 << 3),
    Instruction(64, "HMMA.16816 R3", 7, 1 << 2),
    Instruction(80, "@P0 BRA 0x10", 7, 0),
    Instruction(96, "EXIT", 7, 0),
]


def test_products_are_counted_up_to_the_first_wait_for_a_load_of_the_same_turn(monkeypatch):
    monkeypatch.setattr("scripts.scheduling.instructions", lambda cubin: CODE)
    assert [i.at for i in main_loop(CODE)] == [16, 32, 48, 64, 80]
    assert products_before_a_wait("a.cubin", "LDG.E.128.STRONG") == (3, 2)
    assert products_before_a_wait("a.cubin", "LDS") == (3, 3)


def test_code_without_such_a_loop_is_refused():
    with pytest.raises(ValueError, match="no loop with HMMA"):
        main_loop(CODE[:4])
