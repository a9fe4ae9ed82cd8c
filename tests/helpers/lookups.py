"""Rows of an n-gram drafter, and the tokens that it drafts for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foresay.decoding.rows import Rows
from foresay.drafters.ngram import NgramDrafter
from foresay.lengths import ConstantLength
from helpers.cascading import lists
from helpers.making import make_row


def admitted(drafter: NgramDrafter[Any], *prompts: Sequence[int]) -> Rows:
    rows = Rows([make_row(prompt) for prompt in prompts])
    drafter.admit(rows, 0)
    return rows


def propose(drafter: NgramDrafter[Any], rows: Rows, *budget: int) -> list[list[int]]:
    proposal = drafter.propose(rows, budget, ConstantLength(4))
    assert proposal.distributions is None and proposal.distribution_index is None, "copied tokens are point masses"
    assert proposal.width == max(proposal.num_tokens)
    return lists(proposal)


def drafted(drafter: NgramDrafter[Any], prompt: Sequence[int], budget: int) -> list[int]:
    """Draft tokens after one prompt."""
    return propose(drafter, admitted(drafter, prompt), budget)[0]
