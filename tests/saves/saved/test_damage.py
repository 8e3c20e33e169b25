"""Files that are damaged, hostile or no save at all are refused by name; the model is as it was."""

import json
import os
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

import vbrt
from tests.models import mlp, wrap
from tests.saves.cases import logits
from vbrt.errors import CheckpointError
from vbrt.saves.common.manifest import content_digest
from vbrt.saves.files.safetensors_file import TensorFile
from vbrt.saves.files.safetensors_file import digest as tensor_digest


@pytest.mark.parametrize("damage", ["flip", "truncate", "cut header", "remove", "empty"])
def test_a_damaged_file_is_named_and_the_model_is_as_it_was(saved, damage):
    (shard,) = saved.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes({"flip": data, "truncate": data[:-5000], "cut header": data[:40], "empty": b""}.get(damage, b""))
    if damage == "remove":
        shard.unlink()
    model = mlp()
    words = {"flip": "damaged: the bytes of", "remove": "no such file"}.get(damage, "damaged")
    with pytest.raises(CheckpointError, match=f"{shard.name}: {words}"):
        vbrt.load(saved, model)
    x = torch.randn(2, 64)
    assert torch.equal(logits(model, x), logits(mlp(), x))


@pytest.mark.parametrize("what", ["vbrt.json", "shard", "index", "model.safetensors"])
def test_a_fifo_in_the_place_of_a_file_is_refused_and_nothing_waits_for_it(saved, what):
    (shard,) = saved.glob("*.safetensors")
    if what in ("index", "model.safetensors"):
        (saved / "vbrt.json").unlink()
        shard = shard.rename(saved / "model.safetensors")
    if what == "index":
        (saved / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    path = saved / "vbrt.json" if what == "vbrt.json" else shard
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"{path}: .*FIFO|neither {path.name}|nor {path.name}"):
        vbrt.load(saved, mlp())


@pytest.mark.parametrize("what", ["vbrt.json", "model.safetensors.index.json", "shard", "header"])
def test_a_file_that_pretends_to_be_large_is_refused_before_memory_is_taken(saved, what):
    (shard,) = saved.glob("*.safetensors")
    if what == "model.safetensors.index.json":
        (saved / "vbrt.json").unlink()
    path = shard if what in ("shard", "header") else saved / what
    with open(path, "r+b" if path.exists() else "wb") as file:
        if what == "header":
            file.write((1 << 34).to_bytes(8, "little"))
        file.truncate(1 << 36)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"{path}: "):
        vbrt.load(saved, mlp())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_a_fine_plane_whose_lists_do_not_go_with_its_codes_is_refused(tmp_path):
    vb = wrap(mlp(dtype=torch.bfloat16), "exact").materialize()
    vb.save(tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    tensors = load_file(shard)
    name = "0.weight.fine.starts"
    tensors[name] = tensors[name] + 1000
    save_file(tensors, shard)
    content = json.loads((tmp_path / "vbrt.json").read_text())
    content["tensors"][name][-1] = tensor_digest(tensors[name])
    content["digest"] = content_digest(content)
    (tmp_path / "vbrt.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"0: fine plane: lists of \d+ and \d+ entries, or `starts`, that do not"):
        vbrt.load(tmp_path, mlp())


def file_of(path, header, nbytes):
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes))
    return path


def entry(begin, end, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "nbytes"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16),
        ({"a": entry(4, 12)}, 12),
        ({"a": entry(0, 8)}, 9),
        ({"a": entry(0, 8)}, 7),
        ({"a": entry(0, 8, shape=["2"])}, 8),
        ({"a": entry(0, 8, shape=[2.0])}, 8),
        ({"a": entry(0, 8, shape=[True, 2])}, 8),
        ({"a": entry(0, 8, shape=[-2])}, 8),
        ({"a": entry(0, 8, shape=[float("inf")])}, 8),
        ({"a": entry(0, 8, shape=[1 << 64])}, 8),
        ({"a": [1]}, 8),
        ({"a": entry(0, 8) | {"data_offsets": ["0", "8"]}}, 8),
        ({"a": entry(0, 8, dtype="F33")}, 8),
        ({"a": None}, 8),
        ({"__metadata__": {"a": 1}}, 0),
        (f'{{"a": {json.dumps(entry(0, 4))}, "a": {json.dumps(entry(4, 8))}}}', 8),
        ("[]", 0),
        ("", 0),
        ("{}x", 0),
        ("[" * 10_000, 0),
        ('{"a":' * 10_000, 0),
        ({"a": entry(0, 8, shape=[2] + [1] * 70)}, 8),
        ({"a": entry(0, 0, shape=[1 << 62, 1 << 62, 0])}, 0),
        ({"a": entry(0, 8, dtype="F4", shape=[16])}, 8),
    ],
)
def test_a_header_that_the_library_refuses_is_refused(tmp_path, header, nbytes):
    path = file_of(tmp_path / "x.safetensors", header, nbytes)
    with pytest.raises(CheckpointError, match=f"{path}: damaged, truncated, or not a safetensors file"):
        TensorFile(path)


def test_every_dtype_that_torch_has_is_read(tmp_path):
    for name in ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e4m3fn", "bool", "uint64", "complex64", "float64"):
        tensor = torch.ones(3, 2).to(getattr(torch, name))
        save_file({"a": tensor}, tmp_path / "x.safetensors")
        back = TensorFile(tmp_path / "x.safetensors").read("a")
        assert back.dtype is tensor.dtype and torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"weight_map": {"a": null}}', r"weight_map\.a = None"),
        ('{"weight_map": {"a": 1}}', r"weight_map\.a = 1"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "outside of its directory"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {"a": "."}}', r"weight_map\.a"),
        ('{"weight_map": {"a": ""}}', r"weight_map\.a"),
        ("[]", "weight_map"),
        ("[" * 100_000, "not valid JSON"),
        ('{"weight_map": {"a": "x\\u0000"}}', "x"),
        ("{}", "weight_map"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, text, words):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        vbrt.load(tmp_path, mlp())


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\ud800", "~nobody-of-this-name/x", "x/" * 3000])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    for path in (name, str(tmp_path / name))[: 1 if name.startswith("~") else 2]:
        with pytest.raises(CheckpointError):
            vbrt.load(path, mlp())
        with pytest.raises(CheckpointError):
            wrap(mlp(), "nvfp4").save(path)
