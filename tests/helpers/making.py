"""Rows and small real tokenizers for the unit tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from foresay.decoding.rows import Row, Rows, StopCondition
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.stopping import DraftStep, Reads, Stopping, StoppingRule

_CORPUS = ["the cat sat on the mat. Stop here, stop there.\n\n", "naïve café 日本語 😀😀 über", "END of the end"]


def make_row(
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    *,
    limit: int = 4096,
    seed: int = 0,
    eos: frozenset[int] = frozenset(),
    stop: StopCondition | None = None,
    **params: Any,
) -> Row:
    row = Row(0, prompt, SamplingParams(**params), seed=seed, limit=limit, eos=eos, stop=stop)
    row.extend(output)
    return row


def make_rows(*params: dict[str, Any], prompt: Sequence[int] = (1,)) -> Rows:
    return Rows([make_row(prompt, seed=i, **one) for i, one in enumerate(params)])


@cache
def byte_level() -> Any:
    """A byte-level BPE, as GPT-2, Qwen and Llama 3 have: a token may hold part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@cache
def byte_fallback() -> Any:
    """A sentencepiece-like BPE, as Llama 2 and Gemma have: unknown characters become <0x..> tokens, spaces are marks."""
    letters = "▁abcdefghijklmnopqrstuvwxyz.,"
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    model = models.BPE(
        vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


class Spelling:
    """A tokenizer whose tokens are given strings, for texts that need exact token boundaries."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self.tokens[i] for i in ids)


class By(Stopping):
    """Ends drafts by a function of each token."""

    def __init__(
        self, keep: Callable[[DraftStep], torch.Tensor | None], rows: Rows, reads: Reads = Reads.NOTHING
    ) -> None:
        super().__init__(StoppingRule(reads), rows)
        self.keep = keep  # type: ignore[method-assign]
