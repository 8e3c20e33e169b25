"""Machine rates: bandwidths, TFLOP/s and launch time, measured here or from a GPU's data sheet."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vbrt.config.argument_checks import check_instance
from vbrt.estimation.advice.cpu_expert_rates import FEW_ROWS, experts_gb_s, few_rows
from vbrt.estimation.advice.data_sheets import DataSheet, named_sheet, sheets
from vbrt.host import accelerator
from vbrt.host.safe_files import cache_folder, read_bounded, read_into, write_file
from vbrt.model.run_metadata import cpu_name
from vbrt.report.progress import Progress
from vbrt.residency.miss_policy import CPU_GB_PER_S

__all__ = [
    "Rates",
    "data_sheet",
    "device_name",
    "keep_rates",
    "kept_rates",
    "link_gb_s",
    "measure_rates",
    "rates_file",
    "rates_of_sheet",
]

_MAX_BYTES = 1 << 16
_RATES = 8  # measured ones, for the progress: with a GPU its link, without few rows
_LONG_S = 1.0  # runs of this total length suffice
_FP8_CAPABILITY = (8, 9)  # first compute capability with FP8 matmuls
#: share of `tflops` of few-row matmuls, with bf16 and with 4-bit matrices, where it was not measured: from two Zen 5
#: cores
_FEW, _FEW_DECODED = 0.52, 0.38


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a machine.

    Attributes:
        name: of the GPU, or of the CPU on a machine without one.
        link_gb_s: H2D from pinned memory.
        memory_gb_s: memory that kernels read; measured by copies, as bytes read plus written.
        tflops: bf16 matmuls.
        launch_us: host time of one operator.
        drive_gb_s: sequential reads.
        source: "measured here" or "data sheet".
        fp32_tflops: fp32 matmuls.
        fp8: True if the GPU has FP8 matmuls.
        host_gb_s: host memory, read and written by all cores; default: a host of 16 cores.
        experts_gb_s: 4-bit pages with which the CPU computes weights missing on the GPU; by default assumed.
        few_tflops: bf16 matmuls of `FEW_ROWS` rows on a CPU; 0 (also in older files): a share of `tflops`.
        few_decoded_tflops: the same with 4-bit matrices, decoded first; 0: a share of `tflops`.
        most_pairs: tokens per expert up to which the CPU multiplies by codes; beyond, it decodes the matrix first.
    """

    name: str
    link_gb_s: float
    memory_gb_s: float
    tflops: float
    launch_us: float = 5.0
    drive_gb_s: float = 3.0
    source: str = "data sheet"
    fp32_tflops: float = 0.0
    fp8: bool = False
    host_gb_s: float = 90.0
    experts_gb_s: float = CPU_GB_PER_S
    few_tflops: float = 0.0
    few_decoded_tflops: float = 0.0
    most_pairs: int = 16

    def flops_of(self, dtype: str) -> float:
        """Return the FLOP/s of matmuls in a dtype, by torch's name."""
        return 1e12 * (self.fp32_tflops or self.tflops if dtype == "float32" else self.tflops)

    def repack_s(self, *, decoded: bool) -> float:
        """Return the seconds per weight in which torch's matmul repacks a matrix, whatever the number of rows; decoded:
        including decoding it."""
        measured, share = (self.few_decoded_tflops, _FEW_DECODED) if decoded else (self.few_tflops, _FEW)
        few = measured or share * self.tflops
        return max(0.0, 2e-12 * FEW_ROWS * (1 / few - 1 / self.tflops))


def data_sheet(name: str) -> Rates:
    """Return a GPU's rates by name, in any case. Raises ArgumentError: an unknown GPU; lists the known ones."""
    check_instance(name, str, "data_sheet(): name", f"one of {', '.join(sheets())}")
    return rates_of_sheet(named_sheet(name))


def rates_of_sheet(sheet: DataSheet) -> Rates:
    """Return the rates of a data sheet."""
    return Rates(
        sheet.name,
        sheet.link_gb_s,
        sheet.memory_gb_s,
        sheet.tflops,
        source="data sheet" if sheet.has_bf16 else "data sheet, fp16 as its tensor cores have no bf16",
        fp32_tflops=sheet.fp32_tflops,
        fp8=sheet.fp8_tflops > 0,
    )


def rates_file() -> Path:
    """Return the file of this machine's stored rates; it need not exist."""
    return cache_folder() / "machine.json"


