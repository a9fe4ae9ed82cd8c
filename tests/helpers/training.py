"""Targets of trained drafts, and the texts that they write."""

from __future__ import annotations

import numpy as np
import torch

from foresay.decoding.sampling_params import SamplingParams
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources.wrapping import LoadedModel
from foresay_lab.training.outputs import Text
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
        Text(np.array(prompt + output, dtype=np.int64), len(prompt), True)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
