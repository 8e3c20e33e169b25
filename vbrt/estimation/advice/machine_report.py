"""Report of a machine: rates, and kernels beside torch's, each with its prediction; measured in seconds.

Rates are compared with the GPU's data sheet; kernels with the cost model, given the rates that were measured. Weights
rotate through more bytes than caches hold where few tokens make a product read-bound.
"""

import contextlib
import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.config import known_formats
from vbrt.config.format_records import FORMATS
from vbrt.estimation.advice.cost_model import CostModel, default_cost_model
from vbrt.estimation.advice.data_sheets import DataSheet, find_sheet
from vbrt.estimation.advice.machine_rates import Rates, link_gb_s, measure_rates
from vbrt.estimation.advice.option_measurements import device as measured_device
from vbrt.estimation.advice.step_time import experts_us, product_us
from vbrt.formats import PageLayout, WeightPlanes, get_format
from vbrt.formats.joint_planes import join_fields, join_layouts
from vbrt.formats.page import pack
from vbrt.host import accelerator
from vbrt.kernels import resolve
from vbrt.kernels.cuda.tuning import graph_us
from vbrt.kernels.experts import ExpertPages, Gate
from vbrt.kernels.registry import kernel_refusal
from vbrt.model.run_metadata import commit, cpu_name, versions

__all__ = ["Figure", "MachineReport", "describe_machine", "guarded", "measure_machine", "unmeasured"]

_FORMAT, _GATE = "nvfp4", Gate("silu")
_MATRIX = {"gpu": (14336, 4096), "cpu": (5632, 2048)}  # (N, K) of an 8B model's MLP, of a 1B model's
_EXPERTS = {"gpu": 128, "cpu": 32}  # Qwen3-30B-A3B's; fewer where torch's loop over them takes seconds
_HIDDEN, _INNER, _TOP_K = 2048, 768, 8  # Qwen3-30B-A3B's
_READ_BOUND = 16  # tokens up to which weights rotate
_LONG_S = 0.6  # runs of a case on a CPU take about this long
_DRIVER_S = 5.0
_BUSY = 0.5  # of the cores, by the system's load average, from which other programs slow this one


@dataclass(frozen=True, slots=True)
class Figure:
    """Measured figure.

    Attributes:
        part: "rates", "linear", "experts" or "token".
        unit: "GB/s", "TFLOP/s", "µs" or "ms"; rates grow with speed, times shrink.
        value: None: not measured, and `note` says why.
        torch: the same work by torch in bf16 or fp32.
        predicted: by `by`; None: nothing predicts it.
        failed: True if it could not be measured because something broke.
    """

    part: str
    name: str
    unit: str
    value: float | None = None
    torch: float | None = None
    predicted: float | None = None
    by: str = ""
    note: str = ""
    failed: bool = False

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.value is None or not self.predicted else self.value / self.predicted


@dataclass(slots=True)
class MachineReport:
    """Figures of a machine, in the order of their measurement.

    Attributes:
        machine: GPU, CPU, system and versions; no names of hosts or users.
        rates: as measured; None: they could not be.
        sheet: of its GPU; None: there is none.
        notes: kernels that the GPU lacks, launches that were not measured on its kind, fallbacks of the runs.
    """

    machine: dict[str, Any]
    sheet: DataSheet | None = None
    rates: Rates | None = None
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "machine": self.machine,
            "data_sheet": None if self.sheet is None else asdict(self.sheet),
            "rates": None if self.rates is None else asdict(self.rates),
            "cost_model": default_cost_model(self.machine["computes_on"]).to_dict(),
            "figures": [asdict(figure) | {"ratio": figure.ratio} for figure in self.figures],
            "notes": self.notes,
        }


def describe_machine() -> dict[str, Any]:
    """Return GPU, driver, CPU, memory, system and versions."""
    found = {
        "computes_on": _tier(measured_device()),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": psutil.getloadavg()[0],
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "versions": versions() | {"CUDA": torch.version.cuda, "HIP": torch.version.hip},
        "commit": commit(),
    }
    if found["computes_on"] == "cpu":
        return found
    gpu = accelerator.get_device_properties(accelerator.current_device())
    return {
        "gpu": gpu.name,
        "capability": [gpu.major, gpu.minor],
        "multiprocessors": gpu.multi_processor_count,
        "gpu_memory_bytes": gpu.total_memory,
        "driver": _driver(),
        **found,
    }


