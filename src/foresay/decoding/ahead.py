"""Scores that a step finds ready, where a device computes next to the host.

The last chunk of a prompt returns the scores after the prompt. And a plain pass begins before the host has read the token that it
feeds, so that the device does not wait for what the host does between two steps. The row's cache then has its last token, too; to
the step it is as if its own pass had fed it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from foresay.decoding.devices import to_device
from foresay.decoding.passes import ModelInput, ModelOutput
from foresay.decoding.protocols import KVCache, LanguageModel
from foresay.decoding.rows import Row, Rows
from foresay.decoding.state import StateKey
from foresay.errors import OutOfMemoryError


@dataclass(slots=True)
class Ready:
    """The scores after a row's last token."""

    size: int
    """Tokens of the row, all of which its cache has."""
    output: ModelOutput
    """Logits [B, 1, V] and hidden states [B, 1, H] of a pass."""
    index: int
    """Index of the row in that pass."""


_READY: StateKey[Ready | None] = StateKey(lambda: None)


def keep(row: Row, size: int, output: ModelOutput, index: int) -> None:
    """Keep the scores after the first `size` tokens of a row for its next step; see Ready."""
    _READY.put(row, Ready(size, output, index))


def lend(cache: KVCache) -> None:
    """Let the target's cache know that a draft reads or writes it, too: then it has no row's last token between steps."""
    if hasattr(cache, "is_lent"):
        cache.is_lent = True


def cached(row: Row) -> int:
    """Return how many of a row's tokens its cache has between two steps: all but the last one, unless its scores are kept."""
    one = _READY.find(row)
    return row.size if one is not None and one.size == row.size else row.size - 1


def ready(rows: Rows, cache: KVCache, hidden_layers: tuple[int, ...]) -> list[Ready | None]:
    """Return and forget the scores that are ready for a step, [B]; [] if there are none.

    A row whose last token is cached, and whose scores are not kept with these hidden states, is rewound by it.
    """
    if not (rows.capabilities.runs_ahead and rows.level == 0):
        return []
    found: list[Ready | None] = []
    for row, length in zip(rows, cache.lengths, strict=False):
        one = _READY.find(row)
        fits = one is not None and one.size == row.size == length
        found.append(one if one is not None and fits and one.output.hidden.keys() >= {*hidden_layers} else None)
        _READY.drop(row)
    cache.truncate([row.size - (one is None) for row, one in zip(rows, found, strict=True)])
    return found if any(found) else []


def begin(rows: Rows, tokens: torch.Tensor, target: LanguageModel, cache: KVCache) -> None:
    """Begin the next plain pass over the tokens [B] of this step, which the host does not know yet."""
    counts = [int(row.remaining > 1) for row in rows]
    if not (any(counts) and rows.capabilities.runs_ahead and rows.level == 0):
        return
    lengths = list(cache.lengths)
    try:
        output = target.forward(ModelInput(tokens[:, None], counts), cache)
    except OutOfMemoryError:  # the rows may end with these tokens; if not, the next step finds out
        cache.truncate(lengths)
        return
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if count:
            keep(row, row.size + 1, output, i)


def merged(found: Sequence[Ready | None], output: ModelOutput | None) -> ModelOutput:
    """Return the output of a step's pass with the scores that were ready, as if the pass had fed those rows' last tokens.

    output: logits [B, 1 + K, V], whose first ones are meaningless for these rows, and hidden states [B, T, H] of the tokens fed;
    overwritten. None if no row was fed.
    """
    some = [i for i, one in enumerate(found) if one is not None]
    known = [one for one in found if one is not None]
    first = known[0].output
    in_order = [one.index for one in known] == [*range(len(found))] and len(first.scores()) == len(found)
    if output is None and in_order and all(one.output is first for one in known):
        return first
    index = to_device(some, first.scores().device)

    def at_first(into: torch.Tensor | None, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """parts: [B, 1, ...] of each known output."""
        values = torch.stack([part[one.index] for one, part in zip(known, parts, strict=True)])
        out = values.new_zeros(len(found), *values.shape[1:]) if into is None else into
        out[index, :1] = values
        return out

    given = None if output is None else output.logits
    logits = at_first(given, [one.output.logits for one in known if one.output.logits is not None])
    hidden = {}
    for layer in first.hidden if output is None else output.hidden:
        states = None
        if output is not None:  # those of the draft come after that of the last token
            states = F.pad(output.hidden[layer], (0, 0, 0, 1))
            states[index, 1:] = output.hidden[layer][index]
        hidden[layer] = at_first(states, [one.output.hidden[layer] for one in known])
    return dataclasses.replace(first if output is None else output, logits=logits, hidden=hidden)
