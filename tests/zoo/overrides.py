"""What the names of a config's fields cannot tell of an architecture: data for the builder in `zoo`, and the sample."""

from typing import Any

__all__ = [
    "DIFFUSERS",
    "EXPERTS",
    "HEADS",
    "HEAD_DIM",
    "IMAGE",
    "INNER",
    "KV_HEADS",
    "MOE_INNER",
    "OVERRIDES",
    "PATCH",
    "POSITIONS",
    "SAMPLE",
    "TIMM",
    "TOKENS",
    "UNMAPPED",
    "VOCAB",
    "WIDTH",
]

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, POSITIONS, IMAGE, PATCH, TOKENS = 64, 4, 2, 16, 96, 256, 128, 64, 16, 12
#: routed experts: enough that a few tokens leave some out, and matrices that are no squares
EXPERTS, MOE_INNER = 8, 48


# fmt: off
def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    return {"config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section), **more}}}


_SERIES = {
    "config": {"prediction_length": 4, "context_length": 8, "num_time_features": 1, "lags_sequence": [1, 2, 3]},
    "inputs": {
        "past_values": ("f", (1, 11)), "past_time_features": ("f", (1, 11, 1)), "past_observed_mask": ("ones", (1, 11)),
        "future_values": ("f", (1, 4)), "future_time_features": ("f", (1, 4, 1)),
    },
}
_SHARED_KV = {"config": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}}
_CODES = {"inputs": {"input_ids": ("i", (4, TOKENS), 64)}}
_PAIR = {"inputs": {"pixel_values": ("f", (1, 2, 3, IMAGE, IMAGE))}}
_QFORMER = {
    "config": {"image_token_index": VOCAB - 1},
    "inputs": {"qformer_input_ids": ("i", (1, TOKENS), 64), "input_ids": ("ids", 24, VOCAB - 1, 16)}}
_NO_SESSION = {"skip": "forward takes a video inference session, not tensors"}
_NO_FORWARD = {"skip": "the model class has no forward"}
_LAYOUT = {"inputs": {"bbox": ("=", [[[1, 2, 3, 4]] * TOKENS])}}

