"""Passes of a model over caches of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foresay.decoding.protocols import Logits, ModelInput


def started(model: Any, rows: int = 1) -> Any:
    """A cache of empty rows."""
    cache = model.new_cache()
    cache.add_rows(rows)
    return cache


def scores(model: Any, ids: torch.Tensor, counts: Sequence[int] = (), cache: Any = None) -> torch.Tensor:
    """Scores of tokens [B, T] -> [B, T, V], by a new cache unless one is given."""
    given = ModelInput(ids, list(counts or [ids.shape[1]] * len(ids)))
    found: torch.Tensor = model.forward(given, started(model, len(ids)) if cache is None else cache).scores()
    return found


def in_pieces(model: Any, ids: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Scores of a text [T] -> [T, V] whose pieces are fed one after another."""
    cache = started(model)
    return torch.cat([scores(model, part[None], cache=cache)[0] for part in ids.split(list(sizes))])


def hidden_states(model: Any, tokens: Sequence[int] | torch.Tensor, layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Hidden states of one text, layer -> [S, H]."""
    given = ModelInput(torch.as_tensor(tokens)[None], [len(tokens)], logits=Logits.NONE, hidden_layers=tuple(layers))
    return {layer: states[0] for layer, states in model.forward(given, started(model)).hidden.items()}
