"""The kernels built for every instruction set that this machine runs: results within rounding, and promised bits."""

import subprocess

import pytest
import torch

from tests.kernels.cpu.instruction_sets import CHECKS
from vbrt.kernels.cpu import build, compiler

# the sets that a wheel has and this machine runs, by name
SETS = {each.name: each for each in compiler.served(compiler.machine(), compiler.cpu_features())}
# builds that the default run pays for; what compilers are left to do alone varies less
_DEFAULT = {("linear", "avx2"), ("experts", "avx2"), ("update", "x86-64")}
CELLS = [
    pytest.param(name, source, marks=() if (source, name) in _DEFAULT else pytest.mark.exhaustive)
    for name in SETS
    for source in CHECKS
]


@pytest.mark.parametrize(("name", "source"), CELLS)
def test_every_instruction_set_keeps_the_promises(name, source, use_library, library_for):
    use_library(source, library_for(source, SETS[name]))
    CHECKS[source]()


@pytest.mark.parametrize("source", compiler.sources())
def test_what_computes_here_is_built_for_the_best_set_that_the_compiler_knows(source, tmp_path):
    empty, best = tmp_path / "empty.c", compiler.suitable()[0]
    empty.write_text("")
    command = [*compiler.find_compiler(), "-shared", *best.flags, str(empty), "-o", str(tmp_path / "empty.so")]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"the compiler does not know {best.name}")
    assert build.refusal(torch.device("cpu"), source) is None
    assert best.name in build.libraries()[source]


def test_a_cpu_is_served_what_it_has_and_nothing_more():
    sets = compiler.INSTRUCTION_SETS
    assert {each.name for each in sets if not each.features} == {"x86-64", "neon"}  # one for every CPU of its kind
    for each in sets:
        assert compiler.served(each.machine, each.features)[0] is each
        less = each.features - {max(each.features, default="")}
        assert each not in compiler.served(each.machine, less) or not each.features
    assert compiler.served("riscv64", frozenset({"avx2"})) == ()
