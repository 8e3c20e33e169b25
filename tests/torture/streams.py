"""Forwards through room for two to four pages, interrupted by timers and killed: what comes, the room stays whole."""

import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import vbrt
from vbrt.tiers.stack.slots import Level

PAGE_BYTES = 64 * 64 * 4
ROOMS = (2, 3, 4)  # pages
_LAYERS = 8
_SETTLES_SECONDS = 20.0


@dataclass
class Streams:
    """A model of equal layers, of which room for `room` pages is in memory and the rest comes from files.

    Attributes: cycles, hits: forwards that were begun under a timer, and those that it interrupted.
    """

    room: int
    root: Path
    cycles: int = 0
    hits: int = 0
    seconds: float = field(init=False)  # of a forward

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(_LAYERS)]).eval()
        self.x = torch.randn(3, 64)
        with torch.no_grad():
            self.expected = model(self.x)
        tiers = {
            "gpu": {"enabled": False},
            "cpu": {"budget": self.room * PAGE_BYTES},
            "ssd": {"enabled": True, "path": str(self.root / "tier"), "budget": 1 << 20},
        }
        weights = {"min_parameters": 0, "keep_head": False}
        self.vb = vbrt.wrap(model, "dense", weights=weights, tiers=tiers).materialize(progress=False)
        self.check()
        start = time.perf_counter()
        for _ in range(5):
            self.run()
        self.seconds = (time.perf_counter() - start) / 5

    def run(self) -> torch.Tensor:
        """A forward."""
        with torch.no_grad():
            return self.vb(self.x)

    def interrupt(self, seconds: float) -> bool:
        """Run a forward, with Ctrl-C after a time; whether it came."""
        grad, hit = torch.is_grad_enabled(), False
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                self.run()
                signal.setitimer(signal.ITIMER_REAL, 0)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            hit = True
        signal.signal(signal.SIGALRM, before)
        torch.set_grad_enabled(grad)  # torch's own context managers may be left half way
        self.cycles += 1
        self.hits += hit
        return hit

    def check(self) -> None:
        """The right bits, and not a byte of room that no page has. Raises AssertionError."""
        assert torch.equal(self.run(), self.expected), "wrong bits"
        self.check_room()

    def check_room(self) -> None:
        """What the tiers hold is what pages hold in them, and within the budgets; copies under way are waited for."""
        deadline, stack = time.monotonic() + _SETTLES_SECONDS, self.vb.stack
        while True:
            with stack.guard.lock:
                counted = [(level.tier.name, level.tier.used_bytes, _of_pages(level)) for level in stack.levels]
                settled = all(used == held for _, used, held in counted)
            if settled or time.monotonic() > deadline:
                break
            time.sleep(0.002)
        assert settled, f"lost room: {', '.join(f'{n}: {u} bytes are used, {h} by pages' for n, u, h in counted)}"
        for name, tier in self.vb.stats().tiers.items():
            assert tier.held_bytes <= tier.budget_bytes, f"{name}: {tier}"

    def end(self) -> None:
        """Close, and see that nothing stays. Raises AssertionError."""
        self.vb.close()
        left = [str(path) for path in (self.root / "tier").rglob("*")]
        assert not left, f"left after close: {left}"


def _of_pages(level: Level) -> int:
    """Return the bytes of a level's rooms that pages have."""
    slots = {*level.slots.values(), *level.leaving, *level.pending, *level.living}
    return sum(slot.room.nbytes for slot in slots if slot.room is not None)


def timers(room: int, seed: int, cycles: int) -> Streams:
    """Interrupt that many forwards after random times; see after each that no room is lost. Raises AssertionError."""
    choose = random.Random(f"{seed} {room}")
    with tempfile.TemporaryDirectory() as root:
        one = Streams(room, Path(root))
        for _ in range(cycles):
            one.interrupt(max(1e-6, choose.random() * one.seconds * 1.1))
            one.check_room()
        one.check()
        one.end()
    return one


def kill(room: int, root: Path, seconds: float, seed: int) -> None:
    """Kill a process in the middle of interrupted forwards; the next one removes its files. Raises AssertionError.

    Call it again with the same root.
    """
    ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            one, choose = Streams(room, root), random.Random(seed)
            os.write(ready[1], b"!")
            while True:
                one.interrupt(max(1e-6, choose.random() * one.seconds * 1.1))
        finally:
            os._exit(1)
    os.close(ready[1])
    try:
        assert os.read(ready[0], 1) == b"!", "the child did not begin"
        time.sleep(seconds)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready[0])
    one = Streams(room, root)
    runs = list((root / "tier").glob("run-*"))
    assert len(runs) == 1, f"of dead runs: {runs}"
    one.check()
    one.end()
