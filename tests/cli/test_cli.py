"""The command line, from arguments to exit code, without a network and without more than a tiny model."""

import errno
import functools
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import vbrt
from vbrt.cli import main as cli
from vbrt.cli.options import add_command
from vbrt.cli.plan_tables import label_of
from vbrt.cli.stats import keep_stats, stats_path
from vbrt.config import Machine, load_config
from vbrt.errors import FormatError
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1 import kept, tuning
from vbrt.kernels.cuda.launch_table import Launch
from vbrt.report.stats import LayerStats, Stats, TierStats
from vbrt.residency.needs import tier_needs
from vbrt.residency.plan import PageSpec, Plan, Skip, Swap
from vbrt.residency.site import WeightSite

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

GiB = 1 << 30


@pytest.fixture(autouse=True)
def _state_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A directory with a random Llama of two layers in bfloat16 and a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("llama")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = tokenizers.pre_tokenizers.ByteLevel(), tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the sea is calm and the sky is blue"], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=280,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=100_000,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture
def config_json(tmp_path) -> Path:
    """A config.json alone, of a Llama with 16 layers that nobody wants to have in a test's memory."""
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "dtype": "bfloat16",
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "tie_word_embeddings": True,
            }
        )
    )
    return file


def _errors(capsys) -> str:
    """stderr, known to be one line of error and no more; nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vbrt: error: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


# -- plan -------------------------------------------------------------------------------------------------------------


def test_plan_needs_only_a_config_and_names_what_is_swapped_and_what_stays(config_json, capsys):
    assert cli.main(["plan", str(config_json), "--gpu-memory", "8GiB", "--ram", "16GiB"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM, config fp4: 112 layers bfloat16 -> nvfp4, computing on the gpu" in out
    assert "swapped in model.layers.0-15" in out
    assert "mlp.gate_proj" in out and "8192 x 2048" in out
    assert "shares storage with model.embed_tokens.weight" in out
    assert "LlamaRMSNorm: not an nn.Linear" in out


def test_plan_for_people_and_plan_as_json_say_the_same(config_json, capsys):
    arguments = ["plan", str(config_json), "--gpu-memory", "8GiB", "--ram", "16GiB"]
    assert cli.main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["swaps"]) == 112 == len({swap["name"] for swap in plan["swaps"]})
    assert plan["machine"]["gpu_total_bytes"] == 8 * GiB and plan["machine"]["cpu_available_bytes"] == 16 * GiB
    assert plan["page_bytes"] == sum(page["nbytes"] for swap in plan["swaps"] for page in swap["pages"])
    assert plan["dense_bytes"] == plan["swapped_bytes"] + plan["kept_bytes"]
    assert [need["tier"] for need in plan["needs"]] == ["gpu", "cpu"]
    assert plan["needs"][0]["least_bytes"] == plan["page_bytes"] + plan["kept_bytes"]
    assert all(need["fits"] for need in plan["needs"])


def test_plan_counts_what_the_real_model_will_have(llama, capsys):
    assert cli.main(["plan", str(llama), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    real = vbrt.make_plan(model, load_config(None)).to_dict()
    for key in ("swaps", "skipped", "dense_bytes", "kept_bytes", "page_bytes"):
        assert json.loads(json.dumps(real[key])) == planned[key]


def test_plan_takes_the_dtype_of_the_weights_where_the_config_has_none(llama, tmp_path, capsys):
    data = json.loads((llama / "config.json").read_text())
    data.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(data))
    (tmp_path / "model.safetensors").symlink_to(llama / "model.safetensors")
    assert cli.main(["plan", str(tmp_path), "--json"]) == 0
    assert {swap["dtype"] for swap in json.loads(capsys.readouterr().out)["swaps"]} == {"bfloat16"}


def test_plan_spreads_over_the_tiers_of_another_machine(config_json, capsys):
    machine = ["--gpu-memory", "1GiB", "--ram", "300MiB", "--ssd", "10GiB"]
    assert cli.main(["plan", str(config_json), *machine, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {page["home"] for swap in plan["swaps"] for page in swap["pages"]} == {"ssd"}
    assert [need["tier"] for need in plan["needs"]] == ["gpu", "cpu", "ssd"]
    largest = max(sum(page["nbytes"] for page in swap["pages"]) for swap in plan["swaps"])
    assert plan["needs"][1]["least_bytes"] == largest


def test_plan_for_training_counts_all_parameters_and_no_pages(config_json, capsys):
    machine = ["--gpu-memory", "none", "--ram", "16GiB"]
    assert cli.main(["plan", str(config_json), *machine, "--set", "mode=train", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["mode"] == "train" and plan["page_bytes"] == 0
    assert plan["needs"][0]["least_bytes"] == plan["dense_bytes"]
    assert cli.main(["plan", str(config_json), *machine, "--set", "mode=train"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing moves" in out and "gradients (as many bytes again where all train)" in out


def test_plan_without_a_gpu(config_json, capsys):
    assert cli.main(["plan", str(config_json), "--gpu-memory", "none", "--ram", "8GiB"]) == 0
    assert "computing on the cpu" in capsys.readouterr().out


def test_plan_and_run_say_loudly_that_nothing_is_swapped(llama, tmp_path, capsys):
    file = tmp_path / "small.toml"
    file.write_text('[weights]\nexclude = ["model.*"]\n')
    assert cli.main(["plan", str(llama), "--config", str(file)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "NOTHING IS SWAPPED" in out and "14 of 15 linear layers stay because: weights.exclude has 'model.*'" in out
    assert cli.main(["run", str(llama), "the sea", "--max-new-tokens", "1", "--config", str(file)]) == 0
    err = capsys.readouterr().err
    assert err.startswith("vbrt: warning: nothing is swapped") and err.count("\n") == 1


def test_plan_says_how_much_is_not_swapped(llama, capsys):
    assert cli.main(["plan", str(llama)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "70.6 KiB of the model's 214.6 KiB are not swapped" in out and "largest part is model.embed_tokens" in out


@pytest.mark.parametrize("columns", [40, 80, 140])
def test_plan_stays_within_the_terminal(columns, config_json, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["plan", str(config_json), "--gpu-memory", "8GiB", "--ram", "16GiB"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns


def test_impossible_ram_is_one_line_of_error(config_json, capsys):
    assert cli.main(["plan", str(config_json), "--gpu-memory", "none", "--ram", "2MiB"]) == 2
    error = _errors(capsys)
    assert "kept parameters of 525471744 bytes (501.1 MiB), which are not swapped, do not fit into the cpu" in error
    assert "model.embed_tokens (501.0 MiB; Embedding" in error and "norm" not in error


@pytest.mark.parametrize(("flag", "value"), [("--ram", "lots"), ("--ram", "40%"), ("--ssd", "auto"), ("--ram", "none")])
def test_sizes_of_another_machine_are_checked(flag, value, config_json, capsys):
    assert cli.main(["plan", str(config_json), flag, value]) == 2
    assert f"{flag} {value}: expected bytes, or a size such as 8GiB" in _errors(capsys)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model_type": "llama"', "not valid JSON"),
        ("\x00\x01", "not valid JSON"),
        ("[]", 'no "model_type" in it'),
        ('{"hidden_size": 4}', 'no "model_type" in it'),
        ('{"model_type": "lama"}', "model type `lama`"),
        ('{"model_type": "llama", "hidden_size": "x"}', "expected int, got str"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "division"),
        ('{"model_type": "x", "auto_map": {"AutoConfig": "a.B"}}', "custom code"),
    ],
)
def test_a_config_that_is_no_config_is_one_line_of_error(text, reason, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(text)
    assert cli.main(["plan", str(file)]) == 2
    error = _errors(capsys)
    assert str(file) in error and reason in error


def test_what_is_missing_is_named(tmp_path, capsys):
    assert cli.main(["plan", str(tmp_path / "nothing")]) == 2
    assert "no such file or directory" in _errors(capsys)
    assert cli.main(["plan", "someone/a-model-of-the-hub"]) == 2
    assert "hf download someone/a-model-of-the-hub" in _errors(capsys)
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert "no config.json in this directory" in _errors(capsys)


def test_a_wrong_config_is_refused_before_anything_is_loaded(tmp_path, capsys):
    file = tmp_path / "my.toml"
    file.write_text('[weights]\nformat = "fp3"\n')
    for command in (["plan", "x"], ["run", "x", "y"], ["demo"], ["tune", "x"]):
        assert cli.main([*command, "--config", str(file)]) == 2
        assert "my.toml: weights.format" in _errors(capsys)
        assert cli.main([*command, "--config", "fp44"]) == 2
        assert 'did you mean "fp4"?' in _errors(capsys)


def test_set_changes_keys_of_the_config(config_json, llama, capsys):
    machine = ["--gpu-memory", "8GiB", "--ram", "16GiB"]
    settings = ["--set", "weights.format=nf4", "--set", "tiers.gpu.budget=1GiB", "--config", "exact"]
    assert cli.main(["plan", str(config_json), *machine, *settings, "--set", "weights.fine=none", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {swap["format"] for swap in plan["swaps"]} == {"nf4"} and plan["budgets"]["gpu"] == GiB
    assert (
        cli.main(
            [
                "run",
                str(llama),
                "the sea",
                "--max-new-tokens",
                "1",
                "--json",
                "--set",
                "weights.format=mxfp4",
                "--set",
                "weights.keep_head=false",
            ]
        )
        == 0
    )
    layers = json.loads(capsys.readouterr().out)["stats"]["layers"]
    assert len(layers) == 15 and {layer["format"] for layer in layers.values()} == {"mxfp4"}


def test_a_wrong_set_is_refused_before_anything_is_loaded(capsys):
    for command in (["plan", "x"], ["run", "x", "y"], ["demo"], ["tune", "x"]):
        assert cli.main([*command, "--set", "weights.format=fp3"]) == 2
        assert 'preset "fp4" with --set weights.format=fp3: weights.format = "fp3"; expected' in _errors(capsys)
        assert cli.main([*command, "--set", "nf4"]) == 2
        assert "--set nf4: expected key=value" in _errors(capsys)


def _plan(homes: list[str], budgets: dict[str, int], kept: int) -> Plan:
    swaps = tuple(
        Swap(
            WeightSite(f"layers.{n}.fc", (1, 1)),
            dtype="bfloat16",
            dense_bytes=40,
            format="nvfp4",
            fine="none",
            pages=(PageSpec(f"layers.{n}.fc#coarse", "coarse", 10, home),),
        )
        for n, home in enumerate(homes)
    )
    return Plan(swaps, {"embed": Skip(kept, "Embedding")}, budgets)


def test_tier_needs_count_homes_passage_and_what_is_kept():
    machine, plan = Machine(50, 50, 100, 25, None), _plan(["gpu", "cpu", "cpu"], {"gpu": 30, "cpu": 40}, 7)
    gpu, cpu = tier_needs(plan, machine)
    assert (gpu.pages, gpu.home_bytes, gpu.least_bytes, gpu.most_bytes) == (1, 10, 10 + 10 + 7, 30 + 7)
    assert (cpu.pages, cpu.home_bytes, cpu.least_bytes, cpu.most_bytes) == (2, 20, 20, 20)
    assert gpu.fits and cpu.fits
    _, cpu = tier_needs(plan, replace(machine, cpu_available_bytes=19))
    assert not cpu.fits


def test_plan_exits_with_1_when_what_is_kept_does_not_fit(config_json, capsys):
    # tied embeddings of 500 MiB stay dense; the 4-bit pages alone fit into 80 % of this memory
    assert cli.main(["plan", str(config_json), "--gpu-memory", "none", "--ram", "750MiB"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "DOES NOT FIT: the cpu tier needs 1023.6 MiB, the machine has 750.0 MiB free" in out
    assert "vbrt.wrap would refuse" in out and "The cpu also holds kept parameters of 501.1 MiB" in out
    assert cli.main(["plan", str(config_json), "--gpu-memory", "300MiB", "--ram", "8GiB"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "DOES NOT FIT: the gpu tier needs 510.1 MiB" in out
    assert "do not fit into the gpu memory: 300.0 MiB are free. The largest are model.embed_tokens" in out
    assert cli.main(["plan", str(config_json), "--gpu-memory", "none", "--ram", "1300MiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["budgets"]["cpu"] == ((1300 << 20) - plan["kept_bytes"]) * 8 // 10


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["model.norm"], "model.norm"),
        ([f"h.{n}.fc" for n in range(12)], "h.0-11.fc"),
        (["h.0.fc", "h.4.fc", "h.8.fc"], "h.0,4,8.fc"),
        ([f"h.{n}.fc" for n in range(0, 40, 2)], "h.0..38.fc"),
        ([f"h.{n}.experts.{e}.w1" for n in range(2) for e in range(3)], "h.0-1.experts.0-2.w1"),
    ],
)
def test_layers_of_one_kind_share_a_label(names, label):
    assert label_of(names) == label


# -- run --------------------------------------------------------------------------------------------------------------


def test_run_writes_text_and_stats_and_keeps_them(llama, capsys):
    assert cli.main(["run", str(llama), "the sea", "--max-new-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("the sea") and "8 written" in out and "14 layers" in out
    assert err.startswith("vbrt: warning: 70.6 KiB of the model's 214.6 KiB are not swapped")  # what wrap() warns of
    assert err.count("\n") == 1  # no bars, no reports
    assert cli.main(["stats"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == out.splitlines()[-3:]


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
        }[name] in _errors(capsys)
        (tmp_path / name).symlink_to(llama / name)
    assert cli.main(["run", str(llama / "config.json"), "hello"]) == 2
    assert "not a directory" in _errors(capsys)
    assert cli.main(["run", str(llama), ""]) == 2
    assert "the prompt is empty" in _errors(capsys)


def test_run_refuses_what_does_not_generate(llama, tmp_path, capsys):
    transformers.BertConfig(architectures=["BertModel"]).save_pretrained(tmp_path)
    assert cli.main(["run", str(tmp_path), "hello"]) == 2
    assert "architectures = ['BertModel']" in _errors(capsys)


def test_run_says_that_weights_are_damaged(llama, tmp_path, capsys):
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + bytes(100))
    assert cli.main(["run", str(tmp_path), "hello"]) == 2
    assert f"{tmp_path}: transformers cannot load it: " in _errors(capsys)


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
    assert f"{model}: transformers cannot load it: " in _errors(capsys) and not planted.exists()


def test_files_that_would_keep_us_waiting_are_refused(llama, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for file in llama.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    os.mkfifo(model / "added_tokens.json")
    assert cli.main(["run", str(model), "hello"]) == 2
    assert f"{model / 'added_tokens.json'}: neither a file nor a directory" in _errors(capsys)
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
        assert "a FIFO; expected a regular file" in _errors(capsys)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~nobody-of-this-name/x"])
def test_a_name_that_no_file_can_have_is_one_line_of_error(name, capsys):
    for command in (["plan", name], ["run", name, "hello"], ["stats", name]):
        assert cli.main(command) == 2
        assert _errors(capsys)


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
        assert "68719476736 bytes; expected at most" in _errors(capsys)


def test_run_warns_of_weights_that_are_not_in_the_checkpoint(llama, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert cli.main(["run", str(tmp_path), "hello", "--max-new-tokens", "1"]) == 0
    assert "1 weights are not in the checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1", "x", "1.5", "²"])
def test_max_new_tokens_is_checked(count, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "x", "y", "--max-new-tokens", count])
    assert "expected a whole number, 1 or more" in capsys.readouterr().err


# -- stats ------------------------------------------------------------------------------------------------------------


def _some_stats(**changes) -> Stats:
    layer = LayerStats(
        format="nvfp4",
        kernel="reference",
        materialized=True,
        home="ssd",
        resident=False,
        plane_bytes={"coarse": 1 << 20},
        forwards=4,
        weight_reads=0,
        hits=1,
        misses=3,
        prefetched=2,
        bytes_moved={"ssd>cpu": 3 << 20},
        wait_us=1500,
    )
    layers = {f"model.layers.{n}.self_attn.{part}_proj": replace(layer, hits=n) for n in range(3) for part in "qkvo"}
    return replace(
        Stats(
            "scheduled",
            "cpu",
            4,
            layers,
            {"cpu": TierStats(9 << 20, 1 << 20, 2 << 20, 0, 1)},
            99 << 20,
            3 << 20,
            4 << 20,
            ("pinned memory is not there",),
        ),
        **changes,
    )


def test_stats_survive_json():
    stats = _some_stats()
    assert Stats.from_dict(json.loads(json.dumps(stats.to_dict()))) == stats


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.pop("layers"), "stats.layers is missing"),
        (lambda d: d.update(passes="4"), "stats.passes = '4'; expected a whole number"),
        (lambda d: d.update(passes=True), "stats.passes = True"),
        (lambda d: d.update(tiers=[]), "stats.tiers = []; expected a table"),
        (lambda d: d["tiers"].update(cpu=3), "stats.tiers.cpu is int"),
        (lambda d: d["layers"]["model.layers.0.self_attn.q_proj"].update(materialized=1), "q_proj.materialized = 1"),
        (lambda d: d["layers"]["model.layers.0.self_attn.q_proj"].pop("hits"), "q_proj.hits is missing"),
    ],
)
def test_stats_from_a_damaged_dict_name_what_is_wrong(change, named):
    data = _some_stats().to_dict()
    change(data)
    with pytest.raises(FormatError) as error:
        Stats.from_dict(data)
    assert named in str(error.value)


def test_stats_shows_a_given_file_as_table_and_as_json(tmp_path, capsys):
    stats = _some_stats()
    for data in (stats.to_dict(), {"text": "...", "stats": stats.to_dict()}):
        (tmp_path / "saved.json").write_text(json.dumps(data))
        assert cli.main(["stats", str(tmp_path / "saved.json")]) == 0
        assert capsys.readouterr().out.rstrip() == str(stats)
        assert cli.main(["stats", "--json", str(tmp_path / "saved.json")]) == 0
        assert json.loads(capsys.readouterr().out) == stats.to_dict()


def test_stats_without_a_run_says_where_they_come_from(capsys):
    assert cli.main(["stats"]) == 2
    assert "`vbrt run` and `vbrt demo` leave their stats there" in _errors(capsys)


@pytest.mark.parametrize(("text", "reason"), [("{", "not valid JSON"), ("[1]", "stats is list"), ("{}", "is missing")])
def test_stats_of_a_damaged_file_is_one_line_of_error(text, reason, tmp_path, capsys):
    (tmp_path / "saved.json").write_text(text)
    assert cli.main(["stats", str(tmp_path / "saved.json")]) == 2
    assert reason in _errors(capsys)


def test_a_relative_state_directory_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert stats_path() == Path("~/.local/state/vbrt/last-stats.json").expanduser()


def test_stats_that_cannot_be_kept_cost_a_warning(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    keep_stats(_some_stats())
    assert f"the stats were not kept: {os.strerror(errno.ENOTDIR)}" in capsys.readouterr().err


def _shown(stats: Stats, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(stats)
    return capture.get().splitlines()


def test_the_table_has_one_line_a_layer_at_80_columns_and_says_once_what_is_the_same():
    lines = _shown(_some_stats(), 80)
    assert max(map(len, lines)) <= 80
    shared = [
        "vbrt, scheduled policy",
        "4 passes",
        "format nvfp4",
        "home ssd",
        "kernel reference",
        "forwards 4",
        "names begin with model.layers.",
    ]
    assert " ".join(line.strip() for line in lines[:2]) == " · ".join(shared)
    rows = [line for line in lines if "self_attn" in line]
    assert len(rows) == 12
    assert rows[0].split() == "0.self_attn.q_proj 1.0 MiB 0 3 0.0 % 2/3 3.0 MiB 1.5".split()


def test_the_table_shows_everything_where_there_is_room():
    layers = dict(_some_stats().layers)
    first = next(iter(layers))
    layers[first] = replace(layers[first], format="dense", home="cpu", kernel="triton", forwards=5)
    lines = _shown(_some_stats(layers=layers), 140)
    assert lines[1].split() == "layer format home kernel size forwards hits misses hit rate ahead moved wait ms".split()
    assert lines[3].split()[:4] == [first, "dense", "cpu", "triton"]
    assert lines[-1] == "fallback: pinned memory is not there"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 132, 200])
def test_the_table_stays_within_any_width(width):
    assert max(map(len, _shown(_some_stats(), width))) <= width


def test_the_table_takes_names_as_they_are():
    layers = {"[/bold].:smile:": next(iter(_some_stats().layers.values()))}
    assert any("[/bold].:smile:" in line for line in _shown(_some_stats(layers=layers), 132))
    assert "[/bold].:smile:" in str(_some_stats(layers=layers))
    assert "0 layers" not in str(_some_stats(layers={}))  # no table without layers


# -- tune -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_gpu(tmp_path, monkeypatch):
    """A device of sm_90 with a cache of its own, on which one configuration takes 8 µs and any other 10."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "identity", lambda index: {"gpu": "Some GPU", "triton": "3.6", "kernels": 1})
    monkeypatch.setattr(tuning, "check", lambda tokens, device: None)
    monkeypatch.setattr(devices, "major", lambda index: 9)

    def us(tokens, launch):
        return 8.0 if launch == Launch(4, 16, False) and tokens == 1 else 10.0

    monkeypatch.setattr(tuning, "_timer", lambda n, k, format, device: us)
    tuning.tuned.cache_clear()
    yield tuning.tuning_file(0)
    tuning.tuned.cache_clear()


