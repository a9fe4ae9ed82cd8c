"""The cells of the distribution tests: drafters, rules, lengths, parameters and batches over a table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from foresay.decoding.protocols import Drafter, LengthPolicy
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import (
    Cascade,
    Hybrid,
    MaxGram,
    Memory,
    ModelDrafter,
    NgramStore,
    NgramStoreDrafter,
    PromptLookup,
    SuffixDrafter,
)
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.lengths import ConfidenceLength, ConstantLength, HeuristicLength, ThroughputLength
from foresay.models.table import TableModel
from helpers.sequential import value_of
from helpers.support import Loop, Mixed, Renumbered

SIZE, LENGTH, SAMPLES, ALPHA = 4, 3, 3000, 1e-6
PROMPT = [1, 2, 1, 3, 1, 2]
TARGET = TableModel.random(SIZE, seed=1, concentration=0.7)
DRAFT = TableModel.random(SIZE, seed=2, concentration=0.7)
# drafts whose vocabulary is padded otherwise: ids they lack, and ids the target lacks
NARROW = TableModel.random(SIZE - 1, seed=3, concentration=0.7)
WIDE = TableModel.random(SIZE + 2, seed=4, concentration=0.7)
SMALL = TableModel.random(SIZE, seed=5, concentration=0.7)


def model(table: TableModel) -> ModelDrafter:
    return ModelDrafter(table, SIZE)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "model": lambda: model(DRAFT),
    "same": lambda: model(TARGET),
    "lookup": lambda: PromptLookup(min_ngram=1),
    "mixed": lambda: Mixed(SIZE),
    "max_gram": MaxGram,
    "store": lambda: NgramStoreDrafter(3, filler_top_k=2),
    "shared_store": lambda: NgramStoreDrafter(3, filler_top_k=2, stop_unknown=False, store=NgramStore(3)),
    "suffix": lambda: SuffixDrafter(Memory(max_tokens=256)),
    "cascade": lambda: Cascade([model(DRAFT), MaxGram()], [[3, 2], [0, 2]]),
    "deep": lambda: Cascade([model(WIDE), model(NARROW), Mixed(SIZE)], [[2, 2, 1], [0, 1, 2], [0, 0, 2]]),
    "lenient": lambda: Cascade([model(DRAFT), model(SMALL), MaxGram()], [[2, 2, 1], [0, 2, 1], [0, 0, 2]], lenience=2),
    "horizontal": lambda: Cascade([model(DRAFT), model(SMALL)], [[2, 3], [0, 0]]),
    "hybrid": lambda: Hybrid(PromptLookup(min_ngram=1), model(DRAFT), min_match=2, k=3),
    "translated": lambda: CrossTokenizerDrafter(DRAFT, SIZE, Renumbered(SIZE, private=1)),
}


RULES = ["speculative", "block", "match", "coupled"]


LENGTHS: dict[str, Callable[[], LengthPolicy]] = {
    "0": lambda: ConstantLength(0),
    "2": lambda: ConstantLength(2),
    "5": lambda: ConstantLength(5),
    "heuristic": lambda: HeuristicLength(2, high=5),
    "confidence": lambda: ConfidenceLength(0.4, high=5),
    "throughput": lambda: ThroughputLength(start=2, high=5),
    "fixed": lambda: ThroughputLength(start=2, high=5, sampled=3),
}


PARAMS = {
    "plain": SamplingParams(temperature=1.0, max_new_tokens=LENGTH),
    "nucleus": SamplingParams(temperature=0.8, top_p=0.8, max_new_tokens=LENGTH),
    "top_k": SamplingParams(temperature=1.3, top_k=3, min_p=0.05, max_new_tokens=LENGTH),
    "context": SamplingParams(
        temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, max_new_tokens=LENGTH
    ),
}


BATCHES = {"one": (1, 0), "eight": (8, 0), "joining": (64, 16)}
COUNTS = {"one": 300, "eight": 600, "joining": 1000}
"""Outputs of a cell, unless all cells are tried with SAMPLES each; rows that go one by one take their time."""


_STORED = Path(__file__).parent.parent / "distribution" / "cells.json"
Cell = tuple[str, str, str, str, str]


def product() -> list[Cell]:
    return list(itertools.product(DRAFTERS, RULES, LENGTHS, PARAMS, BATCHES))


def value(cell: Cell, probs: np.ndarray, samples: int | None = None) -> float:
    """The p-value of what a cell writes against a distribution."""
    drafter, rule, length, params, batch = cell
    size, late = BATCHES[batch]
    loop = Loop(TARGET, drafter=DRAFTERS[drafter](), rule=rule, policy=LENGTHS[length](), max_batch_size=size)
    samples = COUNTS[batch] if samples is None else samples
    return value_of(loop, PROMPT, PARAMS[params], probs, samples, join_later=late)


def pairwise() -> list[Cell]:
    """Cells that together hold every pair of values of two axes; `scripts/distribution_cells.py` chose and stored them."""
    return [tuple(cell) for cell in json.loads(_STORED.read_text())]