def measure_machine(report: MachineReport, *, drive: Path | None = None, quick: bool = False) -> Iterator[str]:
    """Measure rates, linear layers and routed experts; yields the name of each part before measuring it.

    Args:
        drive: a directory on the drive to measure; None: no drive.
        quick: rates, and linear layers of three sizes.
    """
    device = measured_device()
    costs = default_cost_model(report.machine["computes_on"])
    report.sheet = find_sheet(report.machine.get("gpu", ""))
    if report.machine["load"] > report.machine["cores"] * _BUSY:
        report.notes.append(
            f"this machine is busy, {report.machine['load']:.1f} threads run or wait on {report.machine['cores']} "
            "cores: an idle one is faster"
        )
    report.notes += unmeasured(device)
    yield "link, memory, products and launches"
    report.figures += guarded("rates", "rates", partial(_rates, report, device, drive))
    if report.rates is None:
        return
    tokens = (1, 64, 512) if quick else (1, 16, 64, 512, 2048)[: 5 if device.type != "cpu" else 4]
    for dtype in (torch.bfloat16,) if device.type != "cpu" else (torch.bfloat16, torch.float32):
        yield f"linear layers, {_name(dtype)}"
        report.figures += guarded(
            "linear", "linear layers", partial(_linear, report.rates, costs, device, dtype, tokens)
        )
    if not quick:
        yield "routed experts"
        report.figures += guarded("experts", "routed experts", partial(_experts, report.rates, costs, device))


def guarded(part: str, name: str, measure: Callable[[], list[Figure]]) -> list[Figure]:
    """Return figures, or one that says why they are missing; the others of a report are measured all the same."""
    try:
        return measure()
    except Exception as error:  # noqa: BLE001  what fails on a machine is a result, and a report shows it
        text = str(error).splitlines()
        first = text[0] if text else type(error).__name__
        if _is_out_of_memory(error):
            return [Figure(part, name, "", note=f"not measured, out of memory ({first}); close other programs")]
        return [Figure(part, name, "", note=f"failed: {type(error).__name__}: {first}", failed=True)]
    finally:
        gc.collect()
        if measured_device().type != "cpu":
            with contextlib.suppress(RuntimeError):  # of an error that broke the context; what follows says so, too
                accelerator.empty_cache()


def unmeasured(device: torch.device) -> list[str]:
    """Return why kernels do not serve a device, and what launches were not measured on its kind."""
    refusal = kernel_refusal(device)
    found = [f"kernels: {refusal}; layers are decoded and multiplied in plain torch"] if refusal else []
    for format in known_formats():
        if not FORMATS[format].lossless:
            note = resolve("linear", "auto", device, format).unmeasured(device) if not refusal else None
            found += [note] if note and note not in found else []
    return found


def _tier(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "gpu"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error).lower()  # the CPU's allocator and pinned memory raise a plain RuntimeError
    return isinstance(error, RuntimeError) and ("out of memory" in said or "can't allocate memory" in said)


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DRIVER_S)
    except (OSError, subprocess.TimeoutExpired):  # as in a container without it
        return None
    return next(iter(done.stdout.split()), None) if done.returncode == 0 else None


# -- rates ------------------------------------------------------------------------------------------------------------


