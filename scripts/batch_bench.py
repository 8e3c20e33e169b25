"""Tokens a second of many sequences and of many users of the 8B shape, beside what link and compute allow.

    python3 scripts/batch_bench.py offline [--prompts 256] [--new 128] [--layers 32] [--out FILE]
    python3 scripts/batch_bench.py serving [--users 1 8 32] [--only "vbrt fp4"] [--out FILE]
    python3 scripts/batch_bench.py --tables     # of docs/howto/batch.md and docs/serving.md, from benchmarks/results

- offline: `generate_many` over prompts of 32 to 512 tokens, random weights, `fp4` through a ring and `exact` with 5 GiB
  of pages on the GPU, all within `--memory` as `gpu_memory`. The bound of a run is the sum over its passes of the
  longer of the bytes that a pass moves at the link's rate, and of the like pass with all pages on the GPU. Both are
  measured in the run.
- serving: `vbrt serve` and `transformers serve` as processes, and clients in threads that stream from /v1/completions.

A row is written as soon as it is measured.
"""

import argparse
import concurrent.futures
import contextlib
import gc
import http.client
import itertools
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

import vbrt
from scripts.generate_bench import add_rows
from scripts.measuring import between, machine, markdown_table, moved_bytes, named_machine
from vbrt.estimation.advice.machine_rates import link_gb_s
from vbrt.host import accelerator
from vbrt.integrations import batches
from vbrt.integrations.text_generation import Turn
from vbrt.integrations.token_times import llama_8b
from vbrt.libraries import transformers_flash

DEVICE = accelerator.TYPE if accelerator.is_available() else "cpu"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = {"offline": ROOT / "docs" / "howto" / "batch.md", "serving": ROOT / "docs" / "serving.md"}
ROOMS = {"fp4": ("a ring of 110 MiB", 110 << 20), "exact": ("5 GiB", 5 << 30)}
_LIKE = 5  # passes whose median stands for one like them
_WORDS = 1000  # of the vocabulary of the checkpoint that is served
_START_SECONDS = 150
PEER_ROOM = ("--dtype", "bfloat16")  # of `transformers serve`, whose cache takes 90 % of the GPU's free memory


class Pass(NamedTuple):
    """Pass of a batch: new tokens, tokens that they attend to, sequences, transformers' name of the attention; when the
    host came to it, and seconds of its launches on a GPU, of the call on a CPU."""

    tokens: int
    cached: int
    sequences: int
    attention: str
    begun: float
    seconds: float


