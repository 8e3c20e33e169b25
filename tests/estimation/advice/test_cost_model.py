"""Coefficients of predicted times: the files that ship, files that are wrong, another machine's set."""

import datetime
import re
from pathlib import Path

import pytest

import vbrt
from tests.models import llama_of
from vbrt.config import FORMATS, Machine
from vbrt.errors import ArgumentError, ConfigError
from vbrt.estimation.advice.cost_model import default_cost_model, kernels_of, read_cost_model
from vbrt.estimation.advice.step_time import predict
from vbrt.kernels import fused_on

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "vbrt" / "estimation" / "advice" / "cost_models"
H200, ZEN4 = ((FOLDER / f"{name}.toml").read_text("utf-8") for name in ("h200", "zen4"))
GiB = 1 << 30


@pytest.mark.parametrize("tier", ["gpu", "cpu"])
def test_the_files_that_ship_name_machine_date_and_a_committed_script(tier):
    costs = default_cost_model(tier)
    assert costs.computes_on == tier and costs.machine and isinstance(costs.date, datetime.date)
    script = ROOT / costs.script.split()[0]
    assert script.is_file() and str(costs) == f"{costs.machine}, {costs.date}"


@pytest.mark.parametrize(("tier", "device"), [("gpu", "cuda"), ("cpu", "cpu")])
def test_weights_that_fused_kernels_read_are_predicted_by_a_measured_family(tier, device):
    costs = default_cost_model(tier)
    packed = {name for name, record in FORMATS.items() if device in fused_on(name) and not record.lossless}
    assert {costs.read_share(kernels_of(name)) for name in packed} == set(costs.packed_read_share.values())
    assert costs.read_share(kernels_of("zeros128-float16")) == costs.read_share(kernels_of("zeros128-float16-ordered"))
    assert costs.read_share(kernels_of("dense")) == costs.read_share(None) == costs.dense_read_share


@pytest.mark.parametrize("text", [H200, ZEN4], ids=["h200", "zen4"])
def test_a_file_without_any_one_of_its_keys_is_refused(text, tmp_path):
    file = tmp_path / "own.toml"
    lines = text.splitlines()
    keys = [at for at, line in enumerate(lines) if re.match(r"(?!512|2048|8192)\w+ = ", line)]
    assert len(keys) > 20
    for at in keys:
        file.write_text("\n".join(lines[:at] + lines[at + 1 :]))
        with pytest.raises(ConfigError) as refused:
            read_cost_model(file)
        assert f"{file}: " in str(refused.value) and lines[at].split(" = ")[0] in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("merged_bytes = 21", "merge_bytes = 21", 'merge_bytes: unknown; did you mean "merged_bytes"?'),
        ("merged_bytes = 21", 'merged_bytes = "many"', 'merged_bytes = "many"; expected a number above 0'),
        ("merged_bytes = 21", "merged_bytes = true", "merged_bytes = true; expected a number above 0"),
        ("merged_bytes = 21", "merged_bytes = nan", "merged_bytes = nan; expected a number above 0"),
        ("merged_bytes = 21", "merged_bytes = 0", "merged_bytes = 0; expected a number above 0"),
        ("merged_bytes = 21", "merged_bytes = 21\nattention_share = 1", "attention_share: unknown"),
        ("table = 0.28", "tables = 0.28", "packed_read_share.tables: unknown"),
        ("table = 0.28", "table = -1", "packed_read_share.table = -1; expected a number above 0"),
        ("512 = 1.1", "few = 1.1", "expected a table from numbers of tokens"),
        ("2026-11-29", '"2026-11-29"', 'date = "2026-11-29"; expected a date without quotes'),
        ('machine = "NVIDIA H200"', 'machine = ""', 'machine = ""; expected a string'),
        ('computes_on = "gpu"', 'computes_on = "npu"', 'computes_on = "npu"; expected "gpu" or "cpu"'),
        ("merged_bytes = 21", "merged_bytes", "not valid TOML"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_name_the_key_and_what_would_do(old, new, said, tmp_path):
    file = tmp_path / "own.toml"
    assert H200.count(old) >= 1
    file.write_text(H200.replace(old, new, 1))
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        read_cost_model(str(file))
    assert str(refused.value).startswith(f"{file}: ")


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("transformers")
    return llama_of(hidden_size=512, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)


@pytest.mark.exhaustive
def test_another_set_changes_what_advice_predicts_and_advice_names_it(model, tmp_path):
    on, rates = Machine(GiB, GiB, 4 * GiB, 4 * GiB), vbrt.data_sheet("RTX 4090")
    file = tmp_path / "own.toml"
    file.write_text(H200.replace("generate_ms = 0.27", "generate_ms = 1000.27").replace("NVIDIA H200", "slow"))
    asked = {"machine": on, "rates": rates, "context": 256}
    ours, other = (vbrt.advise(model, cost_model=path, **asked) for path in (None, file))
    names = [choice.name for choice in ours.choices if choice.fits and choice.found.recorded]
    assert names
    for mine, its in zip(ours.choices, other.choices, strict=True):
        more = 1000 if mine.name in names else 0
        assert its.speed.device_ms == pytest.approx(mine.speed.device_ms + more)
    assert "times by the cost model of slow, 2026-11-29" in str(other)
    assert other.to_dict()["cost_model"] == {"machine": "slow", "date": "2026-11-29", "script": "scripts/times.py"}
    assert ours.to_dict()["cost_model"]["machine"] == "NVIDIA H200"


def test_a_set_of_the_other_tier_is_refused(model, tmp_path):
    on, rates = Machine(None, None, 4 * GiB, 4 * GiB), vbrt.Rates("two cores", 0.0, 30.0, 0.43)
    with pytest.raises(ArgumentError, match=r'h200\.toml: computes_on = "gpu".*name a file with computes_on = "cpu"'):
        vbrt.advise(model, machine=on, rates=rates, cost_model=FOLDER / "h200.toml")
    with pytest.raises(ArgumentError, match="the path of a TOML file"):
        vbrt.advise(model, machine=on, rates=rates, cost_model=3)


def test_products_in_fp8_are_faster_from_the_numbers_of_tokens_that_the_set_has(model, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(H200.replace("2048 = 1.5", "1024 = 1.5"))
    on = Machine(GiB, GiB, 4 * GiB, 4 * GiB)
    rates = vbrt.Rates("a GPU", 50.0, 1e6, 1.0, launch_us=1e-6)  # products decide
    sets = default_cost_model("gpu"), read_cost_model(file)
    for tokens, faster in ((512, False), (1024, True), (4096, False)):
        found = vbrt.estimate(model, "prefill", vbrt.load_config("fp8"), machine=on, context=tokens)
        ours, own = (predict(model, found, rates, cost_model=each).ms for each in sets)
        assert (own < ours) == faster and (own == ours) == (not faster)