def _rates(report: MachineReport, device: torch.device, drive: Path | None) -> list[Figure]:
    rates, sheet = measure_rates(drive), report.sheet
    report.rates, name = rates, "" if sheet is None else f"data sheet of {sheet.name}"

    def rate(what: str, value: float, unit: str = "GB/s", predicted: float | None = None) -> Figure:
        return Figure("rates", what, unit, value, predicted=predicted, by=name if predicted else "")

    def of_sheet(attribute: str) -> float | None:
        return None if sheet is None else getattr(sheet, attribute)

    found = []
    if device.type != "cpu":
        link = of_sheet("link_gb_s")
        found = [
            rate("link, to the GPU, pinned", rates.link_gb_s, predicted=link),
            rate("link, to the host, pinned", link_gb_s(to_host=True), predicted=link),
            rate("link, to the GPU, pageable", link_gb_s(pinned=False)),
            rate("link, to the host, pageable", link_gb_s(to_host=True, pinned=False)),
            rate("memory of the GPU, read and written", rates.memory_gb_s, predicted=of_sheet("memory_gb_s")),
        ]
    found.append(rate("host memory, read and written", rates.host_gb_s))
    if drive is not None:
        found.append(rate("drive, read in order", rates.drive_gb_s))
    return [
        *found,
        rate("products, bf16", rates.tflops, "TFLOP/s", of_sheet("tflops")),
        rate("products, fp32", rates.fp32_tflops, "TFLOP/s", of_sheet("fp32_tflops")),
        rate("experts by the CPU", rates.experts_gb_s),
        rate("launch of an operator", rates.launch_us, "µs"),
    ]


# -- kernels ----------------------------------------------------------------------------------------------------------


def _linear(
    rates: Rates, costs: CostModel, device: torch.device, dtype: torch.dtype, tokens: Sequence[int]
) -> list[Figure]:
    n, k = _MATRIX[_tier(device)]
    weight = _random((n, k), dtype, device)
    kernel = resolve("linear", "auto", device, _FORMAT)
    coarse, layout = _coarse(weight, kernel.page_order(_FORMAT))
    planes = WeightPlanes(_FORMAT, (n, k), dtype, coarse)
    packed, dense = _copies(planes, layout.nbytes, device), [weight]
    dense += [weight.clone() for _ in range(_count(weight.nbytes, device) - 1)]
    found = []
    for t in tokens:
        x = _random((t, k), dtype, device)
        few = slice(None if t <= _READ_BOUND else 1)
        ours, torchs = _side_by_side(
            [partial(kernel.run, x, each) for each in packed[few]],
            [partial(F.linear, x, each) for each in dense[few]],
            captured=device.type != "cpu" and kernel.backend != "reference",
            device=device,
        )
        predicted = product_us(n * k, layout.nbytes, t, rates, costs, format=_FORMAT, dtype=_name(dtype, whole=True))
        name = f"{n} x {k}, {t} token{'s' * (t > 1)}, {_name(dtype)}"
        found.append(Figure("linear", name, "µs", ours, torchs, predicted, f"cost model of {costs}"))
    return found


