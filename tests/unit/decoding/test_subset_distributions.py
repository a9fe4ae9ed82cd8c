"""Scores of a draft that writes some of the tokens only: never written out over the vocabulary where no distribution needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresay.decoding.distributions import VocabularySubset, build_distributions
from foresay.decoding.protocols import ModelOutput
from helpers.making import make_rows

TOKENS = torch.tensor([7, 2, 11, 5])
SUBSET = VocabularySubset.of(TOKENS, 13)


def narrow(batch: int = 3, places: int = 2) -> ModelOutput:
    scores = torch.randn(batch, places, len(TOKENS), generator=torch.Generator().manual_seed(5))
    return ModelOutput(scores, subset=SUBSET)


def test_widened_scores_stand_at_their_tokens_and_nothing_stands_elsewhere() -> None:
    out = narrow()
    wide = out.scores()
    assert wide.shape == (3, 2, 13)
    assert torch.equal(wide[..., TOKENS], out.logits)
    others = [token for token in range(13) if token not in TOKENS.tolist()]
    assert bool((wide[..., others] == -torch.inf).all())


@pytest.mark.parametrize(
    ("params", "greedy", "stays_narrow"),
    [
        ([{}, {}, {}], False, True),
        ([{"temperature": 1.0}, {}, {}], True, True),
        ([{"temperature": 1.0}, {}, {}], False, False),
        ([{"logit_bias": {2: 4.0}}, {}, {}], True, False),
    ],
    ids=["greedy", "sampled, likeliest tokens", "sampled", "processed"],
)
def test_laws_of_narrow_scores_are_those_of_wide_ones(
    params: list[dict[str, Any]], greedy: bool, stays_narrow: bool
) -> None:
    out, rows = narrow(places=1), make_rows(*params)
    drafted = torch.empty(3, 0, dtype=torch.int64)
    found = out.draft_distributions(rows, drafted, greedy=greedy)
    expected = build_distributions(out.scores(), rows, drafted, greedy=greedy)
    assert torch.equal(found.greedy_ids, expected.greedy_ids)
    assert (found.subset is not None) == stays_narrow
    if expected.probs is not None:
        assert found.probs is not None and torch.equal(found.probs, expected.probs)


def test_how_sure_a_draft_is_of_a_token_is_the_same_however_wide_its_scores_are() -> None:
    out, rows = narrow(), make_rows({}, {}, {})
    drafted = torch.empty(3, 0, dtype=torch.int64)
    found, wide = (
        out.draft_distributions(rows, drafted, greedy=True),
        build_distributions(out.scores(), rows, greedy=True),
    )
    for ids in (found.greedy_ids, torch.tensor([[2, 5], [11, 7], [7, 7]]), torch.tensor([[0, 12], [2, 3], [4, 5]])):
        torch.testing.assert_close(found.confidence(ids), wide.confidence(ids))
    assert float(found.confidence(torch.tensor([[0]] * 3)).sum()) == 0.0, "a token that it cannot write"


def test_places_of_a_narrow_output_keep_its_tokens() -> None:
    out = narrow(places=3)
    part = out.at(torch.tensor([[1, 2], [0, 1], [2, 0]]), [0, 0, 0])
    assert part.scores().shape == (3, 2, 13)
    assert torch.equal(part.scores()[0, 0], out.scores()[0, 1])
