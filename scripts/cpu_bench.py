"""vbrt on a CPU beside llama.cpp (pip install llama-cpp-python gguf) and unwrapped torch, on one machine.

    python scripts/cpu_bench.py --prepare --files DIR           # writes the models, random ones; takes 6 GB there
    python scripts/cpu_bench.py --files DIR                     # everything
    python scripts/cpu_bench.py --part published published_prompt --out benchmarks/results/cpu-peers-published.json
    python scripts/cpu_bench.py --files DIR --part decode --only "llama.cpp Q4_0" "vbrt fp4, bf16" --rounds 2

Contenders take turns, each in a process of its own. What a call measures goes into benchmarks/results/cpu-peers.json,
beside what calls before it have measured at the same commit; `scripts/bench --tables` makes the tables. Contenders that
cannot run here are left out, and named with the reason.

`--instructions avx2` holds vbrt and torch to what a CPU without AVX-512 has, and writes cpu-peers-avx2.json. llama.cpp
is held to it when it is built:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON" \\
        pip install --no-binary llama-cpp-python llama-cpp-python gguf
    python scripts/cpu_bench.py --files DIR --instructions avx2 --part decode prefill

On a machine that computes other things as well, `--one-thread` takes seconds of the CPU, of one thread.
"""

import argparse
import contextlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # scripts are no package

from scripts.cpu_contenders import CONTENDERS, Contender, Process, absent, version
from scripts.cpu_encoding import encoded
from scripts.measuring import machine

_PUBLISHED = tuple(name for name, one in CONTENDERS.items() if one.weights == "own")
_OF_PRESETS = tuple(name for name in CONTENDERS if name not in _PUBLISHED)
#: contenders of a part, unless the command line names them
USUAL = {
    "decode": _OF_PRESETS,
    "outside": ("vbrt fp4, bf16", "vbrt fp4, bf16, int8"),
    "prefill": (
        "torch fp32",
        "torch bf16",
        "vbrt fp4, bf16",
        "vbrt fp4, fp32",
        "vbrt fp4, bf16, int8",
        "llama.cpp Q4_0",
    ),
    "matvec": _OF_PRESETS,
    "ssd": ("vbrt fp4, bf16",),
    "moe": ("torch bf16", "vbrt fp4, bf16", "llama.cpp Q4_0"),
    "start": ("torch bf16", "vbrt fp4, bf16", "llama.cpp Q4_0"),
    "encode": (),
    "published": _PUBLISHED,
    "published_prompt": _PUBLISHED,
}
#: of the part encode: a way and a preset of the Llama, or of the Qwen3-MoE
ENCODINGS = {
    **{f"{way} {preset}": 0 for way in ("wrap", "load", "convert") for preset in ("fp4", "exact")},
    **{f"wrap {preset}": 0 for preset in ("mxfp4", "nf4", "quantile")},
    "wrap fp4, experts": 1,
}
PROMPT, NEW, LONG = 16, 24, 512
_WARM = {"new": 6, "tokens": 64}  # of the turn before those that count
IOS = ("direct", "buffered")
_PIECE = 2 << 20  # bytes of a read of the drive's rate
#: environment that holds torch and its libraries to AVX2
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
HELD = {name: {"VBRT_INSTRUCTION_SET": name, **_AVX2} for name in ("avx2", "avx2-vnni")}
MATRICES = ("5632x2048", "2048x5632")


