"""The rules by which a draft continues, as numbers that a kernel can read. Knows no policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Continuation:
    """The rule by which one row's greedy draft continues, for drafters that draw several tokens in one call.

    Another token is drafted while probability * weights[c_1] * ... * weights[c_n] > threshold, with c_i the tenth of the
    confidence of the i-th token (its softmax probability under the draft): 0 below 0.1, 9 from 0.9 on.
    """

    probability: float = 1.0
    weights: tuple[float, ...] = (1.0,) * 10
    threshold: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError unless there is a weight for each tenth."""
        if len(self.weights) != 10:
            raise ValueError(
                f"a Continuation has {len(self.weights)} weights; it needs 10, one for each tenth of confidence"
            )


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chain of one row that was drawn by a rule in one call. confidences: each token's probability under the draft."""

    token_ids: list[int]
    confidences: list[float]
