"""Training as people type it: transformers' and PEFT's own models, `loss.backward()`, `optimizer.step()`, beside peers.

    python scripts/typed_training.py [lora] [experts] [olmoe] [full] [full8b] [gpt2] [qwen3] [vit] [--tokens 2048]
    python scripts/typed_training.py --table     # the table of docs/training.md, from benchmarks/results

- lora: adapters by PEFT, r = 16 on q and v, gradient checkpointing, of a Llama of the 8B shape: in bf16, in 4 bits with
  all pages on the GPU and with 1 GiB of them, and with bitsandbytes' NF4 where it is installed; bf16 and 4 bits with
  `torch.compile` of each block, too. `--copies 2` emulates a slower link: the ring copies each page so often.
- experts: the same on all routed experts, by `target_parameters`, of 8 layers of Qwen3-30B-A3B's shape: in bf16, in 4
  bits with all experts on the GPU, and with a quarter of them; with the bytes of adapters, gradients and moments.
- olmoe: the same of a whole OLMoE-1B-7B.
- full: AdamW over LlamaForCausalLM of 1.2 B fp32 parameters under autocast: by Trainer, which clips, and by a loop;
  resident, from the tiers with activations kept, computed again and offloaded, torchao's CPUOffloadOptimizer and
  FSDP2's CPUOffloadPolicy.
- full8b: AdamW over a bf16 LlamaForCausalLM of 8 B parameters, on 24 GB of the GPU, in about 125 GB of host memory; its
  forward and backward with all weights on the whole GPU, and no update, stand beside it.
- gpt2, qwen3, vit: the same loop over GPT2LMHeadModel (0.8 B), Qwen3ForCausalLM (0.6 B) and ViTForImageClassification
  (0.6 B, whose tokens are patches of 14 x 14), resident and from the tiers.

Ways take turns in one process, each with the memory of the others freed. A row: milliseconds a step (median), tokens a
second, the allocator's peak, the first losses; `--profile` adds what the GPU did in one step. Link, update and both
passes by themselves stand beside "full".
"""

import argparse
import contextlib
import functools
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor, nn

import vbrt
from scripts import experts_decode, full_models
from scripts.full_models import DEVICE, Llama, draw_, emptied, llama_of, measured, no_init_weights, waited
from scripts.full_profile import profiled
from scripts.full_runs import limited, link_rate
from scripts.measuring import between, machine, markdown_table
from vbrt.integrations.token_times import llama_8b
from vbrt.tiers.schedule.stream_link import DirectLink, StreamLink

CONTEXT, LR = 2048, 1e-4
SHAPE = Llama(layers=24, width=2048, inner=5632, heads=32, kv_heads=4, vocabulary=32000)
_PAGES_8B = "4GiB"  # on the GPU: two blocks, and two leases of the head
SMALL = Llama(layers=2, width=128, inner=256, heads=4, kv_heads=2, vocabulary=256)  # to try the script on a CPU
_SLOTS = 20  # of a block's largest page, on the GPU: two blocks, and two leases of the head

PAGE = ROOT / "docs" / "training.md"
RESULTS = [
    ROOT / "benchmarks" / "results" / f"typed-training-{run}nvidia-h200.json"
    for run in ("models-", "peers-", "8b-", "gpt2-", "lora-", "experts-", "lora-link-")
]
MARKS = "<!-- typed: scripts/typed_training.py --table -->", "<!-- end of typed -->"
_TITLES = {
    "full": "AdamW, LlamaForCausalLM of 1.2 B fp32 parameters under autocast",
    "full8b": "AdamW, LlamaForCausalLM of 8.0 B bf16 parameters; from the tiers on 24 GB of GPU memory",
    "gpt2": "AdamW, GPT2LMHeadModel of 0.8 B fp32 parameters under autocast",
    "qwen3": "AdamW, Qwen3ForCausalLM of 0.6 B fp32 parameters under autocast",
    "vit": "AdamW, ViTForImageClassification of 0.6 B fp32 parameters under autocast",
    "lora": "LoRA by PEFT, r = 16 on q and v, gradient checkpointing, Llama of the 8B shape",
    "experts": "LoRA by PEFT, r = 16 on all routed experts, gradient checkpointing, 8 layers of Qwen3-30B-A3B's shape",
    "olmoe": "LoRA by PEFT, r = 16 on all routed experts, gradient checkpointing, a whole OLMoE-1B-7B",
}

