"""GGUF files of tiny models, written by the library itself."""

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from transformers import modeling_gguf_pytorch_utils as legacy

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
#: architecture of the file -> (class of the config, its settings, keys of the metadata beyond those of all)
MODELS = {
    "llama": ("LlamaConfig", {}, {"rope.dimension_count": 32}),
    "qwen3": ("Qwen3Config", {}, {"attention.key_length": 32}),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        {"expert_count": 4, "expert_used_count": 2, "attention.key_length": 32},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),  # in files: a "llama"
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 16},
        {},
    ),
    "lfm2": (  # one of those that transformers has newer rules for
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"], "head_dim": 16, "block_auto_adjust_ff_dim": False},
        {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2]},
    ),
    "gemma2": ("Gemma2Config", {"sliding_window": 16}, {"attention.key_length": 32, "attention.sliding_window": 16}),
}
PLAIN = (Type.F32, Type.F16, Type.BF16)


def model_of(architecture, **changes):
    """A model with random weights, in float32."""
    torch.manual_seed(0)
    kind, settings, _ = MODELS[architecture]
    config = getattr(transformers, kind)(**{**SIZES, **settings, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def blocks(values, type):
    """Bytes of values as the library quantizes them; of types that it only reads, codes of any values."""
    try:
        return gguf.quantize(values, type)
    except NotImplementedError:
        weights, nbytes = gguf.GGML_QUANT_SIZES[type]
        made = np.random.default_rng(0).integers(0, 256, (values.size // weights, nbytes), dtype=np.uint8)
        scales = (np.random.default_rng(1).random((len(made), 1)) * 0.01 + 0.001).astype(np.float16).view(np.uint8)
        places = {Type.Q3_K: [108], Type.Q6_K: [208], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q2_K: [80, 82]}
        places |= {Type.TQ1_0: [52], Type.TQ2_0: [64]}
        for place in places.get(type, [0]):
            made[:, place : place + 2] = scales
        if type is Type.NVFP4:
            made[:, :4] = made[:, :4] % 16
        return made.reshape(*values.shape[:-1], -1)


def permuted(rows, heads):
    """Rows of a query or key projection as llama.cpp has them for Llama."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def as_in_files(architecture, name, value, config):
    """A value as llama.cpp's converter writes it."""
    if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
        heads = config.num_attention_heads if "attn_q." in name else config.num_key_value_heads
        return permuted(value, heads)
    if architecture == "gpt-oss" and name.endswith("down_exps.weight"):
        return value.swapaxes(1, 2)
    if name.endswith("shortconv.conv.weight"):
        return value[:, 0]
    return value + 1 if architecture == "gemma2" and "norm" in name else value


def tensors_of(model, architecture):
    """Yield (name in the file, value) for the tensors of a model."""
    processor = legacy.TENSOR_PROCESSORS.get(architecture, legacy.TensorProcessor)(config={})
    found = legacy.get_gguf_hf_weights_map(model, processor, model_type=architecture)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    for name, new in found.items():
        if new == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        value = state[new]
        if name.endswith(("_gate_exps", "_up_exps")):
            value = np.split(value, 2, axis=1)["_up_" in name]
        name = name if name.endswith((".weight", ".bias", "ssm_a", "ssm_d")) else f"{name}.weight"
        yield name, np.ascontiguousarray(as_in_files(architecture, name, value, model.config))


def write(path, model, architecture, type_of, *, tokens=True, more=()):
    """Write a model; `type_of` says how a matrix of a name is held. Return what the file decodes to, by its names."""
    writer, config, decoded = gguf.GGUFWriter(path, architecture), model.config, {}
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    writer.add_rope_freq_base(10000.0)
    keys = {"attention.head_count_kv": config.num_key_value_heads} | MODELS[architecture][2]
    if architecture == "qwen3moe":
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    for key, value in keys.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    writer.add_vocab_size(config.vocab_size)
    if tokens:
        add_tokens(writer, config.vocab_size)
    for name, value in [*tensors_of(model, architecture), *more]:
        type = type_of(name) if value.ndim > 1 else Type.F32
        data = value.astype(np.float32) if type == Type.F32 else blocks(value, type)
        if type == Type.F16:
            data = value.astype(np.float16)
        writer.add_tensor(name, data, raw_dtype=None if type in (Type.F32, Type.F16) else type)
        decoded[name] = gguf.dequantize(data, type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def add_tokens(writer, count):
    """A vocabulary of single bytes."""
    alphabet = [chr(number) for number in range(33, 33 + count - 3)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*alphabet, "!!", "Ġ", "<|end|>"])
    writer.add_token_types([1] * (count - 1) + [3])
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(count - 1)


def split(path, directory, parts):
    """Write the tensors of a file into several, as llama.cpp's gguf-split does: the first has the metadata."""
    reader = gguf.GGUFReader(path)
    shares = np.array_split(np.arange(len(reader.tensors)), parts)
    for number, share in enumerate(shares):
        name = f"part-{number + 1:05d}-of-{parts:05d}.gguf"
        writer = gguf.GGUFWriter(directory / name, reader.get_field("general.architecture").contents())
        for key, field in reader.fields.items():
            if number == 0 and not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(key, field.contents(), *field.types[:2])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for index in share:
            tensor = reader.tensors[index]
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
