"""A tiny model on disk, a config of a large one, and a state directory for each test of the command line."""

import json
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _state_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    """A directory with a random Llama of two layers in bfloat16 and a byte-level tokenizer."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("llama")
    save_tokenizer(directory)
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


@pytest.fixture(scope="session")
def qwen(tmp_path_factory) -> Path:
    """A directory with a random Qwen3-MoE of two layers with 8 routed experts each, and the same tokenizer."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("qwen")
    save_tokenizer(directory)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=280,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = tokenizers.pre_tokenizers.ByteLevel(), tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the sea is calm and the sky is blue"], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


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
