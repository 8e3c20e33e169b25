"""Draft length: the one with the highest expected tokens per second, by measurement.

With acceptance a (share of drafted tokens, up to the first wrong one, that verification confirms), a round of k drafts
yields E(k) = (1 - a^(k + 1)) / (1 - a) tokens (Leviathan, Kalman, Matias 2023) in k d + v(k) seconds: d per draft,
v(k) = base + slope * k for verifying k + 1 rows. Plain decoding (k = 0) is a candidate as well where its steps are
captured and nothing is streamed: they may take a fraction of v(0).
"""

from collections import deque
from dataclasses import dataclass, field

__all__ = ["MOST", "Pace", "expected_tokens"]

#: maximum drafts per round
MOST = 32
_CHOICES = (0, 1, 2, 4, 8, 16, 24, MOST)  # within 2 % of the best; few, since each is checked for bitwise equivalence
_FIRST = (16, 8)  # first rounds: two lengths, to fit the line
_AGAIN = 4  # drafts of a probe round
_MEMORY = 24  # rounds in the moving window
_PROBE = 64  # rounds without drafts between probes
_SLOW, _PLAIN = 3, 6  # plain steps that are captured and checked (not timed), and all that are tried


@dataclass(slots=True)
class Pace:
    """Chooses the number of drafts per round.

    Attributes:
        fixed: constant number of drafts; None: adaptive.
        k: last choice.
        tries_plain: True if a round without drafts is a captured step, whose time says nothing about verification.
    """

    fixed: int | None = None
    k: int = 0
    tries_plain: bool = False
    _right: float = 4.0  # prior acceptance: 4 of 5
    _wrong: float = 1.0
    _draft_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    _verify: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    _plain_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    _tried: int = 0
    _rounds: int = 0
    _idle: int = 0

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens confirmed, up to the first wrong one; exponentially weighted."""
        return self._right / (self._right + self._wrong)

    def choose(self, room: int) -> int:
        """Return how many tokens to draft, at most `room`."""
        self.k = max(0, min(room, MOST, self._wanted()))
        return self.k

    def _wanted(self) -> int:
        if self.fixed is not None:
            return self.fixed
        if self._rounds < len(_FIRST):
            return _FIRST[self._rounds]
        if self.tries_plain and self._tried < _PLAIN:
            return 0
        if self._idle >= _PROBE:
            return _AGAIN
        draft_s = sorted(self._draft_s)[len(self._draft_s) // 2]
        base_s, slope_s = self._verify_line()
        plain_s = sorted(self._plain_s)[len(self._plain_s) // 2] if self.tries_plain and self._plain_s else base_s

        def pace(k: int) -> float:
            return expected_tokens(self.acceptance, k) / (k * (draft_s + slope_s) + base_s if k else plain_s)

        return max(_CHOICES, key=pace)

    def _verify_line(self) -> tuple[float, float]:
        """Least-squares fit (base, slope) of verification seconds over drafts, both non-negative."""
        count = len(self._verify)
        mean_k = sum(k for k, _ in self._verify) / count
        mean_s = sum(s for _, s in self._verify) / count
        spread = sum((k - mean_k) ** 2 for k, _ in self._verify)
        slope = sum((k - mean_k) * (s - mean_s) for k, s in self._verify) / spread if spread else 0.0
        slope = min(max(slope, 0.0), mean_s / (mean_k + 1))
        return max(mean_s - slope * mean_k, 1e-9), slope

    def note(self, drafted: int, accepted: int, tried: int, seconds: tuple[float, float] | None) -> None:
        """Update the estimates with a round.

        Args:
            accepted, tried: drafts confirmed, and drafts examined up to the first wrong one.
            seconds: of all drafts and of verification; None if the round included other work.
        """
        self._idle = 0 if drafted else self._idle + 1
        if not drafted and self.tries_plain:
            self._tried += 1
            if seconds is not None and self._tried > _SLOW:
                self._plain_s.append(sum(seconds))
            return
        if seconds is not None:
            self._verify.append((drafted, seconds[1]))
        if not drafted:
            return
        if seconds is not None:
            self._rounds += 1
            self._draft_s.append(seconds[0] / drafted)
        keep = 0.98**tried
        self._right = self._right * keep + accepted
        self._wrong = self._wrong * keep + (tried - accepted)


def expected_tokens(acceptance: float, k: int) -> float:
    """Return the expected number of tokens per round of k drafts."""
    return k + 1 if acceptance >= 1 else (1 - acceptance ** (k + 1)) / (1 - acceptance)
