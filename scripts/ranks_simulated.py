"""Sums between ranks on hosts of their own, simulated on one machine: Gloo over network namespaces of a set rate.
Writes JSON. Needs root, and `ip` and `tc` of iproute2.

    sudo python3 scripts/ranks_simulated.py [--ranks 2 4 8 16] [--mbit 1000 10000] [--delay-us 0] [--out results.json]

Each rank is a process in a namespace of its own, behind a link of that bandwidth, all on one bridge, forked from
a process that has imported torch. What is measured is the all-reduce of what tensor parallel sums: one token's
activations, and those of many; beside it what a ring would take on such links. Where the kernel has no `netem`, links
have a bandwidth (`tbf`) and the delay of a bridge within one kernel; `--delay-us` needs netem.
"""

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
import torch.distributed as dist

from scripts.measuring import machine

SIZES = (16 << 10, 1 << 20, 8 << 20)
_PREFIX = "vbsim"
_NEWNET = 0x40000000


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def hosts(count: int, mbit: int, delay_us: int) -> Iterator[list[str]]:
    """Namespaces on one bridge; yields their addresses."""
    bridge = f"{_PREFIX}br"
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "up")
        for rank in range(count):
            name, outside = f"{_PREFIX}{rank}", f"{_PREFIX}v{rank}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", outside, "master", bridge, "up")
            inside = ("ip", "-n", name)
            run(*inside, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            run(*inside, "link", "set", "eth0", "up")
            run(*inside, "link", "set", "lo", "up")
            shape = ("tbf", "rate", f"{mbit}mbit", "burst", f"{max(64, mbit // 8)}kb", "latency", "200ms")
            if delay_us:
                shape = ("netem", "delay", f"{delay_us / 2}us", "rate", f"{mbit}mbit", "limit", "100000")
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shape)
            if delay_us:
                run("tc", "qdisc", "add", "dev", outside, "root", *shape)
        yield [f"10.77.0.{rank + 1}" for rank in range(count)]
    finally:
        for rank in range(count):
            subprocess.run(["ip", "netns", "del", f"{_PREFIX}{rank}"], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", f"{_PREFIX}v{rank}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def enter(name: str) -> None:
    """Go into a namespace."""
    with open(f"/var/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")


def measure(rank: int, addresses: list[str]) -> dict[str, float]:
    """Milliseconds of an all-reduce by bytes, the median of some, the slowest rank counting."""
    enter(f"{_PREFIX}{rank}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    store = dist.TCPStore(addresses[0], 29555, len(addresses), is_master=rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(addresses), timeout=limit)
    found = {}
    for nbytes in SIZES:
        tensor, taken = torch.zeros(nbytes // 2, dtype=torch.bfloat16), []
        for turn in range(8 if nbytes < 1 << 22 else 4):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            taken += [time.perf_counter() - start] if turn else []
        slowest = torch.tensor([statistics.median(taken)], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found[str(nbytes)] = 1e3 * float(slowest)
    dist.barrier()
    return found


def ring_ms(ranks: int, nbytes: int, mbit: int, delay_us: int) -> float:
    """What a ring of sums takes: 2 (N - 1) steps of an Nth of the bytes, each behind the delay."""
    steps = 2 * (ranks - 1)
    return steps * (nbytes / ranks * 8 / (mbit * 1e3) + delay_us / 1e3)


def simulated(ranks: int, mbit: int, delay_us: int) -> dict:
    """One row."""
    with hosts(ranks, mbit, delay_us) as addresses:
        read, write = os.pipe()
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    found = measure(rank, addresses)
                    if rank == 0:
                        os.write(write, json.dumps(found).encode())
                    os._exit(0)
                os._exit(1)
            children.append(child)
        os.close(write)
        with os.fdopen(read, "rb") as file:
            data = file.read()
        failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    row = {"ranks": ranks, "mbit": mbit, "delay_us": delay_us, "failed": failed}
    row["sum_ms"] = {size: round(ms, 3) for size, ms in json.loads(data or b"{}").items()}
    row["ring_ms"] = {str(size): round(ring_ms(ranks, size, mbit, delay_us), 3) for size in SIZES}
    return row


def main() -> None:
    """Print a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--mbit", nargs="+", type=int, default=[1000, 10000])
    parser.add_argument("--delay-us", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked, rows = parser.parse_args(), []
    for mbit in asked.mbit:
        for ranks in asked.ranks:
            rows.append(simulated(ranks, mbit, asked.delay_us))
            print(json.dumps(rows[-1]), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