# Data only: "config" sets fields by dotted path (also where the type is a sub-config of another one), "inputs" replaces
# inputs (see `inputs.realise`; None removes one), "levels" are those to try, "skip" is a reason not to try at all.
OVERRIDES: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"inputs": {"input_values": ("f", (1, 1024, 128))}},
    "audioflamingo3_encoder": {"inputs": {"input_features": ("f", (1, 128, 64)), "input_features_mask": ("ones", (1, 64))}},
    "autoformer": {**_SERIES, "config": {**_SERIES["config"], "moving_average": 3}},
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "bamba": {"config": {"mamba_d_head": 32, "attn_layer_indices": [1]}},
    "granitemoehybrid": {"config": {"mamba_d_head": 32, "layer_types": ["mamba", "attention"]}},
    "bark": _NO_FORWARD,
    "glm_image_vqmodel": _NO_FORWARD,
    "blip-2": {"config": {"image_token_index": VOCAB - 1}, "inputs": {"input_ids": ("ids", 24, VOCAB - 1, 16)}},
    "blip_2_qformer": {"inputs": {"encoder_hidden_states": ("f", (1, 8, WIDTH))}},
    "blt": {"config": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 2}},
    "bros": _LAYOUT,
    "chameleon": {"config": {"vocabulary_map": {"<image>": 7}}},
    "clap": {"inputs": {"input_features": ("f", (1, 1, 1024, 64)), "is_longer": ("=", [[False]])}, "levels": ("shallow",)},
    "clvp": {"inputs": {"input_features": ("f", (1, 80, 64))}},
    "cohere_compass_text": {"config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}}},
    "dbrx": {"config": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0, "ffn_config.moe_num_experts": EXPERTS, "ffn_config.moe_top_k": 2}},
    "decision_transformer": {
        "inputs": {
            "states": ("f", (1, 4, 17)), "actions": ("f", (1, 4, 4)), "rewards": ("f", (1, 4, 1)), "returns_to_go": ("f", (1, 4, 1)),
            "timesteps": ("=", [[0, 1, 2, 3]]), "attention_mask": ("ones", (1, 4)),
        },
        "config": {"act_dim": 4, "state_dim": 17},
    },
    "deepseek_ocr2_text": {"config": {"mlp_layer_types": ["dense", "sparse"]}},
    "dia": {"inputs": {"decoder_input_ids": ("i", (1, TOKENS, 9), 64)}},
    "diffusion_gemma_text": {"config": {"num_experts": EXPERTS, "top_k_experts": 2}},
    "dots1": {"config": {"n_routed_experts": EXPERTS, "n_shared_experts": 1}},
    "efficientloftr": _PAIR,
    "lightglue": _PAIR,
    "edgetam_video": _NO_SESSION,
    "sam2_video": _NO_SESSION,
    "sam3_tracker_video": _NO_SESSION,
    "sam3_video": _NO_SESSION,
    "encodec": {"inputs": {"input_values": ("f", (1, 1, 640))}},
    "emu3": {"config": {"vocabulary_map": {"<image>": 7, "<|extra_200|>": 8, "<|image token|>": 9}}},
    "ernie4_5_vl_moe_text": {"config": {**_mrope(3, 3, 2)["config"], "moe_intermediate_size": [MOE_INNER, 32]}},
    "esm": {"config": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}},
    "flint": {"config": {"mlp_only_layers": [0]}},
    "fun_asr_nano_encoder": {"inputs": {"input_features": ("f", (1, 64, 560)), "input_features_mask": ("ones", (1, 64))}},
    "gemma3n_text": {"config": {**_SHARED_KV["config"], "intermediate_size": INNER, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]}},
    "gemma3n_audio": {"inputs": {"audio_mel": ("f", (1, 64, 128)), "audio_mel_mask": ("=", [[False] * 64])}},
    "gemma4_audio": {"inputs": {"input_features": ("f", (1, 64, 128)), "attention_mask": ("=", [[True] * 64])}},
    "gemma4_text": {"config": {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2}},
    "gemma4_vision": {
        "inputs": {"pixel_values": ("f", (1, 16, 768)), "pixel_position_ids": ("=", [[[x, y] for y in range(4) for x in range(4)]])}
    },
    "glm4v_text": _mrope(2, 3, 3),
    "glm4v_moe_text": _mrope(1, 1, 2, partial_rotary_factor=0.5),
    "glm_image_text": _mrope(2, 3, 3),
    "glm_ocr_text": _mrope(2, 3, 3),
    "granite4_vision": {"config": {"deepstack_layer_map": [[1, 0]]}},
    "granite_speech5_encoder": {"inputs": {"input_features": ("f", (1, 16, 320))}},
    "granite_speech5_ctc": {"inputs": {"input_features": ("f", (1, 16, 320))}},
    "grounding-dino": {"config": {"num_queries": 4}},
    "mm-grounding-dino": {"config": {"num_queries": 4}},
    "hunyuan_v1_moe": {"config": {"num_experts": EXPERTS, "moe_topk": 2}},
    "hunyuan_vl_text": _mrope(2, 2, 2, 2),
    "idefics": {"inputs": {"pixel_values": ("f", (1, 1, 3, IMAGE, IMAGE)), "image_attention_mask": ("ones", (1, TOKENS, 1))}},
    "inkling_text": {"config": {"n_shared_experts": 2}},
    "inkling2_vision": {"inputs": {"pixel_values": ("f", (16, 16, 16, 3))}},
    "instructblip": _QFORMER,
    "instructblipvideo": {
        "config": {"video_token_index": VOCAB - 1},
        "inputs": {"qformer_input_ids": ("i", (4, TOKENS), 64), "input_ids": ("ids", 72, VOCAB - 1, 64), "pixel_values": ("f", (1, 4, 3, IMAGE, IMAGE))},
    },
    "jamba": {"config": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}},
    "kimi_k25_vision": {"inputs": {"pixel_values": ("f", (16, 3, 16, 16))}},
    "kosmos-2": {"inputs": {"image_embeds_position_mask": ("=", [[False, *[True] * 16, *[False] * 7]]), "input_ids": ("i", (1, 24), 64)}},
    "kyutai_speech_to_text": {"inputs": {"input_ids": ("i", (1, TOKENS, 33), 64)}},
    "layoutlm": _LAYOUT,
    "lfm2_moe": {"config": {"layer_types": ["conv", "full_attention"]}},
    "lxmert": {"inputs": {"visual_feats": ("f", (1, 4, WIDTH)), "visual_pos": ("f", (1, 4, 4))}},
    "mamba2": {"config": {"head_dim": 32, "n_groups": 2}},
    "minicpm_ocr_vision": {"inputs": {"target_sizes": ("=", [[4, 4]])}},
    "minicpmv4_7_vision": {"inputs": {"target_sizes": ("=", [[4, 4]])}},
    "molmo2": {"config": {"adapter_config.vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"config": {"num_key_value_heads": HEADS}},
    "muse_glimmer_assistant": {"inputs": {"noise_embeds": ("f", (1, TOKENS, WIDTH)), "context_hidden_states": ("f", (1, TOKENS, 2 * WIDTH))}},
    "muse_glimmer_vision": {"inputs": {"pixel_values": ("f", (16, 1536))}},
    "muse_spark_vision": {"inputs": {"pixel_values": ("f", (16, 1536))}},
    "muse_spark_audio": {"config": {"num_hidden_layers": 4}, "inputs": {"input_values": ("f", (1, 3840))}},
    "musicgen": _CODES,
    "musicgen_melody": _CODES,
    "nemotron3_5_asr": {"inputs": {"prompt_ids": ("=", [1])}},
    "nemotron_h": {"config": {"n_groups": 2}},
    "oneformer": {"inputs": {"task_inputs": ("i", (1, 77), 64)}},
    "paddleocr_vl_text": _mrope(2, 3, 3),
    "patchtsmixer": {"inputs": {"past_values": ("f", (1, 32, 1))}},
    "patchtst": {"inputs": {"past_values": ("f", (1, 32, 1))}},
    "perceiver": {"inputs": {"inputs": ("f", (1, TOKENS, WIDTH))}, "config": {"d_model": WIDTH}},
    "pi0": {"inputs": {"pixel_values": ("f", (1, 1, 3, IMAGE, IMAGE)), "pixel_attention_mask": ("=", [[True]]), "action_embeds": ("f", (1, 4, WIDTH))}},
    "qwen2_5_omni_text": _mrope(2, 3, 3),
    "qwen2_5_vl_text": _mrope(2, 3, 3),
    "qwen2_vl_text": _mrope(2, 3, 3),
    "qwen3_asr_encoder": {"inputs": {"input_features": ("f", (1, 128, 100)), "input_features_mask": ("ones", (1, 100))}},
    "qwen3_omni_moe_talker_text": {
        "config": {"shared_expert_intermediate_size": WIDTH}, "inputs": {"inputs_embeds": ("f", (1, TOKENS, WIDTH)), "input_ids": None}
    },
    "qwen4_exp_text": {"config": {
        "indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_n_heads": HEADS, "indexer_head_dim": HEAD_DIM, "indexer_kv_heads": 1,
        "ple_layer_ids": [1], "heads_per_ngram": 2, "ngram_vocab_size_base": 64, "eos_token_id": 2,
    }},
    "recurrent_gemma": {"config": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]}},
    "reformer": {
        "config": {"axial_pos_shape": (8, 16), "axial_pos_embds_dim": (32, 32), "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "attn_layers": ["local", "lsh"]}
    },
    "seggpt": {"config": {"image_size": [2 * IMAGE, IMAGE]}, "inputs": {"pixel_values": ("f", (1, 3, IMAGE, IMAGE)), "prompt_pixel_values": ("f", (1, 3, IMAGE, IMAGE)), "prompt_masks": ("f", (1, 3, IMAGE, IMAGE))}},
    "siglip2": {"inputs": {"pixel_values": ("f", (1, 16, 768)), "pixel_attention_mask": ("ones", (1, 16)), "spatial_shapes": ("=", [[4, 4]])}},
    "siglip2_vision_model": {
        "inputs": {"pixel_values": ("f", (1, 16, 768)), "pixel_attention_mask": ("ones", (1, 16)), "spatial_shapes": ("=", [[4, 4]])}
    },
    "speecht5": {"inputs": {"input_values": ("f", (1, TOKENS, WIDTH)), "decoder_input_values": ("f", (1, TOKENS, WIDTH))}},
    "t5gemma2_encoder": {"skip": "its default config lacks the fields its model reads"},
    "timesfm": {"inputs": {"past_values": ("f", (1, 64)), "past_values_padding": ("=", [[0] * 64]), "freq": ("=", [[0]])}},
    "timesfm2_5": {"inputs": {"past_values": ("f", (1, 64)), "past_values_padding": ("=", [[0] * 64])}},
    "udop": _LAYOUT,
    "vibevoice_acoustic_tokenizer_decoder": {"config": {"num_filters": 4}, "inputs": {"hidden_states": ("f", (1, WIDTH, 4))}},
    "vibevoice_acoustic_tokenizer_encoder": {"config": {"num_filters": 4}, "inputs": {"hidden_states": ("f", (1, 1, 3200))}},
    "video_llama_3_vision": {"inputs": {"merge_sizes": ("=", [1])}},
    "voxtral_realtime_text": {"skip": "transformers maps it to a class that it does not have"},
    "tvp": {"config": {"visual_prompt_size": 8}},
    "vibevoice_acoustic_tokenizer": {"config": {"num_filters": 4}},
    "align": {"levels": ("shallow",), "inputs": {"pixel_values": ("f", (1, 3, IMAGE, IMAGE))}},
    "hgnet_v2": {"config": {"hidden_sizes": [256, 512, 1024, 2048]}},
    "d_fine": {"config": {"num_queries": 16}},
    "deimv2": {"config": {"num_queries": 16}},
    "pp_doclayout_v3": {"config": {"num_queries": 16}},
    "pp_doclayout_v4": {"config": {"num_queries": 16}},
    "xlstm": {"config": {"qk_dim_factor": 1.0}},
    "xmod": {"config": {"default_language": "en_XX"}},
    "efficientnet": {"levels": ("default",), "inputs": {"pixel_values": ("f", (1, 3, IMAGE, IMAGE))}},
    "sam2_hiera_det_model": {
        "config": {"hidden_size": 32, "embed_dim_per_stage": [32, 64, 128, 256], "num_attention_heads_per_stage": [1, 2, 4, 4], "image_size": [IMAGE, IMAGE],
                   "blocks_per_stage": [1, 1, 2, 1], "global_attention_blocks": [3], "window_size_per_stage": [8, 8, 4, 4], "window_positional_embedding_background_size": [4, 4]},
    },
    "sam2_vision_model": {"config": {"backbone_channel_list": [256, 128, 64, 32], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}},
    "sam3_vision_model": {"config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}},
    "step3p7": {"config": {"text_config.sliding_window": 8}},
    "mimi_decoder": {"inputs": {"latents": ("f", (1, WIDTH, 8))}},
    "pocket_tts_audio_tokenizer_decoder": {"inputs": {"latents": ("f", (1, WIDTH, 8))}},
    "pp_ocrv5_mobile_rec": {"inputs": {"pixel_values": ("f", (1, 3, 96, 160))}},
    "pp_ocrv6_small_rec": {"inputs": {"pixel_values": ("f", (1, 3, 96, 160))}},
    "voxtral_realtime": {"inputs": {"input_features": ("f", (1, 128, 8 * TOKENS))}},
    "gemma4_unified_assistant": {"skip": "drafts for another model and needs its key-value states"},
    "gemma4_assistant": {"skip": "drafts for another model and needs its key-value states"},
    "zamba": {"config": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]}},
}

