"""A greedy draft model in a replay, computed once: its argmax after every recorded token serves every draft length.

A greedy draft continues its own tokens, and is tested only up to its first token that differs from the recording. Up to
there its draft tokens are its argmax after each recorded token, so one teacher-forced pass over each text gives them all, and
a sweep over draft lengths costs no further passes. Draft tokens after a mismatch are never tested, and hold other values
than live. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foresay.decoding.distributions import build_distributions
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LanguageModel, LengthPolicy, ModelInput
from foresay.decoding.rows import IntArray, Row, Rows
from foresay.drafters import ModelDrafter
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.drafters.draft_cache import DraftCache
from foresay.drafters.stateless import Stateless
from foresay.lab.replay.replay import recorded_params
from foresay.records.recording import Recording

_CHUNK = 32
"""Columns of a pass: no more than a scoring pass may have, so that the logits are bit for bit the live ones."""


class PrecomputedDrafter(Stateless):
    """Drafts the precomputed argmax of a draft model over the recorded texts."""

    def __init__(self, argmax: Sequence[IntArray], max_length: int) -> None:
        """argmax: for each text [size], the draft's likeliest token after each position. max_length: the draft's context."""
        self._argmax, self._max_length = argmax, max_length

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """The draft tokens after each row's last token, [B, K], as many as the draft's context allows."""
        counts = [max(0, min(n, self._max_length - row.size)) for n, row in zip(budget, rows, strict=True)]
        out = np.zeros((len(rows), max(counts)), dtype=np.int64)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            drafted = self._argmax[row.request_id][row.size - 1 : row.size - 1 + count]
            out[i, : len(drafted)] = drafted
            ends = (j + 1 for j, token in enumerate(drafted.tolist()) if row.ends_with(token, row.num_new + j + 1))
            counts[i] = next(ends, count)
        return Proposal(torch.from_numpy(out), counts)


def can_precompute(drafter: Any, policy: LengthPolicy, recording: Recording) -> bool:
    """Whether a PrecomputedDrafter gives the same Steps: one greedy draft model, and a length policy that ignores its logits.

    But for one count: after a miss the two drafts hold other tokens, and either may come upon an end token and stop there where
    the other drafts on; what is accepted and written is the same.
    """
    from foresay.lengths import ConstantLength, HeuristicLength

    plain = isinstance(drafter, ModelDrafter) and not isinstance(drafter, CrossTokenizerDrafter)
    blind = isinstance(policy, ConstantLength | HeuristicLength)
    decoder_only = all(record.source is None for record in recording.records)
    return plain and blind and decoder_only and recording.greedy


@torch.inference_mode()
def precompute(drafter: ModelDrafter, recording: Recording) -> PrecomputedDrafter:
    """The argmax of a draft model after every recorded token, from one teacher-forced pass over each text."""
    model = drafter.context.model
    params = recorded_params(recording, 1 << 30)
    argmax = []
    for record in recording.records:
        tokens = [*record.prompt, *record.output]
        row = Row(0, tokens, params, limit=len(tokens) + 1, eos=recording.eos)
        row.prompt_length = len(record.prompt)
        argmax.append(_argmax_after(model, row, len(record.prompt)))
    return PrecomputedDrafter(argmax, model.max_length)


def _argmax_after(model: LanguageModel, row: Row, begin: int) -> IntArray:
    """[size] the likeliest token after each position, from the prompt's last token on; zeros before."""
    context = DraftCache(model, model.vocab_size)
    rows = Rows([row])
    context.admit(rows, 0)
    out: IntArray = np.zeros(row.size, dtype=np.int64)
    prefix = Row(0, row.tokens[:begin], row.params, limit=row.limit, eos=row.eos)
    context.prepare(Rows([prefix]), [True])
    start, end = context.cache.lengths[0], min(row.size, model.max_length)
    while start < end:
        count = min(_CHUNK, end - start)
        fed = torch.from_numpy(row.tokens[start : start + count])[None].to(model.device)
        scores = context.forward(ModelInput(fed, [count])).scores()
        skipped = max(0, begin - 1 - start)
        here = Row(0, row.tokens[: start + skipped + 1], row.params, limit=row.limit, eos=row.eos)
        here.prompt_length = row.prompt_length
        continuation = torch.from_numpy(row.tokens[None, start + skipped + 1 : start + count])
        distributions = build_distributions(scores[:, skipped:], Rows([here]), continuation)
        out[start + skipped : start + count] = distributions.greedy_ids[0].cpu().numpy()
        start += count
    return out
