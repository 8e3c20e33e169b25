"""What ranks are asked to do: functions of tests that run on each of them, by name."""

import contextlib
import copy
import errno
import io
import os
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

import vbrt
from scripts.ranks_beside import whole_tables
from tests.models import config
from tests.patience import LONG_S
from vbrt.generation.capture.captured_step import answer_captures
from vbrt.generation.capture.exact_attention import as_captured
from vbrt.generation.fusion.fuse_step import joined
from vbrt.generation.speculation.draft_length import Choice, Pace
from vbrt.layers.weights.weight_shards import is_sharded

TOKENS = torch.arange(3, 15).reshape(1, 12)
#: how torch's styles cut a Llama
PLAN = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def llama(dtype: torch.dtype = torch.bfloat16, *, bias: bool = True, **sizes: Any) -> nn.Module:
    """A Llama of 2 layers whose columns 4 ranks can cut at whole blocks of every format, the same on every rank."""
    torch.manual_seed(3)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        **sizes,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=bias, mlp_bias=bias)).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


def mesh(device: str = "cpu") -> Any:
    """All ranks in a row."""
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))


def parallel(model: nn.Module) -> nn.Module:
    """Cut a Llama by torch's own styles, where it is."""
    ranks = mesh(next(model.parameters()).device.type)
    for layer in model.model.layers:
        parallelize_module(layer, ranks, {name: STYLES[style]() for name, style in PLAN.items()})
    return model


