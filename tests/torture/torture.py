"""What is done to a wrapped model while Ctrl-C, kills and other threads come: a sample in tests, all of it by
scripts/torture.py."""

import contextlib
import functools
import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import vbrt
from tests.torture.interrupting import interrupted
from vbrt.layers import SwappedLayer

X = torch.arange(3 * 32).reshape(3, 32).sin()
_KIB = 1024


def build(preset: str, device: str = "cpu") -> nn.Module:
    """The same model each time, or its outline on the meta device."""
    torch.manual_seed(7)
    dtype = torch.bfloat16 if preset == "exact" else torch.float32
    with torch.device(device):
        model = nn.Sequential(
            nn.Linear(32, 64),
            nn.GELU(),
            nn.Linear(64, 64),
            nn.LayerNorm(64),
            nn.Linear(64, 64),
            nn.Linear(64, 64),
            nn.Linear(64, 32),
        )
    return model.to(dtype).eval()


def options(preset: str, root: Path, cpu: str | int = "auto") -> dict:
    """For `vbrt.wrap`: everything is swapped, files go below `root`, nothing to a GPU."""
    return {
        "config": preset,
        "weights": {"min_parameters": 0, "keep_head": False},
        "tiers": {
            "gpu": {"enabled": False},
            "cpu": {"budget": cpu},
            "ssd": {"enabled": True, "path": str(root / "tier"), "budget": 1 << 20},
        },
    }


def small(preset: str) -> int:
    """A budget in bytes that about half of the layers fit into."""
    return {"dense": 48, "exact": 32, "fp4": 16}[preset] * _KIB


@dataclass
class Trial:
    """One operation, ready to be interrupted: `work` does it, `vb` is what it is done to."""

    preset: str
    root: Path
    vb: vbrt.VBModelWrapper | None = None
    model: nn.Module | None = None
    made: list = field(default_factory=list)  # wrappers that `work` returned

    @property
    def x(self) -> torch.Tensor:
        """An input in the model's dtype."""
        return X.to(torch.bfloat16 if self.preset == "exact" else torch.float32)

    def run(self, model: nn.Module) -> torch.Tensor:
        """A forward."""
        with torch.no_grad():
            return model(self.x)

    def wrap(self, cpu: str | int, *, encoded: bool = True) -> vbrt.VBModelWrapper:
        """A wrapped model, encoded unless told otherwise."""
        self.model = build(self.preset)
        self.vb = vbrt.wrap(self.model, **options(self.preset, self.root, cpu))
        return self.vb.materialize(progress=False) if encoded else self.vb

    def expected(self) -> torch.Tensor:
        """What the model computes when nothing comes in between."""
        if self.preset not in _EXPECTED:
            with tempfile.TemporaryDirectory() as root:
                vb = vbrt.wrap(build(self.preset), **options(self.preset, Path(root), small(self.preset)))
                _EXPECTED[self.preset] = self.run(vb)
                vb.close()
        return _EXPECTED[self.preset]

    def check(self, vb: nn.Module) -> None:
        """All layers give their right bits, twice, within the budgets."""
        for _ in range(2):
            assert torch.equal(self.run(vb), self.expected()), "wrong bits"
        for name, tier in vb.stats().tiers.items():
            assert tier.held_bytes <= tier.budget_bytes, f"{name}: {tier}"

    def check_save(self, saved: Path) -> None:
        """A save is whole, and of this model."""
        loaded = vbrt.load(saved, build(self.preset, "meta"))
        assert torch.equal(self.run(loaded), self.expected()), "wrong bits in a save"
        loaded.close()

    def end(self, vb: vbrt.VBModelWrapper) -> None:
        """Close, and see that nothing stays."""
        vb.close()
        left = sorted(path.relative_to(self.root) for path in (self.root / "tier").rglob("*"))
        assert not left, f"left after close: {left}"


_EXPECTED: dict[str, torch.Tensor] = {}


def _wrapping(trial: Trial) -> tuple[Callable, Callable]:
    trial.model = build(trial.preset)

    def wrap() -> None:
        trial.made.append(vbrt.wrap(trial.model, **options(trial.preset, trial.root, small(trial.preset))))

    def afterwards() -> None:
        if not trial.made:
            assert not any(isinstance(m, SwappedLayer) for m in trial.model.modules()), "half wrapped"
            assert not trial.model._forward_pre_hooks
            gc.collect()
            assert not list((trial.root / "tier").glob("*")), "a run directory without a run"
            wrap()
        trial.check(trial.made[0])
        trial.end(trial.made[0])

    return wrap, afterwards


