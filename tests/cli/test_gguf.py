"""The commands on GGUF files: config and tokenizer come from the metadata."""

import json

import pytest

from tests.cli.cases import errors
from vbrt.cli import main as cli
from vbrt.formats.ggml import GGML_PLANES

pytest.importorskip("gguf")
pytest.importorskip("transformers")
from tests.saves.published.gguf_files import Type, model_of, write


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model = model_of("llama", hidden_size=256, intermediate_size=256)
    write(path, model, "llama", lambda name: Type.TQ1_0 if "ffn" in name else Type.Q4_0)
    return path


@pytest.fixture(autouse=True)
def unknown(monkeypatch):
    """TQ1_0 as a type that gguf knows and vbrt does not."""
    monkeypatch.delitem(GGML_PLANES, "TQ1_0")


SETTINGS = ("--set", "weights.min_parameters=0", "--set", "tiers.gpu.enabled=false")


def test_inspect_says_what_it_is_and_becomes(file, capsys):
    assert cli.main(["inspect", str(file), "--json", *SETTINGS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["layout"]) == ("LlamaForCausalLM", "GGUF (llama) of quantized weights")
    assert found["dtypes"].keys() == {"TQ1_0", "Q4_0", "F32"} and found["nbytes"] == sum(found["dtypes"].values())
    assert {row["layout"]: row["becomes"] for row in found["weights"]}["GGUF TQ1_0"] == "decoded"
    assert {layer["becomes"] for layer in found["layers"]} == {"symmetric32-float16", "dense"}
    assert any("GGUF Q4_0, taken as symmetric32-float16 bit for bit" in note for note in found["notes"])


def test_run_speaks_from_the_file_and_from_what_convert_makes_of_it(file, tmp_path, capsys):
    said = []
    assert cli.main(["convert", str(file), str(tmp_path / "out"), *SETTINGS]) == 0
    assert "warning: " in (heard := capsys.readouterr().err) and "decoded and held as dense: GGUF TQ1_0" in heard
    for model in (file, tmp_path / "out"):
        capsys.readouterr()
        settings = SETTINGS if model == file else ()
        assert cli.main(["run", str(model), "A!", "--max-new-tokens", "6", "--json", *settings]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["text"] == said[1]["text"]
    assert said[0]["prompt_tokens"] == 2
    formats = [{name: layer["format"] for name, layer in each["stats"]["layers"].items()} for each in said]
    assert formats[0] == formats[1] and len(formats[0]) == 16  # head and table, too


def test_the_dtype_of_the_model_is_ones_choice(file, llama, capsys):
    assert cli.main(["inspect", str(file), "--json", *SETTINGS, "--dtype", "bfloat16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {layer["dtype"] for layer in found["layers"]} == {"bfloat16"}
    assert {layer["becomes"] for layer in found["layers"]} == {"symmetric32-float16", "nvfp4+exact"}
    for command in ("inspect", "chat"):
        assert cli.main([command, str(llama), "--dtype", "float16"]) == 2
        assert "these files have dtypes of their own; leave it out" in errors(capsys)


def test_damage_is_an_error_with_the_path(file, tmp_path, capsys):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:-40])
    for command in (["inspect", broken], ["run", broken, "A"], ["convert", broken, tmp_path / "out"]):
        assert cli.main([*map(str, command)]) == 2
        assert "broken.gguf: damaged, truncated, or not a GGUF file" in errors(capsys)
    assert not (tmp_path / "out").exists()
