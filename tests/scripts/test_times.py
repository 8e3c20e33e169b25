"""Predictions beside what is committed: rows of scripts/advice.py as they are written today, and as they were."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import vbrt
from scripts import estimates, times
from scripts.estimates import llama_8b_meta

_COMMITTED = Path("benchmarks/results/advice-nvidia-h200.json")


def test_each_committed_row_has_the_config_that_it_ran_under():
    for row in json.loads(_COMMITTED.read_text())["rows"]:
        config = times.config_of(row)
        plain = row["name"] == "unwrapped" or "on the plain model" in row["name"]
        assert (config is None) == (plain or row["name"].startswith("all weights, bf16"))


@pytest.mark.exhaustive
def test_estimates_hold_against_every_first_answer_that_was_followed():
    rows = times.followed(json.loads(_COMMITTED.read_text()))
    rows = [(row, found) for row, found, _ in rows if row["first"] and not times._trained_otherwise(row)]
    off = {row["case"]: found.again_bytes / row["peak_bytes"] - 1 for row, found in rows}
    assert len(off) == 11 and all(-0.02 <= one <= 0.05 for one in off.values()), off


@pytest.mark.parametrize(
    "which", ["streaming", *(pytest.param(which, marks=pytest.mark.exhaustive) for which in ("cpu", "all"))]
)
def test_the_page_has_the_times_that_are_predicted_today(which):
    if which == "streaming":
        rows = times.streaming(times.Model(llama_8b_meta(), times.rates()))
    else:
        rows = times.on_cpu() if which == "cpu" else times.every()
    assert set(times.times_table(rows)) <= set(times._PAGE.read_text().splitlines())


def test_a_row_is_read_by_its_config_or_by_its_preset_and_budget():
    older = {"preset": "exact", "budget": 3 << 30}
    config = times.config_of(older)
    assert (
        config.tiers.gpu.budget == 3 << 30
        and config.weights == vbrt.load_config("exact", weights={"fine_coding": "plain"}).weights
    )
    assert times.config_of({"config": json.loads(json.dumps(config.to_dict()))}) == config
    assert times.config_of({"config": None}) is times.config_of({"preset": None, "budget": None}) is None


def test_a_setting_that_failed_is_in_the_table_with_its_reason(monkeypatch):
    row = {"case": "one", "gpu": 1 << 30, "name": "fp4", "first": True, "error": "no room"}
    rows = [(row | {"oom": oom}, SimpleNamespace(again_bytes=0), None) for oom in (True, False)]
    monkeypatch.setattr(times, "followed", lambda committed: iter(rows))
    *_, oom, other = times.advice_table({})
    assert oom.endswith("| out of memory | | |") and other.endswith("| no room | | |")


def test_a_family_whose_library_is_missing_is_skipped_with_a_word(monkeypatch, capsys, tmp_path):
    def estimated(case, on):
        if case.family.startswith("UNet"):
            raise ModuleNotFoundError("No module named 'diffusers'", name="diffusers")
        return SimpleNamespace(peak_bytes=1, again_bytes=1)

    monkeypatch.setattr(estimates, "estimated", estimated)
    names = [row["case"] for row in estimates.families()]
    assert names and not any(name.startswith("UNet") for name in names)
    said = capsys.readouterr().err
    assert "skipped: UNet of SD 1.5, prefill" in said and "diffusers" in said
    page = tmp_path / "page.md"
    old = "| UNet of SD 1.5, prefill, 4 × 2048, unwrapped | 1 | 2 | 3 |"
    page.write_text(f"<!-- estimates:begin -->\n{old}\n<!-- estimates:end -->")
    for name, value in (("_PAGE", page), ("streaming", list), ("training", list)):
        monkeypatch.setattr(estimates, name, value)
    estimates.write_table()
    assert old in page.read_text() and "| Mamba, prefill" in page.read_text()
