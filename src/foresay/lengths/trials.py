"""When to try drafting again after it did not pay: the time that trials lose stays below a fixed share of the total.

Owns the clock of trials and pauses. Does not know what is drafted or whether it pays.
"""

from __future__ import annotations

_STEPS = 4
"""Steps of a trial; the first one may include the draft model's catch-up."""
_MAX_EXTRA_STEPS = 12
"""Most steps by which a trial is extended while it is inconclusive."""
_MAX_LOSS = 0.01
"""Share of the time that trials may lose."""
_MAX_DOUBLINGS = 5
"""The pause after n failed trials in a row is doubled n - 1 times, for n up to this number."""
_SETTLED = 64
"""Steps after the start of a trial before new requests are a reason for another one."""


class Trials:
    """The trials of one drafter."""

    def __init__(self) -> None:
        self.steps_left = 0
        """Remaining steps of the current trial."""
        self._lost_s = self._elapsed_s = self._resume_s = self._earliest_s = 0.0
        self.just_ended = False
        """True if the previous step was the last of a trial."""
        self._extra_steps = 0
        """Steps by which the current trial was extended."""
        self._steps_since = self._num_failed = 0
        """Steps since the last trial began; trials in a row after which no draft paid."""

    def succeed(self) -> None:
        """Drafting pays: reset the count of failed trials."""
        self._num_failed, self.just_ended = 0, False

    def extend(self, inconclusive: bool) -> bool:
        """Extend a trial that has just ended by one step and return True, if it is inconclusive and not too long.

        inconclusive: too few drafts were tested to conclude that drafting does not pay.
        """
        extended = self.just_ended and inconclusive and self._extra_steps < _MAX_EXTRA_STEPS
        self.just_ended = False
        if extended:
            self.steps_left, self._extra_steps = 1, self._extra_steps + 1
        return extended

    def begin(self, batch_changed: bool) -> bool:
        """Begin a trial and return True, if one is due. batch_changed: requests joined or left, so drafting may pay now."""
        if batch_changed and self._steps_since >= _SETTLED:
            self._num_failed = 0
            self._resume_s = min(self._resume_s, self._earliest_s)
        if self._elapsed_s < self._resume_s:
            return False
        self.steps_left, self._lost_s, self._steps_since, self._extra_steps = _STEPS, 0.0, 0, 0
        self._num_failed = min(self._num_failed + 1, _MAX_DOUBLINGS)  # reset by `succeed`
        return True

    def advance(self, seconds: float) -> None:
        """Advance the clock by one step of the given seconds."""
        self._elapsed_s += seconds
        self._steps_since += 1

    def record(self, lost_s: float, total_s: float) -> None:
        """Record a step with a draft. lost_s: seconds more than its tokens take without a draft, negative if it paid."""
        self.just_ended = self.steps_left == 1
        self.steps_left = max(0, self.steps_left - 1)
        self._lost_s += lost_s
        pause = max(self._lost_s / _MAX_LOSS, 16 * total_s)
        self._earliest_s = self._elapsed_s + pause  # even with new requests no trial exceeds its share of the time
        self._resume_s = self._elapsed_s + pause * 2 ** max(0, self._num_failed - 1)
