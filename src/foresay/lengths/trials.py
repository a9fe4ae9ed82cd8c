"""When drafts that do not pay are tried again: as seldom as the time that the trials lost asks for.

Owns the clock of trials and pauses. Knows neither what a draft is nor what pays.
"""

from __future__ import annotations

_STEPS = 4
"""Of a trial: the first may pay for what the draft missed."""
_FURTHER = 12
"""Most steps by which a trial goes on while too little was seen."""
_LOSS = 0.01
"""Share of the time that trials may lose."""
_PATIENCE = 5
"""Doublings of the pause between trials, at most."""
_SETTLED = 64
"""Steps after a trial before requests that join are reason for another."""


class Trials:
    """Of one drafter."""

    def __init__(self) -> None:
        self.left = 0
        """Steps of the trial under way still to come."""
        self._lost = self._elapsed = self._resume_s = self._least_s = 0.0
        self.just_ended = False
        """Whether the step before was the last of a trial."""
        self._further = 0
        """Steps by which the trial under way went on."""
        self._since = self._failed = 0
        """Steps since the last began; trials in a row after which no draft paid, each of which doubles the next pause."""

    def paid(self) -> None:
        """Drafts pay: none of the trials before is held against them."""
        self._failed, self.just_ended = 0, False

    def goes_on(self, hopeful: bool) -> bool:
        """Whether a trial that has just come to its end goes on. hopeful: too little was seen to say that drafts do not pay."""
        goes_on = self.just_ended and hopeful and self._further < _FURTHER
        self.just_ended = False
        if goes_on:
            self.left, self._further = 1, self._further + 1
        return goes_on

    def begin(self, joined: bool) -> bool:
        """Whether one begins now. joined: requests have come or gone, so that what did not pay may now."""
        if joined and self._since >= _SETTLED:
            self._failed = 0
            self._resume_s = min(self._resume_s, self._least_s)
        if self._elapsed < self._resume_s:
            return False
        self.left, self._lost, self._since, self._further = _STEPS, 0.0, 0, 0
        self._failed = min(self._failed + 1, _PATIENCE)  # until it turns out to pay
        return True

    def went_on(self, seconds: float) -> None:
        """A step has passed."""
        self._elapsed += seconds
        self._since += 1

    def drafted(self, lost_s: float, total_s: float) -> None:
        """A step has drafted. lost_s: how much longer its tokens took than without; less than nothing where it paid."""
        self.just_ended = self.left == 1
        self.left = max(0, self.left - 1)
        self._lost += lost_s
        pause = max(self._lost / _LOSS, 16 * total_s)
        self._least_s = self._elapsed + pause  # whoever joins: no trial costs more than its share
        self._resume_s = self._elapsed + pause * 2 ** max(0, self._failed - 1)
