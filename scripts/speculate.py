"""Self-speculation: tokens a second with drafts and without, and whether the tokens are those of plain decoding.

    python scripts/speculate.py                          # the committed language model, on any machine
    python scripts/speculate.py --train 600              # a model of 32 M parameters, trained here for so many steps
    python scripts/speculate.py --shape 8b               # a random model of the 8B shape: acceptance is forced

Parts are independent: one that fails prints its traceback and leaves the others their figures. Writes JSON with --out.
"""

import argparse
import cProfile
import dataclasses
import importlib
import itertools
import json
import pstats
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn

import vbrt
from scripts import committed
from scripts.lm import LanguageModel, Shape, read_text
from scripts.measuring import llama_8b, machine
from vbrt.generation.speculation import call_drafters, seeded_generate
from vbrt.generation.speculation.draft_loop import EXACTNESS
from vbrt.generation.speculation.drafters import Ngrams
from vbrt.generation.speculation.sequences import Sequences
from vbrt.report.speculation_counters import SpeculationCounts

TRAINED = Shape(layers=10, width=512, heads=8, context=512)
PROMPT = 128


# -- models -----------------------------------------------------------------------------------------------------------


def as_gpt2(model: LanguageModel, dtype: torch.dtype) -> nn.Module:
    """The byte language model as transformers' GPT-2, which has the same architecture."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = model.shape
    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        activation_function="gelu",
        bos_token_id=None,
        eos_token_id=None,
    )
    plain = GPT2LMHeadModel(config)
    plain.load_state_dict(gpt2_state(model), strict=False)
    return plain.to(dtype).eval()


def gpt2_state(model: LanguageModel) -> dict[str, torch.Tensor]:
    """The weights of the byte language model under GPT-2's names and in its orientation."""
    state = {"transformer.wte.weight": model.token.weight, "transformer.wpe.weight": model.position.weight}
    state |= {f"transformer.ln_f.{name}": tensor for name, tensor in model.norm.named_parameters()}
    for index, block in enumerate(model.blocks):
        to, attention, width = f"transformer.h.{index}", block.attention, model.shape.width
        joined = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        state |= {
            f"{to}.attn.c_attn.weight": joined.t(),
            f"{to}.attn.c_attn.bias": joined.new_zeros(3 * width),
            f"{to}.attn.c_proj.weight": attention.o_proj.weight.t(),
            f"{to}.attn.c_proj.bias": joined.new_zeros(width),
            f"{to}.mlp.c_fc.weight": block.up.weight.t(),
            f"{to}.mlp.c_fc.bias": block.up.bias,
            f"{to}.mlp.c_proj.weight": block.down.weight.t(),
            f"{to}.mlp.c_proj.bias": block.down.bias,
        }
        state |= {f"{to}.ln_1.{name}": tensor for name, tensor in block.attention_norm.named_parameters()}
        state |= {f"{to}.ln_2.{name}": tensor for name, tensor in block.mlp_norm.named_parameters()}
    return {**state, "lm_head.weight": model.head.weight}


