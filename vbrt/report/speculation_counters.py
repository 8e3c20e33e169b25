"""Counters of self-speculation, over all `generate` calls of a model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

__all__ = ["SpeculationCounts", "SpeculationStats"]


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters of self-speculation.

    Attributes:
        exactness: of the last call, "tokens" or "distribution".
        k: drafts of the last round.
        rounds: verification passes, also without a draft.
        tokens: emitted by them, per sequence: a batch's rows count once.
        drafted, accepted: drafted tokens; drafted tokens that verification accepted.
        tried: drafts up to and including the first rejected one of each round; `accepted / tried` is the acceptance.
        draft_us, verify_us: time of drafting and of verification.
        link_bytes: bytes moved between tiers during these rounds.
    """

    exactness: str = ""
    k: int = 0
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    tried: int = 0
    draft_us: int = 0
    verify_us: int = 0
    link_bytes: int = 0

    @property
    def acceptance(self) -> float | None:
        """Acceptance rate of a draft whose predecessors were accepted; None before the first draft."""
        return self.accepted / self.tried if self.tried else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens per read of the weights; None before the first round."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes moved between tiers per token; None before the first."""
        return self.link_bytes / self.tokens if self.tokens else None

    def __str__(self) -> str:
        if not self.rounds:
            return "speculation: no rounds yet"
        accepted = "no drafts" if self.acceptance is None else f"acceptance {self.acceptance:.1%}"
        drafts = self.draft_us / self.drafted / 1000 if self.drafted else 0.0
        return (
            f"speculation ({self.exactness}): {accepted} · {self.tokens_per_round:.2f} tokens a round of {self.rounds}"
            f" · k {self.k} · draft {drafts:.2f} ms · verification {self.verify_us / self.rounds / 1000:.2f} ms"
            f" · {self.bytes_per_token / 2**20:.1f} MiB a token"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with the rates."""
        rates = ("acceptance", "tokens_per_round", "bytes_per_token")
        return asdict(self) | {name: getattr(self, name) for name in rates}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`. Raises KeyError, TypeError or ValueError for anything else."""
        values = {of.name: data[of.name] for of in fields(cls)}
        return cls(**{name: str(value) if name == "exactness" else int(value) for name, value in values.items()})


@dataclass(slots=True)
class SpeculationCounts:
    """Running counters; `reasons`: fallbacks from drafting to plain decoding."""

    totals: dict[str, Any] = field(default_factory=lambda: asdict(SpeculationStats()))
    reasons: list[str] = field(default_factory=list)

    def note(self, drafted: int, accepted: int, taken: int, seconds: tuple[float, float]) -> None:
        """Count a round that emitted `taken` tokens; seconds: of its drafts and of its verification."""
        draft_s, verify_s = seconds
        counted = {
            "rounds": 1,
            "tokens": taken,
            "drafted": drafted,
            "accepted": accepted,
            "tried": min(taken, drafted),
            "draft_us": round(draft_s * 1e6),
            "verify_us": round(verify_s * 1e6),
        }
        for name, value in counted.items():
            self.totals[name] += value
        self.totals["k"] = drafted

    def stats(self) -> SpeculationStats | None:
        """Return a snapshot; None before the first round."""
        return SpeculationStats(**self.totals) if self.totals["rounds"] else None
