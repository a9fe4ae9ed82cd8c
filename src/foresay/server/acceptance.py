"""Acceptance over time: a moving average of each drafting method against its first requests, to notice a fall.

Acceptance falls when requests change, or when the target was replaced and the draft was not. Owns the averages. Knows no HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass

from foresay.decoding.outcome import Step

logger = logging.getLogger("foresay.server")
BASELINE = 20_000
"""Tested draft tokens whose acceptance is the baseline."""
WINDOW = 5_000
"""Tested draft tokens after which the moving average has forgotten two thirds of earlier ones."""
FALLEN, RECOVERED = 0.8, 0.9
"""Shares of the baseline below which a warning is logged, and from which on the next fall is logged again."""


@dataclass(slots=True)
class Acceptance:
    """Acceptance of one drafting method."""

    tested: int = 0
    accepted: int = 0
    """Draft tokens of the baseline, and those of them that were accepted."""
    average: float = 0.0
    """Moving average of accepted tokens over tested ones, after the baseline."""
    has_fallen: bool = False

    @property
    def baseline(self) -> float | None:
        """Share of tested tokens that was accepted at first; None before enough were tested."""
        return self.accepted / self.tested if self.tested >= BASELINE else None

    @property
    def ratio(self) -> float:
        """The moving average over the baseline; 1 before there is a baseline, or if nothing was accepted at first."""
        return self.average / self.baseline if self.baseline else 1.0

    def take(self, step: Step) -> None:
        """Count a step."""
        tested = step.num_tested
        if not tested:
            return
        if self.baseline is None:
            self.tested, self.accepted = self.tested + tested, self.accepted + step.num_accepted
            self.average = self.accepted / self.tested
        else:
            weight = min(1.0, tested / WINDOW)
            self.average += weight * (step.num_accepted / tested - self.average)


class AcceptanceMonitor:
    """Acceptance of every drafting method of a server."""

    def __init__(self, model: str) -> None:
        """model: the served name, for the log."""
        self._model = model
        self.methods: dict[Hashable, Acceptance] = {}

    def take(self, method: Hashable, step: Step) -> None:
        """Count a step; log once when the method's acceptance has fallen."""
        if not step.num_tested:
            return
        found = self.methods.setdefault(method, Acceptance())
        found.take(step)
        if not found.has_fallen and found.ratio < FALLEN:
            found.has_fallen = True
            logger.warning(
                "acceptance of %s for %s has fallen: %.0f%% of tested draft tokens are accepted, %.0f%% at first",
                method, self._model, 100 * found.average, 100 * (found.baseline or 0.0),
            )  # fmt: skip
        elif found.has_fallen and found.ratio >= RECOVERED:
            found.has_fallen = False