def trained(steps: int, folder: Path) -> LanguageModel:
    """A model of `TRAINED`'s shape after so many steps of scripts/train."""
    numbers = {"layers": TRAINED.layers, "width": TRAINED.width, "heads": TRAINED.heads, "context": TRAINED.context}
    options = [f"--{name}={value}" for name, value in {**numbers, "batch": 64, "steps": steps, "lr": 1e-3}.items()]
    options += ["--mixed-precision", "--use-flash-attn", f"--log-every={steps}", f"--checkpoint-every={steps}"]
    command = [sys.executable, "scripts/train.py", "small", *options, f"--out={folder}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr) as training:
        importlib.import_module("transformers")  # which takes seconds, too
    if training.returncode:
        raise SystemExit(f"scripts/train failed: exit status {training.returncode}")
    return committed.filled(LanguageModel(TRAINED), folder / "model.safetensors")


def prompts_of(text: torch.Tensor, count: int) -> torch.Tensor:
    """Prompts int64 [count, PROMPT] from places all over a text."""
    starts = torch.linspace(0, len(text) - PROMPT - 1, count, dtype=torch.float64).long()
    return torch.stack([text[start : start + PROMPT].long() for start in starts.tolist()])


# -- parts ------------------------------------------------------------------------------------------------------------


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, out


def counted(vb: vbrt.VBModelWrapper, run: Callable[[], Any]) -> tuple[float, Any, dict[str, Any]]:
    """Seconds, result, and what was counted meanwhile."""
    counts = vb._attachment.speculation
    counts.totals.update(SpeculationCounts().totals)
    seconds, out = timed(run)
    stats = counts.stats()
    return seconds, out, stats.to_dict() if stats else {}


def language_model(model: LanguageModel, text: torch.Tensor, args: argparse.Namespace, rows: "Rows") -> None:
    """A trained model: tokens with drafts beside tokens without, one prompt at a time and all in batches."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vb = vbrt.wrap(as_gpt2(model, torch.bfloat16).to(device), "exact", weights={"min_parameters": 0}).materialize()
    ids = prompts_of(text, args.prompts).to(device)
    settings = {"max_new_tokens": args.tokens, "pad_token_id": 0}
    singles = ids[: args.singles].split(1)
    groups = (
        (ids.split(args.batch), EXACTNESS[:1], args.batch_k),
        (singles, EXACTNESS[:1], args.k[0]),
        (singles, EXACTNESS[1:], "auto"),
    )
    draws = (("greedy", {"do_sample": False}), ("sampled", {"do_sample": True, "top_k": 0, "seed": 7}))
    for parts, (exactness,), k in groups:
        for drawn, how in draws:

            def run(parts: Sequence[torch.Tensor] = parts, how: dict = how, **others: Any) -> list[torch.Tensor]:
                masked = [(part, torch.ones_like(part)) for part in parts]
                return [vb.generate(p, attention_mask=m, **{**settings, **how, **others}) for p, m in masked]

            drafts = {"speculate": k, "exactness": exactness}
            first = run()  # so that nothing is compiled or recorded in what is timed
            plain_s, plain = timed(run)
            again = sum(int((a == b).all(-1).sum()) for a, b in zip(first, plain, strict=True))
            run(parts[:1], **drafts)
            spent_s, got, counts = counted(vb, lambda run=run, drafts=drafts: run(**drafts))
            same = sum(int((a == b).all(-1).sum()) for a, b in zip(got, plain, strict=True))
            row = {"model": f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M", "drawn": drawn}
            row |= {"batch": len(parts[0]), "exactness": exactness, "drafts": k, "new_tokens": args.tokens}
            row |= {"same": same, "plain_again": again, "of": sum(map(len, plain)), "plain_s": plain_s, "s": spent_s}
            rows.add({**row, **counts, "fallbacks": [why for why in vb.stats().fallbacks if "speculate" in why]})
    print(list(vb.stats().fallbacks), vb.stats().steps, file=sys.stderr)
    vb.close()


class Forced(Sequences):
    """Sequences whose drafts are right with a given probability, whatever the logits say: for times."""

    acceptance, dice = 0.9, random.Random(0)

    def look(self, tokens: torch.Tensor, guessed: torch.Tensor | None = None) -> bool:
        super().look(tokens, guessed)
        return guessed is not None and self.dice.random() < self.acceptance


class Guesses(Ngrams):
    """As many proposals as are asked for, at once: n-grams of a text that repeats itself."""

    def propose(self, sequences: Sequences, k: int) -> torch.Tensor:
        return sequences.ids[:, -1:].expand(-1, k)


def shape_8b(args: argparse.Namespace, rows: "Rows") -> None:
    """The 8B shape with random weights, of which `--resident` GB stay on the GPU and the rest streams."""
    for preset in args.presets:
        model = llama_8b(args.layers)
        weights = {"keep_head": True}
        swapped = vbrt.make_plan(model, vbrt.load_config("fp4" if preset == "exact" else preset, weights=weights))
        resident = swapped.page_bytes if preset == "exact" else 0  # coarse planes
        tiers = {"gpu": {"budget": resident + (args.ring << 20)}}
        compute = {"exactness": args.compute} if preset in ("exact", "dense") else {}
        seconds, vb = timed(
            lambda: vbrt.wrap(model, preset, weights=weights, tiers=tiers, compute=compute).materialize()  # noqa: B023
        )
        print(f"# {preset} ready after {seconds:.0f} s", file=sys.stderr, flush=True)
        streamed(vb, preset, args, rows)
        vb.close()
        torch.cuda.empty_cache()


def streamed(vb: vbrt.VBModelWrapper, preset: str, args: argparse.Namespace, rows: "Rows") -> None:
    """Rows of one preset: the first call with drafts that are always wrong, then forced acceptances."""
    ids = torch.randint(0, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(1)).cuda()
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    drafter = {"drafter": "coarse" if preset == "exact" else "ngrams"}

    def run(tokens: int, **drafts: Any) -> torch.Tensor:
        further = {**drafter, **drafts} if drafts else {}
        return vb.generate(ids, **settings, min_new_tokens=tokens, max_new_tokens=tokens, **further)

    call_drafters.Ngrams = Guesses
    try:
        run(257)  # plain steps are recorded, and lengths planned
        plain = run(97)
        first_s, _ = timed(lambda: run(1))
        seeded_generate.Sequences = Forced
        Forced.acceptance, Forced.dice = 0.0, random.Random(3)
        for number in range(2):
            wrong_s, _, counts = counted(vb, lambda: run(65, speculate="auto"))
            plain_s, _ = timed(lambda: run(65))
            row = {"model": "8b", "preset": preset, "what": f"64 tokens, drafts always wrong, call {number + 1}"}
            rows.add({**row, "ratio": wrong_s / plain_s, "plain_s": plain_s, **counts})
        step_s = (plain_s - first_s) / 64
        rows.add({"model": "8b", "preset": preset, "what": "plain", "ms_a_token": 1e3 * step_s})
        seeded_generate.Sequences = Sequences
        got = run(97, speculate=4)
        seeded_generate.Sequences = Forced
        row = {"model": "8b", "preset": preset, "what": "tokens equal to plain, k = 4", "same": torch.equal(got, plain)}
        rows.add({**row, "steps": dataclasses.asdict(vb.stats().steps), "fallbacks": list(vb.stats().fallbacks)})
        for acceptance, exactness in itertools.product(args.acceptance, EXACTNESS):
            for k in args.k if exactness == EXACTNESS[0] else args.k[-1:]:
                case = (acceptance, exactness, k)
                rows.add({"preset": preset, **forced(vb, run, (first_s, step_s), case)})
            if exactness == EXACTNESS[0]:
                seeded_generate._paces.clear()  # what was learned of another acceptance
                for number in range(args.calls):
                    row = forced(vb, run, (first_s, step_s), (acceptance, exactness, "auto"), tokens=257)
                    rows.add({"preset": preset, "what": f"256 tokens, call {number + 1}", **row})
    finally:
        seeded_generate.Sequences, call_drafters.Ngrams = Sequences, Ngrams
    if args.profile:
        profiled(lambda: run(24, speculate=16))


def forced(
    vb: vbrt.VBModelWrapper,
    run: Callable[..., torch.Tensor],
    plain: tuple[float, float],
    case: tuple,
    *,
    tokens: int = 97,  # within one block of the cache
) -> dict[str, Any]:
    """A row: tokens a second after the first token, where drafts are right with a given probability."""
    first_s, step_s = plain
    Forced.acceptance, exactness, k = case
    Forced.dice = random.Random(3)
    if k != "auto":
        run(40, speculate=k, exactness=exactness)  # passes of this length are recorded, and compared
        Forced.dice = random.Random(3)
    spent_s, _, counts = counted(vb, lambda: run(tokens, speculate=k, exactness=exactness))
    speed = counts["tokens"] / (spent_s - first_s)
    return {
        "model": "8b",
        "compute": vb._attachment.settings.compute.exactness,
        "acceptance_forced": Forced.acceptance,
        "exactness": exactness,
        "drafts": k,
        "tokens_per_s": speed,
        "ratio": speed * step_s,
        "draft_ms": counts["draft_us"] / 1e3 / max(1, counts["drafted"]),
        "verify_ms": counts["verify_us"] / 1e3 / counts["rounds"],
        **counts,
    }


class Rows:
    """What was measured, printed and written as it comes: a run that is killed leaves what it has."""

    def __init__(self, out: Path | None) -> None:
        self._out, self.rows = out, []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        text = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        print(json.dumps(text), flush=True)
        if self._out:
            self._out.write_text(json.dumps({"machine": machine(), "rows": self.rows}, indent=1) + "\n")


def profiled(run: Callable[[], Any]) -> None:
    """Print where the host's time goes."""
    profiler = cProfile.Profile()
    profiler.runcall(run)
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, metavar="STEPS", help="train a model here instead of the committed one")
    parser.add_argument("--shape", choices=["8b"], help="the 8B shape, on a GPU, instead of a trained model")
    parser.add_argument("--layers", type=int, default=32, help="of the 8B shape")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--singles", type=int, default=5, help="prompts that are also decoded one at a time")
    parser.add_argument("--batch", type=int, default=5, help="prompts of a batch")
    parser.add_argument("--batch-k", type=int, default=4, help="drafts a round of a batch")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--presets", nargs="*", default=["fp4", "exact"], help="of the 8B shape")
    parser.add_argument("--ring", type=int, metavar="MIB", default=900, help="on the GPU for what streams")
    parser.add_argument("--acceptance", type=float, nargs="*", default=[0.6, 0.8, 0.9, 0.95])
    parser.add_argument("--k", type=int, nargs="*", default=[4, 8, 16], help="drafts a round, beside auto")
    parser.add_argument("--calls", type=int, default=3, help="of 256 tokens, one after the other, by auto")
    parser.add_argument(
        "--compute", choices=["bits", "rounded"], default="bits", help="compute.exactness, of the 8B shape"
    )
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes, of the 8B shape")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore", UserWarning)
    rows = Rows(args.out)
    try:
        if args.shape:
            shape_8b(args, rows)
        elif args.train:
            with tempfile.TemporaryDirectory() as folder:
                model = trained(args.train, Path(folder))
            language_model(model, read_text(None, TRAINED.context).held_out, args, rows)
        else:
            language_model(committed.dense(), committed.held_out(), args, rows)
    except Exception:  # noqa: BLE001 (what was measured until then is kept)
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