def _living(trial: Trial, work: Callable[[], object]) -> tuple[Callable, Callable]:
    def afterwards() -> None:
        trial.check(trial.vb)
        work()
        trial.check(trial.vb)
        trial.end(trial.vb)

    return work, afterwards


def _materializing(trial: Trial) -> tuple[Callable, Callable]:
    vb = trial.wrap(small(trial.preset), encoded=False)
    return _living(trial, lambda: vb.materialize(progress=False))


def _first_forward(trial: Trial) -> tuple[Callable, Callable]:
    vb = trial.wrap(small(trial.preset), encoded=False)
    return _living(trial, lambda: trial.run(vb))


def _forward(trial: Trial) -> tuple[Callable, Callable]:
    vb = trial.wrap(small(trial.preset))
    trial.check(vb)
    return _living(trial, lambda: trial.run(vb))


def _budget_down(trial: Trial) -> tuple[Callable, Callable]:
    vb = trial.wrap("1MiB")
    trial.check(vb)
    return _living(trial, lambda: vb.set_budget("cpu", small(trial.preset)))  # attaches the ssd


def _budget_up(trial: Trial) -> tuple[Callable, Callable]:
    vb = trial.wrap(small(trial.preset))
    trial.check(vb)
    return _living(trial, lambda: vb.set_budget("cpu", "1MiB"))


def _saving(trial: Trial) -> tuple[Callable, Callable]:
    vb, saved = trial.wrap(small(trial.preset)), trial.root / "saved"
    vb.save(saved)

    def afterwards() -> None:
        trial.check_save(saved)
        trial.check(vb)
        vb.save(saved)
        trial.check_save(saved)
        kept = (saved / "vbrt.json").read_text()
        strange = [p.name for p in saved.iterdir() if p.name != "vbrt.json" and f'"{p.name}"' not in kept]
        assert not strange, f"left by a save: {strange}"
        trial.end(vb)

    return lambda: vb.save(saved), afterwards


def _loading(trial: Trial) -> tuple[Callable, Callable]:
    vb, saved = trial.wrap(small(trial.preset)), trial.root / "saved"
    vb.save(saved)
    vb.close()
    trial.model = build(trial.preset, "meta")
    before = [(type(m), dict(m._parameters), dict(m._buffers)) for m in trial.model.modules()]

    def load() -> None:
        trial.made.append(vbrt.load(saved, trial.model))

    def afterwards() -> None:
        if not trial.made:
            after = [(type(m), m._parameters, m._buffers) for m in trial.model.modules()]
            assert [b[0] for b in before] == [a[0] for a in after], "not given back"
            assert all(
                b[k].keys() == a[k].keys() and all(b[k][n] is a[k][n] for n in b[k])
                for b, a in zip(before, after, strict=True)
                for k in (1, 2)
            ), "not given back"
            assert not trial.model._forward_pre_hooks
            gc.collect()
            assert not list((trial.root / "tier").glob("*")), "a run directory without a run"
            load()
        trial.check(trial.made[0])
        trial.end(trial.made[0])

    return load, afterwards


def _closing(trial: Trial) -> tuple[Callable, Callable]:
    vb = trial.wrap(small(trial.preset))
    trial.check(vb)
    return vb.close, lambda: trial.end(vb)


def _unwrapping(trial: Trial) -> tuple[Callable, Callable]:
    vb = trial.wrap(small(trial.preset))
    trial.check(vb)

    def afterwards() -> None:
        dense = vb.unwrap()
        assert not any(isinstance(m, SwappedLayer) for m in dense.modules())
        dense = trial.run(dense)
        assert trial.preset == "fp4" or torch.equal(dense, trial.expected())
        trial.end(vb)

    return vb.unwrap, afterwards


