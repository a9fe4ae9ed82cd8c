"""Drafts end at their first end token, whether a model draws them by itself or the host draws token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foresay import Logits, ModelInput, SamplingParams, TableModel
from foresay.decoding.chains import Drawn, Sampling
from foresay.decoding.draws import inverse_cdf
from foresay.drafters import ModelDrafter, model
from helpers.support import run

VOCAB, ROWS = 12, 40
ENDS = frozenset({3, 7, 8})


class DrawsByItself(TableModel):
    """A table that draws chains as a model on a GPU does: it goes on after an end token."""

    draws_chains = True

    def draw_chains(
        self, known: ModelInput, cache: Any, room: Sequence[int], sampling: Sampling | None
    ) -> Drawn | None:
        assert sampling is not None
        drafting = [i for i, n in enumerate(room) if n]
        temperature = torch.tensor(sampling.temperature)[:, None]
        output = self.forward(dataclasses.replace(known, logits=Logits.LAST), cache)
        tokens, probs = list[torch.Tensor](), list[torch.Tensor]()
        for j in range(max(room)):
            scores = output.scores()[:, -1].float()
            found = ((scores - scores.amax(-1, keepdim=True)) / temperature).softmax(-1)
            probs.append(found[drafting])
            tokens.append(inverse_cdf(found, sampling.uniforms[:, j]))
            fed = [int(n > j + 1) for n in room]
            if any(fed):
                output = self.forward(ModelInput(tokens[-1][:, None], fed, logits=Logits.LAST), cache)
        return Drawn(torch.stack(tokens, 1), torch.cat(probs))


def texts(rule: str, **neighbour: Any) -> tuple[list[list[int]], list[tuple[int, int]], int]:
    """Texts next to a neighbour, drafted and accepted tokens of each of their steps, and chains that were drawn at once."""
    target = TableModel.random(VOCAB, seed=1, concentration=0.5)
    draft = DrawsByItself.random(VOCAB, seed=2, concentration=0.5)
    at_once = []
    known = draft.draw_chains
    draft.draw_chains = lambda *given: (at_once.append(1), known(*given))[1]  # type: ignore[method-assign]
    params = [SamplingParams(max_new_tokens=30, seed=n, temperature=1.2) for n in range(ROWS)]
    params.append(SamplingParams(max_new_tokens=30, seed=99, temperature=1.2, ignore_eos=True, **neighbour))
    outputs, steps, engine = run(
        target, [[1 + n % 5, 2] for n in range(ROWS + 1)], params, drafter=ModelDrafter(draft, VOCAB), rule=rule, gamma=6,
        max_batch_size=ROWS + 1, eos=ENDS,
    )  # fmt: skip
    assert engine.draft_failures == 0
    own = [one for one in steps if one.request_id != ROWS]
    return outputs[:-1], [(one.num_drafted, one.num_accepted) for one in own], len(at_once)


@pytest.mark.parametrize("rule", ["block", "speculative", "match"])
def test_a_text_does_not_depend_on_who_draws_the_draft(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block verification depends on the draft's length; a neighbour with a penalty has all drafts drawn token by token.

    Control: with drafts that go on after an end token the texts differ, not only the counts of drafted tokens.
    """
    by_itself, by_host = texts(rule), texts(rule, repetition_penalty=1.1)
    assert by_itself[:2] == by_host[:2]
    assert by_itself[2] > 3 and by_host[2] == 0
    lengths = {drafted for drafted, accepted in by_itself[1] if accepted < drafted}
    assert lengths >= {1, 3, 6}, "rejected drafts that ended early, and whole ones"
    if rule == "block":
        monkeypatch.setattr(model, "up_to_end", lambda *given: None)
        assert texts(rule)[0] != by_host[0]
