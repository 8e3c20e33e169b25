"""Interrupts, timers, kills and threads against wrapped models, from a fixed seed; see tests/torture.py for what must
hold after each. Prints a line for each part and each failure; exits 1 if there was one."""

import argparse
import faulthandler
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

from tests.tiers.schedule import test_programme_ends
from tests.torture import lives, streams, torture
from tests.torture.interrupting import interrupted

HANGS_SECONDS = 120
_STREAMED = 500  # forwards of one model


def failed(what: str, work: Callable[[], object]) -> bool:
    """Run one trial; a failure is printed, a hang ends the process with the stacks of all threads."""
    faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
    try:
        work()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        print(f"FAILED {what}: {type(error).__name__}: {error}", flush=True)
        return True
    finally:
        faulthandler.cancel_dump_traceback_later()
    return False


def pairs(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Operations and presets that are asked for."""
    for operation in options.only or torture.OPERATIONS:
        for preset in options.presets:
            yield operation, preset


def interrupts(options: argparse.Namespace) -> int:
    """Ctrl-C at distinct places; `--count` of them for each operation and preset."""
    failures = 0
    for operation, preset in pairs(options):
        choose, start = random.Random(f"{options.seed} {operation} {preset}"), time.monotonic()
        known = torture.places(operation, preset)
        chosen = known if options.count is None else choose.sample(known, min(options.count, len(known)))
        bad = 0
        for at in chosen:
            bad += failed(f"{operation}, {preset}, {at}", partial(_named, operation, preset, at))
        seconds = time.monotonic() - start
        print(f"{operation}, {preset}: {len(chosen)} of {len(known)} places, {bad} failed, {seconds:.0f} s", flush=True)
        failures += bad
    return failures


def _named(operation: str, preset: str, at: int) -> None:
    try:
        torture.at_place(operation, preset, at)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} (interrupted at {interrupted})") from error


def timers(options: argparse.Namespace) -> int:
    """Ctrl-C after random times in random operations."""
    choose, all_pairs = random.Random(options.seed), list(pairs(options))
    seconds = {pair: torture.duration(*pair) for pair in all_pairs}
    failures = hits = 0
    for number in range(options.count or 2000):
        pair = choose.choice(all_pairs)
        delay = max(1e-6, choose.random() * seconds[pair])
        hit: list[bool] = []
        failures += failed(
            f"{number}: {', '.join(pair)} after {delay:.6f} s",
            lambda pair=pair, delay=delay, hit=hit: hit.append(torture.after_delay(*pair, delay)),
        )
        hits += any(hit)
    print(f"timers: {options.count or 2000} operations, {hits} interrupted, {failures} failed", flush=True)
    return failures


def kills(options: argparse.Namespace) -> int:
    """SIGKILL after random times."""
    choose, failures = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as root:
        for number in range(options.count or 200):
            preset, seconds = choose.choice(options.presets), choose.random() ** 2 * 0.5
            (Path(root) / preset).mkdir(exist_ok=True)
            failures += failed(
                f"kill {number}: {preset} after {seconds:.4f} s",
                partial(lives.kill, preset, Path(root) / preset, seconds, options.seed * 100_000 + number),
            )
    print(f"kills: {options.count or 200}, {failures} failed", flush=True)
    return failures


def threads(options: argparse.Namespace) -> int:
    """Storms of four threads, one after the other for each preset."""
    failures = 0
    for preset in options.presets:
        with tempfile.TemporaryDirectory() as root:
            seconds, turns = options.seconds / len(options.presets), []
            faulthandler.dump_traceback_later(seconds + HANGS_SECONDS, exit=True)
            try:
                turns.append(lives.storm(preset, Path(root), seconds, options.seed))
            except Exception as error:  # noqa: BLE001 - printed, and counted
                print(f"FAILED threads, {preset}: {type(error).__name__}: {error}", flush=True)
                failures += 1
            faulthandler.cancel_dump_traceback_later()
            print(f"threads, {preset}: {seconds:.0f} s, {sum(turns)} operations", flush=True)
    return failures


def programmes(options: argparse.Namespace) -> int:
    """Ctrl-C at every place of runs of programmes, and of what ends them."""
    failures = 0
    for work in test_programme_ends.WORKS:
        at, going, bad = 0, [True], 0
        while going[-1] and at < (options.count or sys.maxsize):
            at += 1
            what = partial(test_programme_ends.interrupt, work, at)
            bad += failed(f"programmes, {work}, {at}", lambda what=what, going=going: going.append(what()))
        print(f"programmes, {work}: {at} places, {bad} failed", flush=True)
        failures += bad
    return failures


def streamed(options: argparse.Namespace) -> int:
    """Ctrl-C, after random times, in forwards through little room; and kills."""
    count, failures, cycles, hits = options.count or 1500, 0, 0, 0
    for seed in range(options.seed, options.seed + options.seeds):
        room = streams.ROOMS[seed % len(streams.ROOMS)]
        for first in range(0, count, _STREAMED):  # each in its own time
            done: list[streams.Streams] = []
            work = partial(streams.timers, room, seed * count + first, min(_STREAMED, count - first))
            failures += failed(
                f"streams, seed {seed}, room for {room}", lambda work=work, done=done: done.append(work())
            )
            cycles, hits = cycles + sum(one.cycles for one in done), hits + sum(one.hits for one in done)
        print(f"streams, seed {seed}: {cycles} forwards, {hits} interrupted, {failures} failed so far", flush=True)
    choose = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as root:
        for number in range(options.kills):
            room, seconds = streams.ROOMS[number % len(streams.ROOMS)], choose.random() ** 2 * 0.2
            work = partial(streams.kill, room, Path(root), seconds, number)
            failures += failed(f"streams, kill {number}: room for {room} after {seconds:.4f} s", work)
    print(f"streams: {cycles} forwards, {hits} interrupted, {options.kills} kills, {failures} failed", flush=True)
    return failures


PARTS = {
    "interrupts": interrupts,
    "timers": timers,
    "kills": kills,
    "threads": threads,
    "programmes": programmes,
    "streams": streamed,
}


def main() -> int:
    """See scripts/torture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--count", type=int, help="places of each operation, timers, kills, or forwards")
    parser.add_argument("--seconds", type=float, default=600, help="of threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=20, help="of streams")
    parser.add_argument("--kills", type=int, default=0, help="of streams")
    parser.add_argument("--only", nargs="*", choices=tuple(torture.OPERATIONS), help="operations")
    parser.add_argument("--presets", nargs="*", choices=torture.PRESETS, default=torture.PRESETS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    sys.unraisablehook = lambda unraisable: None  # Ctrl-C in a __del__ is only printed
    torch.set_num_threads(1)  # no thread but the library's own, and a fork finds none
    return min(1, PARTS[options.part](options))


if __name__ == "__main__":
    sys.exit(main())
