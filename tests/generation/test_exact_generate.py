"""`generate` of lossless presets gives the plain model's tokens and logits, bit for bit."""

import copy
import functools
from typing import Any

import pytest
import torch

import vbrt
from tests.matrix import matrix

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:vbrt")

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64}
WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
#: prefix of the class names, and what the config says
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 64}),
    "gemma3": ("Gemma3", SIZES | WINDOWS | {"head_dim": 64}),
    "gpt2": ("GPT2LMHead", {"vocab_size": 512, "n_embd": 256, "n_layer": 3, "n_head": 4}),
    "mistral": ("Mistral", SIZES | {"sliding_window": 20}),
    "phi": ("Phi", SIZES | {"num_key_value_heads": 4}),
    "olmoe": ("Olmoe", SIZES | EXPERTS | {"num_experts": 8}),
    "gpt_oss": ("GptOss", SIZES | EXPERTS | {"num_local_experts": 8, "head_dim": 64, "sliding_window": 20}),
    "deepseek_v2": (
        "DeepseekV2",
        SIZES | EXPERTS | LATENT | {"num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1},
    ),
    "bamba": (
        "Bamba",
        SIZES
        | {"mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1}
        | {"attn_layer_indices": [1]},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 512, "d_model": 256, "d_kv": 64, "d_ff": 384, "num_layers": 2, "num_heads": 4}
        | {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"vocab_size": 512, "d_model": 256, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4}
        | {"decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "max_source_positions": 40}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 511, "decoder_start_token_id": 1, "num_mel_bins": 8}
        | {"max_target_positions": 200, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}
#: families whose steps are eager: their caches hold latents, and keys are products of as many rows as there are tokens
EAGER = {"deepseek_v2"}
CALLS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"do_sample": True}, "beams": {"num_beams": 3}}


@functools.cache
def model_of(family: str, dtype: torch.dtype) -> torch.nn.Module:
    name, sizes = FAMILIES[family]
    prefix = name.removesuffix("LMHead").removesuffix("ForConditionalGeneration")
    text = "Text" if family == "gemma3" else ""
    config = getattr(transformers, f"{prefix}{text}Config")(**sizes)
    torch.manual_seed(1)
    make = getattr(
        transformers,
        name if name.endswith("Generation") else f"{name}{'Model' if name.endswith('LMHead') else 'ForCausalLM'}",
    )
    model = make(config).to(dtype).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def generated(model: torch.nn.Module, family: str, device: str, *, padded: bool, **call: Any) -> Any:
    torch.manual_seed(2)
    given = {"max_new_tokens": 25, "output_logits": True, "return_dict_in_generate": True} | call
    if family == "whisper":
        given["input_features"] = torch.randn(2 if padded else 1, 8, 80).to(device, next(model.parameters()).dtype)
        return model.generate(**given)
    ids = torch.randint(1, 512, (2, 23))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    ids, mask = (ids, mask) if padded else (ids[1:], mask[1:])
    return model.generate(ids.to(device), attention_mask=mask.to(device), **given)


def check(family: str, call: str, batch: str, preset: str, pages: str, device: str, dtype: torch.dtype) -> Any:
    """Compare a call of both models; return the statistics of the wrapped one."""
    plain = copy.deepcopy(model_of(family, dtype)).to(device)
    settings: dict[str, Any] = {"weights": {"min_parameters": 0}}
    if device == "cuda":
        nbytes = vbrt.make_plan(plain, vbrt.load_config(preset, **settings)).page_bytes
        settings["tiers"] = {"gpu": {"budget": "1GiB" if pages == "resident" else int(nbytes * 0.6)}}
    vb = vbrt.wrap(copy.deepcopy(plain), preset, **settings)
    kwargs = {"padded": batch == "padded", "do_sample": False} | CALLS[call]
    want, got = (generated(of, family, device, **kwargs) for of in (plain, vb))
    assert torch.equal(got.sequences, want.sequences)
    assert all(map(torch.equal, got.logits, want.logits))
    stats = vb.stats()
    vb.close()
    return stats


@pytest.mark.sample(5)
@pytest.mark.usefixtures("recorded")
@matrix(family=list(FAMILIES), call=list(CALLS), batch=["one", "padded"], preset=["dense"])
def test_recorded_steps_have_the_plain_models_bits(family, call, batch, preset):
    steps = check(family, call, batch, preset, "resident", "cpu", torch.float32).steps
    assert (steps.eager == 0) is (family not in EAGER), steps.reasons


@pytest.mark.gpu
@matrix(
    turns=2,
    family=list(FAMILIES),
    call=list(CALLS),
    batch=["one", "padded"],
    preset=["dense", "exact"],
    pages=["resident", "streamed"],
)
def test_generate_on_a_gpu_has_the_plain_models_bits(family, call, batch, preset, pages):
    steps = check(family, call, batch, preset, pages, "cuda", torch.bfloat16).steps
    if preset == "dense" and pages == "resident":
        assert (steps.eager == 0) is (family not in EAGER), steps.reasons
