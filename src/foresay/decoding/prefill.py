"""Filling a cache up to the last committed token, in chunks of their own.

A prompt, or what a draft missed while it sat out, never rides in a decoding pass: padding a 256-token chunk over seven
decoding rows costs eight times its price. Neighbouring rows share a chunk while the padding stays small, where the model says
that they may (`Capabilities.prefill_together`).
"""

from __future__ import annotations

import torch

from foresay.decoding.protocols import KVCache, LanguageModel, Logits, ModelInput
from foresay.decoding.rows import Rows

_MAX_TOKENS = 1024
"""Tokens of a chunk over all rows, pads included."""


def pending(rows: Rows, cache: KVCache, place: int) -> int:
    """Committed tokens of a row that the cache lacks, the last one (which the next pass feeds) not counted."""
    return rows[place].size - 1 - cache.lengths[place]


def prefill_chunk(
    model: LanguageModel,
    cache: KVCache,
    rows: Rows,
    first: int,
    hidden_layers: tuple[int, ...] = (),
    until: int | None = None,
    most: int | None = None,
) -> int:
    """Run one chunk over the rows from `first` on that lack tokens; returns the tokens filled, 0 when none lack any.

    hidden_layers: whose hidden states are added to `Row.prompt_hidden`. until: the place of a row that waits, but for the first.
    most: tokens of the chunk, at most; None fills as many as the model wants at once.
    """
    while first < len(rows) and pending(rows, cache, first) <= 0:
        first += 1
    if first == len(rows):
        return 0
    counts: list[int] = []
    ability = model.capabilities
    last = max(first + 1, len(rows) if until is None else until) if ability.prefill_together else first + 1
    for place in range(first, last):
        room = ability.prefill_chunk if most is None else max(1, most) - sum(counts)
        count = min(ability.prefill_chunk, room, pending(rows, cache, place))
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
    model_input = ModelInput(tokens, counts, first, logits=Logits.NONE, hidden_layers=hidden_layers)
    hidden = model.forward(model_input, cache).hidden
    for i, count in enumerate(counts if hidden_layers else ()):
        row = rows[first + i]
        new = {layer: states[i, :count] for layer, states in hidden.items()}
        held = row.prompt_hidden
        row.prompt_hidden = {n: torch.cat([held[n], states]) if n in held else states for n, states in new.items()}
    return sum(counts)
