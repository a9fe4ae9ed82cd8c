"""Output under a grammar has the target's distribution given the grammar, whatever drafts and whatever rule.

The reference knows nothing of the library that makes the masks: a token may come where the text is then the beginning of one of
the four that the schema allows. Drafts go past it, so that a mask must be right after draft tokens that were taken back.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter
from foresay.models.table import TableModel
from foresay.text.grammar import Grammar, JsonMask
from helpers.distribution_cells import ALPHA, DRAFTERS, RULES
from helpers.sequential import value_of
from helpers.support import Loop, Mixed

TOKENS = ["<eos>", '"', "a", "b", "ab", "ba"]
EOS, SIZE, LENGTH = 0, len(TOKENS), 5
WANTED = ['"a"', '"ab"', '"ba"', '"bab"']
PROMPT = [2, 3, 1, 4, 1, 2]
TARGET, DRAFT = (TableModel.random(SIZE, seed=seed, concentration=0.7) for seed in (11, 12))


def grammar() -> Grammar:
    inner = Tokenizer(BPE({text: i for i, text in enumerate(TOKENS)}, [("a", "b"), ("b", "a")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    return Grammar({"enum": [text.strip('"') for text in WANTED]}, tokenizer, SIZE, [EOS])


SCHEMA = grammar()


def may_come(written: tuple[int, ...], token: int) -> bool:
    text = "".join(TOKENS[one] for one in written)
    return text in WANTED if token == EOS else any(one.startswith(text + TOKENS[token]) for one in WANTED)


def joint() -> np.ndarray:
    """The distribution of outputs, [SIZE ** LENGTH]; those that end before are filled up with ends."""
    out = np.zeros(SIZE**LENGTH)
    for place, output in enumerate(itertools.product(range(SIZE), repeat=LENGTH)):
        prob = 1.0
        for i, token in enumerate(output):
            if EOS in output[:i]:
                prob *= token == EOS
                continue
            distribution = TARGET.distribution([*PROMPT, *output[:i]]).numpy()
            distribution = distribution * [may_come(output[:i], one) for one in range(SIZE)]
            prob *= distribution[token] / distribution.sum() if distribution[token] else 0.0
            if prob == 0:
                break
        out[place] = prob
    assert out.sum() == pytest.approx(1.0) and (out > 0).sum() > len(WANTED), "texts have several spellings"
    return out


JOINT = joint()


def sample(drafter: Any, rule: str, mask: Any = SCHEMA.mask_after) -> float:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, max_new_tokens=LENGTH, seed=seed, processors=(mask(len(PROMPT)),))

    def counted(seeds: range, outputs: list[list[int]]) -> list[list[int]]:
        return [[*one, *[EOS] * (LENGTH - len(one))] for one in outputs]

    loop = Loop(TARGET, drafter=drafter, rule=rule, gamma=3, max_batch_size=64)
    return value_of(loop, PROMPT, params, JOINT, 400, counted=counted, eos=frozenset({EOS}))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["none", "model", "lookup", "mixed"])
def test_output_has_the_targets_distribution_under_the_grammar(name: str, rule: str) -> None:
    made: dict[str, Any] = {"model": lambda: ModelDrafter(DRAFT, SIZE), "mixed": lambda: Mixed(SIZE)}
    assert sample(made.get(name, DRAFTERS[name])(), rule) > ALPHA


class Forgetful(JsonMask):
    """Does not take back what was only drafted."""

    def _advance(self, written: list[int]) -> bool:
        self._consumed = self._consumed[: len(written)]
        taken = self._matcher.try_consume_tokens(written[len(self._consumed) :])
        self._consumed += written[len(self._consumed) :][:taken]
        return len(self._consumed) == len(written)


class Blind(JsonMask):
    """Leaves the distribution as it is."""

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize("broken", [Forgetful, Blind])
def test_the_comparison_sees_a_broken_mask(broken: type[JsonMask]) -> None:
    def mask(length: int) -> JsonMask:
        return broken(SCHEMA.mask_after(length)._matcher, SIZE, length, "")

    assert sample(Mixed(SIZE), "speculative", mask) < ALPHA
