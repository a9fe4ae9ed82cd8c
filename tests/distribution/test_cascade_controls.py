"""Broken cascades, lossy rules and broken translations: the distribution tests must kill each at the same sample size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foresay.decoding.acceptance import Lenience, Typical
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import Drafter, Rule
from foresay.decoding.randomness import Streams
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, MaxGram, cascade
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.drafters.proposal_builder import ProposalBuilder
from foresay.engine import guard
from helpers.distribution_cells import ALPHA, DRAFT, PARAMS, PROMPT, SIZE, SMALL, TARGET, model
from helpers.reference import joint
from helpers.sequential import value_of
from helpers.support import Loop, Renumbered

LENGTH, SAMPLES = 4, 1200
Patch = pytest.MonkeyPatch


def value(drafter: Drafter, rule: str | Rule = "speculative", gamma: int = 5) -> float:
    """The p-value of what a drafter makes the loop write."""
    params = SamplingParams.of(PARAMS["plain"], max_new_tokens=LENGTH)
    loop = Loop(TARGET, drafter=drafter, rule=rule, gamma=gamma, max_batch_size=500)
    return value_of(loop, PROMPT, params, joint(TARGET, params, PROMPT, LENGTH), SAMPLES)


def two(lenience: float = 1.0) -> Cascade:
    return Cascade([model(DRAFT), model(SMALL)], [[4, 1], [0, 3]], lenience=lenience)


def overshooting() -> Cascade:
    """One token is wanted of a review of five, all of which hold: how many are kept is the review's choice."""
    return Cascade([model(DRAFT), model(DRAFT)], [[1, 0], [0, 5]])


def three(lenience: float = 1.0) -> Cascade:
    return Cascade([model(DRAFT), model(SMALL), MaxGram()], [[3, 2, 1], [0, 2, 2], [0, 0, 2]], lenience=lenience)


@pytest.mark.parametrize(
    ("make", "lenience", "rule"),
    [(two, 1.0, "speculative"), (two, 2.0, "block"), (three, 1.0, "block"), (three, 2.0, "speculative")],
)
def test_the_intact_cascade_survives(make: Callable[[float], Cascade], lenience: float, rule: str) -> None:
    assert value(make(lenience), rule) > ALPHA


def _streams_shared_by_the_levels(patch: Patch) -> None:
    """A cascade whose inner reviews draw the numbers that the target's review will draw."""

    def streams(self: Rows, device: torch.device, most: int = 0) -> Streams:
        seeds = torch.tensor([row.seed for row in self], device=device)
        return Streams(seeds, torch.tensor([row.size for row in self], device=device))

    patch.setattr(Rows, "streams", streams)


def _lenient_review_passed_off_as_exact(patch: Patch) -> None:
    """Tokens of a lenient review labelled with the reviewer's distribution, which they do not have."""
    patch.setattr(cascade, "Speculative", lambda: Lenience(4.0))


def _changed(patch: Patch, change: Callable[[Any, list[int]], tuple[Proposal, list[int]]]) -> None:
    """Change what is added of each review: its tokens, and how many of them."""
    add = ProposalBuilder.add

    def changed(self: ProposalBuilder, proposal: Proposal, counts: list[int] | None = None) -> None:
        add(self, *((proposal, None) if counts is None else change(proposal, counts)))

    patch.setattr(ProposalBuilder, "add", changed)


def _unlikely_tokens_hidden(patch: Patch) -> None:
    """Where a review ends may depend on what came before a token, never on the token."""

    def choosy(full: Any, counts: list[int]) -> tuple[Proposal, list[int]]:
        likeliest = full.distributions[full.distribution_index.clamp(min=0)].argmax(-1) == full.token_ids
        leading = 1 + likeliest[:, 1:].long().cumprod(-1).sum(-1)
        return full, torch.minimum(leading, torch.tensor(counts)).tolist()

    _changed(patch, choosy)


def _labelled_with_the_distribution_one_position_on(patch: Patch) -> None:
    index = "distribution_index"
    _changed(patch, lambda full, n: (dataclasses.replace(full, **{index: torch.roll(getattr(full, index), -1, 1)}), n))


@pytest.mark.parametrize(
    ("breaks", "make"),
    [
        (_streams_shared_by_the_levels, two),
        (_lenient_review_passed_off_as_exact, two),
        (_unlikely_tokens_hidden, overshooting),
        (_labelled_with_the_distribution_one_position_on, two),
    ],
    ids=["streams", "lenient", "hidden", "labels"],
)
def test_a_broken_cascade(breaks: Callable[[Patch], None], make: Callable[[], Cascade], monkeypatch: Patch) -> None:
    assert make is not overshooting or value(make()) > ALPHA
    breaks(monkeypatch)
    assert value(make()) < ALPHA


@pytest.mark.parametrize(
    ("rule", "is_exact"),
    [(Lenience(2.0), False), (Typical(), False), (Lenience(1.0), True)],
    ids=["l=2", "typical", "l=1"],
)
def test_a_lossy_rule_is_seen_to_be_lossy(rule: Rule, is_exact: bool) -> None:
    assert not rule.exact and (value(model(DRAFT), rule) > ALPHA) == is_exact


def test_a_translation_without_its_restriction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that the target lacks have probability zero in the distribution drawn from, not only in the recorded one."""
    assert value(CrossTokenizerDrafter(DRAFT, SIZE, Renumbered(SIZE, private=1))) > ALPHA

    class Unrestricted(CrossTokenizerDrafter):
        def _in_draft_tokens(self, place: int, row: Row, greedy: bool) -> Row:
            self._model._others[:] = False
            return super()._in_draft_tokens(place, row, greedy)

        def _same_tokens(self, draft: Proposal) -> Proposal:
            full = super()._same_tokens(draft)
            assert full.distributions is not None  # which would not sum to 1, and be the drafter's failure
            return dataclasses.replace(
                full, distributions=full.distributions / full.distributions.sum(-1, keepdim=True)
            )

    monkeypatch.setattr(guard, "checked", lambda proposal, *rest, **more: proposal)  # which would refuse such tokens
    assert value(Unrestricted(DRAFT, SIZE, Renumbered(SIZE, private=1))) < ALPHA
