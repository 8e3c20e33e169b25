"""What README and the documentation show runs, block after block, as somebody would type it: see `pages.py`."""

import contextlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vbrt
from tests.cli.conftest import llama, qwen  # noqa: F401 - fixtures
from tests.docs.pages import PAGES, Page
from tests.docs.setups import SETUPS

_WITH_GPU_BLOCKS = [name for name in PAGES if any(block.mark == "gpu" for block in Page(name).blocks)]
pytestmark = pytest.mark.filterwarnings("ignore:.*decoded")


@pytest.fixture
def run(llama, qwen, tmp_path, monkeypatch, registers):  # noqa: F811
    """A function that runs a page in a directory of its own and returns its names; its models are closed afterwards."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    scope = {}

    def run(name, *, gpu=False, setup=None):
        page = Page(name)
        setup = setup or page.setup
        scope.update(SETUPS[setup](llama, qwen) if setup else {})
        page.run(scope, gpu=gpu)
        return scope

    yield run
    for value in scope.values():
        if isinstance(value, vbrt.VBModelWrapper | vbrt.VBPipelineWrapper):
            with contextlib.suppress(vbrt.WrapError):  # unwrapped by the page
                value.close()


def shows_experts(scope, printed):
    assert "routed experts" in printed
    assert "Routed experts" in Path("run.html").read_text("utf-8")


def decodes_what_bitsandbytes_has_written(scope, printed):
    assert {layer.format for layer in vbrt.of(scope["model"]).stats().layers.values()} == {"nvfp4"}
    tensors = load_file("Llama-nf4/model.safetensors")
    decoded = scope["vb"].unwrap().state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    table, codes = tensors[f"{name}.quant_map"], tensors[name].flatten().long()
    levels = table[torch.stack((codes >> 4, codes & 15), dim=-1).flatten()].view(-1, 64)
    assert torch.equal(decoded[name].flatten(), (levels * tensors[f"{name}.absmax"][:, None]).bfloat16().flatten())


#: what must hold once a page has run, with what it has printed
_THEN = {"docs/experts.md": shows_experts, "docs/migrating.md": decodes_what_bitsandbytes_has_written}


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_run_one_after_the_other(run, name, capsys):
    page = Page(name)
    has_python = any(block.language == "python" for block in page.blocks)
    assert page.setup or not has_python, "no `<!-- setup: name -->`, see tests/docs/pages.py"
    scope = run(name)
    if name in _THEN:
        _THEN[name](scope, capsys.readouterr().out)


@pytest.mark.exhaustive
def test_the_tutorial_prints_what_it_shows(run, capsys):
    run("docs/tutorial.md", setup="real_smollm2")
    printed, texts = capsys.readouterr().out, [b.text for b in Page("docs/tutorial.md").blocks if b.language == "text"]
    shown = [line for text in texts for line in text.splitlines()]
    assert len(shown) > 15 and [line for line in shown if line not in printed] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", _WITH_GPU_BLOCKS)
def test_the_blocks_that_need_a_gpu_run_there(run, name):
    run(name, gpu=True)
