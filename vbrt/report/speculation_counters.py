"""Counters of speculation, over all `generate` calls of a model."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, Self

__all__ = ["Round", "SpeculationCounts", "SpeculationStats"]

_BY_DRAFTER = ("rounds", "drafted", "accepted", "tried", "draft_us")


class Round(NamedTuple):
    """Measurement of a round; a plain step has drafter "" and drafted 0.

    Attributes:
        drafted: tokens proposed and verified, which may be fewer than chosen.
        accepted, tried: drafts confirmed, and drafts examined up to the first wrong one.
        tokens: appended to each row.
        draft_s, verify_s: seconds of all drafts, and of verification or the plain step.
        other: includes one-time work: its seconds count against the leash, not in the estimates.
    """

    drafter: str
    drafted: int
    accepted: int
    tried: int
    tokens: int
    draft_s: float
    verify_s: float
    other: bool = False


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters of speculation.

    Attributes:
        exactness: of the last call, "tokens" or "distribution".
        k: drafts of the last round.
        rounds: verification passes, also without a draft.
        tokens: emitted by them, per sequence: a batch's rows count once.
        drafted, accepted: drafted tokens; drafted tokens that verification accepted.
        tried: drafts up to and including the first rejected one of each round; `accepted / tried` is the acceptance.
        draft_us, verify_us: time of drafting and of verification.
        link_bytes: bytes moved between tiers during these rounds.
        by_drafter: name of a drafter -> its "rounds", "drafted", "accepted", "tried" and "draft_us".
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
    by_drafter: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

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
        drafters = " ".join(self.by_drafter) or "no drafter"
        return (
            f"speculation ({self.exactness}): {accepted} · {self.tokens_per_round:.2f} tokens a round of {self.rounds}"
            f" · {drafters} · k {self.k} · draft {drafts:.2f} ms"
            f" · verification {self.verify_us / self.rounds / 1000:.2f} ms"
            f" · {self.bytes_per_token / 2**20:.1f} MiB a token"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with the rates."""
        rates = ("acceptance", "tokens_per_round", "bytes_per_token")
        return asdict(self) | {name: getattr(self, name) for name in rates}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`. Raises KeyError, TypeError or ValueError for anything else."""
        counts = {of.name: int(data[of.name]) for of in fields(cls) if of.name not in ("exactness", "by_drafter")}
        by_drafter = {str(name): {of: int(each[of]) for of in _BY_DRAFTER} for name, each in data["by_drafter"].items()}
        return cls(exactness=str(data["exactness"]), by_drafter=by_drafter, **counts)


@dataclass(slots=True)
class SpeculationCounts:
    """Running counters; `reasons`: fallbacks from drafting to plain decoding."""

    totals: dict[str, Any] = field(default_factory=lambda: asdict(SpeculationStats()))
    reasons: list[str] = field(default_factory=list)

    def note(self, round: Round) -> None:
        """Count a round."""
        counted = {
            "rounds": 1,
            "tokens": round.tokens,
            "drafted": round.drafted,
            "accepted": round.accepted,
            "tried": round.tried,
            "draft_us": int(round.draft_s * 1e6),
            "verify_us": int(round.verify_s * 1e6),
        }
        for name, value in counted.items():
            self.totals[name] += value
        self.totals["k"] = round.drafted
        if round.drafted:
            mine = self.totals["by_drafter"].setdefault(round.drafter, dict.fromkeys(_BY_DRAFTER, 0))
            for name in _BY_DRAFTER:
                mine[name] += counted[name]

    def stats(self) -> SpeculationStats | None:
        """Return a snapshot; None before the first round."""
        return SpeculationStats(**copy.deepcopy(self.totals)) if self.totals["rounds"] else None
