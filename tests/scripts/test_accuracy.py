"""The committed language model in 4 bits: perplexity on text it has never seen, within what docs/accuracy.md says."""

import json
import math
from pathlib import Path

import pytest
import torch

import vbrt
from scripts import accuracy, bench_tables, calibrated, committed, precision
from scripts.lm import is_held_out, library_files, loss_of

ROOT = Path(__file__).resolve().parents[2]
WINDOWS = 6  # of 512 bytes, evenly spread over the text


@pytest.fixture(scope="module")
def loss():
    """Of a model on a part of the text, in nats a byte."""
    text, context = committed.held_out(), committed.shape().context
    return lambda model: loss_of(model, text, context, at_most=WINDOWS)


@pytest.fixture(scope="module")
def dense_loss(loss):
    return loss(committed.dense())


def test_the_model_has_learned_its_language(dense_loss):
    assert math.exp(dense_loss) < 3.5


def test_nvfp4_costs_less_than_a_percent_of_perplexity_and_qat_wins_it_back(loss, dense_loss):
    """Bounds a little above what was measured on these windows, 1.0038 and 0.9989; the aims are 1.02 and 1.01."""
    nvfp4 = loss(vbrt.wrap(committed.dense(), "fp4"))
    qat = loss(committed.after_qat())
    assert 1 < math.exp(nvfp4 - dense_loss) < 1.006
    assert math.exp(qat - dense_loss) < 1.002


def test_exact_gives_the_same_perplexity_to_the_last_bit():
    """The first and the last block, which is as good a test as all and takes less time to encode."""
    text, model = committed.held_out()[:513], committed.dense(torch.bfloat16)
    dense = loss_of(model, text, 512)
    vb = vbrt.wrap(model, "exact", weights={"include": ["blocks.0.*", "blocks.6.*"]})
    assert len(vb.plan.swaps) == 12 and loss_of(vb, text, 512) == dense


def test_the_documents_are_those_of_the_committed_results():
    assert accuracy.DOCS.read_text() == accuracy.page()
    for path in bench_tables.RESULTS.glob("training-*.json"):
        assert "\n".join(bench_tables.train_table(path)) in bench_tables.DOCS.read_text()


def test_the_readmes_figures_of_perplexity_are_those_of_the_committed_results():
    rows = {row["format"]: row["loss"] for row in json.loads(accuracy.RESULT.read_text())["rows"]}
    cost = {name: 100 * math.expm1(loss - rows["dense, fp32 arithmetic"]) for name, loss in rows.items()}
    others = sorted(cost[name] for name in ("mxfp4", "nf4", "quantile"))
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"rounded: +{cost['nvfp4']:.1f} % perplexity a byte" in readme
    assert f"rounded: +{others[0]:.1f} to {others[-1]:.1f} %" in readme


def test_the_committed_results_keep_the_bounds():
    rows = {row["format"]: row["loss"] for row in json.loads(accuracy.RESULT.read_text())["rows"]}
    dense = rows["dense, fp32 arithmetic"]
    assert rows["exact, bf16 arithmetic"] == rows["dense, bf16 arithmetic"]
    assert math.exp(rows["nvfp4"] - dense) < 1.02 and math.exp(rows["nvfp4 after QAT"] - dense) < 1.01


def test_calibration_lowers_the_loss_of_every_format_and_8_bits_meet_every_budget_in_bytes():
    """Without 8 bits the third, .0027 for half as many bytes again, is missed: exact layers take too many."""
    result = json.loads(calibrated.RESULT.read_text())
    kl = {(row["format"], row["way"]): row for row in result["formats"]}
    for format in accuracy.FORMATS:
        for text in ("first", "last"):
            found = [kl[format, way][text] for way in calibrated.WAYS]
            assert found[2] < 0.92 * found[0] and found[1] < 1.03 * found[0]
    rows = {(row["method"], row["more"]): row for row in result["budgets"]}
    for more, gate in calibrated.GATES.items():
        assert rows["nvfp4 and exact, calibrated", more]["first"] <= (gate if more < 0.5 else 0.0039)
        for way in ("", ", calibrated"):
            ours = rows[f"nvfp4, mxint8 and exact{way}", more]
            assert ours["taken"] <= more and ours["first"] < rows[f"nvfp4 and exact{way}", more]["first"]
            assert ours["first"] <= gate
    eight = {row["kind"]: row["first"] for row in result["eight_bits"]}
    assert 8 * eight["mxint8"] < eight["MXFP8"]


def test_no_other_way_to_choose_is_below_the_curve_of_measured_kl():
    curves = precision.curves_of(json.loads(precision.RESULT.read_text()))
    for more, kl in curves[precision.CHOSEN].items():  # two texts of 8,192 and 12,288 bytes rank nearly alike
        assert all(kl <= (1 if more in precision.GATES else 1.02) * curve[more] for curve in curves.values())
    assert all(curves[precision.CHOSEN][more] <= gate for more, gate in precision.GATES.items())


def test_a_calibrated_block_of_the_model_loses_a_tenth_less_of_another_text(tmp_path):
    """Measured: a fifth."""
    text = committed.held_out().long()
    (tmp_path / "ids.json").write_text(json.dumps(text[8192:9216].tolist()))
    found = []
    for way in ({}, {"calibrate": str(tmp_path / "ids.json")}):
        model = committed.dense()
        reference = model(text[None, :512]).log_softmax(-1)
        vb = vbrt.wrap(model, "fp4", weights={"include": ["blocks.0.*"], **way})
        ours = vb(text[None, :512]).log_softmax(-1)
        found.append(torch.nn.functional.kl_div(ours, reference, reduction="sum", log_target=True).item())
    assert 0 < found[1] < 0.9 * found[0]


def test_the_committed_results_of_experts_keep_the_bounds():
    rows = {row["format"]: row["loss"] for row in json.loads(accuracy.EXPERTS_RESULT.read_text())["rows"]}
    assert rows["exact, bf16 arithmetic"] == rows["dense, bf16 arithmetic"]
    for format in accuracy.FORMATS:
        assert math.exp(rows[format] - rows["dense, fp32 arithmetic"]) < 1.002, format


def test_nvfp4_experts_of_a_layer_cost_less_than_half_a_percent_of_perplexity():
    text, found = committed.held_out(), []
    for wrapped in (False, True):
        model = committed.with_experts()
        if wrapped:
            model = vbrt.wrap(model, "fp4", weights={"include": ["model.layers.2.mlp.experts"]})
            assert [swap.experts for swap in model.plan.swaps] == [48]
        found.append(loss_of(model, text, 512, at_most=2))
    assert math.exp(found[0]) < 3.5 and abs(math.exp(found[1] - found[0]) - 1) < 0.005 and found[0] != found[1]


def test_whole_modules_are_held_out(tmp_path):
    for name in ("tomllib/_parser.py", "tomllib/__init__.py", "json/decoder.py", "test/test_json.py", "tempfile.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    files = [path.relative_to(tmp_path) for path in library_files(tmp_path)]
    assert {path.as_posix() for path in files if is_held_out(path)} == {
        "tomllib/_parser.py",
        "tomllib/__init__.py",
        "tempfile.py",
    }
    assert {path.as_posix() for path in files if not is_held_out(path)} == {"json/decoder.py"}