# base models that no mapping of transformers has
UNMAPPED = {"qwen3_omni_moe_talker_text": "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeTalkerModel"}

_HEADS = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM}
_LATENT = ("f", (1, 4, 8, 8))
_TIME = ("=", [1])

# timm: arguments of create_model. diffusers: class, arguments, inputs.
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {}, "mixer_s32_224": {}, "swin_tiny_patch4_window7_224": {}, "convnext_atto": {}, "levit_128s": {},
}
DIFFUSERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "unet2d_condition": (
        "UNet2DConditionModel",
        {"sample_size": 8, "block_out_channels": (32, 64), "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": WIDTH, "layers_per_block": 1, "attention_head_dim": 8},
        {"sample": _LATENT, "timestep": _TIME, "encoder_hidden_states": ("f", (1, TOKENS, WIDTH))},
    ),
    "dit": (
        "DiTTransformer2DModel",
        {**_HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2},
        {"hidden_states": _LATENT, "timestep": _TIME, "class_labels": ("=", [3])},
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {**_HEADS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "joint_attention_dim": WIDTH,
         "caption_projection_dim": WIDTH, "pooled_projection_dim": WIDTH, "pos_embed_max_size": 16},
        {"hidden_states": _LATENT, "timestep": _TIME, "encoder_hidden_states": ("f", (1, TOKENS, WIDTH)), "pooled_projections": ("f", (1, WIDTH))},
    ),
    "autoencoder_kl": ("AutoencoderKL", {"block_out_channels": (32,), "norm_num_groups": 8}, {"sample": ("f", (1, 3, 16, 16))}),
}
# fmt: on