# -- offline ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched() -> Iterator[list[Pass]]:
    """Yield the passes of transformers' continuous batching, as they end."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor as Processor

    plain, passes, timed = Processor._generation_step, list[Pass](), list[tuple[Any, ...]]()

    def step(processor: Any, model: Any) -> None:
        given, begun = processor.inputs_and_outputs, time.perf_counter()
        pairs, events = getattr(given, "io_pairs", None), []
        now = given if pairs is None else pairs[given.current_pair].host_io
        sizes = now.total_seqlen_q, max(now.total_seqlen_k.values()), now.num_request_in_batch
        sizes += (model.config._attn_implementation,)
        if (stream := given.compute_stream) is not None:
            events = [stream.record_event(accelerator.Event(enable_timing=True))]
        plain(processor, model)
        events += [stream.record_event(accelerator.Event(enable_timing=True))] if events else []
        timed.append((sizes, begun, time.perf_counter() - begun, events))

    Processor._generation_step = step
    try:
        yield passes
    finally:
        Processor._generation_step = plain
        for sizes, begun, seconds, events in timed:
            if events:
                events[1].synchronize()
                seconds = events[0].elapsed_time(events[1]) / 1e3
            passes.append(Pass(*sizes, begun, seconds))


def prompts_of(count: int, longest: int) -> dict[str, list[int]]:
    """Prompts of 1/16 of the longest to the longest."""
    drawn = random.Random(5)
    lengths = [drawn.randint(max(1, longest // 16), longest) for _ in range(count)]
    return {str(number): [drawn.randrange(10, 250) for _ in range(length)] for number, length in enumerate(lengths)}


def run(vb: vbrt.VBModelWrapper, prompts: dict[str, list[int]], new: int) -> tuple[dict[str, Any], list[Pass]]:
    """Answer all prompts; return a row, and the passes."""
    if DEVICE != "cpu":
        gc.collect()
        accelerator.empty_cache()
        accelerator.reset_peak_memory_stats()
    before, steps, begun = moved_bytes(vb), vb.stats().steps, time.perf_counter()
    with watched() as passes:
        found = list(batches.generate_many(vb, prompts, Turn(new)))
        seconds = time.perf_counter() - begun
    tokens = sum(len(result.tokens) for result in found)
    if tokens != new * len(prompts):
        raise RuntimeError(f"{tokens} tokens, expected {new * len(prompts)}: {[r.error for r in found if r.error][:1]}")
    decoding = [one for one in passes if one.tokens == one.sequences == max(p.sequences for p in passes)]
    gaps = [b.begun - a.begun - a.seconds for a, b in itertools.pairwise(decoding)]
    row = {
        "prompts": len(prompts), "prompt_tokens": sum(map(len, prompts.values())), "new": new,
        "seconds": seconds, "tokens_per_s": tokens / seconds, "passes": len(passes),
        "moved_bytes_a_pass": (moved_bytes(vb) - before) / len(passes),
        "sequences": max(one.sequences for one in passes), "step_ms": 1e3 * _median([p.seconds for p in decoding]),
        "between_steps_ms": 1e3 * _median(gaps), "attention": passes[-1].attention,
        "begin_s": passes[0].begun - begun, "prompt_passes_s": sum(p.seconds for p in passes if p not in decoding),
    }  # fmt: skip
    now = vb.stats().steps
    row |= {"replayed": now.captured - steps.captured, "recordings": now.recordings - steps.recordings}
    row |= {"recording_s": (now.record_us - steps.record_us) / 1e6, "eager": dict(now.reasons)}
    return row | (_peak(vb) if DEVICE != "cpu" else {}), passes


def warm_up(vb: vbrt.VBModelWrapper, prompts: dict[str, list[int]]) -> None:
    """Have kernels compiled for passes of all prompts, and of all numbers of sequences that remain of them."""
    names = list(prompts)
    run(vb, prompts, 2)
    while names := names[: len(names) // 2]:
        run(vb, {name: prompts[name] for name in names}, 3)


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _peak(vb: vbrt.VBModelWrapper) -> dict[str, float]:
    """Bytes of the GPU at the most: the allocator's, and what the process has beside it."""
    free, total = accelerator.mem_get_info()
    beside = total - free - accelerator.memory_reserved()
    found = {"peak_bytes": torch.cuda.max_memory_reserved() + beside, "beside_bytes": beside}
    found |= {"peak_allocated_bytes": torch.cuda.max_memory_allocated(), "pages_bytes": vb.plan.budgets["gpu"]}
    return found | {"budget_bytes": vb.plan.gpu_room.limit_bytes if vb.plan.gpu_room else None}


def bound(row: dict[str, Any], passes: list[Pass], resident: list[Pass], link_bytes_s: float) -> dict[str, float]:
    """Return what a run would take whose passes took the longer of their bytes over the link and of the like pass with
    all pages on the GPU; and tokens a second of both."""

    def like(one: Pass) -> float:
        nearest = min(resident, key=lambda p: (abs(p.tokens - one.tokens), abs(p.cached - one.cached)))
        same = sorted((p for p in resident if p.tokens == nearest.tokens), key=lambda p: abs(p.cached - one.cached))
        return statistics.median(p.seconds for p in same[:_LIKE])  # one of several, as one may have been captured

    link_s = row["moved_bytes_a_pass"] / link_bytes_s
    seconds = sum(max(link_s, like(one)) for one in passes)
    tokens = row["prompts"] * row["new"]
    found = {"link_ms": 1e3 * link_s, "compute_s": sum(map(like, passes)), "bound_s": seconds}
    return found | {"bound_tokens_per_s": tokens / seconds, "of_bound": seconds / row["seconds"]}


def offline(options: argparse.Namespace, rows: list[dict[str, Any]]) -> Iterator[None]:
    """Add rows; yields after each."""
    prompts = prompts_of(options.prompts, options.longest)
    link = 1e9 * link_gb_s()
    for case in options.only or ROOMS:
        model = llama_8b(options.layers, DEVICE)  # no other is in memory, which a batch's cache would make do without
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        start = time.perf_counter()
        vb = vbrt.wrap(model, case, gpu_memory=f"{options.memory}GB").materialize(progress=False)
        ready_s = time.perf_counter() - start
        warm_up(vb, prompts)
        row, resident = run(vb, prompts, options.new)
        rows.append({"case": f"{case}, all on the GPU", "ready_s": ready_s, **row})
        yield
        said, room = ROOMS[case]
        vb.set_budget("gpu", room)
        row, passes = run(vb, prompts, options.new)
        row |= bound(row, passes, resident, link) | {"link_bytes_s": link, "fallbacks": list(vb.stats().fallbacks)}
        rows.append({"case": f"{case}, {said}", **row})
        yield
        if options.masks:
            with mock.patch.object(transformers_flash, "flash_refusal", lambda model: "--masks"):
                rows.append({"case": f"{case}, {said}, through masks", **run(vb, prompts, options.new)[0]})
                yield
        vb.close()
        del vb, model
        gc.collect()
        accelerator.empty_cache()


