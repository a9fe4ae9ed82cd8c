"""SmolLM2-135M in float32: every method writes what plain decoding writes, which is what transformers finds likeliest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from foresay.models.sources.wrapping import LoadedModel
from foresay.spec.recipe import Resources
from foresay.spec.recipes import read_drafter, read_length
from foresay_lab.training.ngrams import NgramCounter
from helpers.chat_prompts import PROMPTS
from helpers.guarantees import assert_greedy
from helpers.support import run

pytestmark = pytest.mark.slow
NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW)
EOS = frozenset([2])


@pytest.fixture(scope="module")
def prompts(smollm2_tokenizer: Any) -> list[list[int]]:
    template = smollm2_tokenizer.apply_chat_template
    chats = [[{"role": "user", "content": text}] for text in (PROMPTS[2], PROMPTS[5], PROMPTS[3])]
    return [template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats]


@pytest.fixture(scope="module")
def target(smollm2_folder: Path) -> CausalModel:
    """As foresay loads it: by its own kernels."""
    model = load_model(smollm2_folder, LoadOptions(dtype="fp32")).model
    assert isinstance(model, CausalModel)
    assert model.batch_invariant
    return model


@pytest.fixture(scope="module")
def plain(target: CausalModel, smollm2_fp32: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Output without drafts, each of whose tokens transformers finds the likeliest."""
    outputs, _, _ = run(target, prompts, GREEDY, gamma=0, eos=EOS)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(smollm2_fp32, prompt, output)
        assert len(output) == NEW or output[-1] in EOS
    return outputs


def test_a_ragged_batch_with_rows_joining(
    target: CausalModel, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """The target as its own draft: every draft token must be accepted."""
    drafter = ModelDrafter(target, target.vocab_size)
    ours, steps, engine = run(target, prompts, GREEDY, drafter=drafter, gamma=4, eos=EOS, join_later=2)
    assert ours == plain
    assert engine.draft_failures == 0 and max(s.batch_size for s in steps) > 1
    assert sum(s.num_accepted for s in steps) > 0.97 * sum(s.num_tested for s in steps)


METHODS: dict[str, str] = {
    "prompt_lookup": "6",
    "max_gram": "10",
    "ngram_store(n=3, filler_top_k=4)": "8",
    "suffix": "6",
    "self(28)": "confidence(0.5)",
    "self(29, vocabulary={table}, coverage=0.9)": "6",
    "cascade(self=28, max_gram; k=[[4, 6], [0, 4]], lenience=2)": "10",
    "cascade(self=29, self=26, suffix; k=[[3, 4, 6], [0, 2, 3], [0, 0, 4]])": "heuristic(high=13)",
}


@pytest.mark.parametrize("drafter", METHODS)
def test_every_method(
    drafter: str,
    target: CausalModel,
    smollm2_tokenizer: Any,
    prompts: list[list[int]],
    plain: list[list[int]],
    tmp_path: Path,
) -> None:
    """Each drafter with another length policy, in a ragged batch of two, which the last prompts join; n-grams also alone."""
    loaded = LoadedModel("SmolLM2", target, smollm2_tokenizer, EOS)
    table = tmp_path / "frequent.safetensors"
    counter = NgramCounter(2, target.vocab_size)
    for text in (*prompts, *plain):
        counter.add(text)
    counter.table().save(table)
    build = read_drafter(drafter.replace("{table}", str(table))).prepare(Resources(loaded))
    options: dict[str, Any] = {"policy": read_length(METHODS[drafter]), "eos": EOS}
    for size in (1, 2) if drafter == "prompt_lookup" else (2,):
        ours, steps, engine = run(target, prompts, GREEDY, drafter=build(), max_batch_size=size, **options)
        assert ours == plain and engine.draft_failures == 0
        assert any(s.num_accepted < s.num_drafted for s in steps)
        assert any(s.num_accepted == s.num_drafted > 0 for s in steps)
