"""Encoding a whole model on a CPU, in the ways that users have; each call in a process of its own.

    python scripts/cpu_encoding.py wrap fp4 DIRECTORY

    wrap       a model in memory: vbrt.wrap(model, preset).materialize()
    load       vbrt.load of a dense checkpoint
    convert    vbrt convert of a dense checkpoint into a save

It prints seconds and how many weights were encoded, as JSON. Kernels are loaded, or built, before the clock starts.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # scripts are no package

__all__ = ["WAYS", "encoded"]


def encoded(way: str, preset: str, directory: Path) -> dict[str, float]:
    """Return "seconds" and "weights" of encoding the dense checkpoint of a directory, in a process of its own."""
    command = [sys.executable, __file__, way, preset, str(directory)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def wrap(directory: Path, preset: str) -> float:
    """Return the seconds of wrapping a model that is in memory, and encoding it."""
    import vbrt

    model = _dense(directory)
    start = time.perf_counter()
    with vbrt.wrap(model, preset) as vb:
        vb.materialize(progress=False)
        return time.perf_counter() - start


def load(directory: Path, preset: str) -> float:
    """Return the seconds of loading a dense checkpoint."""
    import vbrt

    model = _outline(directory)
    start = time.perf_counter()
    with vbrt.load(directory, model, preset, progress=False):
        return time.perf_counter() - start


def convert(directory: Path, preset: str) -> float:
    """Return the seconds of converting a dense checkpoint."""
    from vbrt.cli.main import main as command

    with tempfile.TemporaryDirectory(dir=directory.parent) as folder, contextlib.redirect_stdout(sys.stderr):
        start = time.perf_counter()
        status = command(["convert", str(directory), str(Path(folder) / "save"), "--config", preset])
        seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"vbrt convert ended with {status}")
    return seconds


WAYS = {"wrap": wrap, "load": load, "convert": convert}


def _dense(directory: Path):
    """Return the model in memory of its own, not mapped from the file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _outline(directory: Path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).eval()


def main() -> None:
    way, preset, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    import torch

    import vbrt
    import vbrt.saves.convert.convert
    from vbrt.kernels.cpu import build

    assert vbrt.wrap and vbrt.load  # imported, before the clock starts
    for source in ("encode", "linear", "experts"):
        build.refusal(torch.device("cpu"), source)
    plan = vbrt.make_plan(_outline(directory), vbrt.load_config(preset))
    seconds = WAYS[way](directory, preset)
    weights = sum(swap.dense_bytes // getattr(torch, swap.dtype).itemsize for swap in plan.swaps)
    print(json.dumps({"seconds": seconds, "weights": weights}))


if __name__ == "__main__":
    main()
