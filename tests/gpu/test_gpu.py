"""What only a GPU can show; the only tests that may be skipped."""

from __future__ import annotations

import pytest
import torch

from families import VOCAB, make
from foresay.core import SamplingParams
from foresay.models.causal import CausalModel
from support import ModelDrafter, Sometimes, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
PROMPTS = [[5, 6, 7], [8], [9] * 12]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bloom"])
def test_greedy_output_on_the_gpu_equals_the_cpu(family: str) -> None:
    params = SamplingParams(max_new_tokens=32)
    wanted = run(CausalModel(make(family)), PROMPTS, params, gamma=0)[0]
    target = CausalModel(make(family).to("cuda"))
    ours, _, engine = run(target, PROMPTS, params, drafter=Sometimes(wanted, VOCAB), gamma=4)
    assert engine.draft_failures == 0
    assert ours == wanted


@pytest.mark.parametrize("rule", ["speculative", "block", "match", "coupled"])
def test_sampled_rows_equal_single_requests_on_the_gpu(rule: str) -> None:
    target = CausalModel(make("llama").to("cuda"))
    params = [SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.9, seed=i) for i in range(3)]
    alone = [
        run(target, [p], s, drafter=ModelDrafter(target, VOCAB), rule=rule)[0][0]
        for p, s in zip(PROMPTS, params, strict=True)
    ]
    assert run(target, PROMPTS, params, drafter=ModelDrafter(target, VOCAB), rule=rule)[0] == alone
