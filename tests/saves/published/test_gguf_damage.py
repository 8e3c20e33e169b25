"""Damaged, foreign and hostile GGUF files are refused by name, and the model stays as it was."""

import struct

import pytest
import torch

import vbrt
from vbrt.errors import CheckpointError, VBError
from vbrt.saves.files.gguf_file import GGUFFile, open_shards

gguf = pytest.importorskip("gguf")

F32, Q4_0 = 0, 2


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def value(key, kind, packed):
    return text(key) + struct.pack("<I", kind) + packed


def tensor(name="a.weight", shape=(32, 2), type=Q4_0, offset=0):
    """An entry; the shape as ggml has it, the dimension of rows first."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", type, offset)


ARCHITECTURE = value("general.architecture", 8, text("llama"))
MANY = 1 << 60
TENSORS = (tensor(),)


def content(values=(ARCHITECTURE,), tensors=TENSORS, *, head=b"GGUF", version=3, counts=None, data=bytes(36)):
    header = (
        head + struct.pack("<IQQ", version, *(counts or (len(tensors), len(values)))) + b"".join((*values, *tensors))
    )
    return header + bytes(-len(header) % 32) + data


def opened(path, made):
    path.write_bytes(made)
    return open_shards(path)


def test_a_whole_file_of_this_kind_is_read(tmp_path):
    (file,) = opened(tmp_path / "a.gguf", content())
    assert file.text("general.architecture") == "llama"
    assert file.tensors["a.weight"].shape == (2, 32)
    assert torch.equal(file.rows("a.weight", 1, 1), torch.zeros(1, 18, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (content(head=b"GGML"), "begins with b'GGML'"),
        (content(version=1), "version 1; expected"),
        (content(version=3 << 24), "another byte order"),
        (content(counts=(1, MANY)), "1 tensors and .* values of metadata in"),
        (content(counts=(MANY, 1)), "tensors and 1 values"),
        (content(counts=(2, 1)), "bytes wanted|0 dimensions"),
        (content([ARCHITECTURE, struct.pack("<Q", MANY)]), "bytes wanted"),
        (content([ARCHITECTURE, value("a", 9, struct.pack("<IQ", 0, MANY))]), "bytes wanted"),
        (content([ARCHITECTURE, value("a", 9, struct.pack("<IQ", 8, MANY))]), "bytes wanted"),
        (content([ARCHITECTURE, value("a", 9, struct.pack("<IQ", 9, 1))]), "array of values of type 9"),
        (content([ARCHITECTURE, value("a", 99, bytes(8))]), "value of unknown type 99"),
        (content([ARCHITECTURE, ARCHITECTURE]), "general.architecture appears twice"),
        (content([ARCHITECTURE, value("general.alignment", 4, struct.pack("<I", 24))]), "general.alignment = 24"),
        (content([ARCHITECTURE, value("general.alignment", 8, text("x"))]), "expected a power of two"),
        (content([value("\0", 0, b"\1"), text("é").replace("é".encode(), b"\xff\xff")]), "utf-8"),
        (content(tensors=[tensor(shape=())]), "tensor of 0 dimensions"),
        (content(tensors=[tensor(shape=(32, 1, 1, 1, 1))]), "tensor of 5 dimensions"),
        (content(tensors=[tensor(shape=(32, 0))]), r"tensor of shape \(0, 32\)"),
        (content(tensors=[tensor(shape=(1 << 40, 1 << 40))]), "tensor of shape"),
        (content(tensors=[tensor(shape=(32, 1 << 50))]), "ends at byte"),
        (content(tensors=[tensor(type=777)]), "a.weight is of type 777, which gguf"),
        (content(tensors=[tensor(shape=(48, 1))]), "rows of 48, and Q4_0 blocks of 32"),
        (content(tensors=[tensor(offset=32)]), "a.weight begins at byte"),
        (content(tensors=[tensor(offset=(1 << 64) - 32)]), "a.weight begins at byte"),
        (content(tensors=[tensor(shape=(32,)), tensor("b", (32,))]), "begins at byte .*after the previous one"),
        (content(tensors=[tensor(shape=(32,)), tensor("b", (32,), offset=64)], data=bytes(99)), "begins at byte"),
        (content(tensors=[tensor(shape=(32,)), tensor(shape=(32,), offset=32)]), "a.weight appears twice"),
        (content(data=bytes(35)), "ends at byte .* of"),
        (content([ARCHITECTURE, value("split.count", 2, struct.pack("<H", 2))]), "split.count = 2 .*part of a file"),
    ],
)
def test_damaged_headers_are_refused_by_name(tmp_path, made, message):
    with pytest.raises(CheckpointError, match=rf"a\.gguf: .*{message}"):
        opened(tmp_path / "a.gguf", made)


def test_every_cut_and_flipped_bit_of_a_header_is_read_or_refused(tmp_path):
    numbers = value("n", 9, struct.pack("<IQ3i", 5, 3, 1, 2, 3))
    made = content([ARCHITECTURE, numbers, value("t", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))])
    path = tmp_path / "a.gguf"
    for end in range(0, len(made), 3):
        with pytest.raises(CheckpointError, match=r"a\.gguf"):
            opened(path, made[:end])
    refused = 0
    for place in range(len(made) - 36):
        try:
            opened(path, bytes(b ^ (1 << place % 8) if n == place else b for n, b in enumerate(made)))
        except CheckpointError as error:
            refused += str(path) in str(error)
    assert refused > len(made) // 3


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.gguf: cannot be read"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "a.gguf").mkdir()
    with pytest.raises(CheckpointError, match="expected a regular file"):
        GGUFFile(tmp_path / "a.gguf")


def test_damage_that_shows_when_weights_are_read_leaves_the_model_as_it_was(tmp_path):
    pytest.importorskip("transformers")
    from tests.saves.published.gguf_files import Type, model_of, write

    path, model = tmp_path / "model.gguf", model_of("llama")
    write(path, model, "llama", lambda name: Type.Q4_0)
    info = GGUFFile(path).tensors["blk.1.ffn_up.weight"]
    whole = bytearray(path.read_bytes())
    whole[info.begin : info.begin + 2] = b"\xff\x7f"  # a scale that is no number
    path.write_bytes(whole)
    before = dict(model.named_parameters())
    with pytest.raises(CheckpointError, match=r"model\.gguf: blk\.1\.ffn_up\.weight: .*hold NaN"):
        vbrt.load(path, model, "dense", weights={"min_parameters": 0}, tiers={"gpu": {"enabled": False}})
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


def test_metadata_that_transformers_makes_no_model_of_is_an_error_of_ours(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "a.gguf"
    path.write_bytes(content([value("general.architecture", 4, struct.pack("<I", 7))]))
    with pytest.raises(VBError, match=r"general\.architecture = 7 in its metadata; expected a text"):
        vbrt.from_pretrained(path)
    path.write_bytes(content([value("general.architecture", 8, text("toaster"))]))
    with pytest.raises(VBError, match=r"a\.gguf: transformers .* cannot make a config of its metadata"):
        vbrt.from_pretrained(path)
