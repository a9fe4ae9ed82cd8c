"""A greedy draft model in a replay, computed once: its argmax after every recorded token serves every draft length.

A greedy draft continues its own tokens and is tested only up to the first token that differs from the recording. Up to that
token, the draft tokens are the argmax after each recorded token. One teacher-forced pass over each text therefore yields all of
them, and a sweep over draft lengths needs no further passes. Draft tokens after a mismatch differ from live ones, but are never
tested. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foresay.decoding.distributions import build_distributions
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy, ModelInput
from foresay.decoding.rows import IntArray, Row, Rows
from foresay.drafters import ModelDrafter
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.drafters.draft_cache import DraftCache
from foresay.drafters.stateless import Stateless
from foresay.lengths import ConstantLength, HeuristicLength
from foresay.records.recording import Recording
from foresay_lab.replay.replay import recorded_params

_CHUNK = 32
"""Tokens per pass: at most the size of a scoring pass, so that the logits equal the live ones bit for bit."""


class PrecomputedDrafter(Stateless):
    """A drafter that proposes a draft model's precomputed argmax over the recorded texts."""

    def __init__(self, argmax: Sequence[IntArray], max_length: int) -> None:
        """argmax: for each text, the most probable token after each position, [size]. max_length: context length of the draft."""
        self._argmax, self._max_length = argmax, max_length

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Return the draft tokens after each row's last token, [B, K] int64, limited by the draft's context length."""
        counts = [max(0, min(n, self._max_length - row.size)) for n, row in zip(budget, rows, strict=True)]
        out = np.zeros((len(rows), max(counts)), dtype=np.int64)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            drafted = self._argmax[row.request_id][row.size - 1 : row.size - 1 + count]
            out[i, : len(drafted)] = drafted
            ends = (j + 1 for j, token in enumerate(drafted.tolist()) if row.ends_with(token, row.num_new + j + 1))
            counts[i] = next(ends, count)
        return Proposal(torch.from_numpy(out), counts)


def can_precompute(drafter: Any, policy: LengthPolicy, recording: Recording) -> bool:
    """True if a PrecomputedDrafter gives the same Steps: one greedy draft model and a length policy that ignores its logits.

    The number of draft tokens may differ: after a mismatch the two drafts differ, and either may stop earlier at an end token.
    The accepted tokens and the output are the same.
    """
    if not isinstance(drafter, ModelDrafter) or isinstance(drafter, CrossTokenizerDrafter) or drafter.hidden_layers:
        return False
    decoder_only = all(record.source is None for record in recording.records)
    return isinstance(policy, ConstantLength | HeuristicLength) and decoder_only and recording.greedy


@torch.inference_mode()
def precompute(drafter: ModelDrafter, recording: Recording) -> PrecomputedDrafter:
    """Compute a draft model's argmax after every recorded token, with one teacher-forced pass over each text."""
    model = drafter.context.model
    params, argmax = recorded_params(recording, 1 << 30), list[IntArray]()
    for record in recording.records:
        tokens, begin = [*record.prompt, *record.output], len(record.prompt)
        row = Row(0, tokens, params, limit=len(tokens) + 1, eos=recording.eos)
        row.prompt_length = begin
        context = DraftCache(model, model.vocab_size)
        context.admit(Rows([row]), 0)
        prefix = Row(0, row.tokens[:begin], params, limit=row.limit, eos=row.eos)
        context.prepare(Rows([prefix]), [True])
        argmax.append(np.zeros(row.size, dtype=np.int64))  # zeros remain before the prompt's last token
        start, end = context.cache.lengths[0], min(row.size, model.max_length)
        while start < end:
            count = min(_CHUNK, end - start)
            fed = torch.from_numpy(row.tokens[start : start + count])[None].to(model.device)
            scores = context.forward(ModelInput(fed, [count])).scores()
            skipped = max(0, begin - 1 - start)
            here = Row(0, row.tokens[: start + skipped + 1], params, limit=row.limit, eos=row.eos)
            here.prompt_length = begin
            continuation = torch.from_numpy(row.tokens[None, start + skipped + 1 : start + count])
            distributions = build_distributions(scores[:, skipped:], Rows([here]), continuation)
            argmax[-1][start + skipped : start + count] = distributions.greedy_ids[0].cpu().numpy()
            start += count
    return PrecomputedDrafter(argmax, model.max_length)
