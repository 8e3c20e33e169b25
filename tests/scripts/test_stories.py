"""The README's stories on tiny shapes, and the picture's bench as far as no GPU is needed."""

import json
import re
import sys

import pytest
import torch

pytest.importorskip("transformers")

from scripts import memory_bench, stories, story_models
from tests.cli.conftest import llama  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore")


def told(monkeypatch, tmp_path, story, *given):
    """What a story writes."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["stories.py", story, *given, "--out", str(out)])
    stories.main()
    return json.loads(out.read_text())[story]


def test_a_shape_has_the_same_random_weights_each_time_and_loads_without_the_dense_model():
    with story_models.wrapped("tiny", "exact") as one, story_models.wrapped("tiny", "fp4") as other:
        assert one.lossless and {layer.format for layer in other.stats().layers.values()} == {"nvfp4"}
        first, second = one.state_dict(), other.state_dict()
    assert torch.equal(first["lm_head.weight"], second["lm_head.weight"])
    drawn = first["model.layers.1.mlp.up_proj.weight"].float()
    assert drawn.std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"].float(), drawn)


def test_half_of_the_experts_hit_more_than_an_eighth(monkeypatch, tmp_path):
    given = ("--shape", "tiny-experts", "--new", "3", "--shares", "50", "12.5")
    few, many = told(monkeypatch, tmp_path, "experts", *given)["shares"]
    assert (few["percent"], many["percent"]) == (12.5, 50) and few["hit_rate"] < many["hit_rate"] < 1
    assert few["ms"] > 0 and few["decides"] == ["host"]


def test_adapters_learn_on_a_shape(monkeypatch, tmp_path):
    pytest.importorskip("peft")
    row = told(monkeypatch, tmp_path, "lora", "--shape", "tiny", "--steps", "3", "--length", "16")
    assert row["last_loss"] < row["first_loss"] and row["trained_parameters"] == 7168 and row["step_s"] > 0


def test_a_gpu_too_small_for_what_stays_dense_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("", (), {"total_memory": 1 << 37}))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share: None)
    args = stories.options().parse_args(["generate", "--shape", "qwen3-32b", "--gpu-memory", "5GB", "--spare", "1.8GB"])
    args.where = args.shape
    room = stories.Room(args)
    room.device = torch.device("cuda")
    with pytest.raises(SystemExit, match=r"too small: what stays dense, --spare and CUDA take 5\.2 GiB"):
        room.tiers()


def test_the_picture_is_that_of_the_committed_results(tmp_path):
    pytest.importorskip("matplotlib")
    lines = memory_bench.points()
    memory_bench.draw(lines, tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text("utf-8")
    assert all(f">{name}</text>" in drawn for name in memory_bench.DRAWN)
    shown = memory_bench.PICTURE.read_text("utf-8")
    assert re.findall(r'<path d="M [^"]*"', drawn) == re.findall(r'<path d="M [^"]*"', shown), "memory_bench.py --plot"
    accelerate, exact, *_, fp4 = lines.values()
    assert min(fp4)[0] < min(accelerate)[0] and min(exact)[1] < min(accelerate)[1]


def test_a_directory_of_a_model_has_a_story_too(llama, monkeypatch, tmp_path):  # noqa: F811
    row = told(monkeypatch, tmp_path, "generate", str(llama), "--new", "3")
    assert row["model"] == llama.name and row["ms"] > 0 and row["pages_gb"] > 0
