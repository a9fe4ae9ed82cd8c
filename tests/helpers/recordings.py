"""A tokenizer of numbers, prompts for it, and a target that reads them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.generator import Generator
from foresay.models.table import TableModel
from foresay_lab.data.items import PromptItem
from helpers.families import VOCAB, make


class Numbers:
    """A tokenizer whose texts are the ids: "5 6 7"."""

    chat_template = None

    def __init__(self, size: int = VOCAB) -> None:
        self.size = size

    def __call__(self, text: str, **_: Any) -> Any:
        words = text.replace("User:", "").replace("Assistant:", "").split()
        return type("Encoded", (), {"input_ids": [int(word) for word in words]})

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self.size)}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(f"{i} " for i in ids)


def numbered(count: int, *, high: int = VOCAB, longest: int = 12, seed: int = 0) -> list[PromptItem]:
    numbers = random.Random(seed)
    lengths = [numbers.randrange(1, longest) for _ in range(count)]
    texts = [" ".join(str(numbers.randrange(2, high)) for _ in range(n)) for n in lengths]
    return [PromptItem(f"p{i}", text, category=f"c{i % 2}") for i, text in enumerate(texts)]


def noisy(make_one: Callable[[], Any] = lambda: make("llama"), amount: float = 0.15, seed: int = 1) -> Any:
    """A model that often, and not always, agrees with the one it was made from."""
    model = make_one()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.add_(torch.randn(weight.shape, generator=generator) * amount * weight.std())
    return model


def cycle(size: int, period: int = 10) -> TableModel:
    """A target that writes 2, 3, ... and again from the beginning: what came before comes again."""
    table = torch.full((size, size, size), 1e-6)
    for token in range(size):
        table[:, token, 2 + (token - 1) % period] = 1.0
    return TableModel(table)


def loaded(target: Any = None, batch: int = 4, **options: Any) -> Generator:
    return foresay.load(
        target if target is not None else make("llama"),
        **{"tokenizer": Numbers(), "drafter": "none", "max_batch_size": batch, **options},
    )


SAMPLED = SamplingParams(max_new_tokens=20, temperature=0.8, top_p=0.7, seed=11, ignore_eos=True)
