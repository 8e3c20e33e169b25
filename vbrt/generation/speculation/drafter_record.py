"""Record of a drafter: acceptance, seconds of a draft, trials and rests; `draft_length.py` decides by it."""

import statistics
from collections import deque
from dataclasses import dataclass, field

__all__ = ["Record"]

_PRIOR = (1.5, 0.5)  # drafts right and wrong before any is verified
_KEEP = 0.85  # weight of older rounds in the acceptance, per round
_SEEN = 2.5  # proposals, by weight, that a free drafter must have had beside plain steps before a trial
_PROMISE = 0.4  # share of them that must have been right
_ENOUGH = 3.4  # right drafts, by weight: three of three
_CAUTION = 0.7  # wrong drafts added where much depends on the acceptance
_CAPTURED = 1 / 6  # of an eager draft's time; 1/30 for an 8B model on an H200, where launches take longest
_DILUTED = 0.01  # share of plain steps that failed trials may cost on average
_REST = (16, 1024)  # tokens a drafter rests, at least and at most


@dataclass(slots=True)
class Record:
    """Acceptance and cost of one drafter.

    Attributes:
        free: proposing costs no pass of any model.
        right, wrong: drafts confirmed and refuted, exponentially weighted by round.
        times: seconds of a draft in the last rounds.
        pending: its step is captured once that pays.
        captured: it is.
        capturing: the round that captures it is not noted yet.
        trial: never run since it started or rested.
        rest: tokens until it is tried again.
        saved: plain steps saved since it started or rested; negative: lost.
        gained: the same without one-time work.
        failures: rests in succession without gain.
        seen_right, seen_wrong: proposals of a free drafter that were right and wrong beside plain steps.
    """

    free: bool
    right: float = _PRIOR[0]
    wrong: float = _PRIOR[1]
    times: deque[float] = field(default_factory=lambda: deque(maxlen=3))
    pending: bool = False
    captured: bool = False
    capturing: bool = False
    trial: bool = True
    rest: int = 0
    saved: float = 0.0
    gained: float = 0.0
    failures: int = 0
    seen_right: float = 0.0
    seen_wrong: float = 0.0

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens confirmed, up to the first wrong one."""
        return self.right / (self.right + self.wrong)

    @property
    def draft_s(self) -> float | None:
        """Seconds of a draft; None: not timed."""
        return statistics.median_low(self.times) if self.times else None

    @property
    def best_draft_s(self) -> float:
        """Expected seconds of a draft, once its step is captured if it will be; 0 if unknown."""
        return (self.draft_s or 0.0) * (_CAPTURED if self.pending else 1.0)

    @property
    def cautious(self) -> float:
        """Acceptance, rather too low, for decisions that much depends on."""
        return self.right / (self.right + self.wrong + _CAUTION)

    @property
    def proven(self) -> bool:
        """True if enough drafts were right lately for an investment."""
        return self.right >= _ENOUGH

    def capture(self) -> None:
        """Note that the step is captured from now on."""
        self.pending, self.captured, self.capturing = False, True, True
        self.times = deque([_CAPTURED * seconds for seconds in self.times], self.times.maxlen)

    @property
    def _seen(self) -> float:
        return self.seen_right + self.seen_wrong

    @property
    def _promises(self) -> bool:
        return self._seen >= _SEEN and self.seen_right >= _PROMISE * self._seen

    def ready(self, *, paid: bool) -> bool:
        """Whether it may draft; `paid`: gains pay for a trial of a free drafter that was not seen enough."""
        unseen = paid and self._seen < _SEEN
        return not self.rest and (not self.trial or not self.free or self._promises or unseen)

    def observe(self, *, right: bool) -> None:
        """Note a proposal beside a plain step."""
        self.seen_right = self.seen_right * _KEEP + right
        self.seen_wrong = self.seen_wrong * _KEEP + (not right)
        if self.rest and self.failures <= 1 and self._promises:
            self._end_rest()
        elif self.trial:
            self._expect()

    def verified(self, accepted: int, tried: int) -> None:
        """Note how many of the drafts that were examined are right."""
        self.right = self.right * _KEEP + accepted
        self.wrong = self.wrong * _KEEP + (tried - accepted)

    def save(self, steps: float, *, once: float) -> None:
        """Note plain steps saved by a round, of which one-time work cost `once`."""
        self.saved += steps
        self.gained += steps + once
        self.trial = False

    def start_rest(self) -> None:
        """Rest, twice as long after each failure."""
        self.failures = 0 if self.saved > 0 else self.failures + 1
        least, most = _REST
        self.rest = round(min(max(-self.saved / _DILUTED, least) * 2 ** max(self.failures - 1, 0), most))
        self.seen_right = self.seen_wrong = 0.0

    def wait(self, tokens: int) -> None:
        """Let a rest pass by the tokens that were made."""
        if self.rest:
            self.rest = max(self.rest - tokens, 0)
            if not self.rest:
                self._end_rest()

    def _end_rest(self) -> None:
        self._expect()
        self.trial, self.rest, self.saved, self.gained = True, 0, 0.0, 0.0

    def _expect(self) -> None:
        """Expect of a trial what was seen, or else the prior."""
        right, wrong = (self.seen_right, self.seen_wrong) if self._seen else _PRIOR
        self.right, self.wrong = (sum(_PRIOR) * of / (right + wrong) for of in (right, wrong))
