"""Whether it pays to record a step: on a CPU, making a recording takes as long as some steps do."""

import math

__all__ = ["Worth"]

#: passes that a recording and its checks take, and what noting a step takes for each module, in µs
PASSES, NOTING_US = 4, 500.0


class Worth:
    """Weighs what a recording costs against what it saves in each step, over all calls of `generate`.

    A recording is made once the steps that are known to be left in a call, and those that have run eagerly before,
    would together have saved what it costs: so calls of unknown length never lose more than they would have won.
    """

    def __init__(self, saves_us: float, modules: int) -> None:
        """saves_us: of a step, for each module; 0: a recording always pays."""
        self._saved_s = saves_us * modules * 1e-6
        self._noting_s = NOTING_US * modules * 1e-6
        self._steps, self._fastest_s = 0, math.inf

    @property
    def is_weighed(self) -> bool:
        """False if a recording always pays."""
        return self._saved_s > 0

    def note(self, seconds: float) -> None:
        """Note an eager step that a recording might have replaced."""
        self._steps += 1
        self._fastest_s = min(self._fastest_s, seconds)

    def pays(self, left: int) -> bool:
        """True if a step should be recorded, with so many known to be left in this call."""
        if not self.is_weighed:
            return True
        cost = PASSES * self._fastest_s + self._noting_s  # infinite before the first step
        return (self._steps + left) * self._saved_s >= cost