Batch = dict[str, Tensor]
Step = Callable[[Batch], Tensor]


def typed(model: Any, optimizer: Any, *, autocast: bool = False) -> Step:
    """The loop of a tutorial."""

    def step(batch: Batch) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step.autocast = autocast  # type: ignore[attr-defined]
    return step


# -- LoRA --------------------------------------------------------------------------------------------------------------


def adapted(model: nn.Module, **targets: list[str]) -> Step:
    """A model with adapters, on q and v or other targets, as PEFT's documentation has it."""
    from peft import LoraConfig, get_peft_model

    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    config = LoraConfig(r=16, **(targets or {"target_modules": ["q_proj", "v_proj"]}))
    adapters = get_peft_model(model, config).train()
    trained = [weight for weight in adapters.parameters() if weight.requires_grad]
    step = typed(adapters, torch.optim.AdamW(trained, LR))
    step.model = adapters.get_base_model()  # type: ignore[attr-defined]
    step.adapter_bytes = 4 * sum(weight.nbytes for weight in trained)  # type: ignore[attr-defined]  # and moments
    return step


def base(options: argparse.Namespace, device: str = DEVICE) -> nn.Module:
    model = llama_8b(options.layers, device) if DEVICE == "cuda" else llama(SMALL, torch.bfloat16)
    model.config.use_cache = False
    return model


def bf16(options: argparse.Namespace) -> Step:
    return adapted(base(options))


def fp4(options: argparse.Namespace) -> Step:
    return adapted(vbrt.wrap(base(options), "fp4").materialize())


def fp4_streamed(options: argparse.Namespace) -> Step:
    vb = vbrt.wrap(base(options), "fp4", budget="1GiB").materialize()
    step = adapted(vb)
    step.streams = vb  # type: ignore[attr-defined]
    return step


def compiled(make: Callable[[argparse.Namespace], Step]) -> Callable[[argparse.Namespace], Step]:
    """A way with `torch.compile` of each block."""

    def made(options: argparse.Namespace) -> Step:
        step = make(options)
        for block in step.model.get_decoder().layers:  # type: ignore[attr-defined]
            block.compile()
        return step

    return made


def bitsandbytes_nf4(options: argparse.Namespace) -> Step:
    """bitsandbytes' NF4 with bf16 arithmetic, as transformers' BitsAndBytesConfig makes it."""
    import bitsandbytes as bnb

    model = base(options)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            four = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            four.weight = bnb.nn.Params4bit(layer.weight.detach().cpu(), requires_grad=False, quant_type="nf4")
            model.set_submodule(name, four.to(DEVICE))
    return adapted(model)


_EXPERTS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def mixture(options: argparse.Namespace) -> nn.Module:
    if options.family == "olmoe":
        return olmoe()
    if DEVICE == "cuda":
        return experts_decode.build(options.layers, torch.device("cuda", 0))
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}
    return experts_decode.build(2, torch.device("cpu"), **sizes)


