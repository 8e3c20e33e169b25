"""Weights cut by each of transformers' styles, wrapped in each format, beside the same plan on decoded weights."""

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

import vbrt
from tests.distributed.cases import TOKENS, mesh, weight_reads
from tests.models import config
from vbrt.host import file_prefetch
from vbrt.layers.weights.weight_shards import is_sharded


class One(nn.Module):
    """A layer with a bias."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.layer = nn.Linear(columns, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def one_layer(style: str, format: str, dtype: str, shape: tuple[int, int] = (256, 256)) -> dict[str, Any]:
    """Compare a layer under a style, with gradients and without, with the plan on what one process decodes."""
    torch.manual_seed(1)
    model = One(*shape).to(getattr(torch, dtype)).eval()
    x = torch.randn(3, shape[1]).to(getattr(torch, dtype))
    if style == "rowwise":  # it takes this rank's slice
        x = x.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()
    whole = vbrt.wrap(copy.deepcopy(model), config(format)).materialize()
    decoded = copy.deepcopy(model)
    decoded.load_state_dict(whole.state_dict())
    whole.close()
    plain, vb = _cut(decoded, style), vbrt.wrap(_cut(model, style), config(format))
    with torch.no_grad():
        want, got = plain(x), vb(x)
    x.requires_grad_()
    again = vb(x)
    again.sum().backward()
    grad, x.grad = x.grad, None
    plain(x).sum().backward()
    handle = vb.registry["layer"].handle
    shard = handle.spec.site.shard
    return {
        "equal": torch.equal(got, want),
        "error": _error(got, want),
        "error_with_grad": _error(again, want),
        "error_of_grad": _error(grad, x.grad),
        "cut": shard and (shard.dim, shard.parts),
        "reads": (handle.forwards, handle.weight_reads),
    }


def _cut(model: nn.Module, style: str) -> nn.Module:
    ranks, layer = mesh(), model.layer
    layer.config = SimpleNamespace(qk_rope_head_dim=64)
    for parameter in ("weight", "bias"):
        ALL_PARALLEL_STYLES[style].shard_param(layer, parameter, ranks)
    ALL_PARALLEL_STYLES[style].install_forward(layer, ranks)
    return model.requires_grad_(False)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).detach().abs().max() / want.detach().abs().max())


def routed(dtype: torch.dtype) -> nn.Module:
    """A model of routed experts whose columns 4 ranks can cut at whole blocks of every format."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    sizes = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2))
    return model.to(dtype).eval()


def loaded(path: str, decoded: str, format: str, **sizes: Any) -> dict[str, Any]:
    """Compare the logits of a model that transformers loads into planes with those of a plan on decoded weights."""
    from transformers import AutoModelForCausalLM, DistributedConfig

    def load(path: str, **options: Any) -> nn.Module:
        distributed = DistributedConfig(tp_plan="auto", **({"tp_size": dist.get_world_size()} | sizes))
        return AutoModelForCausalLM.from_pretrained(path, distributed_config=distributed, **options).eval()

    plain, model = load(decoded), load(path, quantization_config=vbrt.QuantizationConfig(config(format)))
    vb = vbrt.of(model)
    with torch.no_grad():
        for parameter in plain.parameters():  # products of weights mapped from files depend on where they begin
            held = parameter._local_tensor if is_sharded(parameter) else parameter
            held.data = held.data.clone()
        want, got = plain(TOKENS).logits, model(TOKENS).logits
    site = vb.registry["model.layers.0.mlp.experts"].handle.spec.site
    return {
        "equal": torch.equal(got, want),
        "error": _error(got, want),
        "cut": (site.shard.dim, site.shard.count),
        "reads": weight_reads(vb),
    }


class _Counted:
    """A safetensors file, or a slice of one, that counts the bytes that are taken out of it."""

    def __init__(self, inner: Any, count: list[int]) -> None:
        self._inner, self._count = inner, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __exit__(self, *given: object) -> None:
        pass

    def get_slice(self, name: str) -> "_Counted":
        return _Counted(self._inner.get_slice(name), self._count)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._inner[index]
        self._count.append(tensor.nbytes)
        return tensor


def read(path: str, **sizes: int) -> dict[str, int]:
    """The bytes that a rank takes out of the files of a model, plain and into planes, and reads ahead of that."""
    from transformers import AutoModelForCausalLM, DistributedConfig, modeling_utils

    taken: list[int] = []
    ahead: list[int] = []

    def opened(*args: Any, **kwargs: Any) -> _Counted:
        return _Counted(safe_open(*args, **kwargs), taken)

    distributed = DistributedConfig(tp_plan="auto", **({"tp_size": dist.get_world_size()} | sizes))
    with mock.patch.object(modeling_utils, "safe_open", opened):
        AutoModelForCausalLM.from_pretrained(path, distributed_config=distributed)
        plain = sum(taken)
        taken.clear()
        with (
            mock.patch.object(file_prefetch, "_read", lambda piece: ahead.append(piece.nbytes)),
            mock.patch.object(file_prefetch, "_PIECE_BYTES", 1 << 12),
        ):
            model = AutoModelForCausalLM.from_pretrained(
                path, distributed_config=distributed, quantization_config=vbrt.QuantizationConfig(config("nvfp4"))
            )
    return {"taken": sum(taken), "plain": plain, "ahead": sum(ahead), "swapped": len(vbrt.of(model).plan.swaps)}
