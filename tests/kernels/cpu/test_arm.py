"""The kernels built for Arm and run by an emulator: results within rounding, and promised bits."""

import shutil
import subprocess

import pytest

from tests.emulator import arm
from tests.kernels.cpu.instruction_sets import CALL_CHECKS, check_products
from vbrt.kernels.cpu import compiler

WHY = arm.why_not()
needs_emulator = pytest.mark.skipif(WHY is not None, reason=str(WHY))
# runs of seconds; the others take up to a minute
_DEFAULT = {("neon", "update"), ("neon", "tiles")}
CELLS = [
    pytest.param(name, source, marks=() if (name, source) in _DEFAULT else pytest.mark.exhaustive)
    for name in arm.SETS
    for source in CALL_CHECKS
]


@needs_emulator
@pytest.mark.parametrize(("name", "source"), CELLS)
def test_arm_keeps_the_promises(name, source, use_library, tmp_path):
    use_library(source, arm.ArmLibrary(source, name, tmp_path))
    CALL_CHECKS[source]()


@pytest.mark.sample(1)
@needs_emulator
@pytest.mark.parametrize("name", arm.SETS)
def test_arm_multiplies_by_one_format_as_promised(name, use_library, tmp_path):
    use_library("linear", arm.ArmLibrary("linear", name, tmp_path))
    check_products(["nvfp4", "superblock32"])


@pytest.mark.sample(1)
@pytest.mark.skipif(shutil.which(arm.COMPILER) is None, reason=f"{arm.COMPILER} is not installed")
@pytest.mark.parametrize("name", arm.SETS)
def test_every_source_is_c_that_an_arm_compiler_takes(name):
    for source in compiler.sources():
        file = str(compiler.HERE / f"{source}.c")
        line = [arm.COMPILER, "-fsyntax-only", *compiler.options_of(source, arm.SETS[name]), file]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:2000]