def olmoe() -> nn.Module:
    """The shape of OLMoE-1B-7B-0924."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    sizes = {} if DEVICE == "cuda" else {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    with torch.device(DEVICE), full_models.drawn_in(torch.bfloat16):
        return OlmoeForCausalLM(OlmoeConfig(**sizes)).requires_grad_(False)


def experts_bf16(options: argparse.Namespace) -> Step:
    return adapted(mixture(options), **_EXPERTS)


def experts_fp4(options: argparse.Namespace) -> Step:
    return adapted(vbrt.wrap(mixture(options), "fp4").materialize(), **_EXPERTS)


def experts_streamed(options: argparse.Namespace) -> Step:
    """With room for a quarter of the experts, beside all other pages."""
    vb = vbrt.wrap(mixture(options), "fp4", policy={"kind": "experts"}).materialize()
    if DEVICE == "cuda":
        experts_decode.put_below(vb)
        vb.set_budget("gpu", experts_decode.budget_of(vb, 0.25))
    step = adapted(vb, **_EXPERTS)
    step.streams = vb  # type: ignore[attr-defined]
    return step


# -- full --------------------------------------------------------------------------------------------------------------


def llama(shape: Llama, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' class, of random weights."""
    with torch.device(DEVICE), no_init_weights():
        return draw_(llama_of(shape).to(dtype)).train()


def gpt2() -> nn.Module:
    """The shape of gpt2-large."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 36, "n_embd": 1280, "n_head": 20}
    if DEVICE == "cpu":
        sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_positions=CONTEXT))


def qwen3() -> nn.Module:
    """The shape of Qwen3-0.6B."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
    if DEVICE == "cpu":
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True))


def vit() -> nn.Module:
    """The shape of vit-huge-patch14-224."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
    if DEVICE == "cpu":
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**sizes, patch_size=14, image_size=224, num_labels=1000))


MODELS = {"gpt2": gpt2, "qwen3": qwen3, "vit": vit}


def trainee(options: argparse.Namespace) -> nn.Module:
    """The model of a family, without dropout, which would draw other numbers where blocks are computed again."""
    if options.family not in MODELS:
        model = llama(SHAPE if DEVICE == "cuda" else SMALL)
        model.config.use_cache = False
        return model
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = MODELS[options.family]()
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def batch_of(family: str, tokens: int) -> Batch:
    """A batch of so many tokens."""
    torch.manual_seed(0)
    if family == "vit":
        images = max(1, tokens // 256)
        return {
            "pixel_values": torch.randn(images, 3, 224, 224, device=DEVICE),
            "labels": torch.randint(0, 1000, (images,), device=DEVICE),
        }
    ids = torch.randint(0, 256, (max(1, tokens // CONTEXT), min(tokens, CONTEXT)), device=DEVICE)
    return {"input_ids": ids, "labels": ids}


def recomputing(options: argparse.Namespace) -> nn.Module:
    model = trainee(options)
    model.gradient_checkpointing_enable()
    return model


def resident(options: argparse.Namespace, *, recompute: bool = True) -> Step:
    model = recomputing(options) if recompute else trainee(options)
    return typed(model, torch.optim.AdamW(model.parameters(), LR, fused=True), autocast=True)


def in_tiers(options: argparse.Namespace, activations: str) -> tuple[vbrt.VBFullWrapper, torch.optim.Optimizer]:
    model = trainee(options)
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=True)
    repeated = (p for name, p in model.named_parameters() if any(part.isdigit() for part in name.split(".")))
    page = 2 * max(weight.numel() for weight in repeated)
    tiers = {"gpu": {"budget": _SLOTS * page}} if DEVICE == "cuda" else {"gpu": {"enabled": False}}
    return vbrt.wrap(model, "full", optimizer=optimizer, tiers=tiers, training={"activations": activations}), optimizer


def from_tiers(activations: str) -> Callable[[argparse.Namespace], Step]:
    def make(options: argparse.Namespace) -> Step:
        vb, optimizer = in_tiers(options, activations)
        step = typed(vb, optimizer, autocast=True)
        step.vb = vb  # type: ignore[attr-defined]
        return step

    return make


def model_8b() -> nn.Module:
    model = llama(full_models.SHAPES["8b"] if DEVICE == "cuda" else SMALL, torch.bfloat16)
    model.config.use_cache = False
    return model


def passes_8b(options: argparse.Namespace) -> Step:
    """Forward and backward alone: gradients are dropped."""
    model = model_8b()
    model.gradient_checkpointing_enable()

    def step(batch: Batch) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


def from_tiers_8b(options: argparse.Namespace) -> Step:
    """With tables in the tiers and inputs of blocks offloaded; the GPU has 24 GB from here on."""
    model = model_8b()
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=True)
    tiers = {"gpu": {"budget": _PAGES_8B}} if DEVICE == "cuda" else {"gpu": {"enabled": False}}
    how = {"tiers": tiers, "training": {"activations": "offload"}, "weights": {"embeddings": True, "keep_head": False}}
    vb = vbrt.wrap(model, "full", optimizer=optimizer, **how)
    emptied()
    limited(24)
    step = typed(vb, optimizer)
    step.vb = vb  # type: ignore[attr-defined]
    return step


class Trainer:
    """transformers' Trainer over a model, with what it does by itself: it clips, and steps a schedule."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, *, recompute: bool) -> None:
        self.model, self.optimizer, self.recompute = model, optimizer, recompute

    def measured(self, batch: Batch, *, steps: int, warm: int) -> dict:
        """What `full_models.measured` returns, and the first losses."""
        import transformers

        rows = [{name: value[at].cpu() for name, value in batch.items()} for at in range(len(batch["labels"]))]
        watch, count = _Watch(warm), steps + warm
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, max_steps=count, per_device_train_batch_size=len(rows), learning_rate=LR, bf16=True,
                gradient_checkpointing=self.recompute, use_cpu=DEVICE == "cpu", logging_strategy="no",
                save_strategy="no", report_to=[], disable_tqdm=True,
            )  # fmt: skip
            trainer = transformers.Trainer(
                self.model, arguments, train_dataset=rows * count, optimizers=(self.optimizer, None), callbacks=[watch]
            )
            trainer.train()
        return watch.found()


