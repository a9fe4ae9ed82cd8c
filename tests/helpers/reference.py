"""Distributions by enumeration, written independently of the code under test, and the chi-squared test that compares."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from scipy import stats

from foresay.decoding.sampling_params import SamplingParams
from foresay.models.huggingface.causal import CausalModel
from foresay.models.table import TableModel

LEAST = 5
"""How often the chi-squared test must expect a cell."""


class Enumerated:
    """A tiny model's distributions after all contexts, by its family's own code, without a cache of keys and values."""

    def __init__(self, target: CausalModel) -> None:
        self._target, self.vocab_size = target, target.vocab_size

    @cache  # noqa: B019 - one object for all tests of a model
    def _after(self, context: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            return self._target.uncached(torch.tensor([context]))[0, -1].double().softmax(-1)

    def distribution(self, context: Sequence[int]) -> torch.Tensor:
        return self._after(tuple(context))


@cache
def enumerated(target: CausalModel) -> Enumerated:
    """The distributions of a model, which are computed once."""
    return Enumerated(target)


def distribution(
    target: TableModel | Enumerated, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """The distribution of the token after prompt + output, [V] float64, by the definitions of the parameters."""
    logits = target.distribution([*prompt, *output]).log().numpy().copy()
    for token in set(prompt) | set(output):
        value = logits[token]
        logits[token] = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
    for token, count in Counter(output).items():
        logits[token] -= params.presence_penalty + count * params.frequency_penalty
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in params.banned_token_ids:
        logits[token] = -np.inf
    if params.greedy:
        return np.eye(len(logits))[int(logits.argmax())]
    logits = logits / params.temperature
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        logits[order[params.top_k :]] = -np.inf
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    if params.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= params.top_p]] = 0
        probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    return probs / probs.sum()


def joint(target: TableModel | Enumerated, params: SamplingParams, prompt: Sequence[int], length: int) -> np.ndarray:
    """The distribution of the first `length` output tokens, flattened, [V ** length]."""
    size = target.vocab_size
    out = np.ones(1)
    for i in range(length):
        before = itertools.product(range(size), repeat=i)
        each = [
            prob * distribution(target, params, prompt, one) if prob else np.zeros(size)
            for prob, one in zip(out, before, strict=True)
        ]
        out = np.concatenate(each)
    return out


def p_value(outputs: Sequence[Sequence[int]], probs: np.ndarray, size: int) -> float:
    """Chi-squared p-value of observed outputs against their distribution; 0 when something impossible was observed.

    Cells expected less than LEAST times are pooled.
    """
    places = [sum(token * size**k for k, token in enumerate(reversed(output))) for output in outputs]
    observed = np.bincount(places, minlength=len(probs)).astype(float)
    if observed[probs == 0].sum() > 0:
        return 0.0
    expected = probs * len(outputs)
    rare = expected < LEAST
    seen = np.append(observed[~rare], observed[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] == 0:
        seen, wanted = seen[:-1], wanted[:-1]
    if len(wanted) == 1:
        return 1.0
    return float(stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue)
