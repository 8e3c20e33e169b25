"""The benchmark of large dense models: rows of tiny ones, whose layers stream, and the table of them."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from scripts import large_models, story_models

KIND, SIZES = story_models.SHAPES["qwen3-32b"]
TINY = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 16}
KEPT = 2 * 2 * TINY["vocab_size"] * TINY["hidden_size"]


@pytest.mark.filterwarnings("ignore")
def test_a_shape_has_rows_by_format_and_by_sequences(monkeypatch, tmp_path):
    monkeypatch.setattr(large_models, "TOKENS", 4)
    monkeypatch.setattr(large_models, "_WARM", 4)
    monkeypatch.setattr(large_models, "BESIDE", 0)
    monkeypatch.setitem(story_models.SHAPES, "tiny-32b", (KIND, SIZES | TINY | {"num_hidden_layers": 8}))
    token = 2 * 8 * 8 * 16 * 2 * 2 * 4  # bytes of the KV cache of one sequence, of all layers
    held = large_models.Held(4, KEPT + 4 * token + 1e6)
    found = [row for way in large_models.WAYS for row in large_models.rows(way, "tiny-32b", held, [1, 4, 64])]
    assert [row.get("on_gpu", 0) for row in found[:3]] == [1.0, 1.0, 0]
    assert "no room" in found[2]["refused"]
    four, three = found[0], found[3]
    assert three["pages_gb"] < 0.75 * four["pages_gb"] and four["whole_ms"] == 2 * four["ms"]
    assert found[7]["tokens_s"] == pytest.approx(4e3 / found[7]["whole_ms"])
    path = tmp_path / "large.json"
    where = {"gpu": "G", "cpu": "C", "cores": 2, "python": "3", "commit": "c", "versions": {}}
    path.write_text(json.dumps({"machine": where, "rows": found}))
    lines = large_models.large_table(path)
    assert sum(line.startswith("| tiny-32b") for line in lines) == len(found) and "no room" in "\n".join(lines)
