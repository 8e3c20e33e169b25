"""`vbrt convert`: the same save as `vb.save`, without the model; it goes on where it stopped, and damages nothing."""

import contextlib
import json

import pytest
import torch

import vbrt
from tests.cli.cases import errors
from vbrt.cli import main as cli
from vbrt.saves.common.manifest import read_manifest
from vbrt.saves.convert import convert
from vbrt.saves.convert.conversion_journal import JOURNAL

transformers = pytest.importorskip("transformers")
from vbrt.integrations import hf_configs  # noqa: E402 - needs transformers


def contents(directory):
    """All that a save says, but for the names of its files."""
    manifest = read_manifest(directory)
    tensors = {name: (t.digest, t.dtype, t.shape) for name, t in manifest.tensors.items()}
    return manifest.config, manifest.layers, manifest.kept, tensors


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(convert, "_FILE_BYTES", 20_000)


@contextlib.contextmanager
def stops(number, error):
    """Have conversions stop by an error before they write their n-th file."""
    write, count = convert._write_file, iter(range(1, 1000))

    def failing(path, made):
        if next(count) == number:
            raise error
        return write(path, made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_write_file", failing)
        yield


def test_a_share_of_a_gpu_is_kept_in_a_save_and_asked_for_only_where_a_gpu_computes(llama, tmp_path, capsys):
    file, out = tmp_path / "share.toml", tmp_path / "out"
    file.write_text('gpu_memory = "12GB"\ncontext = 64\n')
    for command in (["inspect", str(llama)], ["convert", str(llama), str(out)]):
        assert cli.main([*command, "--config", str(file)]) == 0
    assert read_manifest(out).config["gpu_memory"] == "12GB"
    if not torch.cuda.is_available():
        assert cli.main(["run", str(out), "the sea", "--max-new-tokens", "1"]) == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["llama", "qwen"])
@pytest.mark.parametrize("preset", ["exact", "fp4"])
@pytest.mark.filterwarnings("ignore")
def test_it_writes_what_save_writes_and_run_takes_it(kind, preset, request, tmp_path, capsys, small_files):
    model, out = request.getfixturevalue(kind), tmp_path / "out of it"
    if preset == "exact":  # on a CPU, pages are plain by default, and files coded
        (tmp_path / "coded.toml").write_text('weights = { fine = "exact", fine_coding = "coded" }\n')
        preset = str(tmp_path / "coded.toml")
    assert cli.main(["convert", str(model), str(out), "--config", preset]) == 0
    assert capsys.readouterr().out.endswith(f"; vbrt run '{out}' 'The sea is'\n")
    with vbrt.load(model, hf_configs.meta_model(model), preset) as vb:
        assert contents(vb.save(tmp_path / "saved")) == contents(out)
    assert len(list(out.glob("*.safetensors"))) > 3 and not (out / JOURNAL).exists()
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {path.name for path in out.iterdir()}


def test_interrupted_it_goes_on_where_it_stopped(qwen, tmp_path, capsys, small_files):
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert cli.main(["convert", str(qwen), str(whole), "--config", "exact"]) == 0
    with stops(6, KeyboardInterrupt()):
        assert cli.main(["convert", str(qwen), str(out), "--config", "exact"]) == 130
    assert "the same command resumes there" in capsys.readouterr().err
    first = sorted(out.glob("*.safetensors"))
    assert len(first) == 5 and not (out / "vbrt.json").exists()
    times = {path: path.stat().st_mtime_ns for path in first}
    first[2].write_bytes(first[2].read_bytes()[:-1] + b"\x55")  # its digest tells
    with open(out / JOURNAL, "a") as file:
        file.write('\n{"file": "vbrt-')  # what a process leaves that was killed: half a line, half a file
    (out / f"{first[0].name}.01234567.tmp").write_bytes(b"x")
    assert cli.main(["convert", str(qwen), str(out), "--config", "exact"]) == 0
    kept = [path for path in first if path.stat().st_mtime_ns == times[path]]
    assert kept == [*first[:2], *first[3:]]
    assert contents(out) == contents(whole) and not list(out.glob("*.tmp"))


def test_a_full_disk_is_an_error_and_loses_nothing(llama, tmp_path, capsys, small_files):
    out = tmp_path / "out"
    with stops(3, OSError(28, "No space left on device", str(out))):
        assert cli.main(["convert", str(llama), str(out)]) == 2
    assert f"{out}: the conversion cannot continue: the disk is full; finished shards stay" in errors(capsys)
    assert len(list(out.glob("*.safetensors"))) == 2
    assert cli.main(["run", str(out), "hello"]) == 2  # nobody takes it for a model
    assert "no config.json" in errors(capsys)


def test_it_takes_nothing_else_for_its_own_work(llama, qwen, tmp_path, capsys, small_files):
    out = tmp_path / "out"
    with stops(2, KeyboardInterrupt()):
        assert cli.main(["convert", str(llama), str(out)]) == 130
    capsys.readouterr()
    assert cli.main(["convert", str(llama), str(out), "--config", "exact"]) == 2
    assert "an interrupted conversion of another config" in errors(capsys)
    assert cli.main(["convert", str(qwen), str(out)]) == 2
    assert "files that have changed since" in errors(capsys)
    assert cli.main(["convert", str(llama), str(llama)]) == 2
    assert "is the source of the conversion" in errors(capsys)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("x")
    assert cli.main(["convert", str(llama), str(tmp_path / "notes")]) == 2
    assert "not empty (mine.txt)" in errors(capsys)


def test_overwriting_keeps_the_save_before_until_the_new_one_is_whole(llama, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["convert", str(llama), str(out)]) == 0
    before = contents(out)
    capsys.readouterr()
    assert cli.main(["convert", str(llama), str(out), "--config", "exact"]) == 2
    assert "is a save already" in errors(capsys)
    with stops(1, KeyboardInterrupt()):
        assert cli.main(["convert", str(llama), str(out), "--config", "exact", "--overwrite"]) == 130
    assert contents(out) == before and len(list(out.glob("*.safetensors"))) == 1
    assert cli.main(["convert", str(llama), str(out), "--config", "exact", "--overwrite"]) == 0
    assert contents(out)[0]["weights"]["fine"] == "exact" and len(list(out.glob("*.safetensors"))) == 1


def test_a_save_of_the_same_format_is_copied_and_one_of_another_is_refused(llama, tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    assert cli.main(["convert", str(llama), str(one), "--config", "exact"]) == 0
    assert cli.main(["convert", str(one), str(two)]) == 0
    assert contents(one) == contents(two)
    capsys.readouterr()
    assert cli.main(["convert", str(one), str(tmp_path / "three"), "--config", "nf4"]) == 2
    assert "a save keeps its format" in errors(capsys)


def test_the_config_of_planes_says_nothing_of_how_the_weights_were_quantized_before(llama, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    for file in llama.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "other"}}))
    assert cli.main(["convert", str(model), str(out)]) == 0
    assert json.loads((out / "config.json").read_text()) == config
