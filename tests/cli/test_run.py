"""`vbrt run`: a model in a directory writes text, within a budget; damaged or hostile files are one line of error."""

import io
import json
import os
import pickle
import re
import sys
import tracemalloc

import pytest
import torch

from tests.cli.cases import errors
from vbrt.cli import main as cli
from vbrt.report.stats import Stats

transformers = pytest.importorskip("transformers")


def test_run_writes_text_and_stats_and_keeps_them(llama, capsys):
    assert cli.main(["run", str(llama), "the sea", "--max-new-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("the sea") and "8 written" in out and "14 layers" in out
    said = [line for line in err.splitlines() if not line.startswith("vbrt: weights are rounded")]  # once a process
    assert not said  # no warnings, no bars, no reports
    assert cli.main(["stats"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == out.splitlines()[-3:]


def test_run_of_routed_experts_shows_them_by_layer_one_by_one_and_in_a_timeline(qwen, tmp_path, capsys):
    page, layer = tmp_path / "run.html", "model.layers.1.mlp.experts"
    assert cli.main(["run", str(qwen), "the", "--max-new-tokens", "5", "--timeline", str(page)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^routed experts · decides host · touched a token 2.0", out, re.M)
    assert "Routed experts" in page.read_text() and layer in page.read_text()
    assert cli.main(["stats", "--experts", layer]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 8
    assert cli.main(["stats", "--experts", layer, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["expert"] for row in rows] == list(range(8)) and sum(row["hits"] for row in rows) >= 10
    assert cli.main(["stats", "--experts", "lm_head"]) == 2
    assert f"model.layers.0.mlp.experts, {layer}" in errors(capsys)


def test_run_refuses_a_timeline_that_it_cannot_write_before_it_loads(qwen, tmp_path, capsys):
    assert cli.main(["run", str(qwen), "the sea", "--timeline", str(tmp_path / "run.txt")]) == 2
    assert ".html" in errors(capsys)


def test_run_exact_writes_what_the_dense_model_writes(llama, capsys):
    assert cli.main(["run", str(llama), "the sea", "--max-new-tokens", "8", "--json", "--config", "exact"]) == 0
    reply = json.loads(capsys.readouterr().out)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    inputs = tokenizer("the sea", return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert reply["text"] == tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert reply["prompt"] == "the sea" and reply["new_tokens"] == 8
    assert Stats.from_dict(reply["stats"]).passes == 8


def test_run_from_files_within_a_budget(llama, tmp_path, capsys):
    file = tmp_path / "tight.toml"
    file.write_text(
        f'[tiers.gpu]\nenabled = false\n[tiers.cpu]\nbudget = "32KiB"\n[tiers.ssd]\nenabled = true\n'
        f'path = "{tmp_path / "pages"}"\n'
    )
    assert cli.main(["run", str(llama), "the sea", "--max-new-tokens", "6", "--json", "--config", str(file)]) == 0
    stats = Stats.from_dict(json.loads(capsys.readouterr().out)["stats"])
    assert stats.misses > 0 and stats.tiers["cpu"].peak_bytes <= 32 << 10
    assert list((tmp_path / "pages").iterdir()) == []


def test_run_takes_a_budget_and_refuses_a_share_of_a_gpu_that_is_not_there(llama, capsys):
    short = ["run", str(llama), "the sea", "--max-new-tokens", "2"]
    assert cli.main([*short, "--json", "--set", "tiers.gpu.enabled=false", "--budget", "1MiB"]) == 0
    assert Stats.from_dict(json.loads(capsys.readouterr().out)["stats"]).tiers["cpu"].budget_bytes == 1 << 20
    if not torch.cuda.is_available():
        assert cli.main([*short, "--gpu-memory", "12GB", "--context", "64"]) == 2
        assert 'with --gpu-memory 12GB --context 64: gpu_memory = "12GB"; torch' in errors(capsys)
    for two, says in (
        (("--budget", "1MiB", "--gpu-memory", "12GB"), "and budget is given, too"),
        (("--budget", "1MiB", "--set", "tiers.gpu.budget=1MiB"), "and tiers.gpu.budget is given, too"),
        (("--budget", "8Gb"), '"b" is for bits; expected bytes: "8GB"'),
        (("--context", "64"), "is read with gpu_memory only"),
        (("--set", "load_in_4bit=true"), "load_in_4bit is an argument of bitsandbytes"),
    ):
        assert cli.main([*short, *two]) == 2
        assert says in errors(capsys)


def test_text_that_is_not_utf_8_is_refused(llama, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"sea \xff"), "utf-8", "surrogateescape"))
    assert cli.main(["run", str(llama), "-", "--config", "dense"]) == 2
    assert "vbrt: error: user: not UTF-8 at character 4; expected text in UTF-8" in capsys.readouterr().err


def test_run_reads_the_prompt_from_stdin(llama, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the sky\n"))
    assert cli.main(["run", str(llama), "-", "--max-new-tokens", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "the sky"


def test_run_says_what_a_directory_lacks(llama, tmp_path, capsys):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert cli.main(["run", str(tmp_path), "hello"]) == 2
        assert {
            "config.json": "no config.json in this directory",
            "model.safetensors": "no weights in this directory",
            "tokenizer.json": "no tokenizer in this directory",
        }[name] in errors(capsys)
        (tmp_path / name).symlink_to(llama / name)
    assert cli.main(["run", str(llama / "config.json"), "hello"]) == 2
    assert "not a directory" in errors(capsys)
    assert cli.main(["run", str(llama), ""]) == 2
    assert "the prompt is empty" in errors(capsys)


def test_run_refuses_what_does_not_generate(llama, tmp_path, capsys):
    transformers.BertConfig(architectures=["BertModel"]).save_pretrained(tmp_path)
    assert cli.main(["run", str(tmp_path), "hello"]) == 2
    assert "architectures = ['BertModel']" in errors(capsys)


def test_run_says_that_weights_are_damaged(llama, tmp_path, capsys):
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + bytes(100))
    assert cli.main(["run", str(tmp_path), "hello"]) == 2
    assert f"{tmp_path / 'model.safetensors'}: damaged, truncated, or not a safetensors file" in errors(capsys)


class Planted:
    """Unpickled by somebody who is not careful, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("kind", ["pickle", "zip", "noise", "empty", "not a dict"])
def test_run_says_that_a_hostile_pickle_is_none_and_runs_nothing_of_it(llama, tmp_path, capsys, kind):
    model, planted = tmp_path / "model", tmp_path / "planted"
    model.mkdir()
    for file in llama.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    path = model / "pytorch_model.bin"
    if kind == "zip":
        torch.save({"model.norm.weight": Planted(planted)}, path)
    elif kind == "not a dict":
        torch.save([torch.ones(3)], path)
    else:
        path.write_bytes({"pickle": pickle.dumps(Planted(planted)), "noise": bytes(range(256)), "empty": b""}[kind])
    planted.unlink(missing_ok=True)
    assert cli.main(["run", str(model), "hello"]) == 2
    assert f"{model}: transformers cannot load it: " in errors(capsys) and not planted.exists()


def test_files_that_would_keep_us_waiting_are_refused(llama, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for file in llama.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    os.mkfifo(model / "added_tokens.json")
    assert cli.main(["run", str(model), "hello"]) == 2
    assert f"{model / 'added_tokens.json'}: neither a file nor a directory" in errors(capsys)
    for name in ("config.json", "stats.json", "own.toml"):
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)
    for command in (
        ["plan", str(model)],
        ["run", str(model), "x"],
        ["stats", str(model / "stats.json")],
        ["plan", str(llama), "--config", str(model / "own.toml")],
    ):
        assert cli.main(command) == 2
        assert "a FIFO; expected a regular file" in errors(capsys)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~nobody-of-this-name/x"])
def test_a_name_that_no_file_can_have_is_one_line_of_error(name, capsys):
    for command in (["plan", name], ["run", name, "hello"], ["stats", name]):
        assert cli.main(command) == 2
        assert errors(capsys)


def test_files_that_pretend_to_be_large_are_refused_before_they_are_read(llama, tmp_path, capsys):
    for name in ("config.json", "stats.json", "own.toml"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(1 << 36)
    for command in (
        ["plan", str(tmp_path)],
        ["stats", str(tmp_path / "stats.json")],
        ["plan", str(llama), "--config", str(tmp_path / "own.toml")],
    ):
        tracemalloc.start()
        assert cli.main(command) == 2
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
        tracemalloc.stop()
        assert "68719476736 bytes; expected at most" in errors(capsys)


def test_run_refuses_a_checkpoint_that_lacks_a_weight(llama, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert cli.main(["run", str(tmp_path), "hello", "--max-new-tokens", "1"]) == 2
    assert "are missing: model.norm.weight" in errors(capsys)


@pytest.mark.parametrize("count", ["0", "-1", "x", "1.5", "²"])
def test_max_new_tokens_is_checked(count, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "x", "y", "--max-new-tokens", count])
    assert "expected a whole number, 1 or more" in capsys.readouterr().err
