"""vbrt.json: earlier versions, and everything in it that is refused by its name."""

import json
import random

import pytest
import torch

import vbrt
from tests.models import mlp
from tests.saves.cases import logits, on_meta
from vbrt.errors import CheckpointError, ConfigError
from vbrt.saves.common.manifest import content_digest, read_manifest


def as_version(directory, version):
    """Make a save one that an earlier vbrt wrote: before layers had sites (2), before manifests had digests (1)."""
    content = json.loads((directory / "vbrt.json").read_text())
    content["version"] = version
    for layer in content["layers"] if version < 3 else ():
        (name, *aliases), kind = [module for module, _, _ in layer["sites"]], layer["sites"][0][2]
        layer |= {"name": name, "aliases": aliases, "kind": kind}
        del layer["sites"], layer["matrices"]
    if version == 1:
        del content["digest"]
        content["tensors"] = {name: [file, digest] for name, (file, _, _, digest) in content["tensors"].items()}
    else:
        content["digest"] = content_digest(content)
    (directory / "vbrt.json").write_text(json.dumps(content, indent=1))
    return content


@pytest.mark.parametrize("version", [1, 2])
def test_a_save_of_an_earlier_version_still_loads(saved, version):
    expected = logits(vbrt.load(saved, mlp()), torch.ones(2, 64))
    as_version(saved, version)
    assert torch.equal(logits(vbrt.load(saved, on_meta(mlp)), torch.ones(2, 64)), expected)


@pytest.mark.parametrize("fp4", [False, True])
def test_a_save_whose_config_has_a_retired_key_still_loads(saved, fp4):
    path, x = saved / "vbrt.json", torch.ones(2, 64)
    expected = logits(vbrt.load(saved, mlp()), x)
    content = json.loads(path.read_text())
    content["config"]["compute"]["fp4"] = fp4
    path.write_text(json.dumps(content | {"digest": content_digest(content)}))
    vb = vbrt.load(saved, on_meta(mlp))
    assert torch.equal(logits(vb, x), expected) and "fp4" not in vb.settings.to_dict()["compute"]
    content["config"]["compute"]["fp5"] = False
    path.write_text(json.dumps(content | {"digest": content_digest(content)}))
    with pytest.raises(ConfigError, match=r"vbrt\.json: compute\.fp5 is not a known key"):
        vbrt.load(saved, on_meta(mlp))


OLD_CHANGES = [
    (("layers",), [{}], r"damaged: layers\[0\] has no \"aliases\""),
    (("layers", 0, "name"), None, r"damaged: layers\[0\]\.name = null; expected a name"),
    (("layers", 0, "name"), "2", r"damaged: layers\[1\] has the name \"2\", which layers\[0\] has already"),
    (("layers", 0, "name"), "7", r"damaged: \"tensors\" has no \"7\.weight\.codes\""),
    (("layers", 0, "aliases"), "02", r"damaged: layers\[0\]\.aliases = \"02\"; expected a list of names"),
    (("layers", 0, "kind"), "Linfar", r"damaged: layers\[0\]\.kind = \"Linfar\"; expected one of Linear"),
]
NEW_CHANGES = [
    (("layers",), [{}], r"damaged: layers\[0\] has no \"dtype\""),
    (("layers", 0, "sites"), None, r"damaged: layers\[0\]\.sites = null; expected lists of module, parameter and kind"),
    (("layers", 0, "sites"), [], r"damaged: layers\[0\]\.sites = \[\]; expected lists"),
    (
        ("layers", 0, "sites", 0),
        ["2", "weight", "Linear"],
        r"damaged: layers\[1\] has the name \"2\", which layers\[0\]",
    ),
    (("layers", 0, "sites", 0), ["7", "weight", "Linear"], r"damaged: \"tensors\" has no \"7\.weight\.codes\""),
    (("layers", 0, "sites", 0), ["0", "weight", "Linfar"], r"damaged: layers\[0\]\.sites = .*Linfar.*; expected lists"),
    (("layers", 0, "sites", 0), ["0", "waist", "Linear"], r"damaged: layers\[0\]: a Linear has no .* name \"waist\""),
    (("layers", 0, "matrices"), 2, r"damaged: layers\[0\]\.matrices = 2; a Linear has 1"),
    (("layers", 0, "matrices"), 0, r"damaged: layers\[0\]\.matrices = 0; expected a whole number"),
]
CHANGES = [
    (("version",), 4, "a save of version 4, by vbrt .*; this vbrt reads versions 1 to 3"),
    (("version",), True, "a save of version true"),
    (("kind",), "something", "not written by vb.save"),
    (("layers",), {}, "damaged: layers = {}; expected a list"),
    (("layers", 0), [], r"damaged: layers\[0\] = \[\]; expected a table"),
    (("layers", 0, "extra"), 1, r"damaged: layers\[0\] has an unknown \"extra\""),
    (("layers", 0, "shape"), [64, 64.0], r"damaged: layers\[0\]\.shape = \[64, 64\.0\]; expected two whole"),
    (("layers", 0, "shape"), [64, True], r"damaged: layers\[0\]\.shape"),
    (("layers", 0, "shape"), [64, 1 << 40], r"damaged: layers\[0\]\.shape"),
    (("layers", 0, "shape"), [64, 80], r"damaged: layers\[0\] asks for uint8 \[64, 40\], and 0\.weight\.codes is "),
    (("layers", 0, "stored_dtype"), "load", r"damaged: layers\[0\]\.stored_dtype = \"load\"; expected one of"),
    (("layers", 0, "stored_dtype"), "float64", r"damaged: layers\[0\]\.stored_dtype .* nvfp4 does not hold"),
    (("layers", 0, "dtype"), "int32", r"damaged: layers\[0\]\.dtype = \"int32\"; expected one of"),
    (("layers", 0, "format"), "nvfq4", r"damaged: layers\[0\]\.format = \"nvfq4\"; expected one of nvfp4"),
    (("layers", 0, "format"), "nf4", r"damaged: layers\[0\] asks for"),
    (("layers", 0, "format"), "dense", r"damaged: layers\[0\]\.planes = .*; expected dense: weight"),
    (("layers", 0, "transposed"), True, r"damaged: layers\[0\]\.transposed = true, which a Linear is not"),
    (("layers", 0, "fine"), 1, r"damaged: layers\[0\]\.fine = 1; expected true or false"),
    (("layers", 0, "fine"), True, r"damaged: layers\[0\]\.fine = true, which float32 in nvfp4 cannot have"),
    (("layers", 0, "planes"), {}, r"damaged: layers\[0\]\.planes = {}; expected coarse: "),
    (("layers", 0, "planes", "coarse"), ["codes"], r"damaged: layers\[0\]\.planes = "),
    (("kept", 0, "kind"), "p`rameter", r"damaged: kept\[0\]\.kind = \"p`rameter\"; expected one of parameter"),
    (("kept", 0, "trainable"), None, r"damaged: kept\[0\]\.trainable = null"),
    (("kept", 0, "name"), "0.weight", r"damaged: kept\[0\] has the name \"0\.weight\", which layers\[0\] has already"),
    (("kept",), [], r"damaged: \"tensors\" has \"0\.bias\", which no layer, parameter or buffer has"),
    (("tensors",), {}, r"damaged: \"tensors\" has no \"0\.weight\.codes\""),
    (("tensors", "0.bias"), None, r"damaged: tensors\.0\.bias = null; expected a list"),
    (("tensors", "0.bias", 0), "../x.safetensors", r"damaged: tensors\.0\.bias\[0\] = .*; expected a file of the name"),
    (("tensors", "0.bias", -1), "0", r"damaged: tensors\.0\.bias\[\d\] = \"0\"; expected 16 hexadecimal digits"),
    (("config",), [], r"damaged: config = \[\]; expected a table"),
    (("vbrt",), 7, "damaged: vbrt = 7; expected a version"),
]