def test_tune_needs_only_a_config_and_shows_each_shape_and_the_file(config_json, fake_gpu, capsys):
    assert cli.main(["tune", str(config_json), "--set", "weights.format=mxfp4"]) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == "out x in format tokens table µs found µs gain".split() and err == ""
    assert lines[1] == "512 x 2048 mxfp4 1 R2 WK16 ahead 10.00 R4 WK16 8.00 25.0 %".split()
    assert lines[2] == "512 x 2048 mxfp4 16 R2 WK16 ahead 10.00 same 10.00".split()
    assert [(*line[:3:2], line[4]) for line in lines[1:-2]] == [
        ("512", "2048", "1"),
        ("512", "2048", "16"),
        ("2048", "2048", "1"),
        ("2048", "2048", "16"),
        ("2048", "8192", "1"),
        ("8192", "2048", "1"),
        ("8192", "2048", "16"),
    ]
    assert out.splitlines()[-1] == f"7 of 7 kept in {fake_gpu}" and fake_gpu.exists()
    assert max(map(len, out.splitlines()[:-1])) <= 79


def test_tune_shows_what_is_kept_and_where(llama, fake_gpu, capsys):
    assert cli.main(["tune", "--show"]) == 0
    assert capsys.readouterr().out == f"nothing is kept yet; it would be in {fake_gpu}\n"
    assert cli.main(["tune", str(llama), "--tokens", "1", "--set", "weights.min_parameters=1"]) == 0
    kept = json.loads(fake_gpu.read_text())["launches"]
    capsys.readouterr()
    assert cli.main(["tune", "--show"]) == 0
    out = capsys.readouterr().out
    assert out.count("1 to 8") == len(kept) > 0 and out.endswith(f"{len(kept)} kept in {fake_gpu}\n")
    fake_gpu.write_text("{")
    tuning.tuned.cache_clear()
    assert cli.main(["tune", "--show"]) == 0
    assert capsys.readouterr().err.startswith(f"vbrt: warning: {fake_gpu} is ignored (JSONDecodeError")


