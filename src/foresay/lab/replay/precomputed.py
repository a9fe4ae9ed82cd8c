"""A draft model in a replay, asked once: what it says behind every recorded token holds for every draft length.

A greedy draft continues its own tokens, and is tested only as long as they are the recorded ones. So its guesses are read
off its likeliest token behind each place of the recorded text, one pass over each text, and a sweep over lengths costs no
further passes. What it would have guessed behind a miss is never looked at, and something else stands there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foresay.decoding.laws import build_laws
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import Feed, LanguageModel, LengthPolicy
from foresay.decoding.rows import IntArray, Row, Rows
from foresay.drafters import ModelDrafter
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.drafters.draft_cache import DraftCache
from foresay.drafters.stateless import Stateless
from foresay.lab.replay.replay import recorded_params
from foresay.records.recording import Recording

_CHUNK = 32
"""Columns of a pass: no more than a scoring pass may have, so that it computes the same bits."""


class PrecomputedDrafter(Stateless):
    """Drafts what a draft model was heard to say of the recorded texts."""

    def __init__(self, said: Sequence[IntArray], max_length: int) -> None:
        """said: for each text, the token guessed behind each of its places. max_length: the draft's context."""
        self._said, self._max_length = said, max_length

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """The guesses behind each row's last token, as long as the draft's context allows."""
        counts = [max(0, min(n, self._max_length - row.size)) for n, row in zip(budget, rows, strict=True)]
        out = np.zeros((len(rows), max(counts)), dtype=np.int64)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            said = self._said[row.request_id][row.size - 1 : row.size - 1 + count]
            out[i, : len(said)] = said
        return Proposal(torch.from_numpy(out), counts)


def can_precompute(drafter: Any, policy: LengthPolicy, recording: Recording) -> bool:
    """Whether a PrecomputedDrafter makes the same Steps: one greedy draft model, and a policy that asks nothing of its scores."""
    from foresay.lengths import ConstantLength, HeuristicLength, ThroughputLength

    plain = isinstance(drafter, ModelDrafter) and not isinstance(drafter, CrossTokenizerDrafter)
    blind = isinstance(policy, ConstantLength | HeuristicLength | ThroughputLength)
    decoder_only = all(record.source is None for record in recording.records)
    return plain and blind and decoder_only and recording.greedy


@torch.inference_mode()
def precompute(drafter: ModelDrafter, recording: Recording) -> PrecomputedDrafter:
    """Hear what a draft model says behind every token of every recorded text."""
    model = drafter.context.model
    params = recorded_params(recording, 1 << 30)
    said = []
    for record in recording.records:
        tokens = [*record.prompt, *record.output]
        row = Row(0, tokens, params, limit=len(tokens) + 1, eos=recording.eos)
        row.prompt_length = len(record.prompt)
        said.append(_argmax_after(model, row, len(record.prompt)))
    return PrecomputedDrafter(said, model.max_length)


def _argmax_after(model: LanguageModel, row: Row, begin: int) -> IntArray:
    """[size] the likeliest token behind each place from the prompt's last on; zeros before."""
    context = DraftCache(model, model.vocab_size)
    rows = Rows([row])
    context.admit(rows, 0)
    out: IntArray = np.zeros(row.size, dtype=np.int64)
    prefix = Row(0, row.tokens[:begin], row.params, limit=row.limit, eos=row.eos)
    context.prepare(Rows([prefix]), [True])
    place, end = context.cache.lengths[0], min(row.size, model.max_length)
    while place < end:
        count = min(_CHUNK, end - place)
        fed = torch.from_numpy(row.tokens[place : place + count])[None].to(model.device)
        scores = context.forward(Feed(fed, [count])).scores()
        keep = max(0, begin - 1 - place)
        here = Row(0, row.tokens[: place + keep + 1], row.params, limit=row.limit, eos=row.eos)
        here.prompt_length = row.prompt_length
        behind = torch.from_numpy(row.tokens[None, place + keep + 1 : place + count])
        laws = build_laws(scores[:, keep:], Rows([here]), behind)
        out[place + keep : place + count] = laws.greedy_ids[0].cpu().numpy()
        place += count
    return out