def changed(content, keys, value):
    *path, last = keys
    for key in path:
        content = content[key]
    content[last] = value


@pytest.mark.parametrize(
    ("version", "keys", "value", "words"),
    [(version, *change) for version in (1, 3) for change in (CHANGES + (NEW_CHANGES if version > 2 else OLD_CHANGES))],
)
def test_a_manifest_with_another_entry_is_refused_by_the_name_of_the_entry(saved, version, keys, value, words):
    as_version(saved, version)
    content = json.loads((saved / "vbrt.json").read_text())
    changed(content, keys, value)
    if "digest" in content:
        content["digest"] = content_digest(content)
    (saved / "vbrt.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"vbrt.json: {words}"):
        vbrt.load(saved, mlp())


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("kept", 0, "trainable"), False),
        (("layers", 0, "trainable"), False),
        (("layers", 0, "dtype"), "bfloat16"),
        (("config", "weights", "keep_head"), False),
        (("vbrt",), "0.9"),
        (("tensors", "0.bias", -1), "0" * 16),
    ],
)
def test_a_manifest_whose_digest_is_not_that_of_its_content_is_refused(saved, keys, value):
    content = json.loads((saved / "vbrt.json").read_text())
    (saved / "vbrt.json").write_text(json.dumps(dict(reversed(content.items())), indent=3))
    assert vbrt.load(saved, mlp()).registry  # order and space are no content
    changed(content, keys, value)
    (saved / "vbrt.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r'vbrt.json: damaged: "digest" = '):
        vbrt.load(saved, mlp())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": 1, "a": 2}', '"a" appears twice in one object'),
        ('{"kind": NaN}', "NaN is not a JSON number"),
        ("\xff", "not valid JSON"),
        ("1" * 5000, "not valid JSON"),
        ("null", "not written"),
    ],
)
def test_what_is_no_manifest_is_refused(saved, text, words):
    (saved / "vbrt.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=f"vbrt.json: .*{words}"):
        vbrt.load(saved, mlp())


def test_any_flipped_bit_of_a_manifest_is_refused_or_changes_nothing(saved):
    path, dice = saved / "vbrt.json", random.Random(0)
    good, want = path.read_bytes(), read_manifest(saved)
    for _ in range(300):
        bad = bytearray(good)
        bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
        path.write_bytes(bad)
        try:
            assert read_manifest(saved) == want
        except CheckpointError as error:
            assert str(path) in str(error)
