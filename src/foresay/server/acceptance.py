"""Acceptance over time: a moving average of a drafting method against its first requests, to notice a fall.

Acceptance falls when requests change, or when the target was replaced and the draft was not. Owns the average. Knows no HTTP.
"""

from __future__ import annotations

import logging
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
    """Acceptance of one drafting method of one model."""

    tested: int = 0
    accepted: int = 0
    """Draft tokens of the baseline, and those of them that were accepted."""
    average: float = 0.0
    """Moving average of accepted tokens over tested ones."""
    has_fallen: bool = False

    @property
    def ratio(self) -> float:
        """The moving average over the baseline; 1 before there is a baseline, or if nothing was accepted at first."""
        return self.average * self.tested / self.accepted if self.tested >= BASELINE and self.accepted else 1.0

    def take(self, step: Step, name: str) -> None:
        """Count a step with tested tokens; log once when the acceptance has fallen. name: of the method and model."""
        if self.tested < BASELINE:
            self.tested, self.accepted = self.tested + step.num_tested, self.accepted + step.num_accepted
            self.average = self.accepted / self.tested
            return
        self.average += min(1.0, step.num_tested / WINDOW) * (step.num_accepted / step.num_tested - self.average)
        had_fallen, self.has_fallen = self.has_fallen, self.ratio < (RECOVERED if self.has_fallen else FALLEN)
        if self.has_fallen and not had_fallen:
            text = "acceptance of %s has fallen: %.0f%% of tested draft tokens are accepted, %.0f%% at first"
            logger.warning(text, name, 100 * self.average, 100 * self.accepted / self.tested)
