"""The examples of Ray, where an actor is killed and a replica loses its pages: docs/howto/ray.md."""

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("transformers")
if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed; pip install 'ray[data,serve]'", allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("pages are shared on Linux only", allow_module_level=True)

pytestmark = pytest.mark.exhaustive  # a cluster of two actors takes half a minute to start and end


@pytest.fixture
def ran(tmp_path):
    """Run a case on a cluster; return what it found."""
    folder = tmp_path / f"vbrt-ray-{secrets.token_hex(4)}"
    folder.mkdir()

    def run(case: str) -> dict:
        path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
        environment = {**os.environ, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"}
        command = [sys.executable, "-m", "tests.integrations.ray_cases", case, str(folder)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads((folder / "result.json").read_text())

    yield run
    shutil.rmtree(Path("/dev/shm", folder.name), ignore_errors=True)


def test_the_batches_of_a_dead_actor_and_of_a_dead_node_are_redone_and_nothing_is_answered_twice(ran):
    found = ran("batch")
    assert found["killed"] == [True, True] and found["nodes"] == 2  # of three
    assert found["right"]
    assert found["same"]  # a second call answers nothing
    assert len(found["ids"]) == len(set(found["ids"])) == 2 * 8 + 1 and found["ids"][-1] == "more"


def test_replicas_share_pages_and_one_without_its_pages_is_replaced(ran):
    found = ran("serve")
    texts, before, after = found["texts"], found["before"], found["after"]
    assert texts[:8] == texts[8:16] == texts[16:] and all(texts)
    assert len(before) == len(after) == 2 and str(found["broken"]) in before
    assert len({tuple(mapped) for mapped in (*before.values(), *after.values())}) == 1 and min(before.values())
    assert found["text"] == texts[0] and found["left"] == []
