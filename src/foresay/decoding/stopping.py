"""When drafts end: a rule as numbers, which this module and the compiled kernels evaluate after each token of a draft model.

The token just drawn stays in the draft: dropping it for its own value would condition its distribution. Knows no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from foresay.decoding.devices import is_remote
from foresay.decoding.distributions import Distributions, entropy
from foresay.decoding.rows import Rows
from foresay.decoding.state import StateKey


class Reads(StrEnum):
    """The quantity that a rule reads of each token."""

    NOTHING = "nothing"
    PROBABILITY = "probability"
    """q(x), the probability with which it was drawn; in greedy rows the softmax probability at temperature 1."""
    ENTROPY = "entropy"
    """H(q), in nats, of the distribution that it was drawn from; in greedy rows of the softmax at temperature 1."""
    CONFIDENCE = "confidence"
    """The softmax probability at temperature 1, which is read on a CPU only: elsewhere it would synchronize."""
    HIDDEN = "hidden"
    """The draft model's hidden state, from which a network predicts the acceptance of the token before."""


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """When the drafts of a batch end. B rows.

    PROBABILITY: a row continues while q(x) >= threshold. ENTROPY: while H(q) <= threshold. HIDDEN: while 1 - c_1 ... c_i <=
    threshold, with c_i = network(hidden state that token i gave). CONFIDENCE: with P = probability w_1 ... w_i, w_j the weight of
    token j by the tenth of its confidence (0 below 0.1, 9 from 0.9 on), those rows continue for which the sum of (P - per_row)
    over the rows with at least as large P, less `threshold`, which they share, is greatest, and greater than 0.
    """

    reads: Reads = Reads.NOTHING
    """The quantity that decides: nothing, probability, entropy, confidence or hidden."""
    threshold: float = 0.0
    """Bound of that quantity; for CONFIDENCE the cost that the rows share."""
    low: int = 0
    """Tokens of a draft up to which it continues in any case."""
    probability: tuple[float, ...] = (1.0,)
    """[B], factor of P; for CONFIDENCE."""
    weights: tuple[float, ...] = (1.0,) * 10
    """Weight of a token by the tenth of its confidence; for CONFIDENCE."""
    per_row: float = 0.0
    """Cost of one more token in one row; for CONFIDENCE."""
    always: tuple[bool, ...] = ()
    """[B], rows that continue in any case; () for none."""
    network: Callable[[torch.Tensor], torch.Tensor] | None = None
    """[B, H] hidden states -> [B] probabilities of acceptance; for HIDDEN."""

    def __post_init__(self) -> None:
        """Raise ValueError unless there is a weight for each tenth."""
        if len(self.weights) != 10:
            raise ValueError(
                f"a StoppingRule has {len(self.weights)} weights; it needs 10, one for each tenth of confidence"
            )


def tenth(confidence: float) -> int:
    """Return the index of a confidence's weight."""
    return min(int(10 * confidence), 9) if confidence > 0 else 0


@dataclass(frozen=True, slots=True)
class DraftStep:
    """The token that a draft model has just added to each row's draft."""

    index: torch.Tensor
    """[B] int64, number of draft tokens before it."""
    token_ids: torch.Tensor
    """[B] int64."""
    distributions: Distributions
    """[B, 1], which the tokens were drawn from, with the raw scores."""
    hidden: torch.Tensor | None = None
    """[B, H], the hidden state of the scores, if the rule reads it."""
    able: Sequence[bool] | None = None
    """[B], rows that have room for another token, for chains drawn by a model; None otherwise."""


CONFIDENCES = StateKey[list[list[float]]](list)
"""The confidences of each row's draft tokens in this step, as far as a rule has read them."""


