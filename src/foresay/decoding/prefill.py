"""Filling a cache up to the last committed token, in chunks of their own.

A prompt, or what a draft missed while it sat out, never rides in a decoding pass: padding a 256-token chunk over seven
decoding rows costs eight times its price. Neighbouring rows share a chunk while the padding stays small, except on a CPU, whose
products over many rows gain nothing and sum differently from a size on: there a prompt is filled the same alone or in a batch.
"""

from __future__ import annotations

import torch

from foresay.decoding.protocols import KVCache, LanguageModel, Logits
from foresay.decoding.rows import Rows

CHUNK = 256
"""Columns of a chunk."""
_MAX_TOKENS = 1024
"""Tokens of a chunk over all rows, pads included."""


def pending(rows: Rows, cache: KVCache, place: int) -> int:
    """Committed tokens of a row that the cache lacks, the last one (which the next pass feeds) not counted."""
    return rows[place].size - 1 - cache.lengths[place]


def fill_chunk(model: LanguageModel, cache: KVCache, rows: Rows, first: int) -> int:
    """Run one chunk over the rows from `first` on that lack tokens; returns the tokens filled, 0 when none lack any."""
    while first < len(rows) and pending(rows, cache, first) <= 0:
        first += 1
    if first == len(rows):
        return 0
    counts: list[int] = []
    last = first + 1 if model.device.type == "cpu" else len(rows)
    for place in range(first, last):
        count = min(CHUNK, pending(rows, cache, place))
        padded = (len(counts) + 1) * max([*counts, count])
        beyond = rows[place].size > model.max_length
        if count <= 0 or beyond or (counts and (padded > _MAX_TOKENS or padded > 2 * (sum(counts) + count))):
            break
        counts.append(count)
    tokens = torch.zeros(len(counts), max(counts), dtype=torch.int64)
    for i, count in enumerate(counts):
        start = cache.lengths[first + i]
        tokens[i, :count] = torch.from_numpy(rows[first + i].tokens[start : start + count])
    tokens = tokens.clamp_(max=model.vocab_size - 1).to(model.device)
    model.forward(tokens, counts, cache, first_row=first, logits=Logits.NONE)
    return sum(counts)
