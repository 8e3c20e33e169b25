# %% [markdown]
# # Several GPUs: a model in each process
#
# One process for each GPU, each with its own tiers:
#
# - **Throughput**: every process answers its share of the prompts.
# - **LoRA under DistributedDataParallel**: adapters are plain parameters, which DDP keeps equal; the frozen weights are
#   in the tiers of each process, so that host memory holds them once for each.
#
# One model over several GPUs (tensor parallel, layers split over devices, memory of other GPUs) is in docs/scaling.md.
#
# Two processes run here over gloo, on CPUs, from a script (a notebook cannot start them). On GPUs call
# `torch.cuda.set_device(rank)` before the model is wrapped, and take the backend "nccl"; that has not been tried yet.

# %%
import os
import tempfile

import small
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel

import vbrt

PROMPTS = ["def main(", "class Reader:\n", "import os\n", "for line in"]


def work(rank: int, world: int, meeting: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    vb = vbrt.wrap(small.language_model(), "fp4", tiers={"gpu": {"enabled": False}})  # gloo is for CPUs
    answer(vb, rank, world)
    adapt(vb, rank, world)
    vb.close()
    dist.destroy_process_group()


def answer(vb: vbrt.VBModelWrapper, rank: int, world: int) -> None:
    """Decode a share of the prompts; the first process shows all."""
    how = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    mine = [small.decode(vb.generate(small.encode(text), **how)) for text in PROMPTS[rank::world]]
    everything = [None] * world
    dist.all_gather_object(everything, mine)
    if rank == 0:
        print(*(text for texts in everything for text in texts), sep="\n---\n")


def adapt(vb: vbrt.VBModelWrapper, rank: int, world: int) -> None:
    """Train adapters on a share of the rows; the others' gradients count, too."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(vb.module, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for row in small.rows(8, 64)[rank::world]:
        loss = parallel(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    first = next(p for p in model.parameters() if p.requires_grad).detach()
    copies = [torch.empty_like(first) for _ in range(world)]
    dist.all_gather(copies, first)
    assert all(torch.equal(copy, first) for copy in copies)
    if rank == 0:
        print(f"\nadapters are equal in all {world} processes; loss {loss.item():.3f}")


# %%
if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(work, (2, f"{folder}/meeting"), nprocs=2)
