"""Greedy outputs compared with transformers'."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from helpers.families import VOCAB

MARGIN = 1e-4
NEW = 18


def prompts() -> list[list[int]]:
    """Ragged prompts; the longest and its output pass the first 64 slots, and a window of 8."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (1, 12, 5, 50, 9, 2)]


def plain(model: PreTrainedModel, prompt: Sequence[int], new: int = NEW) -> list[int]:
    """transformers' own greedy output.

    Zamba2 and Nemotron-H limit time steps except in passes over one token, so that they agree with themselves only uncached.
    """
    ids = torch.tensor([prompt])
    cached = model.config.model_type not in ("zamba2", "nemotron_h")
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=cached,
    )
    return out[0, len(prompt) :].tolist()


def assert_same(
    model: PreTrainedModel,
    prompt: Sequence[int],
    ours: list[int],
    theirs: list[int],
    source: Sequence[int] | None = None,
) -> None:
    """Equal, or different from a position on where the two top logits are closer than MARGIN."""
    if ours == theirs:
        return
    place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    ids = torch.tensor([[*prompt, *theirs[:place]]])
    inputs = {"input_ids": ids} if source is None else {"input_ids": torch.tensor([source]), "decoder_input_ids": ids}
    with torch.no_grad():
        logits = model(**inputs).logits[0, -1]
    top = logits.topk(2).values
    margin = float(top[0] - top[1])
    assert margin < MARGIN, (
        f"differs at token {place} of {len(theirs)} with a margin of {margin:.2e}: {ours} != {theirs}"
    )
