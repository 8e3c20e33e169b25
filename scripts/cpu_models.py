"""Random models of one shape for everybody on a CPU: a checkpoint of transformers, saved planes, and a GGUF file.

Nothing is downloaded. Speed does not depend on the weights' values, so the files do not hold the same ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import vbrt

__all__ = ["SHAPES", "Shape", "checkpoint", "gguf_file", "random_blocks", "random_model", "saved_planes"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama, or with `experts` of a Qwen3-MoE; `inner` is then the width of an expert."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0


SHAPES = {
    "8b": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "1b": Shape(22, 2048, 5632, 32, 4, 64, 32000),
    "moe": Shape(6, 1024, 384, 16, 4, 64, 8192, 64, 4),
    "tiny": Shape(2, 64, 128, 4, 2, 16, 256),
    "tiny-moe": Shape(2, 64, 64, 4, 2, 16, 256, 4, 2),
}

_CONTEXT = 2048
_EPSILON, _THETA = 1e-5, 10000.0

#: bytes of scale in front of a block of codes, and bytes of codes, by the type of a GGUF tensor
_BLOCKS = {"Q4_0": (2, 16), "MXFP4": (1, 16), "NVFP4": (4, 32)}
#: a scale that leaves weights of about 0.02: fp16 0.004, E8M0 2^-8 and E4M3 0.0078, of doubled levels both
_SCALES = {"Q4_0": np.float16(0.004).tobytes(), "MXFP4": bytes([119]), "NVFP4": bytes([4] * 4)}


def standard(shape: Shape):
    """Return the config of transformers' model of a shape."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    sizes = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": _EPSILON,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,  # all tokens that were asked for are generated
    }
    if not shape.experts:
        return LlamaConfig(intermediate_size=shape.inner, **sizes)
    routed = {"num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
    return Qwen3MoeConfig(moe_intermediate_size=shape.inner, **routed, **sizes)


def random_model(shape: Shape, dtype: torch.dtype) -> nn.Module:
    """Return a random model of a shape, in eval mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(standard(shape), dtype=dtype).eval()


def folder_of(files: Path, shape: str, what: str) -> Path:
    """Return where a file or directory of a shape lies."""
    return files / f"{shape}-{what.replace(' ', '-')}"


def written(path: Path, write) -> Path:
    """Return the path, written if it is not there; an interrupted write leaves nothing under this name."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        write(part)
        part.rename(path)
    return path


def checkpoint(files: Path, shape: str) -> Path:
    """Return a directory with the bf16 model in transformers' format."""
    path = folder_of(files, shape, "bf16")
    return written(path, lambda part: random_model(SHAPES[shape], torch.bfloat16).save_pretrained(part))


def saved_planes(files: Path, shape: str, preset: str, dtype: torch.dtype) -> Path:
    """Return a directory with the encoded model, its head included."""
    path = folder_of(files, shape, f"{preset} {str(dtype).removeprefix('torch.')}")

    def write(part: Path) -> None:
        with vbrt.wrap(random_model(SHAPES[shape], dtype), preset, weights={"keep_head": False}) as vb:
            vb.save(part)
            vb.config.save_pretrained(part)

    return written(path, write)


def gguf_file(files: Path, shape: str, kind: str) -> Path:
    """Return a GGUF file of a shape whose matrices are of a 4-bit type; it has no vocabulary."""
    return written(folder_of(files, shape, f"{kind}.gguf"), lambda part: _write_gguf(part, SHAPES[shape], kind))


def _write_gguf(path: Path, shape: Shape, kind: str) -> None:
    import gguf

    arch = "qwen3moe" if shape.experts else "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(_THETA)
    writer.add_layer_norm_rms_eps(_EPSILON)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_per_token)
        writer.add_expert_feed_forward_length(shape.inner)
    random = np.random.default_rng(0)
    for name, sizes in _tensors(shape):
        if name.endswith("norm.weight"):
            writer.add_tensor(name, np.ones(sizes, np.float32))
        elif "ffn_gate_inp" in name:  # llama.cpp wants the router in fp32
            writer.add_tensor(name, (random.standard_normal(sizes) * 0.02).astype(np.float32))
        else:
            raw = random_blocks(random, sizes, kind)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(random: np.random.Generator, sizes: tuple[int, ...], kind: str) -> np.ndarray:
    """Return the bytes of a tensor of a type: uint8 [..., rows, bytes of a row]."""
    scale, codes = _BLOCKS[kind]
    blocks = sizes[-1] // (2 * codes)
    raw = random.integers(0, 256, (*sizes[:-1], blocks, scale + codes), dtype=np.uint8)
    raw[..., :scale] = np.frombuffer(_SCALES[kind], np.uint8)
    return raw.reshape(*sizes[:-1], blocks * (scale + codes))


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of llama.cpp's tensors, [out, in]."""
    hidden, query, pair = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.vocabulary, hidden)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (shape.vocabulary, hidden)
    for layer in range(shape.layers):
        sizes = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (query, hidden),
            "attn_k": (pair, hidden),
            "attn_v": (pair, hidden),
            "attn_output": (hidden, query),
            **(_expert_tensors(shape) if shape.experts else _dense_tensors(shape)),
        }
        for name, size in sizes.items():
            yield f"blk.{layer}.{name}.weight", size


def _dense_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    wide, back = (shape.inner, shape.hidden), (shape.hidden, shape.inner)
    return {"ffn_gate": wide, "ffn_up": wide, "ffn_down": back}


def _expert_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    wide, back = (shape.experts, shape.inner, shape.hidden), (shape.experts, shape.hidden, shape.inner)
    router, head = (shape.experts, shape.hidden), (shape.head_dim,)
    return {
        "attn_q_norm": head,
        "attn_k_norm": head,
        "ffn_gate_inp": router,
        "ffn_gate_exps": wide,
        "ffn_up_exps": wide,
        "ffn_down_exps": back,
    }