# -- serving ----------------------------------------------------------------------------------------------------------


def save_checkpoint(directory: Path, model: Any) -> None:
    """Save a model with a tokenizer of `_WORDS` words, whose tokens are texts of their own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.generation_config.bos_token_id = model.config.bos_token_id = None
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(_WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def servers(directory: Path, half: int) -> dict[str, list[str]]:
    """Command lines, by what a row says; each gets a port."""
    ours = [sys.executable, "-m", "vbrt", "serve", str(directory), "--name", "served", "--config", "fp4"]
    ours += ["--context", "1024"]
    start = "from transformers.cli.transformers import main; main()"
    theirs = [sys.executable, "-c", start, "serve", str(directory), "--continuous-batching", *PEER_ROOM]
    return {
        "vbrt fp4, all on the GPU": ours,
        "vbrt fp4, half streamed": [*ours, "--budget", str(half)],
        "transformers serve, bf16": theirs,
    }


@contextlib.contextmanager
def served(command: list[str], log: Path) -> Iterator[int]:
    """Start a server, and yield its port when it answers. Raises RuntimeError with its last words."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        until = time.monotonic() + _START_SECONDS
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"no answer after {_START_SECONDS} s: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


class Answer(NamedTuple):
    """Answer of a stream: when it was asked for, when its first and its last text came, and texts that came."""

    asked: float
    first: float
    last: float
    texts: int


def ask(port: int, name: str, seed: int, *, words: int, new: int) -> Answer:
    """Stream one completion of a prompt of so many words. Raises RuntimeError: it is no whole answer."""
    drawn = random.Random(seed)
    prompt = " ".join(f"w{drawn.randrange(1, _WORDS)}" for _ in range(words))
    body = {"model": name, "prompt": prompt, "max_tokens": new, "stream": True, "temperature": 0}
    connection = http.client.HTTPConnection("localhost", port, timeout=120)
    asked, moments, last = time.perf_counter(), [], {}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    for line in reply:
        if line.startswith(b"data: {"):
            last = json.loads(line[6:])
            if last.get("choices") and last["choices"][0].get("text"):
                moments.append(time.perf_counter())
    connection.close()
    if not moments or reply.status != 200:
        raise RuntimeError(f"status {reply.status}, {last}")
    return Answer(asked, moments[0], moments[-1], len(moments))


def users_row(port: int, name: str, users: int, *, rounds: int, words: int, new: int) -> dict[str, Any]:
    """Have so many users ask one after the other question, all at once."""

    def user(number: int) -> list[Answer]:
        return [ask(port, name, 1000 * number + turn, words=words, new=new) for turn in range(rounds)]

    with concurrent.futures.ThreadPoolExecutor(users) as threads:
        found = [answer for answers in threads.map(user, range(users)) for answer in answers]
    seconds = max(answer.last for answer in found) - min(answer.asked for answer in found)
    first = [1e3 * (answer.first - answer.asked) for answer in found]
    spans = [1e3 * (answer.last - answer.first) / (new - 1) for answer in found]
    return {
        "users": users, "requests": len(found), "prompt_tokens": words, "new": new, "seconds": seconds,
        "tokens_per_s": len(found) * new / seconds, "first_ms": statistics.median(first), "first_ms_most": max(first),
        "token_ms": statistics.median(spans), "texts": sum(answer.texts for answer in found),
    }  # fmt: skip


def steps_of(port: int) -> dict[str, int]:
    """Decode steps of a server of vbrt so far, by how they ran; transformers' has no such metrics."""
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=5) as reply:
            found = re.findall(r'decode_steps_total{.*how="(\w+)".*} (\d+)', reply.read().decode())
    except urllib.error.HTTPError:
        return {}
    return {how: int(count) for how, count in found}


