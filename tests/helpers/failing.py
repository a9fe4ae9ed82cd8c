"""Draft models that fail after particular tokens, and the first token of many requests that are drafted for by them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from foresay.decoding.acceptance import make_rule
from foresay.decoding.protocols import Drafter, KVCache, ModelInput, ModelOutput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, Hybrid, MaxGram, ModelDrafter, ModelTreeDrafter
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.engine import Engine
from foresay.lengths import ConstantLength
from foresay.models.table import TableModel
from helpers.reference import p_value
from helpers.sequential import decided
from helpers.support import Renumbered

VOCAB = 4
EVEN = TableModel(torch.full((VOCAB, VOCAB, VOCAB), 1 / VOCAB))
"""A target whose tokens are equally likely."""
SKEWED = torch.tensor([0.4, 0.3, 0.2, 0.1])
"""The draft's distribution after any context."""
PROMPT = [1, 2]
KINDS = ["raises", "exits", "nan", "shape"]


class FailingTable(TableModel):
    """A table that fails in the passes that are fed one token, after the first `sound` passes."""

    def __init__(self, token: int, kind: str, *, sound: int = 0) -> None:
        """kind: "raises", "exits" (SystemExit), "nan" (scores after that token are NaN), or "shape" (scores without a batch)."""
        super().__init__(SKEWED.expand(VOCAB, VOCAB, VOCAB))
        self.token, self.kind, self.sound, self.passes = token, kind, sound, 0

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        self.passes += 1
        output = super().forward(model_input, cache)
        met = model_input.token_ids == self.token
        for i, count in enumerate(model_input.num_tokens):
            met[i, count:] = False
        if self.passes <= self.sound or not bool(met.any()) or output.logits is None:
            return output
        if self.kind == "raises":
            raise RuntimeError(f"token {self.token} was fed")
        if self.kind == "exits":
            raise SystemExit(3)
        if self.kind == "shape":
            return ModelOutput(output.logits[0, 0])
        bad = met[:, -1:] if output.logits.shape[1] == 1 else met
        return ModelOutput(output.logits.masked_fill(bad[..., None], float("nan")))


def _model(table: TableModel) -> ModelDrafter:
    return ModelDrafter(table, VOCAB)


SOUND = TableModel(SKEWED.expand(VOCAB, VOCAB, VOCAB))
Make = Callable[[TableModel], Drafter]
CHAINS: dict[str, Make] = {
    "model": _model,
    "hybrid": lambda table: Hybrid(MaxGram(), _model(table), min_match=9, k=4),
    "another tokenizer": lambda table: CrossTokenizerDrafter(table, VOCAB, Renumbered(VOCAB)),
    "horizontal cascade": lambda table: Cascade([_model(SOUND), _model(table)], [[1, 3], [0, 0]]),
    "reviewed by the failing one": lambda table: Cascade([_model(table), _model(SOUND)], [[4, 0], [0, 2]]),
    "reviewed by a sound one": lambda table: Cascade([_model(SOUND), _model(table)], [[4, 0], [0, 2]]),
}
TREES: dict[str, Make] = {
    "tree": lambda table: ModelTreeDrafter(table, VOCAB, branches=2),
    "wide tree": lambda table: ModelTreeDrafter(table, VOCAB, branches=2, width=2),
}


BUDGETS = {
    "tree": 4,
    "wide tree": 4,
    "horizontal cascade": 3,
    "reviewed by the failing one": 3,
    "reviewed by a sound one": 3,
}
"""Draft tokens of a step; 2 for the others, so that a failure depends on the first token alone."""


def first_tokens(make: Callable[[], Drafter], rule: str, samples: int, *, budget: int = 2) -> tuple[float, float]:
    """The p-value of the first token of requests, each alone in an engine of its own, and the share of drafters that failed."""
    firsts, evenly, failures = list[list[int]](), np.full(VOCAB, 1 / VOCAB), 0

    def look(seeds: range) -> float:
        nonlocal failures
        for seed in seeds:
            engine = Engine(EVEN, make(), make_rule(rule), ConstantLength(budget), max_batch_size=1)
            engine.submit(PROMPT, SamplingParams(temperature=1.0, seed=seed, max_new_tokens=budget + 1))
            firsts.append(list(engine.step()[0].token_ids[:1]))
            failures += engine.draft_failures
        return p_value(firsts, evenly, VOCAB)

    return decided(look, samples, evenly), failures / len(firsts)