def test_an_interrupted_tune_says_what_it_has_kept(config_json, fake_gpu, monkeypatch, capsys):
    timed = []

    def us(tokens, launch):
        timed.append(tokens)
        if len(timed) > 3 * (1 + len(tuning.CANDIDATES)):
            raise KeyboardInterrupt
        return 10.0

    monkeypatch.setattr(tuning, "_timer", lambda n, k, format, device: us)
    assert cli.main(["tune", str(config_json)]) == 130
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"3 of 7 kept in {fake_gpu}" and err == "vbrt: interrupted\n"
    assert len(json.loads(fake_gpu.read_text())["launches"]) == 3


def test_tune_refuses_what_it_cannot_do(config_json, fake_gpu, tmp_path, monkeypatch, capsys):
    assert cli.main(["tune"]) == 2
    assert "tune: no model; expected a model directory or a config.json" in _errors(capsys)
    assert cli.main(["tune", str(config_json), "--set", "weights.format=nf4"]) == 2
    assert "no layer of this plan runs on the kernel for few tokens" in _errors(capsys)
    assert cli.main(["tune", str(tmp_path / "nothing")]) == 2
    assert "no such file or directory" in _errors(capsys)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "vbrt").touch()
    fake_tuned = functools.cache(lambda index: {})  # that the file cannot be read either is a warning of its own
    monkeypatch.setattr(tuning, "tuned", fake_tuned)
    assert cli.main(["tune", str(config_json)]) == 2
    assert f"{fake_gpu}: cannot be written: {os.strerror(errno.ENOTDIR)}" in _errors(capsys)


