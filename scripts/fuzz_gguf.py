"""GGUF files that scripts/fuzz damages: headers and blocks. They have no digests, so other content may load."""

import random
from collections.abc import Iterator
from pathlib import Path

import torch

import vbrt
from scripts.fuzz_damage import Damage, Part, bent, keeping, planted, writing
from scripts.fuzz_models import content


def gguf_part(directory: Path, dice: random.Random) -> Part | None:
    """A GGUF file of a small Llama; none without transformers and gguf."""
    try:
        import gguf
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    sizes = {"hidden_size": 32, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, vocab_size=16, num_hidden_layers=2, tie_word_embeddings=True)
    directory.mkdir()
    path = directory / "model.gguf"
    _write(gguf, path)
    data = path.read_bytes()
    end = gguf.GGUFReader(path).data_offset

    def damages() -> Iterator[Damage]:
        while True:
            if dice.random() < 0.03:
                yield planted(path, dice)
            else:
                what, head = bent(data[:end] if dice.random() < 0.8 else data, dice)
                yield writing(path, what, head + (b"" if len(head) > end or what.startswith("cut") else data[end:]))

    def load() -> dict:
        with torch.device("meta"):
            model = LlamaForCausalLM(config).eval()
        return content(vbrt.load(path, model, "dense", weights={"min_parameters": 0}))

    return Part("GGUF", directory, keeping(directory), damages(), load, load(), lambda what: True)


def _write(gguf, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "b"])
    writer.add_array("llama.numbers", [1, 2, 3])
    values = torch.Generator().manual_seed(0)
    layer = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32, "ffn_gate": 256, "ffn_up": 256}
    named = {"attn_v": "Q8_0", "ffn_gate": "Q4_1", "attn_k": "Q5_0", "attn_output": "Q5_1"}
    kinds = {name: gguf.GGMLQuantizationType[type] for name, type in named.items()}
    matrices = {f"blk.{number}.{part}": rows for number in (0, 1) for part, rows in layer.items()}
    for name, rows in {"token_embd": 16, **matrices}.items():
        weight = torch.randn(rows, 32, generator=values).numpy()
        kind = kinds.get(name.rpartition(".")[2], gguf.GGMLQuantizationType.Q4_0)
        writer.add_tensor(f"{name}.weight", gguf.quantize(weight, kind), raw_dtype=kind)
    for number, (type, nbytes) in enumerate({"Q4_K": 144, "IQ3_S": 110}.items()):
        blocks = torch.randint(0, 60, (32, nbytes), dtype=torch.uint8, generator=values).numpy()  # scales are finite
        writer.add_tensor(f"blk.{number}.ffn_down.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[type])
    for name in ("output_norm", *(f"blk.{number}.{norm}" for number in (0, 1) for norm in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", torch.ones(32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