def _Watch(warm: int) -> Any:
    """A callback of Trainer that times steps, after `warm` ones."""
    import transformers

    class Watch(transformers.TrainerCallback):
        began, spans = 0.0, ()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            waited()
            if state.global_step == warm and DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            waited()
            self.spans = (*self.spans, time.perf_counter() - self.began)

        def found(self) -> dict:
            spans = self.spans[warm:]
            found = {"seconds": statistics.median(spans), "each": [round(span, 4) for span in spans]}
            return found | ({"peak_bytes": torch.cuda.max_memory_allocated()} if DEVICE == "cuda" else {})

    return Watch()


def trainer_resident(options: argparse.Namespace) -> Trainer:
    model = trainee(options)
    return Trainer(model, torch.optim.AdamW(model.parameters(), LR, fused=True), recompute=True)


def trainer_from_tiers(options: argparse.Namespace) -> Trainer:
    return Trainer(*in_tiers(options, "recompute"), recompute=False)


def torchao(options: argparse.Namespace) -> Step:
    from torchao.optim import CPUOffloadOptimizer

    model = recomputing(options)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=LR, fused=True)
    return typed(model, optimizer, autocast=True)


def fsdp2(options: argparse.Namespace) -> Step:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = recomputing(options)
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "offload_policy": CPUOffloadPolicy()}
    for block in model.model.layers:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return typed(model, torch.optim.AdamW(model.parameters(), LR, fused=True))


LORA = {
    "bf16": bf16,
    "vbrt fp4": fp4,
    "vbrt fp4, 1 GiB of pages": fp4_streamed,
    "bitsandbytes NF4": bitsandbytes_nf4,
    "bf16, compiled blocks": compiled(bf16),
    "vbrt fp4, compiled blocks": compiled(fp4),
}
EXPERTS = {"bf16": experts_bf16, "vbrt fp4": experts_fp4, "vbrt fp4, 25 % of the experts": experts_streamed}
RESIDENT = {"resident, kept": functools.partial(resident, recompute=False), "resident, recomputed": resident}
TIERS = {
    "vbrt, kept": from_tiers("keep"),
    "vbrt, recomputed": from_tiers("recompute"),
    "vbrt, offloaded": from_tiers("offload"),
}
FULL = {
    "Trainer, resident, recomputed": trainer_resident,
    "Trainer, vbrt, recomputed": trainer_from_tiers,
    "resident, recomputed": resident,
    **TIERS,
    "torchao CPUOffloadOptimizer": torchao,
    "FSDP2, CPUOffloadPolicy": fsdp2,
}
FULL_8B = {"forward and backward, resident, recomputed": passes_8b, "vbrt, offloaded": from_tiers_8b}
WAYS = {"lora": LORA, "experts": EXPERTS, "olmoe": EXPERTS, "full": FULL, "full8b": FULL_8B}
WAYS |= dict.fromkeys(MODELS, RESIDENT | TIERS)
SIZES = {
    "lora": (2048, 8192),
    "experts": (2048,),
    "olmoe": (2048,),
    "full8b": (32768,),
    **dict.fromkeys(("full", *MODELS), (16384, 8192)),
}


