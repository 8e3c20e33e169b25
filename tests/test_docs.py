"""What the documentation shows in Python runs, piece after piece, as somebody would type it."""

import re
from pathlib import Path

import pytest
import torch

import vbrt
from tests.cli.conftest import llama  # noqa: F401 - a fixture
from tests.saves.published_files import publish

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", ["experts.md"])
@pytest.mark.filterwarnings("ignore:.*not swapped")
def test_the_pieces_of_a_page_run_one_after_the_other(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    pieces = re.findall(r"^```python\n(.*?)^```$", (DOCS / name).read_text("utf-8"), re.M | re.S)
    assert len(pieces) > 3
    scope: dict[str, object] = {}
    for number, piece in enumerate(pieces, 1):
        exec(compile(piece, f"{name}, piece {number}", "exec"), scope)
    assert "routed experts" in capsys.readouterr().out
    assert "Routed experts" in (tmp_path / "run.html").read_text("utf-8")


@pytest.mark.filterwarnings("ignore")
def test_the_lines_after_of_the_page_on_migrating_run(llama, tmp_path, monkeypatch):  # noqa: F811
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Llama-3.1-8B").symlink_to(llama)
    (tmp_path / "Llama-nf4").mkdir()
    dense = transformers.AutoModelForCausalLM.from_pretrained(llama)
    dense.load_state_dict(publish(tmp_path / "Llama-nf4", dense, "bitsandbytes"))
    pieces = re.findall(r"^```python\n(.*?)^```$", (DOCS / "migrating.md").read_text("utf-8"), re.M | re.S)
    scope: dict[str, object] = {"torch": torch}
    for number, piece in enumerate(pieces, 1):
        exec(compile(piece, f"migrating.md, piece {number}", "exec"), scope)
    held = {layer.format for layer in vbrt.of(scope["model"]).stats().layers.values()}
    assert len(pieces) == 4 and held == {"nvfp4"}
    decoded = scope["vb"].unwrap().state_dict()
    assert all(torch.equal(decoded[name], value) for name, value in dense.state_dict().items())