def kept_rates() -> Rates | None:
    """Return the stored rates of this machine; None without them, or if the GPU has changed."""
    try:
        found = Rates(**json.loads(read_bounded(rates_file(), _MAX_BYTES).decode()))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.name == device_name() else None


def measure_rates(drive: Path | None = None) -> Rates:
    """Measure this machine, in some seconds; `vbrt tune --machine` also stores the result for later processes.

    drive: a directory on the drive to measure; by default that of temporary files.
    """
    gpu = accelerator.is_used()
    device = torch.device(accelerator.TYPE if gpu else "cpu")
    with Progress("measuring this machine", _RATES, unit="rates") as work:

        def rate(name: str, measure: Callable[..., Any], *args: Any) -> Any:
            work.at(name)
            found = measure(*args)
            work.done()
            return found

        return Rates(
            device_name(),
            rate("link", link_gb_s) if gpu else 0.0,
            rate("memory", _memory_gb_s, device),
            rate("products", _tflops, device, 8192 if gpu else 1024, torch.bfloat16),
            rate("launches", _launch_us, device),
            rate("drive", _drive_gb_s, drive),
            "measured here",
            rate("products in fp32", _tflops, device, 4096 if gpu else 1024, torch.float32),
            accelerator.vendor(device) == "nvidia" and accelerator.get_device_capability() >= _FP8_CAPABILITY,
            rate("host memory", _host_gb_s),
            rate("experts", experts_gb_s),
            *(() if gpu else rate("products of few rows", few_rows)),
        )


def keep_rates(rates: Rates) -> None:
    """Store rates for later processes. Raises OSError: the file cannot be written."""
    rates_file().parent.mkdir(parents=True, exist_ok=True)
    write_file(rates_file(), json.dumps(asdict(rates), indent=1).encode())


def device_name() -> str:
    """Return the GPU's name; without one the CPU's, with the number of compute threads."""
    gpu = accelerator.is_used()
    return accelerator.get_device_name() if gpu else f"{cpu_name()}, {torch.get_num_threads()} threads"


def _best(run: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Return the least seconds of several runs after a warm-up; fewer where they are long."""
    spans = []
    while len(spans) < 2 or (len(spans) <= times and sum(spans) < _LONG_S):
        if device.type == accelerator.TYPE:
            accelerator.synchronize()
        start = time.perf_counter()
        run()
        if device.type == accelerator.TYPE:
            accelerator.synchronize()
        spans.append(time.perf_counter() - start)
    return min(spans[1:])


def link_gb_s(*, to_host: bool = False, pinned: bool = True) -> float:
    """Return the GB/s of 64 MiB copies to the GPU, or `to_host`, from or to pinned or pageable memory."""
    host = torch.ones(1 << 30, dtype=torch.uint8, device="cpu", pin_memory=pinned and accelerator.pins())
    there = torch.empty(64 << 20, dtype=torch.uint8, device=accelerator.TYPE)

    def run() -> None:
        for part in host.split(len(there)):
            target, source = (part, there) if to_host else (there, part)
            target.copy_(source, non_blocking=pinned)

    return len(host) / _best(run, there.device, times=3) / 1e9


def _memory_gb_s(device: torch.device) -> float:
    one = torch.zeros((1024 if device.type == accelerator.TYPE else 256) << 20, dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    return 2 * len(one) / _best(lambda: other.copy_(one), device) / 1e9


def _host_gb_s() -> float:
    one, other = (torch.ones(32 << 20, dtype=torch.float32, device="cpu") for _ in range(2))
    return 3 * one.nbytes / _best(lambda: one.add_(other), one.device) / 1e9


def _tflops(device: torch.device, n: int, dtype: torch.dtype) -> float:
    one = torch.randn(n, n, dtype=torch.float32, device=device).to(dtype)
    return 2 * n**3 / _best(lambda: one @ one, device) / 1e12


def _launch_us(device: torch.device) -> float:
    one = torch.zeros(16, dtype=torch.float32, device=device)

    def run() -> None:
        for _ in range(1000):
            one.add_(1.0)

    return 1e6 * _best(run, device, times=9) / 1000


def _drive_gb_s(directory: Path | None = None) -> float:
    """Return the GB/s of sequential reads of a new file; page-cache rate where the file stays in memory."""
    block = os.urandom(1 << 20) * 16
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        for _ in range(16):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        into, start = bytearray(len(block)), time.perf_counter()
        for at in range(16):
            read_into(file.fileno(), [memoryview(into)], at * len(block))
        return 16 * len(block) / (time.perf_counter() - start) / 1e9
