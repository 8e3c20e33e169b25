"""Draft policy: drafter and number of drafts of each round by expected tokens per second, on a leash.

With acceptance a (share of drafted tokens, up to the first wrong one, that verification confirms), a round of k drafts
yields E(k) = (1 - a^(k + 1)) / (1 - a) tokens (Leviathan, Kalman, Matias 2023, equation 1) in k d + v(k) seconds: d per
draft, v(k) = base + slope * k for verifying k + 1 rows. The line is shared by all drafters; a and d are each drafter's.
A plain step takes one measured plain_s. Times are weighed in plain steps, so an estimate of plain_s scales all of them:

    speedup(k) = E(k) * plain_s / (k d + v(k))

**Leash.** Drafts may cost 2.5 % of the time of a call's tokens, the first 256 in advance: a call of 64 tokens starts
with a credit of 1.6 plain steps, and is at most 3 % slower than plain decoding. A round changes the credit by tokens -
seconds / plain_s, and is run only if its loss with all drafts wrong fits. What is not measured counts as expensive for
the leash (each row and draft as if computed alone) and as cheap for the speedup, so k starts at 1, and grows by what it
earns.

**Capture.** Eager drafts take many times as long as captured ones, so whether a drafter whose step can be captured
pays is judged by what captured drafts are expected to take. The capture is an investment outside of the leash: made
once enough drafts were right, if half of the gain to be expected of the call's remaining tokens covers it.

**First trial.** The first round by a drafter that is not free takes about two plain steps more: an eager draft, a
check, comparisons. A call of 256 tokens affords that. Shorter ones put unused credit by, so that the third call of 64
tokens tries: this one may be 5 % slower, but together with the calls before it is within 3 %.

**Rest.** A drafter whose best speedup falls below 1.05 rests until its loss is 1 % of the plain steps since, twice as
long after each failure, and starts again from the prior acceptance.

**Free drafters** are watched beside plain steps, as a proposal costs nothing: a trial waits until enough would have
been right, or gains of others pay for it, since fewer steps are plain then. Acceptance is expected from proposals seen,
which end a rest early, once without gain.

**One-time work** (recordings, comparisons) costs several plain steps, and is charged. Captured steps record a pass over
k + 1 rows in the 17th round of k drafts (`will_record`), which must be affordable then. Other recordings wait for
`Pace.pays`: gains of the call cover them. Unasked one-time work is expected of each (drafter, k) that has not run.
"""

import statistics
from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

from vbrt.generation.speculation.drafter_record import Record
from vbrt.report.speculation_counters import Round

__all__ = ["CHOICES", "MOST", "Choice", "Pace", "Round", "expected_tokens"]

#: maximum drafts per round
MOST = 32
#: numbers of drafts: within 2 % of the best; few, since each number of rows is recorded and compared by itself
CHOICES = (1, 2, 4, 8, 16, 24, MOST)
_SHARE = 0.025  # of plain decoding's time, that drafts may cost; the promise is 0.03, the rest is for noise
_ADVANCE = (64, 256)  # tokens whose share is credited when a call begins, at least kept and at most
_RESERVE = 2.5  # plain steps of unused credit kept for a first trial
_EARNED = 6.0  # plain steps that gains may add to the credit
_DEAR = 1.04  # times a round's measured duration, for the leash: plain_s is known from few steps
_MARGIN = 1.05  # speedup below which drafts do not pay
_DOUBT = 0.5  # more speedup asked while plain steps are few, divided by their number
_STICK = 0.93  # another choice than the last must promise less than this share of its time
_ONE_TIME = 3.0  # plain steps of a recording that was never timed
_CAPTURE_S = 1.5  # seconds of capturing a drafter's step, kernels compiled before; 2 to 4.5 with them, 8B on an H200
_SURE = 0.5  # share of the gain to be expected with certainty, within which a capture's cost must lie
_FIRST = 2.0  # plain steps that the first round takes more, by a drafter that is not free
_LIVE = 16  # rounds of as many drafts, after which a captured step records their pass (`captured_step.py`)
_ROW = 1.5  # plain steps of recording each of its rows, before one was timed
_DRAFT = 0.45  # plain steps of a draft that was never timed, for the leash
_WINDOW = 16  # plain steps whose times count
_MEMORY = 96  # rounds whose times of verification count, the newest 8 of each k
_PLAIN = 4  # plain steps timed before the first draft
_REFRESH = 16  # times the speedup: rounds between plain steps, which keep plain_s up to date
_OUTLIER = 2.5  # times the expected duration


class Choice(NamedTuple):
    """Drafter and number of drafts of a round; ("", 0): a plain step."""

    drafter: str
    k: int