def serving(options: argparse.Namespace, rows: list[dict[str, Any]]) -> Iterator[None]:
    """Add rows; yields after each."""
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        directory = Path(folder) / "served"
        model = made_for_serving(options)
        save_checkpoint(directory, model)
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
        del model
        if DEVICE != "cpu":
            gc.collect()
            accelerator.empty_cache()
        for case, command in servers(directory, int(linear * 4.5 / 8 / 2)).items():
            if not any(case.startswith(each) for each in options.only or [""]):
                continue
            name, log, start = str(directory) if "transformers" in case else "served", Path(folder) / "log", time.time()
            with served(command, log) as port:
                ready_s = time.time() - start
                try:
                    for users in (1, max(options.users)):  # kernels are compiled
                        users_row(port, name, users, rounds=1, words=options.words, new=4)
                    for users in options.users:
                        how = {"rounds": options.rounds, "words": options.words, "new": options.new}
                        before = steps_of(port)
                        row = users_row(port, name, users, **how)
                        steps = {how: count - before[how] for how, count in steps_of(port).items()}
                        rows.append({"case": case, "ready_s": ready_s, **row, "steps": steps})
                        yield
                except Exception as error:
                    raise RuntimeError(f"{case}: {error}; it said: {log.read_text()[-2000:]}") from error


def made_for_serving(options: argparse.Namespace) -> Any:
    return llama_8b(options.layers, DEVICE, vocabulary=_WORDS)


# -- tables -----------------------------------------------------------------------------------------------------------


def marks(part: str) -> tuple[str, str]:
    """What stands around a part's table on its page."""
    return f"<!-- {part}: scripts/batch_bench.py --tables -->", f"<!-- end of {part} -->"


def table(part: str) -> str:
    """The table of a part, of its committed results."""
    result = json.loads((RESULTS / f"batch-{part}-nvidia-h200.json").read_text())
    lines = {"offline": _offline_lines, "serving": _serving_lines}[part](result["rows"])
    others = {row["commit"]: row["case"].partition(",")[0] for row in result["rows"] if "commit" in row}
    said = [f"Rows of {case}: commit {commit}, another host of that kind." for commit, case in others.items()]
    return "\n".join([*lines, "", " ".join([named_machine(result["machine"]), *said])])


def _offline_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    def cells(row: dict[str, Any]) -> list[str]:
        bounds = ["–"] * 3
        if "link_ms" in row:
            bounds = [f"{row['link_ms']:.0f}", f"{row['bound_tokens_per_s']:,.0f}", f"{row['of_bound']:.2f}"]
        step = f"{row['step_ms']:.0f} + {row['between_steps_ms']:.0f}"
        memory = f"{row['peak_bytes'] / 1e9:.1f} of {row['budget_bytes'] / 1e9:.0f}"
        return [row["case"], f"{row['tokens_per_s']:,.0f}", step, *bounds, memory]

    heads = "pages on the GPU", "tokens/s", "step + host, ms", "link, ms", "bound, tokens/s", "of it", "GPU memory, GB"
    return markdown_table(heads, map(cells, rows))


def _serving_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    def cells(row: dict[str, Any]) -> list[str]:
        times = [f"{row['first_ms']:.0f}", f"{row['token_ms']:.0f}"]
        return [row["case"], str(row["users"]), f"{row['tokens_per_s']:,.0f}", *times]

    return markdown_table(("server", "users", "tokens/s", "first token, ms", "a later token, ms"), map(cells, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="?", choices=list(PAGES))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--longest", type=int, default=512, help="prompt, in tokens")
    parser.add_argument("--new", type=int, help="tokens of an answer (offline: 128, serving: 64)")
    parser.add_argument("--masks", action="store_true", help="offline: also with transformers' own attention")
    parser.add_argument("--memory", type=int, default=48, help="GB of the GPU, offline")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2, help="requests of a user")
    parser.add_argument("--words", type=int, default=128, help="of a user's prompt")
    parser.add_argument("--only", action="append", help="cases that begin so; offline: fp4 or exact")
    parser.add_argument("--scratch", type=Path, help="folder for a checkpoint of 14 GB")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tables", action="store_true", help="write the tables of the docs, measure nothing")
    options = parser.parse_args()
    if options.tables:
        for part, page in PAGES.items():
            page.write_text(between(page.read_text(), marks(part), table(part)))
        return
    if options.part is None:
        parser.error("expected offline, serving or --tables")
    options.new = options.new or (128 if options.part == "offline" else 64)
    out = options.out or RESULTS / f"batch-{options.part}-nvidia-h200.json"
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for _ in (offline if options.part == "offline" else serving)(options, rows):
        rows[-1]["at_s"] = time.perf_counter() - start
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}), flush=True)
        add_rows(out, {"machine": machine(), "layers": options.layers}, rows)


if __name__ == "__main__":
    main()
