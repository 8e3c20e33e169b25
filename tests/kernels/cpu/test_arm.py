"""The kernels built for Arm and run by an emulator: results within rounding, and promised bits."""

import pytest

from tests.emulator import arm
from tests.kernels.cpu.instruction_sets import CHECKS

WHY = arm.why_not()
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))
CELLS = [pytest.param(name, source, marks=pytest.mark.exhaustive) for name in arm.SETS for source in CHECKS]


@pytest.mark.parametrize(("name", "source"), CELLS)
def test_arm_keeps_the_promises(name, source, use_library, tmp_path):
    use_library(source, arm.ArmLibrary(source, name, tmp_path))
    CHECKS[source]()