@contextlib.contextmanager
def slower_link(copies: int) -> Iterator[None]:
    """A link that takes `copies` times as long for what rings and programmes bring: each page is copied so often."""

    def repeated(plain: Callable[..., Callable[[], object]]) -> Callable[..., Callable[[], object]]:
        def copying(*args: Any) -> Callable[[], None]:
            start = plain(*args)

            def started() -> None:
                for _ in range(copies):
                    start()

            return started

        return copying

    links = [StreamLink, DirectLink] if copies > 1 else []
    with contextlib.ExitStack() as patches:
        for link in links:
            patches.enter_context(mock.patch.object(link, "copying", repeated(link.copying)))
        yield


def moved_by(vb: Any, run: Callable[[], object]) -> dict:
    """Seconds of a run, bytes that it moves between tiers, the link's time for them, and what falls back."""
    before = vb.stats().bytes_moved
    waited()
    start = time.perf_counter()
    run()
    waited()
    seconds = time.perf_counter() - start
    moved = {link: nbytes - before.get(link, 0) for link, nbytes in vb.stats().bytes_moved.items()}
    link_s = moved.get("cpu>gpu", 0) / link_rate()
    return {"passes_s": seconds, "moved_bytes": moved, "link_s": link_s, "fallbacks": list(vb.stats().fallbacks)}


def apart(step: Any, batch: Batch) -> dict:
    """Seconds of both passes, and of the update by itself; bytes moved, and the link's time for them."""
    vb = step.vb
    vb.settle()

    def both() -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=step.autocast):
            loss = vb(**batch).loss
        loss.backward()

    passes = moved_by(vb, both)
    start = time.perf_counter()
    vb.step()
    vb.settle()
    update = time.perf_counter() - start
    vb.zero_grad()
    return {**passes, "update_s": update}


def updates_of(step: Any) -> dict[str, int]:
    """Counters of updates so far, of a way from the tiers."""
    if not hasattr(step, "vb"):
        return {}
    step.vb.settle()
    found = step.vb.stats().updates
    return {name: getattr(found, name) for name in ("ahead", "discarded", "wait_us", "update_us")}


def row_of(
    make: Callable[[argparse.Namespace], Step | Trainer], tokens: list[int], options: argparse.Namespace
) -> dict:
    """Make one way, and measure it with each number of tokens."""
    start = time.perf_counter()
    step = make(options)
    waited()
    found: dict[str, Any] = {"ready_s": round(time.perf_counter() - start, 1)}
    for number in tokens:
        batch = batch_of(options.family, number)
        if isinstance(step, Trainer):
            one = step.measured(batch, steps=options.steps, warm=5)
        else:
            losses = [step(batch).item() for _ in range(2)]
            before = updates_of(step)
            one = measured(lambda batch=batch: step(batch), steps=options.steps, warm=3) | {"losses": losses}
            one |= {"profile": profiled(lambda batch=batch: step(batch))} if options.profile else {}
            one |= {"updates": {name: now - before[name] for name, now in updates_of(step).items()}}
            one |= apart(step, batch) if hasattr(step, "vb") else {}
            one |= moved_by(step.streams, lambda batch=batch: step(batch)) if hasattr(step, "streams") else {}
            one |= {"adapter_bytes": step.adapter_bytes} if hasattr(step, "adapter_bytes") else {}
        found[str(number)] = one | {"tokens_per_s": number / one["seconds"]}
    return found


