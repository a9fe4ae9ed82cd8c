"""Tiny encoder-decoders, their sources, and what transformers writes for them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from foresay.models.huggingface.seq2seq import Seq2SeqModel
from helpers.families import VOCAB, make_seq2seq

NEW = 28


def some_sources(lengths: Sequence[int] = (1, 12, 5, 23, 9, 2)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def starts_of(model: Seq2SeqModel, count: int) -> list[list[int]]:
    return [[model.decoder_start_token_id]] * count


def greedy(model: PreTrainedModel, source: Sequence[int], new: int = NEW, **settings: Any) -> list[int]:
    """transformers' own greedy output, without the token its decoder starts from."""
    ids = torch.tensor([source])
    settings = {"eos_token_id": None, **settings}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, max_new_tokens=new, **settings
    )
    return out[0, 1:].tolist()


@functools.cache
def reference_of(family: str) -> tuple[PreTrainedModel, list[list[int]]]:
    model = make_seq2seq(family)
    return model, [greedy(model, source) for source in some_sources()]


def target_of(family: str) -> Seq2SeqModel:
    return Seq2SeqModel(copy.deepcopy(reference_of(family)[0]))
