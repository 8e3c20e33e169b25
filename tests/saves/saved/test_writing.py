"""What a save writes, and what is there when it is interrupted, killed, or cannot write."""

import json
import os
import threading
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import vbrt
from tests import forked
from tests.models import llama, mlp, wrap
from tests.saves.cases import files, logits, on_meta
from vbrt.errors import CheckpointError
from vbrt.saves.files.safetensors_file import TensorFile
from vbrt.saves.saved import save


def test_the_files_are_plain_safetensors_with_the_dense_models_names(tmp_path):
    vb = wrap(llama(dtype=torch.bfloat16), "nvfp4")
    assert vb.save(tmp_path) == tmp_path
    manifest = json.loads((tmp_path / "vbrt.json").read_text())
    assert manifest["version"] == 3 and manifest["vbrt"] == vbrt.__version__
    (shard,) = tmp_path.glob("*.safetensors")
    tensors = load_file(shard)
    codes = tensors["model.layers.0.mlp.up_proj.weight.codes"]
    with vb.registry["model.layers.0.mlp.up_proj"].handle.lease() as (coarse,):
        assert torch.equal(codes, coarse["codes"])
        assert tensors["model.layers.0.mlp.up_proj.weight.scales"].dtype is torch.float8_e4m3fn
    assert torch.equal(tensors["model.norm.weight"], vb.module.model.norm.weight)
    with safe_open(shard, "pt") as file:
        assert set(file.keys()) == set(manifest["tensors"])


def test_the_library_reads_every_tensor_whatever_the_lengths_of_lists(tmp_path):
    vb = wrap(llama(dtype=torch.float16), "exact", exclude=["*.mlp.*"])
    vb.save(tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    tensors = load_file(shard)
    assert any(tensor.numel() % 2 for name, tensor in tensors.items() if name.endswith(".side"))
    assert all(info.begin % info.dtype.itemsize == 0 for info in TensorFile(shard).tensors.values())
    for name, layer in vb.registry.items():
        with layer.handle.lease() as (_, fine):
            assert all(torch.equal(tensors[f"{name}.weight.fine.{field}"], fine[field]) for field in fine)


def test_a_dense_save_is_a_checkpoint_of_the_dense_model(tmp_path):
    model = mlp()
    wrap(mlp(), "dense").save(tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    saved = load_file(shard)
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("vbrt.saves.saved.save._SHARD_BYTES", 20_000)
    vb = wrap(llama(), "nvfp4")
    vb.save(tmp_path)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3 and all(path.stat().st_size < 50_000 for path in shards)
    assert torch.equal(logits(vbrt.load(tmp_path, on_meta(llama))), logits(vb))


def test_a_second_save_takes_the_place_of_the_first(tmp_path):
    wrap(mlp(), "nvfp4").save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    first = files(tmp_path)
    vb = wrap(mlp(), "nf4")
    vb.save(tmp_path)
    assert len(files(tmp_path)) == 3 and len(set(files(tmp_path)) & set(first)) == 2
    assert vbrt.load(tmp_path, mlp()).settings.weights.format == "nf4"


@pytest.mark.parametrize("at", ["pwrite", "fsync", "replace"])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_an_interrupted_save_leaves_the_one_before(tmp_path, monkeypatch, at, when):
    old = wrap(mlp(), "nvfp4")
    old.save(tmp_path)
    before, calls, real = files(tmp_path), [], getattr(os, at)

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) > when:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    vb = wrap(mlp(depth=4), "dense").materialize()
    with monkeypatch.context() as patch:
        patch.setattr(f"vbrt.host.safe_files.os.{at}", failing)
        if (at, when) == ("replace", 2):
            vb.save(tmp_path)
            assert files(tmp_path) != before
            return
        with pytest.raises(CheckpointError, match=f"(?s){tmp_path}.*the disk is full"):
            vb.save(tmp_path)
    assert files(tmp_path) == before
    x = torch.randn(2, 64)
    assert torch.equal(logits(vbrt.load(tmp_path, mlp()), x), logits(old, x))
    vb.save(tmp_path)
    assert torch.equal(logits(vbrt.load(tmp_path, mlp(depth=4)), x), logits(vb, x))


KILLED = """
import os, sys, vbrt
from tests.zoo import zoo
from tests.models import mlp, wrap
left = int(sys.argv[2])
real = os.pwrite
def pwrite(*args):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    return real(*args)
os.pwrite = pwrite
wrap(mlp(), "dense").save(sys.argv[1])
"""


def test_a_killed_save_leaves_the_one_before_and_no_litter_after_the_next(tmp_path):
    vb = wrap(mlp(), "nvfp4")
    vb.save(tmp_path)
    before = files(tmp_path)
    assert forked.run(KILLED, str(tmp_path), "3").returncode == 9
    assert len(files(tmp_path)) == len(before) + 1
    x = torch.randn(2, 64)
    assert torch.equal(logits(vbrt.load(tmp_path, mlp()), x), logits(vb, x))
    vb.save(tmp_path)
    assert len(files(tmp_path)) == len(before)


def test_a_save_writes_through_no_link_that_somebody_planted(tmp_path, monkeypatch):
    victim, saved = tmp_path / "victim", tmp_path / "saved"
    victim.write_text("mine")
    saved.mkdir()
    monkeypatch.setattr("secrets.token_hex", lambda nbytes: "0" * 2 * nbytes)  # even if the name could be known
    for name in ("vbrt.json", "vbrt.json.tmp"):
        (saved / name).symlink_to(victim)
    vb = wrap(mlp(), "nvfp4")
    vb.save(saved)
    assert victim.read_text() == "mine" and not (saved / "vbrt.json").is_symlink()
    planted = saved / "vbrt.json.00000000.tmp"
    planted.symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"cannot be saved.*File exists; a previous save is intact"):
        vb.save(saved)
    assert victim.read_text() == "mine" and not planted.is_symlink()
    assert vbrt.load(saved, mlp()).registry


def test_a_save_whose_directory_cannot_be_synced_says_that_it_is_in_place(tmp_path, monkeypatch):
    wrap(mlp(), "nvfp4").save(tmp_path)
    before = files(tmp_path)
    vb, real = wrap(mlp(), "nf4"), os.fsync

    def failing(fd):
        if "vbrt.json" in files(tmp_path) and "nf4" in (tmp_path / "vbrt.json").read_text():
            raise OSError(5, "Input/output error")
        return real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(CheckpointError, match=r"the save is in place, but .* \(Input/output error\).*save again"):
            vb.save(tmp_path)
    assert set(before) < set(files(tmp_path))  # a power cut may bring the old manifest back
    assert vbrt.load(tmp_path, mlp()).settings.weights.format == "nf4"
    vb.save(tmp_path)
    assert len(files(tmp_path)) == len(before)


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
        wrap(mlp(), "nvfp4").save(tmp_path / "file")
    with pytest.raises(CheckpointError, match="file/below"):
        wrap(mlp(), "nvfp4").save(tmp_path / "file" / "below")


def test_saves_to_one_directory_at_once_come_one_after_the_other(tmp_path, monkeypatch):
    inside, most, write = [], [], save._write_shards

    def watched(*args):
        inside.append(1)
        time.sleep(0.05)
        most.append(len(inside))
        inside.pop()
        return write(*args)

    monkeypatch.setattr(save, "_write_shards", watched)
    threads = [threading.Thread(target=wrap(mlp(), "dense").save, args=(tmp_path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1] and len(files(tmp_path)) == 2
    vbrt.load(tmp_path, on_meta(mlp)).close()
