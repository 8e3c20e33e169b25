"""Saves of models that ranks hold parts of, read by any number of ranks."""

import copy
import json
from pathlib import Path

import pytest
import torch

import vbrt
from tests.distributed import cases
from tests.distributed.ranks import Ranks, RanksFailed
from tests.models import config

MORE = pytest.mark.exhaustive
HELD = [
    ("exact", "bfloat16"),
    pytest.param("nvfp4", "float32", marks=MORE),
    pytest.param("dense", "float32", marks=MORE),
]


def decoded(format: str, dtype: str) -> dict[str, torch.Tensor]:
    """What one process holds."""
    vb = vbrt.wrap(cases.llama(getattr(torch, dtype)), config(format))
    vb.materialize()
    weights = copy.deepcopy(vb.state_dict())
    vb.close()
    return weights


@pytest.mark.parametrize(("format", "dtype"), HELD)
def test_what_two_ranks_save_one_and_four_load(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, format: str, dtype: str
):
    path = tmp_path / "save"
    two_ranks(cases.saved, path=str(path), format=format, dtype=dtype)
    with torch.device("meta"):
        model = cases.llama(getattr(torch, dtype))
    vb = vbrt.load(path, model)
    for name, weight in decoded(format, dtype).items():
        assert torch.equal(vb.state_dict()[name], weight), name
    vb.close()
    for r in four_ranks(cases.loaded_parts, path=str(path), format=format, dtype=dtype):
        assert r == {"wrong": [], "error": pytest.approx(0, abs=1e-6), "swapped": 14}


@MORE
def test_what_one_process_saves_two_ranks_load_and_what_four_save(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path):
    vb = vbrt.wrap(cases.llama(), config("exact"))
    vb.save(tmp_path / "one")
    four_ranks(cases.saved, path=str(tmp_path / "four"), format="exact", dtype="bfloat16")
    for save in ("one", "four"):
        for r in two_ranks(cases.loaded_parts, path=str(tmp_path / save), format="exact", dtype="bfloat16"):
            assert r == {"wrong": [], "error": 0, "swapped": 14}
    two_ranks(cases.saved, path=str(tmp_path / "four"), format="exact", dtype="bfloat16")
    held = json.loads((tmp_path / "four" / "vbrt-ranks.json").read_text())
    folders = {path.name for path in (tmp_path / "four").iterdir() if path.is_dir()}
    assert folders == set(held["ranks"]) and len(folders) == 2, "the save before is gone"
    vb.save(tmp_path / "four")
    assert not list((tmp_path / "four").glob("*ranks*")), "a save of one process takes its place"


def test_a_folder_of_another_save_is_refused_and_a_rank_that_cannot_write_leaves_the_save(
    two_ranks: Ranks, tmp_path: Path
):
    path = tmp_path / "save"
    two_ranks(cases.saved, path=str(path), format="dense", dtype="float32")
    before = (path / "vbrt-ranks.json").read_bytes()
    with pytest.raises(RanksFailed) as failed:
        two_ranks(cases.saved, path=str(path), format="dense", dtype="float32", full=1)
    assert [name for name, _ in failed.value.errors] == ["CheckpointError"] * 2
    assert all(text.startswith("rank 1: ") for _, text in failed.value.errors)
    assert (path / "vbrt-ranks.json").read_bytes() == before
    manifest = next(path.glob("ranks-*-00001-*")) / "vbrt.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float16", 1))
    with pytest.raises(vbrt.CheckpointError, match=r"ranks-.*-00001-of-00002.*of another save"):
        vbrt.load(path, cases.llama(torch.float32))


def test_gate_and_up_in_one_weight_are_cut_each_for_itself_and_loaded_whole(two_ranks: Ranks, tmp_path: Path):
    for r in two_ranks(cases.packed, path=str(tmp_path)):
        assert r == {"equal": True, "parts": [2, 1, None]}
    vb = vbrt.load(tmp_path, torch.nn.Module.to(cases.gated(), "meta"))
    for name, weight in cases.gated().named_parameters():
        assert torch.equal(vb.state_dict()[name], weight), name


def test_save_pretrained_writes_whole_weights_and_refuses_planes_in_parts(two_ranks: Ranks, tmp_path: Path):
    model = cases.llama()
    model.save_pretrained(tmp_path / "model")
    for said in two_ranks(cases.saved_pretrained, path=str(tmp_path / "model"), to=str(tmp_path / "saved")):
        assert said.startswith("save_pretrained: model.layers.0.self_attn.q_proj: each rank has a part of its planes")
    again = type(model).from_pretrained(tmp_path / "saved")
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
