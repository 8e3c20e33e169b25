"""What a process holds while it loads a checkpoint through `from_pretrained` into planes, and how long that takes.
Write benchmarks/results/load-peak-cpu.json.

A checkpoint of a Llama with random bf16 weights is made where there is none. Then, each in a process of its own:

    loading    `from_pretrained` with a `vbrt.QuantizationConfig`, a small budget of host memory and an ssd tier
    encoding   the same, taking turns with encoding a copy of each weight in memory, for the seconds

Memory is sampled: resident and private or shared (tiers are shared memory) is what the process holds; what is mapped
from files counts apart, since the system can drop it at any time.

    python3 scripts/load_peak.py [--gb 2] [--budget 600e6] [--format exact] [--directory DIR] [--out results.json]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHARD_LAYERS = 8
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8}
ALLOWED_BYTES = 400e6  # beside the budget and three times the largest layer


class Sampler(threading.Thread):
    """The largest resident memory of this process, by what it is, in bytes; sampled until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = {"held": 0, "mapped": 0, "all": 0}
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.005):
            self.sample()

    def sample(self) -> None:
        """Take one sample."""
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        anon, mapped, shared = (int(lines[f"Rss{kind}"].split()[0]) << 10 for kind in ("Anon", "File", "Shmem"))
        for what, nbytes in (("held", anon + shared), ("mapped", mapped), ("all", anon + shared + mapped)):
            self.peak[what] = max(self.peak[what], nbytes)

    def stop(self) -> dict[str, int]:
        """Return the peaks."""
        self._done.set()
        self.join()
        return self.peak


def make_checkpoint(directory: Path, gigabytes: float) -> None:
    """Write a checkpoint, one file for some layers, without holding the model."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    layer_bytes = 2 * (SIZES["hidden_size"] ** 2 * 3 + 3 * SIZES["hidden_size"] * SIZES["intermediate_size"])
    layers = max(1, round(gigabytes * 1e9 / layer_bytes))
    config = LlamaConfig(**SIZES, vocab_size=2048, num_hidden_layers=layers, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    groups: dict[str, list[str]] = {}
    for name in shapes:
        number = int(name.split(".")[2]) // SHARD_LAYERS + 1 if ".layers." in name else 0
        groups.setdefault(f"model-{number:05d}.safetensors", []).append(name)
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for file, names in groups.items():
        tensors = {n: torch.randn(shapes[n], generator=generator).mul_(0.02).bfloat16() for n in names}
        save_file(tensors, directory / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in groups.items() for name in names}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(directory)


def encoding(directory: Path, args: argparse.Namespace) -> dict:
    """Load it, and encode a copy of each weight when it is in its pages: the two take turns, so that what else
    the machine does meets both. Seconds of loading are without those of the copies."""
    from transformers import AutoModelForCausalLM

    import vbrt
    from vbrt.saves.load.fill_while_reading import Filling

    apart, alone = Stopwatch(), Stopwatch()
    take = Filling.take

    def take_and_encode(filling: Filling, name: str, weight) -> None:
        take(filling, name, weight)
        with apart:
            copy, handle = weight.clone(), filling.handle_of(name)
            with alone:
                handle.split(copy)

    Filling.take = take_and_encode
    with tempfile.TemporaryDirectory(dir=args.directory) as pages:
        config = vbrt.QuantizationConfig(args.format, tiers=tiers_of(args, pages))
        with Stopwatch() as whole:
            model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=config)
        vbrt.of(model).close()
    seconds, cpu_seconds = whole.seconds - apart.seconds, whole.cpu_seconds - apart.cpu_seconds
    return {
        "encoding_seconds": alone.seconds,
        "encoding_cpu_seconds": alone.cpu_seconds,
        "loading_seconds": seconds,
        "loading_cpu_seconds": cpu_seconds,
        "seconds_over_encoding": seconds / alone.seconds,
        "cpu_seconds_over_encoding": cpu_seconds / alone.cpu_seconds,
    }


class Stopwatch:
    """Adds up the seconds of `with` blocks, and those of the CPUs."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0

    def __enter__(self) -> "Stopwatch":
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.seconds += time.perf_counter() - self._start[0]
        self.cpu_seconds += time.process_time() - self._start[1]


def tiers_of(args: argparse.Namespace, pages: str) -> dict:
    """Return the tiers: a budget of host memory, and files."""
    cpu, ssd = {"budget": int(args.budget)}, {"enabled": True, "path": pages}
    return {"gpu": {"enabled": False}, "cpu": cpu, "ssd": ssd}


