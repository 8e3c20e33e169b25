"""Measuring: seconds of functions that take turns, and what a result was measured on."""

import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict:
    import psutil
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    versions = {}
    for package in ("torch", "transformers", "accelerate", "bitsandbytes"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": gpu,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
        "versions": versions,
    }


def named_machine(where: dict) -> str:
    """The line under a table: of what `machine` has returned."""
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    return f"{where['gpu'] or where['cpu']}, {versions}, Python {where['python']}, commit {where['commit']}."


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, of its cells as texts."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return [first, "| --- " * len(head) + "|", *others]


def between(text: str, marks: tuple[str, str], content: str) -> str:
    """A page with what lies between two marks, on lines of its own, made anew."""
    head, _, rest = text.partition(marks[0])
    return f"{head}{marks[0]}\n\n{content}\n\n{marks[1]}{rest.partition(marks[1])[2]}"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(
    functions: dict[str, Callable[[], object]], *, times: int, before: Callable[[], None] | None = None, warm: int = 2
) -> dict[str, float]:
    """Median seconds of each function, taking turns, so that drift hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(times + warm):
        for name, function in functions.items():
            if before is not None:
                before()
            span = seconds(function)
            if turn >= warm:
                taken[name].append(span)
    return {name: statistics.median(spans) for name, spans in taken.items()}


def drop_page_cache() -> None:
    """As root only: what fadvise leaves of mapped files would favour the peer."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1\n")


def moved_bytes(vb) -> int:
    """Bytes that the pages of a wrapped model have moved, over all links."""
    return sum(sum(page.bytes_moved.values()) for page in vb.stack.pages.values())


def bits_a_weight(vb) -> float:
    """Bits of pages a weight of a wrapped model's layers."""
    return 8 * vb.plan.page_bytes / sum(site.parameters for swap in vb.plan.swaps for site in (swap.site, *swap.parts))


def llama_8b(layers: int):
    """A random bf16 Llama of the 8B shape, on the GPU."""
    from vbrt.integrations.token_times import llama_8b

    return llama_8b(layers, "cuda")
