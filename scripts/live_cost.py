"""What it costs to watch a process: milliseconds a token of `generate`, watched and not, in turns; writes JSON.

Cases, in turns: nobody looks; another process asks twice a second, as `vbrt top` does; `vb.live()` draws frames in the
process itself, on a terminal that goes nowhere. On a GPU it is the shape of an 8B model in fp4, resident and with half
of its pages on the GPU; else a small Llama with as many layers, by the time of the process's own cores, which other
processes of the machine hardly touch. Before that, samples are taken without a pause from a thread while steps are
recorded as CUDA graphs: they must be recorded nevertheless.

    python3 scripts/live_cost.py [--rounds 5] [--new 600] [--out results.json]
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

import vbrt
from scripts.measuring import llama_8b, machine
from vbrt.model.live_sampling import sample

EVERY_S = 0.5
ASKING = f"""
import sys, time
from vbrt.host.stats_endpoint import ask
while True:
    ask(int(sys.argv[1]))
    print(".", flush=True)
    time.sleep({EVERY_S})
"""


def small() -> torch.nn.Module:
    """A Llama of 32 layers whose tokens take some milliseconds on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=32)
    return LlamaForCausalLM(config).eval()


def ms_a_token(vb: vbrt.VBModelWrapper, new: int) -> float:
    ids = torch.arange(10, 26, device=vb.device).reshape(1, 16)
    clock = time.perf_counter if vb.device.type == "cuda" else time.process_time
    begun = clock()
    vb.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    if vb.device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - begun) / new * 1e3


@contextlib.contextmanager
def asked(vb: vbrt.VBModelWrapper) -> Iterator[None]:
    """Have another process ask."""
    with vb.live(offer=True):
        command = [sys.executable, "-c", ASKING, str(os.getpid())]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as asker:
            asker.stdout.readline()  # it has begun
            try:
                yield
            finally:
                asker.kill()


@contextlib.contextmanager
def drawn(vb: vbrt.VBModelWrapper) -> Iterator[None]:
    """Draw frames in this process."""
    terminal = {"TTY_COMPATIBLE": "1", "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        os.environ.update(terminal)
        try:
            with vb.live(every_s=EVERY_S):
                yield
        finally:
            for name in terminal:
                os.environ.pop(name)


CASES: dict[str, Callable[[vbrt.VBModelWrapper], contextlib.AbstractContextManager]] = {
    "nobody looks": lambda vb: contextlib.nullcontext(),
    "vbrt top": asked,
    "vb.live()": drawn,
}


def in_turns(vb: vbrt.VBModelWrapper, rounds: int, new: int) -> dict[str, dict[str, float]]:
    """Return ms a token of each case and how much more it is than without, in percent of medians."""
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for number in range(rounds):
        names = list(CASES)
        for case in names[number % len(names) :] + names[: number % len(names)]:
            with CASES[case](vb):
                times[case].append(ms_a_token(vb, new))
    quiet = statistics.median(times["nobody looks"])
    return {
        case: {
            "ms_a_token": statistics.median(of),
            "more_percent": 100 * (statistics.median(of) / quiet - 1),
            "spread_percent": 100 * (max(of) - min(of)) / quiet,
            "all_ms": of,
        }
        for case, of in times.items()
    }


def recorded_meanwhile(vb: vbrt.VBModelWrapper) -> dict[str, object]:
    """Take samples without a pause while steps are recorded, and return what became of both."""
    stop, taken, errors = threading.Event(), [0], []

    def look() -> None:
        while not stop.is_set():
            try:
                sample(vb.runtime)
                taken[0] += 1
                time.sleep(0.0005)  # or the interpreter would do nothing else
            except Exception as error:  # noqa: BLE001 - it is reported
                errors.append(repr(error))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        ms_a_token(vb, 40)
    finally:
        stop.set()
        thread.join()
    steps = vb.stats().steps
    return {"samples": taken[0], "errors": errors[:3], "recordings": steps.recordings, "captured": steps.captured}


def sample_us(vb: vbrt.VBModelWrapper) -> dict[str, float]:
    """Return microseconds of a sample, which holds the interpreter's lock, and of counting what a pass computes."""
    work, args = vb._attachment.work, (torch.zeros(1, 1, dtype=torch.long),)
    note = timeit.timeit(lambda: work.note((), {"input_ids": args[0]}), number=20_000) / 20_000
    looks = [timeit.timeit(lambda: sample(vb.runtime), number=1) for _ in range(50)]
    return {"sample_us": statistics.median(looks) * 1e6, "count_a_pass_us": note * 1e6}


def share_of_a_core(vb: vbrt.VBModelWrapper, seconds: float = 2.0) -> dict[str, float]:
    """Return what watching takes of one core of the watched process, in percent, while that does nothing else."""
    shares = {}
    for case, watched in CASES.items():
        with watched(vb):
            time.sleep(EVERY_S)  # what it needs is imported
            begun, used = time.perf_counter(), time.process_time()
            time.sleep(seconds)
            shares[case] = 100 * (time.process_time() - used) / (time.perf_counter() - begun)
    return shares


def measure(args: argparse.Namespace, figures: dict[str, object]) -> Iterator[None]:
    """Add figures, part by part."""
    cuda = torch.cuda.is_available()
    model = llama_8b(args.layers) if cuda else small()
    budget = {"gpu": {"budget": "24GiB"} if cuda else {"enabled": False}}
    vb = vbrt.wrap(model, "fp4", tiers=budget, weights={"min_parameters": 0}).materialize(progress=False)
    figures["recorded meanwhile"] = recorded_meanwhile(vb)
    figures |= sample_us(vb)
    figures["percent of a core"] = share_of_a_core(vb)
    yield
    ms_a_token(vb, args.new)  # whatever is made once is made
    figures["resident"] = in_turns(vb, args.rounds, args.new)
    yield
    if cuda:
        pages = sum(page.nbytes for page in vb.stack.pages.values())
        vb.stack.rehome(dict.fromkeys(vb.stack.pages, "cpu"))
        vb.set_budget("gpu", pages // 2)
        ms_a_token(vb, 30)
        figures["half of the pages on the GPU"] = in_turns(vb, max(2, args.rounds // 2), max(20, args.new // 15))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=600, help="tokens to generate each time")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures: dict[str, object] = {}
    begun = time.perf_counter()
    for _ in measure(args, figures):
        print(f"after {time.perf_counter() - begun:.1f} s", flush=True)
        if args.out:
            args.out.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=1) + "\n")
    for name, of in figures.items():
        rows = of if isinstance(of, dict) else {}
        if all(isinstance(row, dict) for row in rows.values()) and rows:
            for case, row in rows.items():
                print(f"{name}, {case}: {row['ms_a_token']:.3f} ms a token, {row['more_percent']:+.2f} %")
        else:
            print(f"{name}: {of}")


if __name__ == "__main__":
    main()
