"""Training on ranks, as ranks are asked to do it: gradients beside those of one process that has seen every batch."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

import vbrt
from tests.distributed.cases import llama, mesh, parallel
from tests.models import config


class Adapted(nn.Module):
    """A layer with a low-rank sum beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        generator = torch.Generator().manual_seed(7)
        for layer in (self.down, self.up):
            nn.init.normal_(layer.weight, std=0.1, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def made(mode: str, *, materialize: bool = True) -> tuple[nn.Module, vbrt.VBModelWrapper]:
    """A wrapped model that trains: adapters beside frozen planes, or all weights through 4 bits."""
    model = llama(torch.float32, intermediate_size=256)
    if mode == "infer":
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
            layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    vb = vbrt.wrap(model.train(), config("nvfp4"), mode=mode)
    if mode == "infer" and materialize:
        vb.materialize()
    return model, vb


def step(model: nn.Module, rank: int) -> None:
    """The gradients of a rank's batch."""
    ids = torch.randint(3, 100, (2, 10), generator=torch.Generator().manual_seed(rank))
    model(input_ids=ids, labels=ids).loss.backward()


def gradients(how: str, mode: str) -> tuple[int, float]:
    """How many parameters have gradients after two steps, and how far they are from the mean over all ranks' batches;
    "shells": of a model that infers and has not run before."""
    mode, materialize = ("infer", False) if mode == "shells" else (mode, True)
    alone, _ = made(mode)
    for rank in range(dist.get_world_size()):
        step(alone, rank)
    model, vb = made(mode, materialize=materialize)
    own = [layer.weight for layer in vb.registry.values()] if mode == "train" else []
    if how == "ddp":
        parallel_model = DistributedDataParallel(model)
        for _ in range(2):
            parallel_model.zero_grad()
            step(parallel_model, dist.get_rank())
    else:
        for layer in model.model.layers:
            fully_shard(layer, ignored_params=set(own))
        fully_shard(model, ignored_params=set(own))
        step(model, dist.get_rank())
        for weight in own:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()
    errors = []
    for (_, want), (_, got) in zip(alone.named_parameters(), model.named_parameters(), strict=True):
        if want.grad is not None:
            found = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
            expected = want.grad / dist.get_world_size()
            errors.append(float((found - expected).abs().max() / expected.abs().max()))
    return len(errors), max(errors)


def refused(how: str) -> Any:
    """What cannot be is refused by name."""
    if how.startswith("full"):
        return _full_spread(how)
    if how == "cut shells":
        return vbrt.wrap(model := llama(), config("nvfp4")), parallel(model)
    model, vb = made("train" if how in ("moved", "cut") else "infer", materialize=how == "fsdp1")
    if how == "fsdp1":
        FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if how == "cut":
        parallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    step(model, dist.get_rank())
    return vb


def _full_spread(how: str) -> Any:
    """Spread over ranks what trains from the tiers."""
    model = llama().train()
    vb = vbrt.wrap(model, config("dense"), mode="full", optimizer=torch.optim.SGD(model.parameters()))
    return fully_shard(model.model.layers[0]) if how.endswith("fsdp2") else (DistributedDataParallel(model), vb)


class Two(nn.Module):
    """Two layers, of which a plan has put a forward of its own around the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def styled(style: str, mode: str) -> dict[str, Any]:
    """A model with a plan's forward around whole weights that train, beside the same without a plan."""
    found = []
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.bfloat16)
    for planned in (True, False):
        torch.manual_seed(0)
        model = Two().to(torch.bfloat16).train()
        model.first.config = SimpleNamespace(qk_rope_head_dim=16)
        if planned:
            ALL_PARALLEL_STYLES[style].install_forward(model.first, mesh())
        trains = {"optimizer": torch.optim.SGD(model.parameters())} if mode == "full" else {}
        vb = vbrt.wrap(model, config("dense" if mode == "full" else "nvfp4"), mode=mode, **trains)
        y = vb(x)
        y.square().mean().backward()
        found.append((y, model.first.weight.grad.clone(), model.first.handle.forwards))
        plain, x32 = vb.unwrap().float(), x.float()
        want = plain.second(torch.relu(nn.functional.linear(x32, *plain.first.parameters())))
        unwrapped = torch.equal(plain(x32), want)
    (got, grad, forwards), (want, alone, _) = found
    if style == "replicated_with_grad_allreduce":
        dist.all_reduce(alone)
    rows = slice(48) if style == "mla_kv_a_proj" else slice(None)  # gradients of its last 16 outputs are summed
    error = float((grad[rows] - alone[rows]).abs().max())
    return {"forwards": forwards, "equal": torch.equal(got, want), "error": error, "unwrapped": unwrapped}
