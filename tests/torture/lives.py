"""Processes that are killed in the middle of mixed operations, and threads that storm."""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import vbrt
from tests.torture.torture import Trial, small

# -- kills ------------------------------------------------------------------------------------------------------------


def kill(preset: str, root: Path, seconds: float, seed: int) -> None:
    """Kill a process in the middle of mixed operations; what it saved must be whole, and the next run clean up.

    Call it again with the same root. Raises AssertionError.
    """
    one, ready = Trial(preset, root), os.pipe()
    one.expected()
    child = os.fork()
    if child == 0:
        _live(one, seed, ready[1])
    os.close(ready[1])
    try:
        assert os.read(ready[0], 1) == b"!", "the child did not begin"
        time.sleep(seconds)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready[0])
    if (root / "saved" / "vbrt.json").exists():
        one.check_save(root / "saved")
    vb = one.wrap(small(preset))
    one.check(vb)
    runs = list((root / "tier").glob("run-*"))
    assert len(runs) == 1, f"of dead runs: {runs}"
    vb.save(root / "saved")
    one.check_save(root / "saved")
    one.end(vb)


def _live(one: Trial, seed: int, ready: int) -> None:
    """In a child: mixed operations until it is killed."""
    try:
        choose = random.Random(seed)
        os.write(ready, b"!")
        while True:
            vb = one.wrap(choose.choice(["1MiB", small(one.preset)]), encoded=False)
            for _ in range(choose.randrange(1, 8)):
                _something(one, vb, choose)
            vb.close()
    finally:
        os._exit(1)


def _something(one: Trial, vb: vbrt.VBModelWrapper, choose: random.Random) -> None:
    what = choose.randrange(10)
    if what < 5:
        assert torch.equal(one.run(vb), one.expected()), "wrong bits"
    elif what < 8:
        vb.set_budget("cpu", choose.choice(["1MiB", small(one.preset)]))
    elif what < 9:
        str(vb.stats())
    else:
        main = threading.current_thread() is threading.main_thread()
        saved = one.root / ("saved" if main else f"saved-{threading.get_ident()}")
        vb.save(saved)
        one.check_save(saved)


# -- threads ----------------------------------------------------------------------------------------------------------


def storm(preset: str, root: Path, seconds: float, seed: int, count: int = 4) -> int:
    """Threads that compute, change budgets, look at figures and save, for so long; returns how often they did.

    Raises what one of them raised first; AssertionError for wrong bits.
    """
    one, done, failures, turns = Trial(preset, root), threading.Event(), [], [0] * count
    vb = one.wrap(small(preset), encoded=False)
    one.expected()
    interval = sys.getswitchinterval()

    def work(number: int) -> None:
        choose = random.Random(seed * count + number)
        try:
            while not done.is_set():
                _something(one, vb, choose)
                turns[number] += 1
        except BaseException as error:
            failures.append(error)
            done.set()
            raise

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    sys.setswitchinterval(1e-4)
    try:
        for worker in workers:
            worker.start()
        done.wait(seconds)
        done.set()
        for worker in workers:
            worker.join(60)
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]
    assert not any(worker.is_alive() for worker in workers), "hangs"
    one.check(vb)
    one.end(vb)
    return sum(turns)
