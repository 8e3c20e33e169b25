"""Tiny models of three families, and their checkpoints with a multi-token prediction head, as published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = ["FAMILIES", "Written", "written"]

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
#: class, config, and what the config says
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", ROUTED | LATENT | {"num_key_value_heads": 4}),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", ROUTED | {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        LINEAR | {"num_experts": 8, "num_key_value_heads": 2, "head_dim": 16, "shared_expert_intermediate_size": 32},
    ),
}
LAYERS = 2


class Written:
    """A checkpoint with a head.

    Attributes:
        directory: of the checkpoint.
        model: of transformers, with one layer more than the checkpoint's model: the head's.
        extra: tensors of the head but its layer: enorm, hnorm, eh_proj, norm.
    """

    def __init__(self, directory: Path, model: nn.Module, extra: dict[str, Tensor]) -> None:
        self.directory, self.model, self.extra = directory, model, extra

    def layered(self, x_BTD: Tensor) -> Tensor:
        """The head's decoder layer over whole sequences, without a cache."""
        inner, tokens = self.model.model, x_BTD.shape[1]
        places = torch.arange(tokens)[None]
        mask = torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]
        out = inner.layers[LAYERS](
            x_BTD, attention_mask=mask, position_ids=places, position_embeddings=inner.rotary_emb(x_BTD, places)
        )
        return out[0] if isinstance(out, tuple) else out


def written(family: str, directory: Path, *, shards: bool = False, **changed: Any) -> Written:
    """Write the checkpoint of a tiny model with random weights, and with those of a head. `changed`: of its config."""
    import transformers

    name, config_name, own = FAMILIES[family]
    torch.manual_seed(7)
    kinds = ["linear_attention", "full_attention", "full_attention"]
    given = SIZES | own | {"num_hidden_layers": LAYERS + 1} | ({"layer_types": kinds} if "num_experts" in own else {})
    given |= changed
    config = getattr(transformers, config_name)(**given)
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():  # norms of ones hide which is which
        nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(directory)
    hidden = config.hidden_size
    extra = {
        "enorm": torch.rand(hidden) + 0.5,
        "hnorm": torch.rand(hidden) + 0.5,
        "eh_proj": torch.randn(hidden, 2 * hidden) * 0.1,
        "norm": torch.rand(hidden) + 0.5,
    }
    tensors = _renamed(_apart(load_file(directory / "model.safetensors")), extra, family)
    (directory / "model.safetensors").unlink()
    _save(directory, tensors, shards=shards)
    data = json.loads((directory / "config.json").read_text())
    data |= {"num_hidden_layers": LAYERS} | ({"layer_types": kinds[:LAYERS]} if "layer_types" in data else {})
    (directory / "config.json").write_text(json.dumps(data))
    return Written(directory, model, extra)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with a matrix of each expert, as published, instead of stacks of them."""
    out = {}
    for name, tensor in tensors.items():
        lead, experts, part = name.partition(".mlp.experts.")
        if part not in ("gate_up_proj", "down_proj"):
            out[name] = tensor
            continue
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for number, matrix in enumerate(tensor):
            for own, held in zip(names, matrix.chunk(len(names)), strict=True):
                out[f"{lead}{experts}{number}.{own}.weight"] = held.clone()
    return out


def _renamed(tensors: dict[str, Tensor], extra: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Tensors as the family's checkpoints name them."""
    last = f"model.layers.{LAYERS}."
    if family == "qwen3_next":
        names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
        more = {f"mtp.{names[name]}.weight": tensor for name, tensor in extra.items()}
        return {name.replace(last, "mtp.layers.0."): tensor for name, tensor in tensors.items()} | more
    more = {f"{last}{name}.weight": tensor for name, tensor in extra.items() if name != "norm"}
    more[f"{last}shared_head.norm.weight"] = extra["norm"]
    more[f"{last}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    more[f"{last}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    return tensors | more


def _save(directory: Path, tensors: dict[str, Tensor], *, shards: bool) -> None:
    if not shards:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    parts = {f"model-{part + 1:05}-of-00003.safetensors": names[part::3] for part in range(3)}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, directory / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
