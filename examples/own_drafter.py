"""A drafter of your own: it continues known phrases, and proposes nothing elsewhere.

python examples/own_drafter.py MODEL

The output is the target's whatever the drafter proposes, so a wrong phrase costs only time. To use the drafter by name, see
the entry points in docs/how-to/own-drafter.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

import foresay
from foresay import ConstantLength, Engine, Proposal, SamplingParams, Speculative, TableModel


class Phrases(foresay.Stateless):
    """Propose the rest of a phrase whose first tokens end a row's text."""

    samples = False  # no proposed token is drawn from a distribution

    def __init__(self, phrases: Sequence[Sequence[int]], min_match: int = 2) -> None:
        self._phrases = [list(phrase) for phrase in phrases]
        self._min_match = min_match

    def propose(self, rows: Any, budget: Sequence[int], policy: Any) -> Proposal:
        """Return up to `budget` tokens for each row, padded on the right."""
        drafts = [
            self._rest([int(token) for token in row.tokens])[:most] for row, most in zip(rows, budget, strict=True)
        ]
        counts = [len(draft) for draft in drafts]
        width = max(counts, default=0)
        padded = [draft + [0] * (width - len(draft)) for draft in drafts]
        return Proposal(torch.tensor(padded, dtype=torch.int64).reshape(len(drafts), width), counts)

    def _rest(self, tokens: list[int]) -> list[int]:
        for phrase in self._phrases:
            for cut in range(len(phrase) - 1, self._min_match - 1, -1):
                if tokens[-cut:] == phrase[:cut]:
                    return phrase[cut:]
        return []


def on_a_table() -> None:
    """Decode with a table of probabilities in place of a model: no weights are needed to try a drafter."""
    engine = Engine(TableModel.random(6, seed=1), Phrases([[1, 2, 3, 4]]), Speculative(), ConstantLength(3))
    engine.submit([1, 2], SamplingParams(max_new_tokens=10, temperature=1.0, seed=3))
    while engine.has_work:
        for step in engine.step():
            print(step.token_ids, f"{step.num_accepted} of {step.num_drafted} draft tokens accepted")


def on_a_model(name: str, tokens: int = 24) -> None:
    """Decode with a model; the phrase is what it generates anyway, so that drafts are accepted."""
    plain = foresay.load(name, drafter="none")
    prompt = "The three primary colours are"
    expected = plain.generate(prompt, max_new_tokens=tokens).token_ids
    drafting = foresay.change(plain, drafter=lambda: Phrases([expected]), length=8)
    answer = drafting.generate(prompt, max_new_tokens=tokens)
    print(answer.text)
    print(f"{answer.stats.num_tokens} tokens in {answer.stats.num_passes} target passes")
    print("same output without a drafter:", answer.token_ids == expected)


if __name__ == "__main__":
    on_a_table()
    on_a_model(*sys.argv[1:2] or ["smollm2-135m"])