def measured_ways(family: str, options: argparse.Namespace) -> dict:
    """Measure all ways of a family in turn, and print a table."""
    options.family, layers = family, options.layers
    options.layers = layers or (8 if family == "experts" else 32)
    ways = {name: way for name, way in WAYS[family].items() if name in (options.only or [name])}
    tokens = options.tokens or (SIZES[family] if DEVICE == "cuda" else (64,))
    rows = {}
    for name, make in ways.items():
        gc.collect()
        emptied()
        try:
            with slower_link(options.copies):
                rows[name] = row_of(make, list(tokens), options)
            if options.copies > 1:
                rows[name]["copies"] = options.copies
        except Exception as error:  # noqa: BLE001  # a peer that is not installed, say: the row says so
            traceback.print_exc()
            rows[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(name, json.dumps(rows[name])[: 6000 if options.profile else 1200], flush=True)
    lines = [
        [
            name,
            number,
            f"{one['seconds'] * 1e3:.0f}",
            f"{one['tokens_per_s']:.0f}",
            f"{one.get('peak_bytes', 0) / 1e9:.1f}",
        ]
        for name, row in rows.items()
        for number, one in row.items()
        if isinstance(one, dict)
    ]
    print(*markdown_table([family, "tokens", "ms", "tokens/s", "GB"], lines), sep="\n", flush=True)
    options.layers = layers
    return rows


def tables() -> str:
    """What was measured, a table for each family; a run's rows stand beside its first one."""
    results = [json.loads(path.read_text()) for path in RESULTS]
    heads = "by", "tokens a step", "ms a step", "tokens/s", "speed, of the run's first row"
    heads = *heads, "GPU memory, GB", "reserved, GB"
    parts = []
    for family, title in _TITLES.items():
        rows = [row for run, result in enumerate(results, 1) for row in _rows(result.get(family, {}), run)]
        if not rows:
            continue
        parts.append("\n".join([f"{title}:", "", *markdown_table(heads, rows)]))
    commits = [result["machine"]["commit"] for result in results]
    files = ", ".join(f"`{path.relative_to(ROOT)}` ({of})" for path, of in zip(RESULTS, commits, strict=True))
    gpu = results[0]["machine"]["gpu"]
    return "\n\n".join([*parts, f"Runs on hosts of their own, each with its commit, {gpu}: {files}."])


def _rows(ways: dict, run: int) -> Iterator[tuple[str, ...]]:
    first = next(iter(ways.values()), {})
    for name, found in ways.items():
        for tokens in (key for key in found if key.isdigit()):
            one, beside = found[tokens], first[tokens]["seconds"] / found[tokens]["seconds"]
            cells = f"{one['seconds'] * 1e3:,.0f}", f"{one['tokens_per_s']:,.0f}", f"{beside:.2f}"
            peaks = (f"{one[of] / 1e9:.1f}" if of in one else "" for of in ("peak_bytes", "reserved_bytes"))
            link = f", link at 1/{found['copies']} of its rate" if "copies" in found and "moved_bytes" in one else ""
            yield f"{name}{link} (run {run})", f"{int(tokens):,}", *cells, *peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", choices=[*WAYS, []], default=[])
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--layers", type=int, default=None, help="of lora (32) and experts (8)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--copies", type=int, default=1, help="of each page that a ring brings: 2 emulates half the link"
    )
    parser.add_argument("--only", action="append")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true", help="write the table of docs/training.md, measure nothing")
    options = parser.parse_args()
    if options.table:
        text = PAGE.read_text()
        PAGE.write_text(between(text, MARKS, tables()))
        return
    result: dict[str, Any] = {"machine": machine()}
    for family in options.families or ("lora", "full"):
        result[family] = measured_ways(family, options)
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
