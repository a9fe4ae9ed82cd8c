"""Prefill: fill a cache up to the last committed token, in chunks.

Prompts, and tokens that a draft model missed while it was inactive, are never part of a decoding pass: padding seven decoding
rows to a chunk of 256 tokens costs eight times the chunk. Neighbouring rows share a chunk while the padding stays small, if the
model allows it (`Capabilities.prefill_together`).
"""

from __future__ import annotations

import torch

from foresay.decoding import ahead
from foresay.decoding.protocols import KVCache, LanguageModel, Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Rows

_MAX_TOKENS = 1024
"""Tokens of a chunk over all rows, pads included."""


def pending(rows: Rows, cache: KVCache, index: int) -> int:
    """Number of committed tokens of a row that its cache lacks, without the last one, which the next pass feeds."""
    return rows[index].size - 1 - cache.lengths[index]


def prefill_chunk(
    model: LanguageModel,
    cache: KVCache,
    rows: Rows,
    first: int,
    hidden_layers: tuple[int, ...] = (),
    until: int | None = None,
    most: int | None = None,
    *,
    scored: bool = False,
) -> int:
    """Prefill one chunk of the rows from index `first` on; return the number of tokens, 0 if no row lacks any.

    hidden_layers: layers whose hidden states are added to `Row.prompt_hidden`. until: index of the first row that must wait.
    most: maximum number of tokens of the chunk; None stands for the model's `prefill_chunk`. scored: True to read the last token
    of a prompt with its last chunk, whose scores its first step finds ready.
    """
    while first < len(rows) and pending(rows, cache, first) <= 0:
        first += 1
    if first == len(rows):
        return 0
    counts: list[int] = []
    capabilities = model.capabilities
    last = max(first + 1, len(rows) if until is None else until) if capabilities.prefill_together else first + 1
    for i in range(first, last):
        room = capabilities.prefill_chunk if most is None else max(1, most) - sum(counts)
        count = min(capabilities.prefill_chunk, room, pending(rows, cache, i))
        padded = (len(counts) + 1) * max([*counts, count])
        too_long = rows[i].size > model.max_length
        if count <= 0 or too_long or (counts and (padded > _MAX_TOKENS or padded > 2 * (sum(counts) + count))):
            break
        counts.append(count)
    ends = [scored and count == pending(rows, cache, first + i) for i, count in enumerate(counts)]
    counts = [count + end for count, end in zip(counts, ends, strict=True)]
    tokens = torch.zeros(len(counts), max(counts), dtype=torch.int64)
    for i, count in enumerate(counts):
        start = cache.lengths[first + i]
        tokens[i, :count] = torch.from_numpy(rows[first + i].tokens[start : start + count])
    tokens = tokens.clamp_(max=model.vocab_size - 1).to(model.device)
    logits = Logits.LAST if any(ends) else Logits.NONE
    model_input = ModelInput(tokens, counts, first, logits=logits, hidden_layers=hidden_layers, is_prompt=True)
    output = model.forward(model_input, cache)
    hidden = {layer: model_input.of_last(states) for layer, states in output.hidden.items()}
    scores = ModelOutput(output.logits, hidden, subset=output.subset)
    for i, (count, end) in enumerate(zip(counts, ends, strict=True)):
        row = rows[first + i]
        if hidden_layers:
            row.add_prompt_hidden({layer: states[i, : count - end] for layer, states in output.hidden.items()})
        if end:
            ahead.keep(row, row.size, scores, i)
    return sum(counts)
