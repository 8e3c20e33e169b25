"""Processes of their own without imports of their own: forks of a server, one for each process of pytest.

The server has imported once what tests in such processes use, which takes a new process four to eight seconds, and has
used no thread: forking is then safe, and takes milliseconds. It keeps the environment that it was started in. What is
about imports, or about variables that libraries read as they are imported, needs a new process.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests.patience import LONG_S

__all__ = ["context", "run", "start"]

_ROOT = Path(__file__).resolve().parent.parent
_PRELOADED = (
    "torch",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",  # by optimizers and by vbrt.wrap, when they are first used
    "torch._inductor.standalone_compile",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.distributed",
    "transformers.models.auto.modeling_auto",
    "transformers.generation",
    "vbrt.integrations.transformers_quantizer",
    "tests.distributed.cases",
    "tests.distributed.style_cases",
    "scripts.train",
)
_TRITONS = ("triton", "vbrt.kernels.cuda")


def context() -> ForkServerContext | SpawnContext:
    """Return the context of multiprocessing whose processes are such forks; new ones on a machine with a GPU, which
    torch refuses to forks of a process that has looked for it, as imports do."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def run(
    code: str, *arguments: str, interpreted: bool = False, timeout_s: float = LONG_S
) -> subprocess.CompletedProcess[str]:
    """Run code as `python -c` does, with `arguments` behind sys.argv[0], from the root of the checkout.

    With `interpreted`, Triton and vbrt.kernels.cuda are imported anew: at import Triton decides whether it interprets.
    What other modules have taken from these before is the compiled one still.
    """
    with tempfile.TemporaryDirectory(prefix="vbrt-forked-") as folder:
        process = start(code, *arguments, folder=folder, interpreted=interpreted)
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
        said = [Path(folder, name).read_text("utf-8") if Path(folder, name).exists() else "" for name in ("out", "err")]
        return subprocess.CompletedProcess([code, *arguments], process.exitcode, *said)


def start(code: str, *arguments: str, folder: str | Path, interpreted: bool = False) -> BaseProcess:
    """Start code as `run` does; it prints into the files `out` and `err` of a folder."""
    process = context().Process(target=_run, args=(code, arguments, str(folder), interpreted))
    process.start()
    return process


def _run(code: str, arguments: tuple[str, ...], folder: str, interpreted: bool) -> None:
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
        for name in [name for name in sys.modules if name.startswith(_TRITONS) and not name.startswith("triton._C")]:
            del sys.modules[name]
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(_ROOT)
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<forked>", "exec"), main.__dict__)
