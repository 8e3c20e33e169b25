"""Configs of GGUF files: sizes and rotary frequencies that transformers leaves out of what it makes of metadata."""

import numpy as np
import pytest
import torch

import vbrt
from vbrt.errors import CheckpointError
from vbrt.saves.published.gguf_checkpoint import GGUFTensors

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
from tests.saves.published.gguf_files import Type, model_of, write  # noqa: E402 - needs both
from vbrt.integrations.gguf_models import gguf_config  # noqa: E402


def config_of(path, architecture="llama", *, more=(), metadata=None):
    with pytest.MonkeyPatch.context() as patch:
        plain = gguf.GGUFWriter.add_rope_freq_base

        def with_scaling(self, base):
            plain(self, base)
            for name, value in (metadata or {}).items():
                getattr(self, f"add_rope_scaling_{name}")(value)

        patch.setattr(gguf.GGUFWriter, "add_rope_freq_base", with_scaling)
        write(path, model_of(architecture), architecture, lambda name: Type.Q8_0, more=more)
    return gguf_config(GGUFTensors(path))


def factors_of(scaling):
    """What llama.cpp's converter writes for a model whose config scales its frequencies."""
    config = transformers.LlamaConfig(head_dim=32, max_position_embeddings=131072, rope_parameters=scaling)
    make = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    plain = 1 / scaling["rope_theta"] ** (torch.arange(0, 32, 2) / 32)
    return (plain / make(config, "cpu")[0]).numpy().astype(np.float32)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 10000.0}


def test_the_scaling_of_llama_3_is_found_from_its_factors(tmp_path):
    config = config_of(tmp_path / "a.gguf", more=[("rope_freqs.weight", factors_of(LLAMA3))])
    assert config.rope_parameters == LLAMA3
    given = {"quantization_config": vbrt.QuantizationConfig("dense", tiers={"gpu": {"enabled": False}})}
    with pytest.raises(CheckpointError, match=r"pass config= with rope_parameters = .*llama3"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", **given)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", config=config, **given)


def test_factors_that_no_config_describes_are_refused_but_with_a_config_beside(tmp_path):
    more = [("rope_freqs.weight", np.linspace(1, 9, 16, dtype=np.float32))]
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight, with factors up to 9 .*the model's config\.json"):
        config_of(tmp_path / "a.gguf", more=more)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"type": gguf.RopeScalingType.LINEAR, "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": gguf.RopeScalingType.YARN, "factor": 4.0, "orig_ctx_len": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        ({"type": gguf.RopeScalingType.NONE}, {"rope_type": "default"}),
    ],
)
def test_scaling_that_metadata_name_is_taken(tmp_path, metadata, expected):
    config = config_of(tmp_path / "a.gguf", metadata=metadata)
    assert config.rope_parameters == {"rope_theta": 10000.0, **expected}


def test_other_scaling_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.type = 'longrope'.*put the model's config\.json"):
        config_of(tmp_path / "a.gguf", metadata={"type": gguf.RopeScalingType.LONGROPE})


def test_sizes_of_experts_and_heads_come_from_the_metadata(tmp_path):
    config = config_of(tmp_path / "a.gguf", "qwen3moe")
    assert (config.moe_intermediate_size, config.head_dim, config.tie_word_embeddings) == (32, 32, False)
