"""`vbrt inspect`: what a checkpoint is, and what it becomes, from headers alone."""

import json

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.cases import errors
from tests.saves.published.published_files import publish
from vbrt.cli import main as cli
from vbrt.saves.files.safetensors_file import TensorFile

transformers = pytest.importorskip("transformers")


@pytest.fixture
def only_headers(monkeypatch):
    def refuse(self, name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(TensorFile, "read", refuse)
    monkeypatch.setattr(TensorFile, "map", refuse)


def test_it_says_what_a_dense_checkpoint_is_and_becomes(qwen, capsys, only_headers):
    assert cli.main(["inspect", str(qwen), "--config", "exact", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["layout"]) == ("Qwen3MoeForCausalLM", "safetensors of dense weights")
    assert found["files"] == 1 and found["dtypes"] == {"bfloat16": found["nbytes"]}
    experts, linear = found["layers"]
    assert (experts["layers"], experts["experts"], experts["becomes"]) == (2, 8, "nvfp4+exact") and experts["lossless"]
    assert experts["dense_bytes"] == 2 * 8 * 3 * 64 * 32 * 2
    assert linear["kind"] == "Linear" and linear["page_bytes"] >= linear["dense_bytes"] * 0.8
    stays = {row["example"]: row["reason"] for row in found["stays"]}
    assert "a lookup table" in stays["model.embed_tokens"]
    in_all = sum(row["nbytes"] for row in found["stays"]) + experts["dense_bytes"] + linear["dense_bytes"]
    assert in_all == found["nbytes"] == 2 * found["parameters"]


def test_it_prints_that_for_people(qwen, capsys, only_headers):
    assert cli.main(["inspect", str(qwen)]) == 0
    out = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM (qwen3_moe)" in out and "nvfp4" in out and "rounded" in out
    assert "stays as it is" in out and all(len(line) <= 132 for line in out.splitlines())


def test_planes_are_what_they_are(llama, tmp_path, capsys):
    assert cli.main(["convert", str(llama), str(tmp_path / "out"), "--config", "exact"]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"] == "planes of vbrt" and found["layers"][0]["becomes"] == "nvfp4+exact"
    assert found["dtypes"].keys() >= {"uint8", "bfloat16"}
    budget = "tiers.cpu.budget=9MiB"  # alone, it changes the config of the planes
    assert cli.main(["inspect", str(tmp_path / "out"), "--json", "--set", budget]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert config["weights"]["fine"] == "exact" and config["tiers"]["cpu"]["budget"] == "9MiB"
    assert cli.main(["inspect", str(tmp_path / "out"), "--config", "nf4"]) == 2
    assert "a save keeps its format" in errors(capsys)


def test_what_cannot_be_loaded_is_said_with_the_reason(llama, tmp_path, capsys):
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.strange"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "vbrt cannot load it" in (out := capsys.readouterr().out) and "model.layers.0.mlp.up_proj.weight" in out
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + bytes(100))
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "damaged, truncated, or not a safetensors file" in errors(capsys)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layout", "becomes"),
    [
        ("gptq", "symmetric32-bfloat16"),
        ("awq", "zeros32-bfloat16"),
        ("fp8 blocks", "floatbytes16-float32"),
        ("hqq", "floatzeros32-bfloat16"),
        ("torchao int4", "signed32-bfloat16"),
        ("torchao int4 in tiles", "signed32-bfloat16"),
        ("act-order gptq", "zeros32-bfloat16-ordered"),
    ],
)
def test_published_weights_are_inspected_converted_and_run(llama, tmp_path, capsys, layout, becomes):
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    for file in llama.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    dense = transformers.AutoModelForCausalLM.from_pretrained(llama)
    decoded = publish(model, dense, layout)
    capsys.readouterr()
    assert cli.main(["inspect", str(model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] in layout and {layer["becomes"] for layer in found["layers"]} == {becomes}
    assert any("taken as" in note or "decoded" in note for note in found["notes"])
    assert cli.main(["inspect", str(model)]) == 0
    assert "in the files" in capsys.readouterr().out
    assert cli.main(["convert", str(model), str(out)]) == 0
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    capsys.readouterr()
    dense.load_state_dict(decoded)
    texts = []
    for directory in (model, out):
        plain = ["--set", "compute.backend=reference"]  # rounds as the dense model does
        assert cli.main(["run", str(directory), "the sea", "--max-new-tokens", "5", "--json", *plain]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    inputs = tokenizer("the sea", return_tensors="pt", return_token_type_ids=False)
    expected = dense.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert texts == [tokenizer.decode(expected, skip_special_tokens=True)] * 2
