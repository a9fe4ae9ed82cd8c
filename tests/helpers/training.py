"""Targets of trained drafts, and the texts that they write."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from foresay.decoding.protocols import Drafter
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources.wrapping import LoadedModel
from foresay_lab.training.batches import batch_of
from foresay_lab.training.outputs import Text
from foresay_lab.training.teacher import TargetPasses
from helpers.families import make
from helpers.support import run

VOCAB, NEW = 48, 40


def loaded(*, layers: int = 4, seed: int = 1) -> LoadedModel:
    model = CausalModel(make("llama", seed, vocab_size=VOCAB, num_hidden_layers=layers, tie_word_embeddings=False))
    model.use_fused()
    return LoadedModel("tiny", model, None, frozenset([0]))


def written(target: LoadedModel, count: int, seed: int = 0, new: int = NEW) -> list[Text]:
    """The target's greedy outputs to random prompts."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(1, VOCAB, (3 + i % 6,), generator=generator).tolist() for i in range(count)]
    outputs, _, _ = run(target.model, prompts, SamplingParams(max_new_tokens=new, ignore_eos=True), gamma=0)
    return [
        Text(np.array(prompt + output, dtype=np.int64), len(prompt))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def batch(target: LoadedModel, texts: Sequence[Text], layers: Sequence[int]) -> Any:
    """All texts as one batch, with what the target computes of them."""
    passes = TargetPasses(target.model, tuple(layers))  # type: ignore[arg-type]
    return batch_of(range(len(texts)), texts, lambda i: passes(texts[i]))


def tokens_per_pass(target: LoadedModel, texts: Sequence[Text], drafter: Drafter, gamma: int) -> float:
    """The figure of decoding the prompts of what the target wrote with a drafter; it writes the same."""
    prompts = [text.tokens[: text.start].tolist() for text in texts]
    params = [SamplingParams(max_new_tokens=text.size, ignore_eos=True) for text in texts]
    outputs, steps, engine = run(target.model, prompts, params, drafter=drafter, gamma=gamma)
    assert outputs == [text.tokens[text.start :].tolist() for text in texts] and engine.draft_failures == 0
    return sum(len(step.token_ids) for step in steps) / len(steps)


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """A limit on the size of this process's files, which the system refuses as it refuses to write to a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
