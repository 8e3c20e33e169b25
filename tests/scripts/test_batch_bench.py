"""scripts/batch_bench.py on a CPU: rows of a batch, its bound, and users of the servers."""

import argparse

import pytest
import torch

import vbrt

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

from scripts import batch_bench as bench  # noqa: E402 - imports transformers
from vbrt.libraries.transformers_batching import BATCHES  # noqa: E402

if BATCHES.refusal():
    pytest.skip(BATCHES.refusal(), allow_module_level=True)


def tiny(vocabulary=1024):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=vocabulary, **sizes, bos_token_id=None, eos_token_id=None)
    return transformers.LlamaForCausalLM(config).eval()


def test_a_batch_has_a_row_and_its_passes():
    with vbrt.wrap(tiny(), "dense") as vb:
        prompts = bench.prompts_of(5, 32)
        assert all(2 <= len(ids) <= 32 for ids in prompts.values())
        row, passes = bench.run(vb, prompts, 6)
    assert row["passes"] == len(passes) and sum(one.tokens for one in passes) == row["prompt_tokens"] + 5 * 5
    assert row["sequences"] == 5 and 0 < row["step_ms"] < 1e3 * row["seconds"] and row["between_steps_ms"] > 0
    assert row["attention"] == "sdpa"
    assert row["tokens_per_s"] == pytest.approx(30 / row["seconds"])


def test_a_bound_takes_the_longer_of_link_and_of_the_like_resident_pass():
    def like(*passes):
        return [bench.Pass(tokens, cached, 4, "sdpa", 0.0, seconds) for tokens, cached, seconds in passes]

    few = [(4, 104 + number, 7.0 if number in (1, 3) else 0.1) for number in range(5)]  # two were captured
    resident = like((100, 0, 0.5), *few, *((4, 904 + number, 0.3) for number in range(5)))
    passes = like((96, 0, 9), (4, 106, 9), (4, 905, 9))
    row = {"prompts": 4, "new": 3, "seconds": 2.0, "moved_bytes_a_pass": 20e9}
    found = bench.bound(row, passes, resident, 100e9)  # 0.2 s a pass over the link
    assert found["bound_s"] == pytest.approx(0.5 + 0.2 + 0.3) and found["of_bound"] == pytest.approx(0.5)
    assert found["bound_tokens_per_s"] == pytest.approx(12.0) and found["compute_s"] == pytest.approx(0.9)


def test_users_of_both_servers_have_rows(tmp_path, monkeypatch):
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package)
    monkeypatch.setattr(bench, "made_for_serving", lambda options: tiny(bench._WORDS))
    monkeypatch.setattr(bench, "PEER_ROOM", ("--cb-num-blocks", "16", "--cb-max-batch-tokens", "64"))
    how = {"users": [1, 3], "rounds": 1, "words": 5, "new": 4, "scratch": tmp_path, "layers": 2}
    rows = []
    for _ in bench.serving(argparse.Namespace(**how, only=["vbrt fp4, all", "transformers"]), rows):
        assert rows[-1]["tokens_per_s"] > 0 and rows[-1]["texts"] == rows[-1]["users"] * 4
        assert set(rows[-1]["steps"]) == ({"captured", "eager"} if "vbrt" in rows[-1]["case"] else set())
        assert 0 < rows[-1]["first_ms"] <= rows[-1]["first_ms_most"] and rows[-1]["token_ms"] > 0
    named = [(row["case"].partition(",")[0], row["users"]) for row in rows]
    assert named == [(case, users) for case in ("vbrt fp4", "transformers serve") for users in (1, 3)]


def test_the_pages_have_the_tables_of_the_committed_results():
    for part, page in bench.PAGES.items():
        text = page.read_text()
        assert text == bench.between(text, bench.marks(part), bench.table(part)), "scripts/batch_bench.py --tables"
        assert all(text.count(mark) == 1 for mark in bench.marks(part))
