"""Drafts for a tiny target whose draft tokens are often right, in a batch whose rows join, leave and are rewound."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foresay.decoding.outcome import Step
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import Drafter, LanguageModel, LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import BlockDrafter, Cascade, Hybrid, PromptLookup, SuffixDrafter
from foresay.models.drafts.base import StoredDraft
from foresay.models.drafts.files import read_draft, write_draft
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.recurrent import RecurrentModel
from helpers.families import VOCAB, make
from helpers.support import run

SMALL = 7
"""Size of such a target's vocabulary."""
PROMPTS = [[5, 6, 1, 2, 3, 4, 5], [2], [1, 2, 1], [6] * 9, [3, 1] * 8]
KINDS: dict[str, Callable[[Any], Any]] = {
    "confident": lambda block: BlockDrafter(block, SMALL, confidence=0.5),
    "best first": lambda block: BlockDrafter(block, SMALL, sample=False, nodes=9),
    "cascade": lambda block: Cascade([BlockDrafter(block, SMALL), PromptLookup(min_ngram=1)], [[2, 2], [0, 0]]),
    "after lookup": lambda block: Cascade([PromptLookup(min_ngram=1), BlockDrafter(block, SMALL)], [[2, 3], [0, 0]]),
    "hybrid": lambda block: Hybrid(SuffixDrafter(), BlockDrafter(block, SMALL), min_match=3, k=4),
}
"""Drafters of a block at a time, of which others are a part."""


@functools.cache
def llama_target(*, fused: bool = True, kernels: bool = True, vocab: int = VOCAB, **changes: Any) -> CausalModel:
    """A target that tests leave as it is. kernels: False for numbers that no kernel reads."""
    weights = make("llama", 3, vocab_size=vocab, tie_word_embeddings=False, **changes)
    model = CausalModel(weights if kernels else weights.double())
    if fused and kernels:
        model.use_fused()
    return model


@functools.cache
def recurrent_target(family: str, fused: bool = True) -> RecurrentModel:
    """A target with a small vocabulary.

    Kernels keep a state for each position; a family's own code feeds tokens again, and then returns known hidden states.
    """
    model = RecurrentModel(make(family, 3, vocab_size=SMALL, tie_word_embeddings=False))
    if fused:
        model.use_fused()
        assert model.fused is not None and model.fused.is_native
    return model


OTHER_DRAFT = (AssertionError, pytest.fail.Exception)
"""Raised where drafts are not those wanted, or cannot be made."""


def watched(drafter: Any, see: Callable[[Rows, Proposal], object]) -> Any:
    """The drafter, each of whose proposals is seen as it is made."""
    propose = drafter.propose

    def watching(rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        proposal: Proposal = propose(rows, budget, policy)
        see(rows, proposal)
        return proposal

    drafter.propose = watching
    return drafter


def compared(drafter: Any, wanted: Callable[[torch.Tensor, torch.Tensor], list[int]]) -> Any:
    """The drafter, each of whose drafts must be `wanted(text, draft)`; `compared` counts their tokens."""
    drafter.compared = 0

    def check(rows: Rows, proposal: Proposal) -> None:
        for row, ids, count in zip(rows, proposal.token_ids, proposal.num_tokens, strict=True):
            if count and row.size > 1:
                if wanted(torch.from_numpy(row.tokens.copy()), ids[:count]) != ids[:count].tolist():
                    pytest.fail("another draft")  # at once: the engine would go on after an exception of a drafter
                drafter.compared += count

    return watched(drafter, check)


def decoded(
    model: LanguageModel,
    drafter: Drafter,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    new: int = 10,
    gamma: int = 4,
    join_later: int = 2,
    max_batch_size: int = 3,
    **options: Any,
) -> list[Step]:
    """Steps of a run that writes what plain decoding writes, of a different number of tokens for each prompt."""
    params = [SamplingParams(max_new_tokens=new + 6 * i, ignore_eos=True) for i in range(len(prompts))]
    plain, _, _ = run(model, prompts, params, gamma=0)
    options |= {"gamma": gamma, "join_later": join_later, "max_batch_size": max_batch_size}
    ours, steps, engine = run(model, prompts, params, drafter=drafter, **options)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert ours == plain
    return steps


def accepted(steps: Sequence[Step]) -> set[int]:
    """Numbers of tokens that were accepted of drafts."""
    return {step.num_accepted for step in steps if step.num_drafted}


def stored(
    made: StoredDraft, folder: Path, *, layout: Any = "plain", **changes: Any
) -> tuple[StoredDraft, dict[str, Any], dict[str, torch.Tensor]]:
    """A draft by way of files; its config.json, with some fields changed, and its tensors."""
    write_draft(made, folder, layout=layout)
    values = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return read_draft(folder), values, load_file(folder / "model.safetensors")