def test_tune_without_a_gpu_or_with_too_many_tokens_reads_no_model(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in (["tune", "nothing"], ["tune", "--show"]):
        assert cli.main(command) == 2
        assert "no CUDA device; expected one from sm_80 on" in _errors(capsys)
    for tokens in ("17", "0", "1,64"):
        assert cli.main(["tune", "nothing", "--tokens", tokens]) == 2
        assert "expected numbers from 1 to 16" in _errors(capsys)
    for arguments in (["--tokens", "1,x"], ["--tokens", ""], ["--device", "a"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["tune", "nothing", *arguments])
        assert "expected a whole number" in capsys.readouterr().err


@pytest.mark.gpu
def test_tune_on_a_gpu_keeps_configurations_that_a_new_process_uses(llama, tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "vbrt", "tune"]
    small = ["--set", "weights.min_parameters=1", "--tokens", "1"]
    done = subprocess.run([*command, str(llama), *small], env=environment, capture_output=True, text=True, check=True)
    count = len(done.stdout.splitlines()) - 3  # the head, a gap, the file
    assert "Traceback" not in done.stderr and count > 0
    assert done.stdout.splitlines()[-1].startswith(f"{count} of {count} kept in {tmp_path}")
    shown = subprocess.run([*command, "--show"], env=environment, capture_output=True, text=True, check=True)
    assert 0 < shown.stdout.count("1 to 8") <= count  # such small shapes may be of as many tiles


# -- the shell around it ----------------------------------------------------------------------------------------------


def test_version_and_help_need_no_torch():
    code = textwrap.dedent("""
        import sys
        from vbrt.cli.main import main
        for arguments in (["--version"], ["--help"], ["plan", "--help"], ["run", "--help"], ["stats", "--help"],
                          ["tune", "--help"]):
            try:
                main(arguments)
            except SystemExit as end:
                assert end.code == 0
        assert "torch" not in sys.modules and "transformers" not in sys.modules
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"vbrt {vbrt.__version__}\n") and "examples:" in done.stdout


def test_without_a_command_there_is_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "usage: vbrt" in capsys.readouterr().err


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("vbrt.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["plan", "x"]) == 2
    assert "pip install 'vbrt[hf]'" in _errors(capsys)


def test_an_interrupt_is_130_and_no_traceback(llama, monkeypatch, capsys):
    import vbrt.wrapper.wrapper

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(vbrt.wrapper.wrapper.VBModelWrapper, "materialize", interrupted)
    assert cli.main(["run", str(llama), "hello"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "vbrt: interrupted"


def test_an_interrupt_while_it_generates_leaves_no_files(llama, tmp_path):
    file = tmp_path / "tight.toml"
    file.write_text(
        f'[tiers.gpu]\nenabled = false\n[tiers.cpu]\nbudget = "32KiB"\n[tiers.ssd]\nenabled = true\n'
        f'path = "{tmp_path / "pages"}"\n'
    )
    # a shell that starts this test in the background has SIGINT ignored for all that it starts
    code = textwrap.dedent("""
        import signal, sys
        from vbrt.cli.main import main
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(main())
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", str(llama), "the sea", "--config", str(file), "--max-new-tokens", "90000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.read(7) == "the sea"
        assert list((tmp_path / "pages").iterdir())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "vbrt: interrupted" and "Traceback" not in err
    assert list((tmp_path / "pages").iterdir()) == []


def test_a_closed_pipe_is_no_traceback(tmp_path):
    layers = {f"layer.{n}": layer for n, layer in enumerate(list(_some_stats().layers.values()) * 80)}
    (tmp_path / "saved.json").write_text(json.dumps(_some_stats(layers=layers).to_dict()))
    command = f'"{sys.executable}" -m vbrt stats "{tmp_path / "saved.json"}" | head -n 1'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_a_command_is_one_file_with_add(monkeypatch, capsys):
    class Hello:
        @staticmethod
        def add(commands):
            parser = add_command(
                commands, "hello", lambda args: print(f"hello {args.name}") or 0, help="greet", examples=""
            )
            parser.add_argument("name")

    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, Hello))
    assert cli.main(["hello", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"