def same_as_unwrapped(format: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """Compare the logits of a wrapped model with those of the same plan unwrapped, of the weights that planes hold."""
    model = llama(getattr(torch, dtype))
    plain = parallel(copy.deepcopy(model))
    vb = vbrt.wrap(parallel(copy.deepcopy(model)), config(format))
    with torch.no_grad():
        got = vb(TOKENS).logits
        if not vb.lossless:
            load_decoded_(plain, format, model)
        want = plain(TOKENS).logits
    with torch.enable_grad():
        again = vb(TOKENS).logits.detach()
    reads = weight_reads(vb)
    close, grad = (float((one - want).abs().max() / want.abs().max()) for one in (got, again))
    site = vb.registry["model.layers.0.mlp.down_proj"].handle.spec.site
    given_back = vb.unwrap()
    with torch.no_grad():
        after = given_back(TOKENS).logits
    return {
        "swapped": len(vb.plan.swaps),
        "equal": torch.equal(got, want),
        "error": close,
        "error_with_grad": grad,
        "reads": reads,
        "shard": (site.shape, site.shard.dim, site.shard.index, site.shard.count, site.whole_shape),
        "unwrapped": torch.equal(after, want),
        "types": {type(p).__name__ for p in given_back.model.layers.parameters()},
    }


def weight_reads(vb: vbrt.VBModelWrapper) -> tuple[int, int]:
    """The least forwards of a layer, and all the weights that were decoded for others."""
    handles = [layer.handle for layer in vb.registry.values()]
    return min(handle.forwards for handle in handles), sum(handle.weight_reads for handle in handles)


def load_decoded_(plain: nn.Module, format: str, model: nn.Module) -> None:
    """Give a parallel model the weights that one process decodes of the planes of the whole model."""
    whole = vbrt.wrap(copy.deepcopy(model), config(format))
    whole.materialize()
    decoded = whole.state_dict()
    whole.close()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if isinstance(parameter, torch.distributed.tensor.DTensor):
                cut = torch.distributed.tensor.distribute_tensor(
                    decoded[name], parameter.device_mesh, parameter.placements
                )
                parameter._local_tensor.copy_(cut._local_tensor)


def loaded_like_unwrapped(path: str, format: str, plan: Any = "auto", **sizes: int) -> dict[str, Any]:
    """Compare the logits of a model that transformers loads into planes on each rank with those of the same plan."""
    from transformers import AutoModelForCausalLM, DistributedConfig

    count = dist.get_world_size()

    def load(**options: Any) -> nn.Module:
        distributed = DistributedConfig(tp_plan=plan, **({"tp_size": count} | sizes))
        return AutoModelForCausalLM.from_pretrained(path, distributed_config=distributed, **options).eval()

    plain = load()
    model = load(quantization_config=vbrt.QuantizationConfig(config(format)))
    vb = vbrt.of(model)
    with torch.no_grad():
        want, got = plain(TOKENS).logits, model(TOKENS).logits
    sites = {swap.name: (swap.site.shape, swap.site.whole_shape) for swap in vb.plan.swaps}
    return {
        "equal": torch.equal(got, want),
        "error": float((got - want).abs().max() / want.abs().max()),
        "sites": sites,
        "skipped": {name: skip.reason for name, skip in vb.plan.skipped.items()},
        "reads": weight_reads(vb),
        "tokens": model.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
        == plain.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist(),
    }


def recorded_like_eager(path: str) -> dict[str, Any]:
    """Record a step of a split model, run the record on other tokens, and compare with the step itself."""
    model = _loaded(path, "nvfp4")
    ids = TOKENS.clone()
    answer_captures()
    with torch.no_grad(), as_captured():
        step = joined(lambda ids: model(ids, use_cache=False).logits, (ids,), same_bits=True)
        ids.copy_(TOKENS.flip(1))
        got, want = step(ids), model(ids, use_cache=False).logits
    return {"equal": torch.equal(got, want), "refused": step.report.refused}


def saved(path: str, format: str, dtype: str, *, full: int | None = None) -> None:
    """Save a split model; the disk of rank `full` is."""
    vb = vbrt.wrap(parallel(llama(getattr(torch, dtype))), config(format))
    fails = OSError(errno.ENOSPC, "No space left on device") if full == dist.get_rank() else None
    with mock.patch("vbrt.saves.saved.save._write_shards", side_effect=fails) if fails else contextlib.nullcontext():
        vb.save(path)
    vb.close()


def saved_pretrained(path: str, to: str) -> str:
    """Save a model that transformers has cut as it saves models: dense weights; and what is said of planes."""
    from transformers import AutoModelForCausalLM, DistributedConfig

    def load(stored: str) -> nn.Module:
        given = vbrt.QuantizationConfig(config("exact"), stored=stored)
        distributed = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
        return AutoModelForCausalLM.from_pretrained(path, distributed_config=distributed, quantization_config=given)

    load("dense").save_pretrained(to)
    try:
        load("planes").save_pretrained(f"{to}-planes")
    except vbrt.CheckpointError as error:
        return str(error)
    return "saved"


def loaded_parts(path: str, format: str, dtype: str) -> dict[str, Any]:
    """Load a save into a split model; compare each weight with the part of what one process decodes."""
    original = llama(getattr(torch, dtype))
    whole = vbrt.wrap(copy.deepcopy(original), config(format))
    whole.materialize()
    want = whole.state_dict()
    other = llama(getattr(torch, dtype))
    nn.init.zeros_(other.lm_head.weight)
    vb = vbrt.load(path, parallel(other))
    wrong = []
    for name, tensor in vb.state_dict().items():
        if isinstance(tensor, torch.distributed.tensor.DTensor):
            cut = torch.distributed.tensor.distribute_tensor(want[name], tensor.device_mesh, tensor.placements)
            wrong += [] if torch.equal(cut._local_tensor, tensor._local_tensor) else [name]
        elif not torch.equal(tensor, want[name]):
            wrong.append(name)
    plain = parallel(copy.deepcopy(original))
    load_decoded_(plain, format, original)
    with torch.no_grad():
        got, expected = vb(TOKENS).logits, plain(TOKENS).logits
    error = float((got - expected).abs().max() / expected.abs().max())
    return {"wrong": wrong, "error": error, "swapped": len(vb.registry)}


def broken(path: str, how: str, whose: int, device: str = "cpu") -> str:
    """Run passes that a rank fails in: a page of it is damaged, it raises something of its own, ends, hangs, or wakes
    up while others ask."""
    vb = vbrt.wrap(parallel(llama(torch.float32).to(device)), streamed(path, device))
    tokens = TOKENS.to(device)
    with torch.no_grad():
        vb(tokens)
        if dist.get_rank() == whose:
            _break(vb, path, how)
            if how == "raise":
                with contextlib.suppress(ValueError):
                    vb(tokens)
        return _stopped(lambda: vb(tokens).logits.sum().item())


def _stopped(run: Callable[[], object]) -> str:
    """What a rank is stopped with, which begins nothing any more; a GPU's rank only once it has waited for others. It
    is in the error, or a note of the one that a collective has raised through a model's own forward."""
    for _ in range(40 if _backend() == "nccl" else 1):
        try:
            run()
        except (vbrt.TierError, RuntimeError) as error:
            with contextlib.suppress(vbrt.TierError):
                run()
                return "computed on"
            return str(error) if isinstance(error, vbrt.TierError) else error.__notes__[-1].removeprefix("vbrt: ")
    return "computed on"


def _backend() -> str:
    return dist.get_backend_config().rpartition(":")[2]


def streamed(path: str, device: str) -> dict[str, Any]:
    """Pages live in files, with room in memory for some."""
    settings, each = config("dense"), (1 << 20) // dist.get_world_size()
    settings["tiers"] |= {"gpu": {"budget": 2 * each}} if device == "cuda" else {}
    settings["tiers"]["cpu"] = {"budget": each if device == "cuda" else 2 * each}
    settings["tiers"]["ssd"] = {"enabled": True, "path": f"{path}/{dist.get_rank()}"}
    return settings


def _break(vb: vbrt.VBModelWrapper, path: str, how: str) -> None:
    layer = vb.module.model.layers[1].mlp.up_proj
    if how == "damage":
        for file in Path(path, str(dist.get_rank())).rglob("*layers.1.mlp.up_proj*"):
            data = bytearray(file.read_bytes())
            data[-100] ^= 255
            file.write_bytes(data)
    elif how == "raise":
        once = iter([True])
        layer.register_forward_pre_hook(lambda *args: _raise_own() if next(once, False) else None)
    elif how == "end":
        layer.register_forward_pre_hook(lambda *args: os._exit(1))
    else:
        longer = {"hang": 4, "wake": 0.7}[how]
        layer.register_forward_pre_hook(lambda *args: time.sleep(_timeout_s() + longer))


def _raise_own() -> None:
    raise ValueError("a user's own")


def _timeout_s() -> float:
    device = torch.device("cuda" if _backend() == "nccl" else "cpu")
    return dist.group.WORLD._get_backend(device).options._timeout.total_seconds()


def asleep_between_recorded_steps(path: str, whose: int) -> dict[str, Any]:
    """Generate by recorded steps, between two of which one rank sleeps for longer than the others wait."""
    vb = vbrt.of(_loaded(path, "nvfp4"))
    tokens, given = TOKENS.to(vb.module.device), {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    vb.generate(tokens, max_new_tokens=24, **given)
    replays = vb._attachment.replays
    sleeper = [_Sleeper(12, _timeout_s() + 4)] if dist.get_rank() == whose else []
    told = _stopped(lambda: vb.generate(tokens, max_new_tokens=24, **given, stopping_criteria=sleeper)[0, -1].item())
    return {"told": told, "replays": replays}


class _Sleeper(StoppingCriteria):
    """Sleeps once, after so many tokens."""

    def __init__(self, after: int, seconds: float) -> None:
        self._left, self._seconds = after, seconds

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            time.sleep(self._seconds)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def _loaded(path: str, format: str, **compute: Any) -> nn.Module:
    """A model that transformers cuts and loads into planes: each rank's part where it computes."""
    from transformers import AutoModelForCausalLM, DistributedConfig

    settings = {**config(format), "compute": compute}
    settings["tiers"] = {} if _backend() == "nccl" else settings["tiers"]
    return AutoModelForCausalLM.from_pretrained(
        path,
        distributed_config=DistributedConfig(tp_size=dist.get_world_size(), tp_plan=whole_tables()),
        quantization_config=vbrt.QuantizationConfig(settings),
    ).eval()


class _FakeNCCL:
    """What a group of GPUs has, with a count of what is called; `fails` when it is to abort."""

    def __init__(self, *, fails: bool = False, name: str = "nccl") -> None:
        self.calls, self._fails, self._name = [], fails, name
        self.options = SimpleNamespace(_timeout=timedelta(seconds=0.1))

    def _get_backend(self, device: torch.device) -> "_FakeNCCL":
        assert device.type == "cuda"
        return self

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        self.calls.append("abort")
        if self._fails:
            raise RuntimeError("no communicator\nframe 0")


def aborted(how: str) -> dict[str, Any]:
    """Have rank 0 notice that rank 1 has failed or hangs, with a group of NCCL's interface in the place of its own."""
    vb = vbrt.wrap(parallel(llama(torch.float32)), config("dense"))
    with torch.no_grad():
        vb(TOKENS)
    watch = vb._attachment.watcher
    watch._ticker.stop()
    watch.beat()
    dist.barrier()
    fake = _FakeNCCL(fails=how == "cannot", name="gloo" if how == "gloo" else "nccl")
    if how == "hangs" and dist.get_rank() == 0:
        vb._attachment.passes += 1  # as if it had gone on
    elif how == "replays" and dist.get_rank() == 0:
        vb._attachment.replays += 1
    elif dist.get_rank() == 1 and how not in ("hangs", "replays"):
        watch.tell(vbrt.TierError("model.layers.1: gone"))
    dist.barrier()
    watch._group, watch._patience_s = fake, 0.01
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for _ in range(3):
            watch.beat()
            dist.barrier()
    return {"verdict": watch.verdict, "calls": fake.calls, "said": said.getvalue()}


def refused_then_right(config_of_rank: dict[int, str]) -> dict[str, Any]:
    """A pass that all ranks refuse, and one that is right behind it; ranks may have other configs."""
    vb = vbrt.wrap(parallel(llama(torch.float32)), config(config_of_rank[dist.get_rank()]))
    with torch.no_grad():
        try:
            want = vb(TOKENS).logits
        except vbrt.VBError as error:
            return {"told": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(IndexError):
            vb(TOKENS + 1000)
        return {"equal": torch.equal(vb(TOKENS).logits, want), "left": vb._attachment.watcher._left}


def listened(how: str) -> list[str]:
    """What rank 0 makes of another that is closed, silent for ten beats, and for ten more."""
    vb = vbrt.wrap(parallel(llama(torch.float32)), config("dense"))
    with torch.no_grad():
        vb(TOKENS)
    watch, told = vb._attachment.watcher, []
    watch._ticker.stop()
    watch.beat()
    dist.barrier()
    if how == "closed" and dist.get_rank() == 1:
        watch._ticker = SimpleNamespace(running=True, stop=lambda: None)
        vb.close()
    dist.barrier()
    for _ in range(2 if dist.get_rank() == 0 else 0):
        for _ in range(10):
            watch.beat()
        told.append(watch.verdict)
    dist.barrier()
    return told if dist.get_rank() == 0 else [watch.look()]


def beats_beside_a_wait_for_another_rank() -> bool:
    """True if a rank tells that it is there while it waits in torch's own store for another one."""
    vb = vbrt.wrap(parallel(llama(torch.float32)), config("dense"))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    other = store.clone()
    with mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=store):
        watch = vb._attachment.watcher
        watch._begin()
    watch._ticker.stop()
    waiting = threading.Thread(target=store.get, args=("later",))
    waiting.start()
    beat = threading.Thread(target=watch.beat)
    beat.start()
    beat.join(LONG_S)
    answered = not beat.is_alive()
    other.set("later", "now")
    waiting.join()
    beat.join()
    return answered


def counted() -> dict[str, Any]:
    """Statistics of one rank, and merged."""
    vb = vbrt.wrap(parallel(llama(torch.float32)), config("dense"))
    with torch.no_grad():
        vb(TOKENS)
    own, all_ranks = vb.stats(), vb.stats(group=True)
    return {"own": own.to_dict(), "all": all_ranks.to_dict(), "text": str(all_ranks)}


class Gated(nn.Module):
    """Gate and up in one weight, a layer that takes their product, and one that no plan cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down, self.same = nn.Linear(64, 256), nn.Linear(128, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.same(self.down(torch.relu(gate) * up))


def gated() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(1)
    return Gated().to(torch.bfloat16).eval()


def packed(path: str) -> dict[str, Any]:
    """Cut two matrices in one weight each for itself, as transformers' styles do; compare, and save."""

    def cut(model: nn.Module) -> nn.Module:
        for name, style in (("gate_up", "packed_colwise"), ("down", "rowwise")):
            for parameter in ("weight", "bias"):
                ALL_PARALLEL_STYLES[style].shard_param(getattr(model, name), parameter, ranks)
            ALL_PARALLEL_STYLES[style].install_forward(getattr(model, name), ranks)
        return model

    ranks, x = mesh(), torch.randn(3, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2))
    plain, vb = cut(gated()), vbrt.wrap(cut(gated()), config("exact"))
    with torch.no_grad():
        equal = torch.equal(plain(x), vb(x))
    vb.save(path)
    return {"equal": equal, "parts": [swap.site.shard and swap.site.shard.parts for swap in vb.plan.swaps]}


def generated_by_ranks_of_two_minds(path: str, format: str, **asked: Any) -> dict[str, Any]:
    """Generate with a model that transformers has cut, where each rank would decide otherwise by what it has timed."""
    eager, model, first = _loaded(path, format, captures=False), _loaded(path, format), dist.get_rank() == 0
    tokens, vb = TOKENS.to(model.device), vbrt.of(model)
    if asked["speculate"] and "gpu" in vb.plan.budgets:  # "auto" drafts where weights are streamed
        vb.set_budget("gpu", max(vb.plan.page_bytes // 2, vb.plan.largest_layer_bytes))
    given = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = eager.generate(tokens, **given)
    drafts = mock.patch.object(Pace, "_best", lambda self, names, room: Choice("coarse", min(room, 3 if first else 2)))
    with drafts:
        got = model.generate(tokens, **given, **asked)
    counts = vb.stats()
    rounds = 0 if counts.speculation is None else counts.speculation.rounds
    print(counts.steps, counts.speculation)  # why, where a test fails
    return {"equal": torch.equal(got, want), "captured": counts.steps.captured, "rounds": rounds}


def generated_apart(path: str, what: str) -> str:
    """Generate from other inputs on each rank, or with other seeds; the model is usable afterwards."""
    model, rank = _loaded(path, "nvfp4"), dist.get_rank()
    given = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
    torch.manual_seed(rank)
    try:
        model.generate(TOKENS + rank * (what == "inputs"), do_sample=what == "seeds", **given)
    except vbrt.VBError as error:
        assert model.generate(TOKENS, do_sample=False, **given).shape == (1, 20)
        return f"{type(error).__name__}: {error}"
    return "generated"


def summed_where_parts_are_seen(path: str) -> dict[str, Any]:
    """`loaded_like_unwrapped` with experts whose outputs are added only while their module has DTensors, as
    transformers 5.17 does it; and why experts are not swapped."""
    from transformers.distributed.tensor_parallel import MoeExpertsParallel

    plain = MoeExpertsParallel.transform_output_post_forward

    def adds(self: Any, module: nn.Module, output: Any, mesh: Any) -> Any:
        return plain(self, module, output, mesh) if any(map(is_sharded, module.parameters())) else output

    with mock.patch.object(MoeExpertsParallel, "transform_output_post_forward", adds), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loaded_like_unwrapped(path, "exact")