# What each is there for: see the table "how swap nn.Linear breaks" in docs/design.md.
SAMPLE: tuple[tuple[str, str], ...] = (
    ("causal", "llama"),
    ("causal", "gpt2"),  # Conv1D, tied head
    ("causal", "openai-gpt"),  # Conv1D with another MLP
    ("causal", "opt"),
    ("causal", "bloom"),
    ("causal", "gpt_neox"),
    ("causal", "gemma"),
    ("causal", "mamba"),  # dt_proj.weight is read, never called
    ("causal", "mixtral"),  # routed experts as 3-D parameters
    ("causal", "gpt_oss"),  # transposed, interleaved, with biases
    ("causal", "llama4_text"),  # experts that are given all tokens
    ("causal", "jetmoe"),  # in attention, too
    ("causal", "dbrx"),  # in two dimensions, read by another module
    ("causal", "longcat_flash"),  # ids that are no expert's
    ("base", "muse_spark_text"),  # a norm behind each expert
    ("base", "step3p7"),
    ("causal", "qwen2_moe"),
    ("causal", "qwen4_exp_text"),  # n-gram tables, asked for their device
    ("causal", "deepseek_v3"),  # latent attention, grouped routing
    ("causal", "nemotron_h"),
    ("causal", "jamba"),
    ("causal", "xlnet"),
    ("causal", "recurrent_gemma"),
    ("base", "albert"),  # one layer called many times
    ("base", "bert"),
    ("base", "t5"),  # wo.weight.dtype is read
    ("base", "bart"),
    ("base", "whisper"),
    ("base", "vit"),
    ("base", "clip"),
    ("base", "llava"),
    ("base", "qwen2_5_vl"),
    ("base", "zamba"),  # layers that share all of their weights
    ("base", "dinov2"),
)
