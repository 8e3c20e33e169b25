"""Other ways to train a model whose optimizer state is too large for the GPU: one function each, for `full_bench.py`.

All train fp32 weights with AdamW under bf16 arithmetic and compute blocks again in the backward pass.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from scripts.full_models import Llama, made, passed

__all__ = ["PEERS"]

LR = 1e-4


def resident(shape: Llama) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """All on the GPU: torch's fused AdamW there."""
    model = made(shape, recompute=True)
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=True)
    return model, _step(model, optimizer)


def resident_kept(shape: Llama) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """All on the GPU, and all activations kept."""
    model = made(shape, recompute=False)
    return model, _step(model, torch.optim.AdamW(model.parameters(), LR, fused=True))


def torchao(shape: Llama) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """torchao's CPUOffloadOptimizer: weights on the GPU, gradients leave as they arise, AdamW on the CPU."""
    from torchao.optim import CPUOffloadOptimizer

    model = made(shape, recompute=True)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=LR, fused=True)
    return model, _step(model, optimizer)


def fsdp2(shape: Llama) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """torch's fully_shard with CPUOffloadPolicy, in one process: weights, gradients and state in host memory."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = made(shape, recompute=True)
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "offload_policy": CPUOffloadPolicy()}
    for block in model.llama.model.layers:
        fully_shard(block, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=True)
    return model, _step(model, optimizer)


def deepspeed(shape: Llama) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """DeepSpeed's ZeRO-Offload, where it is installed and its CPU Adam compiles."""
    import deepspeed as library

    model = made(shape, recompute=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
    }
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(ids: Tensor) -> Tensor:
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return engine, step


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(ids: Tensor) -> Tensor:
        loss = passed(model, ids)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


PEERS = {
    "resident": resident,
    "resident, all activations kept": resident_kept,
    "torchao CPUOffloadOptimizer": torchao,
    "FSDP2, CPUOffloadPolicy": fsdp2,
    "DeepSpeed ZeRO-Offload": deepspeed,
}
