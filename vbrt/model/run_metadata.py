"""Metadata of a timeline: models, configs, machine, versions."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from vbrt.host import accelerator
from vbrt.model.attachment import Attachment
from vbrt.report.run_header import Ran
from vbrt.residency.plan import format_bytes

__all__ = ["commit", "cpu_name", "versions", "what_ran"]

_ROOT = Path(__file__).resolve().parent.parent.parent
_PACKAGES = ("vbrt", "torch", "triton", "transformers")
_GIT_SECONDS = 2.0


def what_ran(attachments: Sequence[Attachment]) -> Ran:
    """Return the metadata of models on one runtime."""
    settings = attachments[0].settings
    return Ran(
        tuple(map(_model, attachments)),
        settings.source,
        settings.to_dict(),
        _machine(attachments[0].stack.device),
        versions(),
        commit(),
        datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _model(attachment: Attachment) -> str:
    plan = attachment.plan
    formats = sorted({swap.format for swap in plan.swaps})
    own = f"{attachment.name}: " if attachment.prefix else ""
    return (
        f"{own}{type(attachment.model).__name__}, {format_bytes(plan.dense_bytes)} dense, "
        f"{len(plan.swaps)} layers in {', '.join(formats) or 'no format'}"
    )


def _machine(device: torch.device) -> str:
    parts = [f"{cpu_name()}, {os.cpu_count()} cores, {format_bytes(psutil.virtual_memory().total)}"]
    if device.type == accelerator.TYPE:
        gpu = accelerator.get_device_properties(device)
        parts.insert(0, f"{gpu.name}, {format_bytes(gpu.total_memory)}")
    return " · ".join(parts)


def cpu_name() -> str:
    """Return the CPU's model name; the architecture as a fallback."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:  # not Linux
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions() -> dict[str, str]:
    """Return the versions of Python, vbrt and the libraries under it that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the git commit of vbrt's checkout; None without a checkout or git."""
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