def _sharing(trial: Trial) -> tuple[Callable, Callable]:
    """Another model comes onto the runtime of one whose pages are all in memory, and have to leave it."""
    first = trial.wrap(2 * small(trial.preset))
    trial.check(first)
    second = build(trial.preset)
    homes = {key: page.home for key, page in first.stack.pages.items()}

    def share() -> None:
        weights = options(trial.preset, trial.root)["weights"]
        trial.made.append(vbrt.wrap(second, trial.preset, weights=weights, runtime=first.runtime))

    def afterwards() -> None:
        if not trial.made:
            assert not any(isinstance(m, SwappedLayer) for m in second.modules()), "half wrapped"
            assert not second._forward_pre_hooks
            assert len(first.runtime.attachments) == 1
            assert {key: page.home for key, page in first.stack.pages.items()} == homes, "the first one's pages moved"
            trial.check(first)
            share()
        for vb in (first, trial.made[0], first):
            trial.check(vb)
        trial.made[0].close()
        trial.check(first)
        trial.end(first)

    return share, afterwards


def _parting(trial: Trial) -> tuple[Callable, Callable]:
    """One of two models on a runtime is closed."""
    first = trial.wrap(small(trial.preset))
    weights = options(trial.preset, trial.root)["weights"]
    second = vbrt.wrap(build(trial.preset), trial.preset, weights=weights, runtime=first.runtime)
    for vb in (first, second):
        trial.check(vb)

    def afterwards() -> None:
        second.close()
        trial.check(first)
        assert len(first.stack.pages) == sum(len(layer.plane_bytes) for layer in first.stats().layers.values())
        trial.end(first)

    return second.close, afterwards


OPERATIONS = {
    "wrap": _wrapping,
    "materialize": _materializing,
    "first forward": _first_forward,
    "forward": _forward,
    "budget down": _budget_down,
    "budget up": _budget_up,
    "save": _saving,
    "load": _loading,
    "close": _closing,
    "unwrap": _unwrapping,
    "share": _sharing,
    "part": _parting,
}
PRESETS = ("dense", "exact", "fp4")


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """A hang is a failure; for the main thread."""

    def late(signum: int, frame: object) -> None:
        raise AssertionError(f"hangs: not done after {seconds} s")

    before, main = signal.signal(signal.SIGUSR1, late), threading.main_thread().ident
    watch = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGUSR1))
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        watch.join()
        signal.signal(signal.SIGUSR1, before)


def trial(operation: str, preset: str, interrupt: Callable[[Callable], bool]) -> bool:
    """Do an operation on a new model under `interrupt`, which says whether one came; then everything must be as it
    should. Raises AssertionError, or whatever the library raised."""
    grad, root = torch.is_grad_enabled(), Path(tempfile.mkdtemp(prefix="torture-"))
    try:
        one = Trial(preset, root)
        one.expected()
        threads = _threads()
        with at_most(60):
            work, afterwards = OPERATIONS[operation](one)
            hit = interrupt(work)
            torch.set_grad_enabled(grad)  # torch's own context managers may be left half way
            afterwards()
        one.vb = one.model = None
        one.made.clear()
        for _ in range(200):
            if _threads() <= threads:
                break
            time.sleep(0.01)
        assert _threads() <= threads, "a thread is left after close"
        return hit
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def places(operation: str, preset: str) -> list[int]:
    """For `at_place`: the first and the last time that an operation comes through each distinct place."""
    _warm(operation, preset)
    found: list[int] = []
    trial(operation, preset, lambda work: bool(found.extend(interrupted.count(work))))
    return found


@functools.cache
def _warm(operation: str, preset: str) -> None:
    """Do an operation once: that imports and fills caches, and comes through more places than the next time."""
    duration(operation, preset)


def at_place(operation: str, preset: str, at: int) -> bool:
    """`trial` with Ctrl-C at a place."""
    return trial(operation, preset, lambda work: interrupted(at, work))


def after_delay(operation: str, preset: str, seconds: float) -> bool:
    """`trial` with Ctrl-C after a time."""
    return trial(operation, preset, lambda work: _timed(seconds, work))


def _timed(seconds: float, work: Callable[[], object]) -> bool:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return False


def duration(operation: str, preset: str) -> float:
    """Seconds that an operation takes when nothing comes in between."""
    took: list[float] = []

    def measure(work: Callable[[], object]) -> bool:
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
        return False

    trial(operation, preset, measure)
    return took[0]
