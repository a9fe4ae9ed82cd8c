"""Each row of a ragged batch equals the same request alone, seeds included, and the coupled rule guarantees more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foresay import Drafter, SamplingParams, TableModel
from foresay.models.huggingface.causal import CausalModel
from helpers.families import VOCAB, make
from helpers.support import Mixed, ModelDrafter, PromptLookup, run

TARGET = TableModel.random(9, seed=5, concentration=0.6)
DRAFT = TableModel.random(9, seed=6, concentration=0.6)
PROMPTS = [[1], [2, 3, 4], [5, 5, 5, 5, 5, 5], [7, 8], [1, 2, 1, 2, 1], [0], [3, 1, 4, 1, 5]]
PARAMS = [
    SamplingParams(max_new_tokens=25, temperature=1.0, seed=1),
    SamplingParams(max_new_tokens=9),
    SamplingParams(max_new_tokens=30, temperature=0.7, top_p=0.9, seed=2, repetition_penalty=1.2),
    SamplingParams(max_new_tokens=14, temperature=1.5, top_k=4, seed=3),
    SamplingParams(max_new_tokens=20, temperature=0.9, min_p=0.1, seed=1),
    SamplingParams(max_new_tokens=25, presence_penalty=0.7, frequency_penalty=0.2, banned_token_ids=(4,)),
    SamplingParams(max_new_tokens=18, temperature=1.0, seed=9, logit_bias={2: 1.5}, stop_token_ids=(6,)),
]
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "model": lambda: ModelDrafter(DRAFT, 9),
    "lookup": lambda: PromptLookup(min_ngram=1),
    "mixed": lambda: Mixed(9),
}


CELLS = [("none", "speculative"), *itertools.product(("model", "lookup"), ("speculative", "block", "match"))]


@pytest.mark.parametrize(("drafter", "rule"), CELLS)
def test_rows_of_a_ragged_batch_equal_single_requests(drafter: str, rule: str) -> None:
    def outputs(prompts: Any, params: Any, **options: Any) -> list[list[int]]:
        found, _, engine = run(TARGET, prompts, params, drafter=DRAFTERS[drafter](), rule=rule, **options)
        assert engine.draft_failures == 0
        return found

    alone = [outputs([prompt], one)[0] for prompt, one in zip(PROMPTS, PARAMS, strict=True)]
    for size, late in ((32, 0), (3, 0), (32, 5)):
        assert outputs(PROMPTS, PARAMS, max_batch_size=size, join_later=late) == alone
    assert outputs(PROMPTS[:1], SamplingParams.of(PARAMS[0], seed=5)) != alone[:1], "another seed"


def test_a_real_model_in_a_ragged_sampled_batch_whose_rows_leave_in_any_order() -> None:
    model, draft = CausalModel(make("llama")), CausalModel(make("llama", seed=0))
    with torch.no_grad():  # a draft that agrees often but not always
        for weight in draft.model.parameters():
            weight += 0.1 * weight.abs().mean() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    prompts = [[5], [6, 7, 8, 9], list(range(10, 40)), [3, 3, 3]]
    params = [SamplingParams(max_new_tokens=12 + i * 7 % 12, temperature=0.8, top_p=0.95, seed=i) for i in range(4)]
    alone = [run(model, [p], s, drafter=ModelDrafter(draft, VOCAB))[0][0] for p, s in zip(prompts, params, strict=True)]
    together, steps, _ = run(model, prompts, params, drafter=ModelDrafter(draft, VOCAB), max_batch_size=3, join_later=2)
    assert together == alone
    assert any(0 < s.num_accepted < s.num_drafted for s in steps)


def test_coupled_output_depends_on_the_seed_alone() -> None:
    """The same tokens with any drafter, any length, alone or in any batch; the other rules do not guarantee it."""
    plain = [run(TARGET, [p], s, rule="coupled", gamma=0)[0][0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
    accepted = 0
    for drafter in DRAFTERS.values():
        for gamma, size, late in ((1, 1, 0), (3, 4, 0), (7, 32, 5)):
            options: dict[str, Any] = {"gamma": gamma, "max_batch_size": size, "join_later": late}
            ours, steps, engine = run(TARGET, PROMPTS, PARAMS, drafter=drafter(), rule="coupled", **options)
            assert ours == plain and engine.draft_failures == 0
            accepted += sum(s.num_accepted for s in steps)
    assert accepted > 100
    none, some = (run(TARGET, PROMPTS, PARAMS, drafter=DRAFTERS["model"](), gamma=gamma)[0] for gamma in (0, 3))
    assert none != some, "control: the speculative rule keeps the distribution, not the tokens"


def test_coupled_acceptance_reaches_its_bound() -> None:
    """At least (1 - d) / (1 + d) of the tested tokens, d the total variation (Daliri et al. 2024)."""
    vocab = 6
    p = torch.rand(vocab, generator=torch.Generator().manual_seed(1)) + 0.1
    q = torch.rand(vocab, generator=torch.Generator().manual_seed(2)) + 0.1
    target = TableModel(p.expand(vocab, vocab, vocab).contiguous())
    draft = TableModel(q.expand(vocab, vocab, vocab).contiguous())
    params = [SamplingParams(max_new_tokens=40, temperature=1.0, seed=s) for s in range(200)]
    _, steps, _ = run(target, [[1]] * 200, params, drafter=ModelDrafter(draft, vocab), rule="coupled", gamma=3)
    tested, accepted = sum(s.num_tested for s in steps), sum(s.num_accepted for s in steps)
    distance = float((p / p.sum() - q / q.sum()).abs().sum() / 2)
    error = 3 * (0.25 / tested) ** 0.5
    assert accepted / tested > (1 - distance) / (1 + distance) - error
    assert accepted / tested < 1 - distance + error