def loading(directory: Path, args: argparse.Namespace) -> dict:
    """Load it, and run one token through it."""
    import torch
    from transformers import AutoModelForCausalLM

    import vbrt

    sampler = Sampler()
    sampler.sample()
    _ = vbrt.QuantizationConfig  # imports what is imported late
    before = dict(sampler.peak)
    sampler.start()
    with tempfile.TemporaryDirectory(dir=args.directory) as pages:
        config = vbrt.QuantizationConfig(args.format, tiers=tiers_of(args, pages))
        model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=config)
        peak = dict(sampler.peak)
        model(torch.ones(1, 1, dtype=torch.int64))
        after = sampler.stop()
        vb = vbrt.of(model)
        plan = vb.plan
        largest = max(swap.dense_bytes for swap in plan.swaps)
        allowed = args.budget + 3 * largest + ALLOWED_BYTES
        vb.close()
    return {
        "dense_bytes": plan.dense_bytes,
        "page_bytes": plan.page_bytes,
        "largest_layer_bytes": largest,
        "budget_bytes": int(args.budget),
        "imported": before,
        "peak": peak,
        "peak_with_a_token": after,
        "allowed_bytes": int(allowed),
        "share_of_allowed": peak["held"] / allowed,
    }


def alone(work: str, args: argparse.Namespace) -> dict:
    """Run one of the two in a process of its own."""
    given = ["--work", work, "--gb", str(args.gb), "--budget", str(args.budget), "--format", args.format]
    given += ["--threads", str(args.threads), "--directory", str(args.directory)]
    done = subprocess.run([sys.executable, __file__, *given], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=2.0, help="of bf16 weights in layers")
    parser.add_argument("--budget", type=float, default=600e6, help="bytes of the cpu tier")
    parser.add_argument("--format", default="exact", help="a preset")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="for checkpoint and pages; by default one that is removed")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "load-peak-cpu.json")
    parser.add_argument("--work", choices=("encoding", "loading"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        import torch

        torch.set_num_threads(args.threads)
        print(json.dumps({"encoding": encoding, "loading": loading}[args.work](checkpoint_of(args), args)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        args.directory = args.directory or Path(temporary)
        if not checkpoint_of(args).exists():
            make_checkpoint(checkpoint_of(args), args.gb)
        found = {work: alone(work, args) for work in ("loading", "encoding")}
    from scripts.measuring import machine

    result = {"machine": machine(), "format": args.format, "threads": args.threads, **found}
    print(json.dumps(result, indent=1))
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def load_table(path: Path) -> list[str]:
    """Return the section of docs/measurements.md for a result."""
    result = json.loads(path.read_text())
    load, timed, where = result["loading"], result["encoding"], result["machine"]
    rows = (
        ("weights in layers", load["dense_bytes"]),
        ("pages", load["page_bytes"]),
        ("budget of host memory", load["budget_bytes"]),
        ("largest layer", load["largest_layer_bytes"]),
        ("held after imports", load["imported"]["held"]),
        ("**peak held while loading**", load["peak"]["held"]),
        ("budget + largest layer × 3 + 400 MB", load["allowed_bytes"]),
        ("peak held, with the first token", load["peak_with_a_token"]["held"]),
        ("peak mapped from files, not included", load["peak"]["mapped"]),
    )
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    what = f"A Llama with random bf16 weights, into `{result['format']}` with an ssd tier, {result['threads']} threads."
    seconds = (
        f"Loading takes {timed['loading_seconds']:.1f} s, encoding the same weights {timed['encoding_seconds']:.1f} s"
    )
    ratios = f"{timed['seconds_over_encoding']:.2f} times as long, {timed['cpu_seconds_over_encoding']:.2f} in CPU time"
    return [
        "## loading a checkpoint through `from_pretrained`",
        "",
        f"{what} Held: resident memory without mapped files, tiers included.",
        "",
        "| what | MB |",
        "| --- | --- |",
        *(f"| {what} | {nbytes / 1e6:,.0f} |" for what, nbytes in rows),
        "",
        f"{seconds} from memory, measured alternately, weight by weight: {ratios}.",
        "",
        f"{where['cpu']}, {where['cores']} cores, {versions}, Python {where['python']}, commit {where['commit']}.",
        "",
    ]


def checkpoint_of(args: argparse.Namespace) -> Path:
    """Return the directory of the checkpoint."""
    return args.directory / f"llama-{args.gb:g}gb"


if __name__ == "__main__":
    main()
