"""Miss policy of routed experts: fetch a missed expert over the link, or compute it on the CPU. Pure decisions.

H2D copies and CPU compute overlap, so a layer waits for the longer of the two. `"compute"` leaves all misses to the
CPU. `"auto"` splits them to minimize the longer one by measured rates; the experts with the highest worth to the cache
are fetched, which makes them resident.

Where the device decides (a cache of experts), it divides by a table of counts, made of the same rates: `hosted_counts`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vbrt.residency.hosted_share import HostRates

__all__ = [
    "CPU_GB_PER_S",
    "OPERATORS",
    "MissRates",
    "Missed",
    "computed_experts",
    "expected_misses",
    "host_pays",
    "hosted_counts",
    "missed_gb_per_s",
]

#: kernel launches of a decoder layer outside its experts, unless replayed in one CUDA graph; transformers has 65 for
#: Qwen3-MoE and 51 for Mixtral
OPERATORS = 60


#: weight of the CPU's time: an expert that it computes is missed again, where a fetched one stays. ms a token with
#: Qwen3-30B-A3B's shape and 10 % of its experts on an H200: 8.4 to 9.2 with 1, 8.3 with 1.25, 8.4 with 1.5, 9.0 with 2
_NOT_KEPT = 1.25


class Missed(NamedTuple):
    """Missed expert: its page is not on the computing device.

    Attributes:
        expert: its number in the layer.
        pairs: number of (token, expert) pairs routed to it.
        nbytes: of its page.
        worth: score of the cache's policy; higher is better.
    """

    expert: int
    pairs: int
    nbytes: int
    worth: int = 0


@dataclass(frozen=True, slots=True)
class MissRates(HostRates):
    """Measured rates of link and CPU, whose rows are an expert's pairs.

    Attributes:
        host_s: overhead per layer if the host decides, in seconds: it waits for the ids, leases the pages, and launches
            `OPERATORS` kernels one by one.
    """

    host_s: float = 0.0


def computed_experts(missed: Sequence[Missed], rates: MissRates | None) -> tuple[int, ...]:
    """Return the experts to compute on the CPU, ascending. A pure function of its arguments.

    Args:
        rates: None: all of them, as with `"compute"`.
    """
    if rates is None:
        return tuple(sorted(one.expert for one in missed))
    return _divided(missed, rates)[0]


def _divided(missed: Sequence[Missed], rates: MissRates) -> tuple[tuple[int, ...], float]:
    """Return the experts to compute on the CPU, and the seconds until both sides are done."""
    link = sum(rates.link_seconds(one.nbytes) for one in missed)
    best, count, cpu = link, 0, rates.call_s
    # never an expert whose CPU time exceeds the link time of all
    order = sorted(
        (m for m in missed if rates.cpu_seconds(m.nbytes, m.pairs) < link), key=lambda m: (m.worth, -m.expert)
    )
    for done, one in enumerate(order, 1):
        cpu, link = cpu + rates.cpu_seconds(one.nbytes, one.pairs), link - rates.link_seconds(one.nbytes)
        longer = max(cpu, link)
        if longer < best:
            best, count = longer, done
    return tuple(sorted(one.expert for one in order[:count])), best


def hosted_counts(
    most: int, nbytes: int, rates: HostRates | None, *, rows: float = 1.0, device_s: float = 0.0
) -> tuple[int, ...]:
    """Return how many of 0, 1 .. `most` missed experts of a layer the CPU computes while the others are fetched.

    So many that the longer side is shortest, with `_NOT_KEPT` on the CPU's; of equal ones the fewest, which round as
    the device does.

    Args:
        nbytes: per page.
        rates: None: all of them, as with `"compute"`.
        rows: per expert.
        device_s: seconds that the device computes after the last fetch.
    """
    if rates is None:
        return tuple(range(most + 1))

    def seconds(missed: int, hosted: int) -> float:
        cpu = hosted * rates.cpu_seconds(nbytes, rows) + rates.call_s if hosted else 0.0
        return max(cpu * _NOT_KEPT, (missed - hosted) * rates.link_seconds(nbytes) + device_s)

    return tuple(min(range(n + 1), key=lambda hosted: (seconds(n, hosted), hosted)) for n in range(most + 1))


#: default CPU compute throughput in GB/s of pages, unless measured by `vbrt tune --machine`; two Zen 4 cores reach 15.6
#: on pages in a GPU's tile order (scripts/missed_rates.py)
CPU_GB_PER_S = 20.0


def missed_gb_per_s(miss: str, link_gb_per_s: float, cpu_gb_per_s: float) -> float:
    """Return the effective GB/s at which missed pages in host memory are served, by `experts.miss`."""
    rates = {"fetch": link_gb_per_s, "compute": cpu_gb_per_s, "auto": link_gb_per_s + cpu_gb_per_s}
    return rates[miss]


def expected_misses(leased: float, share: float) -> float:
    """Return the expected misses per token among `leased` experts, with room for a share of all experts.

    Published routing reuses experts: miss rates are 41 % with room for 10 %, 19 % with 25 %, and 11 % with 50 %
    (benchmarks/results/experts-decode-nvidia-h200.json), approximated here by (1 - share)^2 / 2.
    """
    return leased * (1 - share) ** 2 / 2


def host_pays(misses: float, nbytes: int, rates: MissRates) -> bool:
    """True if a layer is faster with its misses split by the host than with all of them fetched by the device.

    Args:
        misses: expected misses per call of the layer. Experts are not divisible: a single one is either computed or
            fetched, whichever is faster.
        nbytes: per page.
    """
    whole = max(1, round(misses))
    missed = [Missed(expert, 1, nbytes) for expert in range(whole)]
    saved = whole * rates.link_seconds(nbytes) - _divided(missed, rates)[1]
    return saved * misses / whole > rates.host_s
