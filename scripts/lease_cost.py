"""Host time of a lease, on a stand-in stack whose copies cost nothing: small pages in host memory above host memory.

    python scripts/lease_cost.py [--share 0.5] [--passes 40]

Prints, for pages of which a share stays, microseconds a lease (asked for and released) when the policy decides each
lease and when a programme runs, and the same for the pages in turn forward and backward.
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

from vbrt.formats.page import build_layout
from vbrt.residency.simulate import make_policy
from vbrt.tiers import Level, MemoryTier, Owner, TierStack
from vbrt.tiers.stack.slots import State

PAGES, PAGE_BYTES = 224, 4096  # as many as a Llama of 32 layers has


def build(share: float) -> tuple[TierStack, Owner, list[tuple[str, ...]]]:
    """Return a stack, the owner of its pages, and the leases of a pass."""
    sizes = {f"page{at}": PAGE_BYTES for at in range(PAGES)}
    room, cpu = int(share * sum(sizes.values())), torch.device("cpu")
    policy = make_policy("scheduled", room, prefetch=2)
    below = MemoryTier("cpu", cpu, sum(sizes.values()))
    stack = TierStack([Level(MemoryTier("gpu", cpu, room), policy), Level(below)])
    owner = Owner(stack)
    for key, nbytes in sizes.items():
        stack.add(
            key, build_layout("dense", "dense", [("weight", "uint8", (nbytes,))]), "cpu", torch.Tensor.zero_, owner
        )
    return stack, owner, [(key,) for key in sizes]


def idle(stack: TierStack) -> None:
    """Wait until nothing is on its way."""
    while any(slot.state is not State.READY for level in stack.levels for slot in list(level.slots.values())):
        time.sleep(0.001)


def measure(stack: TierStack, orders: list[tuple[str, list]], passes: int, *, programmes: bool) -> tuple[float, bool]:
    """Return the median microseconds a lease, and whether a programme ran."""
    times, stack.ledger.programmes.enabled = [], programmes
    for _ in range(passes):
        spent = leases = 0
        for phase, order in orders:
            idle(stack)
            began = time.perf_counter()
            stack.begin_pass(phase)
            for keys in order:
                with stack.lease(keys):
                    pass
            spent, leases = spent + time.perf_counter() - began, leases + len(order)
        times.append(spent / leases * 1e6)
    return sorted(times[passes // 2 :])[passes // 4], stack.ledger.running is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, nargs="*", default=[0.1, 0.5, 0.9])
    parser.add_argument("--passes", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for share in options.share:
        for name in ("decode", "training"):
            stack, _owner, order = build(share)
            orders = [("decode", order)] if name == "decode" else [("forward", order), ("backward", order[::-1])]
            policy, _ = measure(stack, orders, options.passes, programmes=False)
            programme, ran = measure(stack, orders, options.passes, programmes=True)
            print(f"{name} {share:.0%} resident: policy {policy:.1f} us a lease, programme {programme:.1f} ({ran=})")
            stack.close()


if __name__ == "__main__":
    main()
