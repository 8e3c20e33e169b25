"""Which missed experts are computed where their pages lie, in host memory, and which are fetched. Pure policy.

While the link brings some pages to the computing device, the CPU computes with others, so a layer waits for the longer
of the two. `"compute"` leaves all misses to the CPU. `"auto"` divides them so that the longer of the two is as short as
measured rates allow; the experts that have been worth most to the cache are fetched: they become resident with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "CPU_GB_PER_S",
    "OPERATORS",
    "MissRates",
    "Missed",
    "computed_experts",
    "expected_misses",
    "host_pays",
    "missed_gb_per_s",
]

#: operators of a decoder layer beside its experts, which a recorded step launches at once and the host one by one:
#: what transformers runs for Qwen3-MoE (65) and Mixtral (51), counted
OPERATORS = 60


class Missed(NamedTuple):
    """An expert whose page is not on the computing device.

    Attributes:
        expert: its number in the layer.
        pairs: how many (token, expert) pairs go to it.
        nbytes: of its page.
        worth: what the cache's policy thinks of it; more is better.
    """

    expert: int
    pairs: int
    nbytes: int
    worth: int = 0


@dataclass(frozen=True, slots=True)
class MissRates:
    """Measured rates.

    Attributes:
        link_bytes_s: bytes of pages a second that reach the computing device.
        cpu_bytes_s: bytes of pages a second that the CPU computes with, one pair an expert.
        more: time of each further pair of an expert, as a share of that of the first.
        call_s: seconds that a call of the CPU takes beside its work.
        host_s: seconds that a layer takes longer where the host decides: it waits for the ids, leases the pages, and
            launches `OPERATORS` kernels one by one.
    """

    link_bytes_s: float
    cpu_bytes_s: float
    more: float = 0.0
    call_s: float = 0.0
    host_s: float = 0.0

    def cpu_seconds(self, one: Missed) -> float:
        """Return the time in which the CPU computes one expert."""
        return one.nbytes / self.cpu_bytes_s * (1 + self.more * (one.pairs - 1))

    def link_seconds(self, one: Missed) -> float:
        """Return the time in which its page comes over the link."""
        return one.nbytes / self.link_bytes_s

    def __str__(self) -> str:
        return f"{self.link_bytes_s / 1e9:.1f} GB/s over the link and {self.cpu_bytes_s / 1e9:.1f} GB/s on the CPU"


def computed_experts(missed: Sequence[Missed], rates: MissRates | None) -> tuple[int, ...]:
    """Return the experts to compute where they lie, ascending. Depends on nothing but its arguments.

    Args:
        rates: None: all of them, as `"compute"` has it.
    """
    if rates is None:
        return tuple(sorted(one.expert for one in missed))
    return _divided(missed, rates)[0]


def _divided(missed: Sequence[Missed], rates: MissRates) -> tuple[tuple[int, ...], float]:
    """Return the experts to compute, and the seconds until both sides are done."""
    link = sum(map(rates.link_seconds, missed))
    best, count, cpu = link, 0, rates.call_s
    # an expert that alone takes the CPU longer than the link takes for all is never worth it
    order = sorted((m for m in missed if rates.cpu_seconds(m) < link), key=lambda m: (m.worth, -m.expert))
    for done, one in enumerate(order, 1):
        cpu, link = cpu + rates.cpu_seconds(one), link - rates.link_seconds(one)
        longer = max(cpu, link)
        if longer < best:
            best, count = longer, done
    return tuple(sorted(one.expert for one in order[:count])), best


#: assumed GB/s of pages that a CPU computes with, where `vbrt tune --machine` has not measured it. Two cores of a Zen 4
#: take 15.6 GB/s in the order of a GPU's tiles (scripts/missed_rates.py)
CPU_GB_PER_S = 20.0


def missed_gb_per_s(miss: str, link_gb_per_s: float, cpu_gb_per_s: float) -> float:
    """Return the GB/s at which missed pages in host memory are done with, as `experts.miss` has it."""
    rates = {"fetch": link_gb_per_s, "compute": cpu_gb_per_s, "auto": link_gb_per_s + cpu_gb_per_s}
    return rates[miss]


def expected_misses(leased: float, share: float) -> float:
    """Return how many of the experts that a token goes to are expected to miss, with room for a share of all.

    Published routing uses experts again: 41 % of the leases miss with room for 10 %, 19 % with 25, and 11 % with 50
    (benchmarks/results/experts-decode-nvidia-h200.json), which (1 - share)^2 / 2 is near to.
    """
    return leased * (1 - share) ** 2 / 2


def host_pays(misses: float, nbytes: int, rates: MissRates) -> bool:
    """True if a layer is done earlier where the host divides its misses than where the device fetches all of them.

    Args:
        misses: experts that a call of the layer is expected to miss. They are divided whole: one alone is computed or
            fetched, whichever is faster.
        nbytes: of the page of each.
    """
    whole = max(1, round(misses))
    missed = [Missed(expert, 1, nbytes) for expert in range(whole)]
    saved = sum(map(rates.link_seconds, missed)) - _divided(missed, rates)[1]
    return saved * misses / whole > rates.host_s