def _experts(rates: Rates, costs: CostModel, device: torch.device) -> list[Figure]:
    experts, hidden, inner, top_k = _EXPERTS[_tier(device)], _HIDDEN, _INNER, _TOP_K
    shapes = {"up": (2 * inner, hidden), "down": (hidden, inner)}
    weights = {part: _random(shape, torch.bfloat16, device) for part, shape in shapes.items()}
    up, down = (resolve(f"experts_{part}", "auto", device, _FORMAT) for part in shapes)
    parts = {part: _coarse(weight, up.page_order(_FORMAT)) for part, weight in weights.items()}
    layout = join_layouts({part: own for part, (_, own) in parts.items()})
    page = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    pack(join_fields({part: fields for part, (fields, _) in parts.items()}), layout, page)
    memory = page.expand(experts, -1).contiguous()
    pages = ExpertPages(_FORMAT, torch.bfloat16, shapes, layout, list(memory))
    if device.type != "cpu":
        addresses = memory.data_ptr() + layout.nbytes * torch.arange(experts, dtype=torch.int64, device=device)
        pages = replace(pages, addresses=addresses)
    dense = {part: weight.expand(experts, -1, -1).contiguous() for part, weight in weights.items()}
    found = []
    for t in (1, 64, 512) if device.type != "cpu" else (1, 16):
        x = _random((t, hidden), torch.bfloat16, device)
        routed = [_routing(t, experts, top_k, device) for _ in range(experts // top_k if t <= _READ_BOUND else 1)]

        def ours(ids: Tensor, shares: Tensor, x: Tensor = x) -> Tensor:
            return down.run(up.run(x, ids, pages, gate=_GATE), ids, shares, pages)

        ours_us, torch_us = _side_by_side(
            [partial(ours, ids, shares) for ids, shares in routed],
            [partial(_dense_experts, x, _groups(*each), dense) for each in routed],
            captured=device.type != "cpu" and up.by_address(layout, device),  # else the host reads the routing
            device=device,
        )
        elements = sum(n * k for n, k in shapes.values())
        sizes = (elements, layout.nbytes, experts, top_k, t)
        predicted = experts_us(*sizes, rates, costs, format=_FORMAT)
        name = f"{experts} of {hidden} x {inner}, {top_k} a token, {t} token{'s' * (t > 1)}, bf16"
        found.append(Figure("experts", name, "µs", ours_us, torch_us, predicted, f"cost model of {costs}"))
    return found


def _routing(tokens: int, experts: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids_Tk = torch.rand(tokens, experts, dtype=torch.float32, device=device).argsort(dim=1)[:, :top_k].contiguous()
    return ids_Tk, torch.rand(tokens, top_k, dtype=torch.float32, device=device).softmax(-1).to(torch.bfloat16)


def _groups(ids_Tk: Tensor, shares_Tk: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Return (expert, its tokens, their shares), known before a graph is captured."""
    found = []
    for expert in ids_Tk.unique().tolist():
        rows, slots = torch.where(ids_Tk == expert)
        found.append((expert, rows, shares_Tk[rows, slots][:, None]))
    return found


def _dense_experts(x: Tensor, groups: list[tuple[int, Tensor, Tensor]], dense: dict[str, Tensor]) -> Tensor:
    y = torch.zeros_like(x)
    for expert, rows, shares in groups:
        gate, up = F.linear(x[rows], dense["up"][expert]).chunk(2, -1)
        y.index_add_(0, rows, F.linear(F.silu(gate) * up, dense["down"][expert]) * shares)
    return y


def _coarse(weight: Tensor, order: Any) -> tuple[dict[str, Tensor], PageLayout]:
    """Return the planes of a weight in the order that a kernel is fast on, and their layout."""
    format, shape = get_format(_FORMAT), tuple(weight.shape)
    coarse = format.encode(weight)
    ordered = None if order is None else order.pack(coarse, shape)
    if ordered is None:
        return coarse, format.layout(shape, weight.dtype)
    return ordered, order.layout(shape)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).mul_(0.02).to(dtype)


def _name(dtype: torch.dtype, *, whole: bool = False) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if whole else {"bfloat16": "bf16", "float32": "fp32"}[name]


def _count(nbytes: int, device: torch.device) -> int:
    """Return how many copies of so many bytes caches do not hold."""
    beyond = (300 if device.type != "cpu" else 96) << 20
    return max(1, min(16, -(-beyond // nbytes)))


def _copies(planes: WeightPlanes, nbytes: int, device: torch.device) -> list[WeightPlanes]:
    copies = range(_count(nbytes, device) - 1)
    again = ({name: tensor.clone() for name, tensor in planes.coarse.items()} for _ in copies)
    return [planes, *(replace(planes, coarse=coarse) for coarse in again)]


@torch.no_grad()
def _side_by_side(*sets: Sequence[Callable[[], object]], captured: bool, device: torch.device) -> list[float]:
    """Return the microseconds of one call of each set; the sets take turns.

    captured: the median of CUDA graphs. Else the least, as of rates: where other programs hold up one thread of a call,
    all wait for it.
    """

    def run(calls: Sequence[Callable[[], object]]) -> None:
        for call in calls:
            call()

    if captured:
        taken = graph_us(*(partial(run, calls) for calls in sets))
        return [us / len(calls) for us, calls in zip(taken, sets, strict=True)]
    spans: list[list[float]] = [[] for _ in sets]
    start = time.perf_counter()
    while len(spans[0]) < 2 or time.perf_counter() - start < _LONG_S:
        for calls, own in zip(sets, spans, strict=True):
            before = time.perf_counter()
            run(calls)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            own.append((time.perf_counter() - before) / len(calls))
    return [1e6 * min(own[1:]) for own in spans]  # the first may build kernels
