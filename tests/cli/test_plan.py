"""`vbrt plan`: what would be swapped, on this machine or another, from a config alone."""

import json
from dataclasses import asdict, replace

import pytest

import vbrt
from tests.cli.cases import errors
from vbrt.cli import main as cli
from vbrt.config import Machine, load_config
from vbrt.estimation.advice.machine_rates import Rates, device_name
from vbrt.estimation.advice.multi_gpu_rates import GroupRates, group_rates_file
from vbrt.residency.memory_needs import tier_needs
from vbrt.residency.name_patterns import label_of
from vbrt.residency.plan import PageSpec, Plan, Skip, Swap
from vbrt.residency.weight_site import WeightSite

transformers = pytest.importorskip("transformers")

GiB = 1 << 30


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


def test_plan_predicts_a_token_by_link_and_cpu_together_in_the_words_of_its_json(config_json, capsys):
    arguments = ["plan", str(config_json), "--gpu-memory", "8GiB", "--ram", "16GiB", "--link", "25", "--host", "50"]

    def told(*more: str) -> tuple[dict, str]:
        assert cli.main([*arguments, *more, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert cli.main([*arguments, *more]) == 0
        return data.get("streaming"), " ".join(capsys.readouterr().out.split())

    both, text = told("--budget", "100MiB")
    assert both["assumed_gb_per_s"] == {"link": 25, "cpu": 50}
    assert both["hosted_bytes"] > both["streamed_bytes"] > 0
    assert max(both["link_ms"], both["cpu_ms"]) <= both["ms"] * (1 + 1e-9) < 0.45 * both["link_alone_ms"]
    assert "of weights are computed by the CPU where they lie" in text and f"{both['ms']:.1f} ms, " in text
    moved, text = told("--budget", "100MiB", "--set", "compute.where=device")
    assert moved["hosted_bytes"] == 0 and moved["ms"] == moved["link_alone_ms"] == both["link_alone_ms"]
    assert "computed by the CPU" not in text and "are copied to the GPU" in text
    lossless, _ = told("--budget", "100MiB", "--config", "dense")
    assert lossless["hosted_bytes"] == 0 < lossless["streamed_bytes"]
    assert told("--budget", "2GiB")[0] is None  # everything fits


def test_plan_takes_measured_rates_of_link_and_cpu(config_json, capsys, monkeypatch):
    measured = Rates("a GPU", 12.5, 300.0, 20.0, experts_gb_s=37.0)
    monkeypatch.setattr("vbrt.estimation.advice.machine_rates.kept_rates", lambda: measured)
    arguments = ["plan", str(config_json), "--gpu-memory", "8GiB", "--ram", "16GiB", "--budget", "100MiB", "--json"]
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["streaming"]["assumed_gb_per_s"] == {"link": 12.5, "cpu": 37.0}


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
    machine = ["--gpu-memory", "1800MiB", "--ram", "300MiB", "--ssd", "10GiB"]
    assert cli.main(["plan", str(config_json), *machine, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {page["home"] for swap in plan["swaps"] for page in swap["pages"]} == {"ssd"}
    assert [need["tier"] for need in plan["needs"]] == ["gpu", "cpu", "ssd"]
    largest = max(sum(page["nbytes"] for page in swap["pages"]) for swap in plan["swaps"])
    assert plan["needs"][1]["least_bytes"] == largest


def test_plan_and_estimate_derive_the_budget_from_a_share_of_the_gpu_unless_it_is_given(config_json, capsys):
    machine = ["--gpu-memory", "2GiB", "--ram", "16GiB", "--json"]
    budgets = {}
    for command, given in (
        ("plan", ()),
        ("estimate", ()),
        ("plan", ("--context", "4096")),
        ("plan", ("--budget", "90MiB")),
    ):
        assert cli.main([command, str(config_json), *machine, *given]) == 0
        told = json.loads(capsys.readouterr().out)
        budgets[command, *given] = told["config"]["tiers"]["gpu"]["budget"]
        assert told["config"]["gpu_memory"] is None and told["machine"]["gpu_total_bytes"] == 2 * GiB
        assert command == "estimate" or given[:1] == ("--budget",) or "gpu_memory = " in told["notes"][-1]
    assert budgets["plan",] == budgets["estimate",] != budgets["plan", "--context", "4096"]
    assert budgets["plan", "--budget", "90MiB"] == "90MiB"
    assert cli.main(["plan", str(config_json), *machine, "--context", "65536"]) == 1
    assert "are too little for 65536 + 128 tokens" in json.loads(capsys.readouterr().out)["refusal"]


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


@pytest.mark.sample(1)
@pytest.mark.parametrize("columns", [40, 80, 140])
def test_plan_stays_within_the_terminal(columns, config_json, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["plan", str(config_json), "--gpu-memory", "8GiB", "--ram", "16GiB"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns


def test_no_columns_are_not_a_width(config_json, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "0")
    assert cli.main(["plan", str(config_json), "--gpu-memory", "8GiB", "--ram", "16GiB"]) == 0
    assert "swapped in" in capsys.readouterr().out


def test_impossible_ram_is_one_line_of_error(config_json, capsys):
    assert cli.main(["plan", str(config_json), "--gpu-memory", "none", "--ram", "2MiB"]) == 1
    error = errors(capsys)
    assert "kept parameters of 525471744 bytes (501.1 MiB), which are not swapped, do not fit into the cpu" in error
    assert "model.embed_tokens (501.0 MiB; Embedding" in error and "norm" not in error


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--ram", "lots"),
        ("--ram", "40%"),
        ("--ssd", "auto"),
        ("--ram", "none"),
        pytest.param("--ram", "9" * 5000, id="9"),
    ],
)
def test_sizes_of_another_machine_are_checked(flag, value, config_json, capsys):
    assert cli.main(["plan", str(config_json), flag, value]) == 2
    assert f"{flag} {value[:80]}: expected bytes, or a size such as 8GiB" in errors(capsys)


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
    error = errors(capsys)
    assert str(file) in error and reason in error


def test_what_is_missing_is_named(tmp_path, capsys):
    assert cli.main(["plan", str(tmp_path / "nothing")]) == 2
    assert "no such file or directory" in errors(capsys)
    assert cli.main(["plan", "someone/a-model-of-the-hub"]) == 2
    assert "hf download someone/a-model-of-the-hub" in errors(capsys)
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert "no config.json in this directory" in errors(capsys)


def test_a_wrong_config_is_refused_before_anything_is_loaded(tmp_path, capsys):
    file = tmp_path / "my.toml"
    file.write_text('[weights]\nformat = "fp3"\n')
    for command in (["plan", "x"], ["run", "x", "y"], ["demo"], ["tune", "x"]):
        assert cli.main([*command, "--config", str(file)]) == 2
        assert "my.toml: weights.format" in errors(capsys)
        assert cli.main([*command, "--config", "fp44"]) == 2
        assert 'did you mean "fp4"?' in errors(capsys)


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
        assert 'preset "fp4" with --set weights.format=fp3: weights.format = "fp3"; expected' in errors(capsys)
        assert cli.main([*command, "--set", "nf4"]) == 2
        assert "--set nf4: expected key=value" in errors(capsys)


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
    assert cli.main(["plan", str(config_json), "--gpu-memory", "914MiB", "--ram", "8GiB"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "DOES NOT FIT: the gpu tier needs 510.1 MiB" in out
    assert 'gpu_memory = "914MiB"; 914.0 MiB are too little for 2048 + 128 tokens, which take 1.6 GiB' in out
    assert "parameters that are not swapped 502.1 MiB" in out and "weights.keep_head = false" in out
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


def test_plan_compares_the_ways_over_several_gpus_and_says_what_to_use(config_json, capsys):
    arguments = ["plan", str(config_json), "--gpu-memory", "8GiB", "--ram", "16GiB", "--set", "tiers.gpu.budget=300MiB"]
    assert cli.main([*arguments, "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert "on 2 GPUs" in out and "one stream of tokens: tensor parallel, columns and rows in turn, " in out
    assert cli.main([*arguments, "--ranks", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"]["ranks"] == 4
    assert cli.main([*arguments, "--ranks", "3"]) == 0
    out = capsys.readouterr().out
    assert "tensor parallel: ranks = 3: num_attention_heads = 32 of LlamaForCausalLM is not divisible\n" in out
    assert "tensor parallel, columns" not in out
    assert cli.main([*arguments, "--ranks", "1"]) == 2
    assert "--ranks 1: expected 2 or more" in capsys.readouterr().err


def test_plan_compares_by_what_ranks_of_such_gpus_have_measured_and_says_what_it_cannot_use(
    config_json, capsys, monkeypatch, tmp_path
):
    def source(*more: str) -> str:
        arguments = [
            "plan",
            str(config_json),
            "--gpu-memory",
            "8GiB",
            "--ram",
            "16GiB",
            "--ranks",
            "2",
            "--json",
            *more,
        ]
        assert cli.main(arguments) == 0
        return json.loads(capsys.readouterr().out)["ranks"]["source"]

    def keep(**changes: object) -> None:
        held = GroupRates(2, 50.0, 99.0, 7.0, 8.0, "measured here", 9.0, device_name(), "nccl")
        group_rates_file(2).parent.mkdir(parents=True, exist_ok=True)
        group_rates_file(2).write_text(json.dumps(asdict(replace(held, **changes))))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert source().endswith("341 GB/s: two H200s of one host")
    keep()
    assert "50.0 GB/s each, a sum 99 µs" in source() and source().endswith(f"2 ranks of {device_name()}, nccl)")
    assert "one link 20.0 GB/s; all links at once 20.0 GB/s each" in source("--link", "20")
    keep(link_gb_s=0.0, backend="gloo")
    assert source().endswith(f"two H200s of one host; what was measured here is of {device_name()}, gloo")
    assert cli.main(["plan", str(config_json), "--gpu-memory", "none", "--ranks", "2"]) == 2
    assert "this plan computes on the cpu; name the GPUs' memory" in capsys.readouterr().err
