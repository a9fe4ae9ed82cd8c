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
class Branching:
    """The rule by which one row's tree grows, for drafters that choose its nodes in one call. q: product of the draft's
    probabilities along the path to a node.

    A level gets children while the sum of (scale q - each) over its nodes that would get them, all positive, exceeds `threshold`.
    Of all nodes those are kept whose scale q exceeds `least`, and the likeliest in any case.
    """

    scale: float = 1.0
    threshold: float = 0.0
    each: float = 0.0
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """A draft of one row that was drawn by a rule in one call.

    parents: of a tree, the index of each token's parent or -1; None for a chain. confidences: each token's probability under the
    draft; in a tree the product of those along its path. passes: of the draft model.
    """

    token_ids: list[int]
    confidences: list[float]
    passes: int
    parents: list[int] | None = None