class Bench:
    """What is measured: parts, by name."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._shapes, self._files, self._rounds = options.shapes, options.files, options.rounds
        self._only, self._matrices, self._ios = options.only, options.matrices, options.io
        self._encodings = options.encodings
        self.left_out: dict[str, str] = {}

    def contenders(self, part: str) -> list[Contender]:
        """Return those of a part that can run here."""
        found = []
        for name in self._only or USUAL[part]:
            why = absent(CONTENDERS[name])
            if why is None:
                found.append(CONTENDERS[name])
            else:
                self.left_out[name] = why
        return found

    @contextlib.contextmanager
    def running(self, part: str, shape: str) -> Iterator[dict[str, Process]]:
        """Have the contenders of a part loaded."""
        with contextlib.ExitStack() as stack:
            made = ((one.name, Process(one, shape, self._files)) for one in self.contenders(part))
            yield {name: stack.enter_context(process) for name, process in made}

    def turns(self, part: str, shape: str, do: str, **given: int) -> dict[str, dict]:
        """Return the seconds of all turns, by contender; the first turn of each is not counted."""
        with self.running(part, shape) as processes:
            for process in processes.values():
                process.ask(do, **{key: _WARM.get(key, value) for key, value in given.items()})
            rows: dict[str, dict] = {name: {} for name in processes}
            for _ in range(self._rounds):
                for name, process in processes.items():
                    for key, values in process.ask(do, **given).items():
                        if isinstance(values, list):
                            rows[name][key] = rows[name].get(key, []) + values
        return rows

    def decode(self) -> dict[str, dict]:
        """A token at a time of the Llama, greedy, behind a short prompt."""
        return self.turns("decode", self._shapes[0], "decode", prompt=PROMPT, new=NEW)

    def prefill(self) -> dict[str, dict]:
        """A prompt of the Llama."""
        return self.turns("prefill", self._shapes[0], "prefill", tokens=LONG)

    def published(self) -> dict[str, dict]:
        """A token at a time of SmolLM2-135M in its own bits, greedy, behind a short prompt."""
        return self.turns("published", "smollm2", "decode", prompt=PROMPT, new=NEW)

    def published_prompt(self) -> dict[str, dict]:
        """A prompt of SmolLM2-135M in its own bits."""
        return self.turns("published_prompt", "smollm2", "prefill", tokens=LONG)

    def outside(self) -> dict[str, dict]:
        """What a token of the Llama takes outside of 4-bit products."""
        return self.turns("outside", self._shapes[0], "outside", prompt=PROMPT, new=NEW)

    def moe(self) -> dict[str, dict]:
        """A token at a time of the Qwen3-MoE."""
        return self.turns("moe", self._shapes[1], "decode", prompt=PROMPT, new=NEW)

    def matvec(self) -> dict[str, dict]:
        """One product of a matrix and a token."""
        rows = {}
        for matrix in self._matrices:
            for name, row in self.turns("matvec", matrix, "product", times=8).items():
                rows[f"{matrix}, {name}"] = row
        return rows

    def start(self) -> dict[str, dict]:
        """From starting a process to its first token."""
        rows: dict[str, dict] = {}
        for _ in range(self._rounds):
            for one in self.contenders("start"):
                ways = (
                    {f"{one.name}, encoding": {"encode": True}, one.name: {}} if one.kind == "vbrt" else {one.name: {}}
                )
                for name, options in ways.items():
                    with Process(one, self._shapes[0], self._files, **options) as process:
                        process.ask("decode", prompt=PROMPT, new=2)
                        row = rows.setdefault(name, {"seconds": [], "imports": []})
                        row["seconds"].append(time.perf_counter() - process.begun)
                        row["imports"].append(process.started["imports"])
        return rows

    def encode(self) -> dict[str, dict]:
        """A whole model from bf16 into planes."""
        rows: dict[str, dict] = {name: {"seconds": []} for name in self._encodings}
        for _ in range(self._rounds):
            for name, row in rows.items():
                way, preset = name.partition(",")[0].split()
                found = encoded(way, preset, checkpoint_folder(self._files, self._shapes[ENCODINGS[name]]))
                row["seconds"].append(found["seconds"])
                row["weights"] = found["weights"]
        return rows

    def ssd(self) -> dict[str, dict]:
        """A token with half of the pages on the drive, beside all of them in memory and the drive's own rate."""
        rows = {}
        for one in (one for one in self.contenders("ssd") if one.kind == "vbrt"):
            with Process(one, self._shapes[0], self._files) as whole:
                whole.ask("decode", prompt=PROMPT, new=NEW)
                resident = whole.ask("decode", prompt=PROMPT, new=NEW)["seconds"]
                pages = whole.ask("stats")["page_bytes"]
            for io in self._ios:
                with tempfile.TemporaryDirectory(dir=self._files) as folder:
                    row = self._half(one, pages, {"enabled": True, "path": folder, "io": io})
                rows[f"{one.name}, {io}"] = row | {"resident": resident, "page_bytes": pages}
        return rows

    def _half(self, one: Contender, pages: int, ssd: dict) -> dict:
        tiers, folder = {"cpu": {"budget": pages // 2}, "ssd": ssd}, Path(ssd["path"])
        with Process(one, self._shapes[0], self._files, tiers=tiers) as half:
            half.ask("decode", prompt=PROMPT, new=6)
            before, row, passes = half.ask("stats"), {"seconds": [], "drive": []}, 0
            for _ in range(6 * self._rounds):  # short turns: drives that are shared have bursts
                row["seconds"] += half.ask("decode", prompt=PROMPT, new=4)["seconds"]
                row["drive"].append(drive_rate(folder, pages - pages // 2, direct=ssd["io"] == "direct"))
                passes += 4
            after = half.ask("stats")
        moved = sum(after["moved"].values()) - sum(before["moved"].values())
        return row | {"moved": moved / passes, "read": (after["read"] - before["read"]) / passes}


def checkpoint_folder(files: Path, shape: str) -> Path:
    """Return the directory of a dense model that `--prepare` wrote."""
    from scripts import cpu_models

    return cpu_models.checkpoint(files, shape)


def drive_rate(folder: Path, nbytes: int, *, direct: bool) -> float:
    """Return bytes a second of reading so many bytes of the files of a directory into memory, by four threads."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    for place in range(0, nbytes, mmap.PAGESIZE):
        view[place] = 0
    pieces = [(path, at) for path in folder.rglob("*.page") for at in range(0, path.stat().st_size, _PIECE)]
    places = range(0, nbytes - _PIECE + 1, _PIECE)

    def read(piece: tuple[Path, int], place: int) -> int:
        fd = os.open(piece[0], os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            return os.preadv(fd, [view[place : place + _PIECE]], piece[1])
        finally:
            os.close(fd)

    with ThreadPoolExecutor(4) as pool:
        start = time.perf_counter()
        done = sum(pool.map(read, pieces, places))
        return done / (time.perf_counter() - start)


def prepare(options: argparse.Namespace) -> None:
    """Write the files of all contenders that can run here."""
    import torch

    from scripts import cpu_models

    wanted = [CONTENDERS[name] for name in options.only or CONTENDERS if absent(CONTENDERS[name]) is None]
    for shape in options.shapes:
        cpu_models.checkpoint(options.files, shape)
        for one in wanted:
            if one.kind == "vbrt":
                cpu_models.saved_planes(options.files, shape, one.weights, getattr(torch, one.dtype))
            elif one.kind == "llama.cpp":
                cpu_models.gguf_file(options.files, shape, one.weights)


def merged(
    path: Path, part: str, rows: dict[str, dict], left_out: dict[str, str], instructions: str | None = None
) -> dict:
    """Return the results of a file with those of a part added: seconds of the same commit join, others give way."""
    result = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    about = machine()
    before = result["parts"].get(part, {"rows": {}})
    kept = before["rows"] if before.get("commit") == about["commit"] else {}
    for name, row in rows.items():
        old = kept.get(name, {})
        kept[name] = {
            key: old[key] + value if isinstance(value, list) and key in old else value for key, value in row.items()
        }
    about["versions"] |= {"llama-cpp-python": version("llama.cpp")}
    about["date"] = time.strftime("%Y-%m-%d")
    about |= {"instructions": instructions} if instructions else {}
    result["machine"] = about
    result["parts"][part] = {"commit": about["commit"], "rows": kept, "absent": left_out}
    return result


def shown(rows: dict[str, dict]) -> str:
    """Return the medians in words."""
    return "\n".join(f"  {name}: {statistics.median(row['seconds']) * 1e3:.2f} ms" for name, row in rows.items())


def parsed(arguments: Iterable[str] | None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "vbrt-cpu-bench")
    parser.add_argument("--prepare", action="store_true", help="write the files, measure nothing")
    parser.add_argument("--part", nargs="*", choices=USUAL, default=list(USUAL))
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, help="these contenders")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--matrices", nargs="*", choices=MATRICES, default=list(MATRICES), help="of the part matvec")
    parser.add_argument("--io", nargs="*", choices=IOS, default=list(IOS), help="of the part ssd")
    parser.add_argument("--encodings", nargs="*", choices=ENCODINGS, default=list(ENCODINGS), help="of the part encode")
    parser.add_argument("--shapes", nargs=2, default=["1b", "moe"], help="of the Llama, and of the Qwen3-MoE")
    parser.add_argument("--instructions", choices=HELD, help="hold vbrt and torch to an instruction set")
    parser.add_argument("--one-thread", action="store_true", help="seconds of the CPU, of one thread")
    parser.add_argument("--out", type=Path, help="default: cpu-peers.json of benchmarks/results")
    options = parser.parse_args(arguments)
    held = f"-{options.instructions}" if options.instructions else ""
    name = "cpu-one-thread" if options.one_thread else "cpu-peers"
    options.out = options.out or ROOT / "benchmarks" / "results" / f"{name}{held}.json"
    return options


def main(arguments: Iterable[str] | None = None) -> None:
    options = parsed(arguments)
    os.environ.update(HELD.get(options.instructions, {}))  # of the contenders' processes
    os.environ.update({"OMP_NUM_THREADS": "1"} if options.one_thread else {})
    if options.prepare:
        prepare(options)
        return
    for part in options.part:
        bench = Bench(options)
        measure: Callable[[], dict[str, dict]] = getattr(bench, part)
        rows = measure()
        print(f"{part}: {measure.__doc__}\n{shown(rows)}", flush=True)
        for name, why in bench.left_out.items():
            print(f"  {name}: {why}")
        held = merged(options.out, part, rows, bench.left_out, options.instructions)
        options.out.write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    main()