class Stopping:
    """The evaluation of a rule over one draft of each row. A subclass evaluates a rule that numbers do not state."""

    def __init__(self, rule: StoppingRule, rows: Rows) -> None:
        """Start before the first token of a draft.

        Args:
            rule: The rule of this draft.
            rows: The rows of the step.
        """
        self.rule, self._rows = rule, rows
        self._probability = list(rule.probability)
        self._on = [True] * len(rows)
        self._accepted: torch.Tensor | None = None

    @property
    def is_data(self) -> bool:
        """True if the rule states it all, so that something else may evaluate it."""
        return type(self) is Stopping

    def keep(self, step: DraftStep) -> torch.Tensor | None:
        """Return the rows that continue drafting after a token, [B] bool; None for all.

        Args:
            step: The token of each row.
        """
        rule = self.rule
        if rule.reads is Reads.NOTHING:
            return None
        if rule.reads is Reads.CONFIDENCE:
            return self._while_worth(step)
        sure = {Reads.PROBABILITY: self._probable, Reads.ENTROPY: self._certain, Reads.HIDDEN: self._accepted_so_far}
        out = sure[rule.reads](step)
        return None if out is None else out | (step.index + 1 < rule.low)

    def _probable(self, step: DraftStep) -> torch.Tensor:
        ids, distributions = step.token_ids[:, None], step.distributions
        if distributions.probs_row is None:
            return distributions.confidence(ids)[:, 0] >= self.rule.threshold
        drawn = distributions.prob_of(ids)[:, 0]
        greedy = distributions.probs_row[:, 0] < 0
        if bool(greedy.any()):
            drawn = torch.where(greedy, distributions.confidence(ids)[:, 0], drawn)
        return drawn >= self.rule.threshold

    def _certain(self, step: DraftStep) -> torch.Tensor:
        distributions = step.distributions
        assert distributions.scores is not None
        raw = entropy(distributions.scores[:, 0].float().softmax(-1))
        if distributions.probs is None or distributions.probs_row is None:
            return raw <= self.rule.threshold
        index = distributions.probs_row[:, 0]
        return torch.where(index >= 0, entropy(distributions.probs)[index.clamp(min=0)], raw) <= self.rule.threshold

    @torch.inference_mode()
    def _accepted_so_far(self, step: DraftStep) -> torch.Tensor | None:
        if step.hidden is None or self.rule.network is None:
            return None
        if self._accepted is None:  # the first pass of a draft consumed a committed token, which cannot be rejected
            self._accepted = torch.ones(len(step.index), device=step.hidden.device)
        else:
            self._accepted = self._accepted * self.rule.network(step.hidden)
        return 1 - self._accepted <= self.rule.threshold

    def _while_worth(self, step: DraftStep) -> torch.Tensor | None:
        scores = step.distributions.scores
        if step.able is None or scores is None or is_remote(scores.device):
            return None
        if not CONFIDENCES.of(self._rows):
            CONFIDENCES.put(self._rows, [[] for _ in self._on])
        if not any(self._going(step.able)):
            return None
        return torch.tensor(
            self.after(step.distributions.confidence(step.token_ids[:, None])[:, 0].tolist(), step.able)
        )

    def after(self, confidences: Sequence[float], able: Sequence[bool]) -> list[bool]:
        """Return the rows that continue after a token of each row, [B].

        Args:
            confidences: [B] confidence of the tokens.
            able: [B], rows with room for another token.
        """
        for i, certain in enumerate(confidences):
            CONFIDENCES.of(self._rows)[i].append(certain)
            self._probability[i] *= self.rule.weights[tenth(certain)]
        # only rows with room share the cost of a draft pass
        going = self._going(able)
        best, value, total = 2.0, 0.0, -self.rule.threshold
        for prob in sorted((p for p, on in zip(self._probability, going, strict=True) if on), reverse=True):
            total += prob - self.rule.per_row
            if total > value:
                best, value = prob, total
        self._on = [on and p >= best for p, on in zip(self._probability, going, strict=True)]
        return [on or a for on, a in zip(self._on, self.rule.always or [False] * len(self._on), strict=True)]

    def _going(self, able: Sequence[bool]) -> list[bool]:
        return [on and room for on, room in zip(self._on, able, strict=True)]