class Pace:
    """Chooses drafter and number of drafts per round. Deterministic: equal measurements give equal choices.

    Args:
        drafters: name -> free (proposing costs no pass of any model), in order of preference.
        fixed: constant number of drafts, of the first drafter that proposes any; None: adaptive.
    """

    def __init__(self, drafters: Mapping[str, bool], fixed: int | None = None) -> None:
        self.fixed = fixed
        self.last = Choice("", 0)
        self._records = {name: Record(free) for name, free in drafters.items()}
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._plain_s = 0.0
        self._verify: deque[tuple[int, float]] = deque(maxlen=_MEMORY)
        self._rounds: Counter[int] = Counter()
        self._line = (0.0, 0.0)
        self._credit = self._reserve = 0.0  # plain steps
        self._most = _SHARE * _ADVANCE[0]  # credit without gains
        self._advanced = self._left = 0  # tokens whose share is credited already; tokens left in the call
        self._since_plain = 0
        self._slow = False  # last round
        self._one_time: float | None = None
        self._recorded, self._row = False, _ROW
        self._seen: set[Choice] = set()

    def begin_call(self, tokens: int) -> None:
        """Credit the share of a call of up to `tokens` tokens; gains of the last call are no credit in this one."""
        least, most = _ADVANCE
        advance = min(tokens, most)
        self._most = _SHARE * max(advance, least)
        credit = self._credit + _SHARE * (advance - self._advanced)
        self._credit = min(credit, self._most)
        self._reserve = min(self._reserve + credit - self._credit, _RESERVE)
        self._advanced, self._left = advance, tokens

    @property
    def pays(self) -> bool:
        """True if gains, made and expected, cover one-time work for the last choice, such as recording its passes."""
        if self.fixed is not None:
            return True
        if not self.last.k or not self._plain_s:
            return False
        record = self._records[self.last.drafter]
        if record.pending:
            speedup = max(self._speedup(self.last.drafter, k, cautious=True) for k in CHOICES)
            cost = _CAPTURE_S / self._plain_s
            return record.proven and cost <= _SURE * self._left * (1 - 1 / speedup)
        if record.gained <= 0:
            return False
        cost = max(_ONE_TIME, self._one_time or 0.0)
        gain = self._left * (1 - 1 / self._speedup(*self.last))
        return self._loss(*self.last) + cost <= self._credit and cost <= gain

    def will_capture(self, drafter: str) -> None:
        """Note that a drafter's step can be captured on this device, which makes drafts much faster."""
        record = self._records[drafter]
        record.pending = not record.captured

    def captures(self, drafter: str) -> bool:
        """Decide whether a drafter's step is captured, and replayed, from now on."""
        record = self._records[drafter]
        if not record.captured and self.pays:
            record.capture()
        return record.captured

    def will_record(self, rows: bool) -> None:
        """Note whether a pass over several rows is recorded once it has run often."""
        self._recorded = rows

    def observe(self, drafter: str, *, right: bool) -> None:
        """Note whether a free drafter's proposal would have been right in a plain step."""
        self._records[drafter].observe(right=right)

    def choose(self, room: int, without: Collection[str] = ()) -> Choice:
        """Return the next round's choice, of at most `room` drafts, by none of the drafters `without`."""
        names = [name for name in self._records if name not in without]
        room = min(room, MOST)
        if self.fixed is None:
            paid = any(record.saved > 0 for record in self._records.values())
            self.last = self._best([name for name in names if self._records[name].ready(paid=paid)], room)
        else:
            k = min(self.fixed, room)
            self.last = Choice(names[0], k) if names and k > 0 else Choice("", 0)
        return self.last

    def _best(self, names: list[str], room: int) -> Choice:
        best = Choice("", 0)
        if len(self._times) < _PLAIN:
            return best
        least = self._left / (_MARGIN + _DOUBT * (1 / len(self._times) - 1 / _WINDOW))
        for name in names:
            for k in CHOICES if self._rounds else CHOICES[:1]:
                if k > room or not self._affords(name, k):
                    continue
                steps = self._left / self._speedup(name, k) + self._expected_one_time(name, k)
                if (name, k) == self.last:
                    steps *= _STICK
                if steps < least:
                    best, least = Choice(name, k), steps
        if not best.k and room > 0:
            trials = (name for name in names if self._records[name].trial and self._affords(name, 1))
            best = next((Choice(name, 1) for name in trials), best)
        stale = best.k and self._since_plain >= _REFRESH * self._speedup(*best)
        return Choice("", 0) if stale else best

    def _affords(self, name: str, k: int) -> bool:
        reserve = self._reserve if self._one_time is None and not self._records[name].free else 0.0
        return self._loss(name, k) + self._recording(k) <= self._credit + reserve

    def _speedup(self, name: str, k: int, *, cautious: bool = False) -> float:
        """Expected speed of a round relative to plain steps; costs that were never measured count as none."""
        record = self._records[name]
        seconds = k * record.best_draft_s + self._verify_s(k)
        acceptance = record.cautious if cautious else record.acceptance
        return expected_tokens(acceptance, k) * self._plain_s / seconds

    def _measured(self, k: int) -> list[float]:
        return [seconds for drafts, seconds in self._verify if drafts == k][-8:]

    def _verify_s(self, k: int) -> float:
        """Seconds of verifying k drafts, by the line if they were not measured twice."""
        base_s, slope_s = self._line
        times = self._measured(k)
        return statistics.median_low(times) if len(times) > 1 else base_s + slope_s * k

    def _loss(self, name: str, k: int) -> float:
        """Plain steps that a round loses if all drafts are wrong."""
        return _DEAR * self._steps(name, k) - 1 + self._expected_one_time(name, k)

    def _steps(self, name: str, k: int) -> float:
        """Duration of a round in plain steps; costs that were never measured count as high."""
        record = self._records[name]
        draft_s = (0.0 if record.free else _DRAFT * self._plain_s) if record.draft_s is None else record.draft_s
        known = min(k, max((rows for rows, _ in self._verify), default=0))
        times = self._measured(known)
        verify_s = max([self._verify_s(known), *(times if len(times) == 1 else ())]) * (k + 1) / (known + 1)
        return (k * draft_s + verify_s) / self._plain_s

    def _expected_one_time(self, name: str, k: int) -> float:
        if self._one_time is None:
            return 0.0 if self._records[name].free else _FIRST
        return 0.0 if (name, k) in self._seen else self._one_time

    def _recording(self, k: int) -> float:
        """Plain steps of recording the pass of k drafts, if the next round of as many does."""
        return self._row * (k + 1) if self._recorded and self._rounds[k] == _LIVE else 0.0

    def note(self, done: Round) -> None:
        """Update estimates, credit and rests with a round."""
        self._spend(done.tokens)
        if done.drafted:
            record = self._records[done.drafter]
            record.verified(done.accepted, done.tried)
            if self._plain_s:
                self._note_drafts(record, done)
        elif self.fixed is None:
            self._since_plain = 0
            if not done.other:
                self._times.append(done.verify_s)
                self._plain_s = sorted(self._times)[(len(self._times) - 1) // 3]  # rather too low, with outliers
        if self._plain_s and any(not record.rest for record in self._records.values()):
            self._fit()
            for name, record in self._records.items():
                if not (record.rest or record.trial) and max(self._speedup(name, k) for k in CHOICES) < _MARGIN:
                    record.start_rest()

    def _spend(self, tokens: int) -> None:
        self._left = max(self._left - tokens, 1)
        advanced = min(self._advanced, tokens)
        self._advanced -= advanced
        self._raise(_SHARE * (tokens - advanced), self._most)
        for record in self._records.values():
            record.wait(tokens)

    def _note_drafts(self, record: Record, done: Round) -> None:
        steps = (done.draft_s + done.verify_s) / self._plain_s
        choice = Choice(done.drafter, done.drafted)
        usual = self._steps(done.drafter, done.drafted)
        expected = expected_tokens(record.acceptance, done.drafted) / self._speedup(*choice)
        slow = not done.other and steps > _OUTLIER * expected
        outlier, self._slow = slow and not self._slow, slow  # two in succession are none
        first = self._one_time is None
        once = max(steps - usual, 0.0) if done.other else 0.0
        if self._recorded and self._rounds[done.drafted] == _LIVE:
            self._row = once / (done.drafted + 1)
            if done.other:
                self._verify = deque((each for each in self._verify if each[0] != done.drafted), _MEMORY)
        elif (done.other and not record.capturing) or choice not in self._seen:
            self._one_time = once
        if not (done.other or outlier):
            self._verify.append((done.drafted, done.verify_s))
            record.times.append(done.draft_s / done.drafted)
        self._rounds[done.drafted] += 1
        known = outlier and (done.drafted == 1 or self._measured(done.drafted))
        spent = min(steps, usual) if known or record.capturing else steps
        saved = done.tokens - _DEAR * spent
        if saved > 0:
            recording = self._row * (done.drafted + 1) if self._recorded else 0.0
            self._raise(saved, self._most + _EARNED + (self._one_time or 0.0) + recording)
        else:
            self._credit += saved
            if first:
                lent = min(max(-self._credit, 0.0), self._reserve)
                self._credit, self._reserve = self._credit + lent, self._reserve - lent
        record.save(saved, once=0.0 if record.capturing else _DEAR * once)
        record.capturing = False
        self._since_plain += 1
        self._seen |= {choice, self.last}

    def _raise(self, steps: float, most: float) -> None:
        self._credit = max(self._credit, min(self._credit + steps, most))

    def _fit(self) -> None:
        """Least-squares line (base, slope) of verification seconds over drafts, through medians per number of drafts.

        The plain step is one point of it: one row, which verification computes as well.
        """
        points = [(0, self._plain_s)]
        for k in {k for k, _ in self._verify}:
            times = self._measured(k)
            points += [(k, statistics.median_low(times))] * len(times)
        mean_k, mean_s = (statistics.fmean(of) for of in zip(*points, strict=True))
        slope = statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else 0.0
        slope = min(max(slope, 0.0), mean_s / (mean_k + 1))
        self._line = max(mean_s - slope * mean_k, 1e-9), slope


def expected_tokens(acceptance: float, k: int) -> float:
    """Return the expected number of tokens per round of k drafts."""
    return k + 1 if acceptance >= 1 else (1 - acceptance ** (k + 1)) / (1 - acceptance)
