"""Cost model of a token's link traffic in models with routed experts, by hit rate."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from vbrt.errors import ConfigError
from vbrt.residency.plan import PageSpec, Plan
from vbrt.residency.routing_trace import Routing, plan_layers
from vbrt.residency.simulate import simulate

__all__ = ["HIT_RATES", "LINK_GB_PER_S", "TokenCost", "fitted", "simulated_hits", "token_cost"]

#: hit rates shown by `vbrt plan`
HIT_RATES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
#: default link throughput by source tier: half of NVLink 4, PCIe 4.0 x16 (5.0: about twice that), NVMe
LINK_GB_PER_S = {"peer": 200.0, "cpu": 25.0, "ssd": 3.0}


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Link traffic of one token.

    Attributes:
        experts_bytes: bytes of one token's experts, over all layers.
        cold_bytes: the share at home outside the computing tier, by home: traffic with a cold cache.
        streamed_bytes: bytes of other layers streamed for every token, by home: those at home below the computing tier
            for which it has no room besides one layer's experts.
        room_bytes: room in the computing tier for copies of experts.
        all_bytes: bytes of all experts at home outside the computing tier.
    """

    experts_bytes: int
    cold_bytes: Mapping[str, int]
    streamed_bytes: Mapping[str, int]
    room_bytes: int
    all_bytes: int

    def loaded_bytes(self, hit_rate: float) -> float:
        """Return the bytes of experts loaded per token at a hit rate."""
        return (1 - hit_rate) * sum(self.cold_bytes.values())

    def tokens_per_s(
        self,
        hit_rate: float,
        gb_per_s: Mapping[str, float] = LINK_GB_PER_S,
        missed_gb_per_s: Mapping[str, float] | None = None,
    ) -> float:
        """Return tokens/s at a hit rate, limited by the links only: copies in sequence, no compute.

        Args:
            missed_gb_per_s: effective throughput of missed experts by home, if the CPU computes some; default: links.
        """
        rates = {**gb_per_s, **(missed_gb_per_s or {})}
        seconds = sum((1 - hit_rate) * nbytes / rates[home] for home, nbytes in self.cold_bytes.items())
        seconds += sum(nbytes / gb_per_s[home] for home, nbytes in self.streamed_bytes.items())
        return 1e9 / seconds if seconds else float("inf")


def token_cost(plan: Plan) -> TokenCost | None:
    """Return a plan's cost per token; None without routed experts in the tiers."""
    if not plan.routed or plan.mode == "train":
        return None
    top, routed = plan.compute_tier, plan.routed
    experts = _by_home((page, swap.top_k / swap.experts) for swap in routed for page in swap.pages)
    every = _by_home((page, 1.0) for swap in plan.swaps if not swap.experts for page in swap.leased)
    below = sum(nbytes for home, nbytes in every.items() if home != top)
    room = plan.budgets[top] - plan.home_bytes(top)
    one_layer = max(sum(page.nbytes for page in swap.leased) for swap in routed)
    kept = max(0, min(below, room - one_layer))
    passing = 1 - kept / below if below else 0.0
    return TokenCost(
        round(sum(experts.values())),
        {home: round(nbytes) for home, nbytes in experts.items() if home != top},
        {home: round(nbytes * passing) for home, nbytes in every.items() if home != top and passing},
        room - round(kept),
        sum(page.nbytes for swap in routed for page in swap.pages if page.home != top),
    )


def _by_home(pages: Iterable[tuple[PageSpec, float]]) -> dict[str, float]:
    """Return the bytes per token by home, from pages and the share of each that a token uses."""
    found: dict[str, float] = {}
    for page, share in pages:
        found[page.home] = found.get(page.home, 0.0) + page.nbytes * share
    return found


def fitted(routing: Routing, plan: Plan, *, source: str) -> Routing:
    """Return a recorded routing with the page sizes of a plan.

    Raises:
        ConfigError: the layers differ; the message begins with `source`.
    """
    layers = {layer.name: layer for layer in plan_layers(plan)}
    strange = next((one for one in routing.layers if _differs(one, layers.get(one.name))), None)
    if strange is not None or not routing.layers:
        has = f"{strange.name} with {strange.experts} experts" if strange else "no layer"
        own = next(iter(layers.values()), None)
        here = f"{own.name} with {own.experts} experts and so on" if own else "no routed experts in the tiers"
        raise ConfigError(f"{source}: it has {has}, this model has {here}; record the routing of this model")
    return replace(routing, layers=tuple(layers[one.name] for one in routing.layers))


def _differs(recorded: object, own: object) -> bool:
    return own is None or recorded.experts != own.experts


def simulated_hits(routing: Routing, room_bytes: int) -> dict[str, float]:
    """Return the hit rates of decoding from a cold cache, by policy: "lru", and "experts" with both scopes."""
    found = {}
    for name, kind, scope in (
        ("lru", "lru", "layer"),
        ("experts, by layer", "experts", "layer"),
        ("experts, by model", "experts", "model"),
    ):
        phases = simulate(kind, routing, room_bytes, scope=scope).phases
        decoding = [counts for phase, counts in phases.items() if phase != "prompt"] or list(phases.values())
        hits, misses = sum(c.hits for c in decoding), sum(c.misses for c in decoding)
        found[name] = hits / (hits + misses) if hits + misses else 0.0
    return found
