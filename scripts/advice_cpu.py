"""Advice followed on a machine without a GPU: what each candidate takes there, beside what was predicted of it.

    python scripts/advice_cpu.py --files DIR [--shape 1b] [--only fp4 exact]   # DIR: of scripts/cpu_bench.py --prepare

What a call measures goes into benchmarks/results/advice-cpu.json, beside what calls before it have measured; the rates
are those of the first call, unless --rates measures them anew.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
import transformers

import vbrt
from scripts.cpu_contenders import Torch
from scripts.cpu_models import SHAPES, checkpoint
from scripts.measuring import machine
from vbrt.config import VBConfig, load_config
from vbrt.estimation.advice.machine_rates import Rates, measure_rates
from vbrt.estimation.memory.task import Task

_RESULTS = ROOT / "benchmarks" / "results" / "advice-cpu.json"
_TURNS = 3  # the least counts: other guests of the machine only add to it
TASKS = Task("decode", 1, 16, 24), Task("prefill", 1, 512)


#: what advice tries on such a machine, where all of it fits
CANDIDATES: dict[str, VBConfig | None] = {
    "unwrapped": None,
    **{preset: load_config(preset) for preset in ("dense", "exact", "fp4", "nf4", "mxfp4", "mxint8")},
    "fp4, activations in int8": load_config("fp4", compute={"int8": True}),
}


def measured(files: Path, shape: str, name: str, config: VBConfig | None) -> dict[str, float]:
    """Return the milliseconds of each task, of a checkpoint under a config."""
    path = checkpoint(files, shape)
    if config is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True)
    else:
        model = vbrt.from_pretrained(path, config, progress=False)
    subject, found = Torch(model.eval()), {}
    decode, prefill = TASKS
    subject.decode(decode.context, 6)
    spans = [subject.decode(decode.context, decode.new)["seconds"] for _ in range(_TURNS)]
    found["decode"] = 1e3 * min(map(statistics.median, spans))
    found["prefill"] = 1e3 * min(subject.prefill(prefill.context) for _ in range(_TURNS))
    print(name, {kind: round(ms, 1) for kind, ms in found.items()}, flush=True)
    return found


def rows(files: Path, shape: str, only: list[str] | None) -> Iterator[dict[str, Any]]:
    """Yield what was measured of each candidate, by task."""
    for name, config in CANDIDATES.items():
        if only is None or name in only:
            for kind, ms in measured(files, shape, name, config).items():
                yield {"shape": shape, "case": name, "task": kind, "ms": ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=Path, required=True, help="where scripts/cpu_bench.py has its models")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1b")
    parser.add_argument("--only", nargs="*", choices=tuple(CANDIDATES), default=None, help="some of the candidates")
    parser.add_argument("--rates", action="store_true", help="measure the machine anew")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    args = parser.parse_args()
    known = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    rates = measure_rates() if args.rates or "rates" not in known else Rates(**known["rates"])
    start, found = time.perf_counter(), []
    try:
        found.extend(rows(args.files, args.shape, args.only))
    finally:
        done = {(row["shape"], row["case"], row["task"]) for row in found}
        kept = [row for row in known["rows"] if (row["shape"], row["case"], row["task"]) not in done]
        result = {"machine": machine(), "threads": torch.get_num_threads(), "rates": asdict(rates)}
        args.out.write_text(json.dumps(result | {"rows": kept + found}, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
