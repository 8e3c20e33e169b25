"""How many tokens to draft: what has the most tokens a second, by what was measured so far.

With an acceptance of a (the share of drafted tokens, up to the first wrong one, that verification confirms), a round of
k drafts gives E(k) = (1 - a^(k + 1)) / (1 - a) tokens (Leviathan, Kalman, Matias 2023) in k d + v(k) seconds: d for a
draft, v(k) = base + slope * k for the verification of k + 1 rows. Plain decoding is tried, too, where its steps are
recorded and wait for no link: they then may take a fraction of v(0).
"""

from collections import deque
from dataclasses import dataclass, field

__all__ = ["MOST", "Pace", "expected_tokens"]

#: drafts a round at most
MOST = 32
_CHOICES = (0, 1, 2, 4, 8, 16, 24, MOST)  # within 2 % of the best; few: verification learns what agrees for each
_FIRST = (16, 8)  # of the first rounds: two lengths, so that times can be fitted
_AGAIN = 4  # after rounds without drafts
_MEMORY = 24  # rounds
_PROBE = 64  # rounds without drafts until one is tried again
_SLOW, _PLAIN = 3, 6  # plain steps that are recorded and compared first; and those that are tried in all


@dataclass(slots=True)
class Pace:
    """Chooses the drafts of each round.

    Attributes:
        fixed: drafts of every round; None: by measurement.
        k: the last choice.
        tries_plain: whether a round without drafts is a recorded step, whose time says nothing of verification.
    """

    fixed: int | None = None
    k: int = 0
    tries_plain: bool = False
    _right: float = 4.0  # before anything is known: four of five
    _wrong: float = 1.0
    _draft_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    _verify: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    _plain_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    _tried: int = 0
    _rounds: int = 0
    _idle: int = 0

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that are confirmed, up to the first wrong one; recent rounds count more."""
        return self._right / (self._right + self._wrong)

    def choose(self, room: int) -> int:
        """Return how many tokens to draft, at most `room`: one round for what is left costs less than several."""
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
        """(base, slope) of the verification's seconds by the number of drafts: least squares, neither negative."""
        count = len(self._verify)
        mean_k = sum(k for k, _ in self._verify) / count
        mean_s = sum(s for _, s in self._verify) / count
        spread = sum((k - mean_k) ** 2 for k, _ in self._verify)
        slope = sum((k - mean_k) * (s - mean_s) for k, s in self._verify) / spread if spread else 0.0
        slope = min(max(slope, 0.0), mean_s / (mean_k + 1))
        return max(mean_s - slope * mean_k, 1e-9), slope

    def note(self, drafted: int, accepted: int, tried: int, seconds: tuple[float, float] | None) -> None:
        """Learn from a round.

        Args:
            accepted, tried: drafts that were confirmed, of those that were looked at before the round ended.
            seconds: of all drafts, and of the verification; None of a round that also did something else.
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
    """Return how many tokens a round of k drafts gives on average."""
    return k + 1 if acceptance >= 1 else (1 - acceptance ** (k + 1)) / (1 - acceptance)
