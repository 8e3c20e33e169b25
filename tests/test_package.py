"""What the package shows of itself: to a shell's completion, to type checkers, in a wheel."""

import subprocess
import sys
from pathlib import Path

import pytest

import vbrt

ROOT = Path(__file__).parents[1]


def test_dir_of_a_fresh_import_lists_the_public_names():
    program = "import sys, vbrt; print(*dir(vbrt)); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr  # and that loads none of them
    assert set(vbrt.__all__) <= set(done.stdout.split())


def test_a_wheel_says_that_it_has_types_and_brings_presets_and_cost_models():
    wheel = pytest.importorskip("hatchling.builders.wheel")
    paths = {Path(file.distribution_path) for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {Path("vbrt/py.typed"), Path("vbrt/__init__.py"), Path("vbrt/configs/fp4.toml")} <= paths
    assert {Path(f"vbrt/estimation/advice/cost_models/{name}.toml") for name in ("h200", "zen4")} <= paths
