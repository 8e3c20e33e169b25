"""A format and a kernel from outside the package: registered by one call each, then they are like vbrt's own."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vbrt
import vbrt.saves.common.manifest  # as in a process that has read a save before a plug-in comes
from tests.formats.toy import KERNEL, RECORD, Int4, multiply
from vbrt.cli import main as cli
from vbrt.config import FormatRecord, load_config
from vbrt.config.plugins import load_plugins
from vbrt.errors import ConfigError, FormatError
from vbrt.formats import Format, get_format, register_format
from vbrt.kernels import register_kernel, resolve

CPU = torch.device("cpu")


@pytest.fixture
def int4(registers):
    register_format(RECORD)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 64), nn.ReLU(), nn.Linear(64, 40)).eval()


def wrap(made, **options):
    weights = {"format": "int4", "min_parameters": 0, "keep_head": False} | options.pop("weights", {})
    return vbrt.wrap(made, weights=weights, tiers={"gpu": {"enabled": False}}, **options)


def labels(vb):
    return {(layer.kernel, layer.format) for layer in vb.stats().layers.values() if layer.forwards}


def test_a_model_computes_with_the_weights_that_the_new_format_decodes(int4):
    plain = model()
    with wrap(model()) as vb:
        layer, x = vb.module[0], torch.randn(3, 70)
        y = layer(x)
        fmt = get_format("int4")
        decoded = fmt.decode(fmt.encode(plain[0].weight.detach()), (64, 70), torch.float32)
        assert torch.equal(layer.weight, decoded) and not torch.equal(decoded, plain[0].weight)
        assert torch.equal(y, F.linear(x, decoded, plain[0].bias))
        assert labels(vb) == {("reference", "int4")}
        pages = {page.key: page.nbytes for swap in vb.plan.swaps for page in swap.pages}
        assert pages["0#coarse"] == fmt.layout((64, 70), torch.float32).nbytes


def test_a_kernel_for_it_is_the_one_that_runs(int4, monkeypatch):
    calls = []

    def counted(x, planes, bias=None, activation="none"):
        calls.append(planes.format)
        return multiply(x, planes, bias, activation)

    register_kernel(replace(KERNEL, run=counted))
    x = torch.randn(3, 70)
    with wrap(model()) as vb, wrap(model(), compute={"backend": "reference"}) as expected:
        y = vb(x)
        assert calls == ["int4", "int4"] and labels(vb) == {("compiled", "int4")}
        torch.testing.assert_close(y, expected(x))
        assert len(calls) == 2 and labels(expected) == {("reference", "int4")}
    assert resolve("linear", "auto", CPU, "nf4").run is not counted


def test_its_save_loads_with_the_same_bits(int4, tmp_path):
    x = torch.randn(3, 70)
    with wrap(model()) as vb:
        y = vb(x)
        vb.save(tmp_path)
    with vbrt.load(tmp_path, model(), tiers={"gpu": {"enabled": False}}) as vb:
        assert torch.equal(vb(x), y) and labels(vb) == {("reference", "int4")}


def test_its_save_is_refused_by_name_where_nobody_has_registered_it(registers, tmp_path):
    register_format(RECORD)
    with wrap(model()) as vb:
        vb.save(tmp_path)
    del vbrt.formats.FORMATS["int4"], vbrt.formats._INSTANCES["int4"]
    with pytest.raises(vbrt.CheckpointError, match=r'"int4"; expected one of nvfp4, .* or one of a plug-in'):
        vbrt.load(tmp_path, model())


def test_plans_and_estimates_count_its_pages(int4):
    weights = {"format": "int4", "min_parameters": 0, "keep_head": False}
    config = load_config(weights=weights, tiers={"gpu": {"enabled": False}})
    nbytes = sum(get_format("int4").layout(shape, torch.float32).nbytes for shape in ((64, 70), (40, 64)))
    assert vbrt.make_plan(model(), config).page_bytes == nbytes
    task = vbrt.Task("prefill", batch=1, context=4, step=lambda made: made(torch.randn(4, 70)))
    rows = {row.name: row.nbytes for row in vbrt.estimate(model(), task, config).rows}
    assert rows["pages"] == nbytes


def test_blocks_freeze_to_it(int4):
    layer = vbrt.FusedFP4Linear(64, 32)
    fmt, w = get_format("int4"), layer.weight.detach().clone()
    layer.quantize("int4")
    assert torch.equal(layer.weight, fmt.decode(fmt.encode(w), (32, 64), torch.float32))


def test_it_is_listed_where_a_name_is_wrong(int4):
    with pytest.raises(ConfigError, match=r'"int5"; expected .*"dense", "int4" or "auto"; did you mean "int4"'):
        wrap(model(), weights={"format": "int5"})


def test_what_it_cannot_do_is_refused_by_name(int4):
    with pytest.raises(FormatError, match="format 'int4' has no 4-bit codes in blocks to refine"):
        wrap(model().bfloat16(), weights={"fine": "exact"}).materialize()
    with pytest.raises(FormatError, match="format 'int4' has no 4-bit codes in blocks to train through"):
        wrap(model(), mode="train")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("int5", "format 'int5'; expected a FormatRecord"),
        (replace(RECORD, name="nf4"), "format 'nf4': the name is taken; expected none of nvfp4, .*nf4"),
        (replace(RECORD, name="auto"), "format 'auto': the name is taken"),
        (replace(RECORD, name="int 5"), "format 'int 5': name; expected a plain word of a-z"),
        (replace(RECORD, name="int5", block=0), "format 'int5': block = 0; expected a whole number from 1 on"),
        (replace(RECORD, name="int5", bits=4.5), "format 'int5': bits = 4.5; expected a whole number from 1 on"),
        (replace(RECORD, name="int5", kernels="e2m1"), "kernels = 'e2m1'.*; expected None; .*register_kernel"),
        (replace(RECORD, name="int5", lossless=True), "lossless = True, which only formats of vbrt itself can have"),
        (replace(RECORD, name="int5", codec="no.such:Int5"), "codec 'no.such:Int5': No module named 'no'"),
        (replace(RECORD, name="int5", codec="tests.formats.toy:Int5"), "has no attribute 'Int5'"),
        (replace(RECORD, name="int5", codec=dict), "codec <class 'dict'>; expected a subclass of vbrt.formats.Format"),
    ],
)
def test_a_record_that_is_wrong_is_refused_by_name(registers, record, message):
    before = dict(vbrt.formats.FORMATS)
    with pytest.raises(FormatError, match=message):
        register_format(record)
    assert before == vbrt.formats.FORMATS


class NoDecode(Format):
    encode, layout = Int4.encode, Int4.layout


class OtherCodes(Int4):
    def encode(self, w_NK, squares=None):
        return super().encode(w_NK) | {"codes": torch.zeros(1, dtype=torch.uint8)}


class OtherDtype(Int4):
    def decode(self, tensors, shape, dtype):
        return super().decode(tensors, shape, torch.float32)


class OtherPlane(Int4):
    def layout(self, shape, dtype):
        return replace(super().layout(shape, dtype), plane="dense")


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (NoDecode, "format 'int5': NoDecode lacks decode; expected all methods of Format"),
        (OtherCodes, r"int5 coarse page, field 'codes': got torch.uint8 \(1,\); expected torch.uint8 \(3, 32\)"),
        (OtherDtype, r"format 'int5': decode gave torch.float32 \(3, 33\); expected torch.bfloat16"),
        (OtherPlane, "format 'int5': a layout of plane 'dense' of format 'int5'; expected plane 'coarse'"),
    ],
)
def test_a_half_made_format_is_refused_by_name(registers, codec, message):
    before = dict(vbrt.formats.FORMATS)
    with pytest.raises(FormatError, match=message):
        register_format(FormatRecord("int5", codec, block=32))
    assert before == vbrt.formats.FORMATS


def test_a_name_is_registered_once(int4):
    with pytest.raises(FormatError, match="format 'int4': the name is taken"):
        register_format(RECORD)


# -- plug-ins ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(registers, tmp_path, monkeypatch):
    """A function that installs a package with a plug-in, a module of this text."""

    def install(module, text):
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vbrt.plugins]\nint4 = {module}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        load_plugins.cache_clear()

    yield install
    load_plugins.cache_clear()


PLUGIN = """
from tests.formats.toy import KERNEL, RECORD
from vbrt.formats import register_format
from vbrt.kernels import register_kernel
register_format(RECORD)
register_kernel(KERNEL)
"""


def test_commands_know_what_an_installed_plugin_registers(installed, tmp_path, capsys):
    pytest.importorskip("transformers")
    installed("int4_plugin", PLUGIN)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 280, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    chosen = ["--set", "weights.format=int4", "--gpu-memory", "1GiB", "--ram", "8GiB", "--json"]
    assert cli.main(["plan", str(tmp_path / "config.json"), *chosen]) == 0
    assert {swap["format"] for swap in json.loads(capsys.readouterr().out)["swaps"]} == {"int4"}
    assert cli.main(["estimate", str(tmp_path / "config.json"), "--context", "8", *chosen]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    assert resolve("linear", "auto", CPU, "int4").run is multiply


def test_a_fresh_process_imports_a_plugin_with_its_first_config_and_not_before(installed, tmp_path):
    installed("int4_plugin", PLUGIN)
    program = (
        "import sys, vbrt, vbrt.formats, vbrt.kernels, vbrt.saves.common.manifest\n"
        "assert 'int4_plugin' not in sys.modules\n"
        "vbrt.load_config(weights={'format': 'int4'})\n"
        "assert vbrt.formats.get_format('int4').block == 32\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_a_plugin_that_cannot_be_imported_is_named(installed):
    installed("broken_plugin", "import no_such_module\n")
    with pytest.raises(
        ConfigError,
        match="plug-in int4 = broken_plugin of broken_plugin: ModuleNotFoundError: No module named 'no_such_",
    ):
        load_config("fp4")
