"""Every kind of drafter with its target on a GPU: batched, ragged, greedy and sampled, without a failed draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foresay.decoding.protocols import Drafter
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import (
    BlockDrafter,
    HeadDrafter,
    Hybrid,
    ModelTreeDrafter,
    NgramStoreDrafter,
    SelfDrafter,
    SuffixDrafter,
    SuffixTreeDrafter,
)
from foresay.generation.load import load
from foresay.models.drafts.block import BlockModel
from foresay.models.drafts.head import HeadModel
from foresay.models.drafts.mtp import MtpHead
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_layers
from foresay.models.huggingface.recurrent import RecurrentModel
from helpers.blocks import random_block
from helpers.families import RECURRENT, VOCAB, make
from helpers.heads import random_head
from helpers.mtp import save_with_mtp
from helpers.support import ModelDrafter, Sometimes, run

PROMPTS = [[5, 6, 1, 2, 3, 4, 5], [2], [1, 2, 1], [6] * 9, [3, 1] * 8]
NARROW = list(range(0, VOCAB, 2))


def target_on(device: str, family: str = "llama", seed: int = 0) -> CausalModel:
    """A tiny model on a device, with fused layers where the family has them."""
    model = CausalModel(make(family, seed).to(device))
    model.use_fused()
    return model


def _head(model: CausalModel, **changes: Any) -> HeadModel:
    return HeadModel(random_head(model, seed=7, **changes), model)


def _block(model: CausalModel, **changes: Any) -> BlockModel:
    return BlockModel(random_block(model, seed=7, **changes), model)


def _draft(model: CausalModel) -> CausalModel:
    return target_on(model.device.type, seed=1)


CHAINS: dict[str, Callable[[CausalModel], Drafter]] = {
    "head": lambda model: HeadDrafter(_head(model), VOCAB),
    "narrow head": lambda model: HeadDrafter(_head(model, ids=NARROW), VOCAB),
    "chosen": lambda model: HeadDrafter(_head(model), VOCAB, sample=False, nodes=15),
    "hybrid": lambda model: Hybrid(
        SuffixDrafter(device=model.device), HeadDrafter(_head(model), VOCAB, nodes=12), min_match=3, k=12
    ),
    "block": lambda model: BlockDrafter(_block(model), VOCAB),
    "narrow block": lambda model: BlockDrafter(_block(model, ids=NARROW), VOCAB),
    "block without an anchor": lambda model: BlockDrafter(_block(model, from_anchor=False), VOCAB),
    "confident block": lambda model: BlockDrafter(_block(model), VOCAB, confidence=0.4),
    "first layers": lambda model: SelfDrafter(first_layers(model, 2), VOCAB),
    "model": lambda model: ModelDrafter(_draft(model), VOCAB),
    "recycling": lambda model: NgramStoreDrafter(3, filler_top_k=4, device=model.device),
}
TREES: dict[str, Callable[[CausalModel], Drafter]] = {
    "head tree": lambda model: HeadDrafter(_head(model), VOCAB, nodes=9),
    "block tree": lambda model: BlockDrafter(_block(model), VOCAB, sample=False, nodes=9),
    "model tree": lambda model: ModelTreeDrafter(_draft(model), VOCAB, branches=2, width=2),
    "suffix tree": lambda model: SuffixTreeDrafter(device=model.device),
}


@pytest.mark.parametrize("kind", CHAINS | TREES)
def test_greedy_output_is_that_of_plain_decoding(kind: str, device: str) -> None:
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    wanted = run(CausalModel(make("llama")), PROMPTS, params, gamma=0)[0]
    model = target_on(device)
    ours, steps, engine = run(
        model, PROMPTS, params, drafter=(CHAINS | TREES)[kind](model), gamma=6, join_later=2, max_batch_size=3
    )
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert ours == wanted
    assert any(step.num_drafted for step in steps)


@pytest.mark.parametrize("rule", ["speculative", "match", "coupled"])
@pytest.mark.parametrize("kind", CHAINS | TREES)
def test_a_row_alone_samples_what_the_cpu_samples(kind: str, rule: str, device: str) -> None:
    """The same seed gives the same draft tokens, the same acceptance and the same output on both devices."""
    params = SamplingParams(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)

    def sampled(on: str) -> list[list[int]]:
        model = target_on(on)
        drafter = (CHAINS | TREES)[kind](model)
        ours, _, engine = run(model, PROMPTS[:1], params, drafter=drafter, rule=rule, gamma=6)
        assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
        return ours

    assert sampled(device) == sampled("cpu")


SETTINGS: dict[str, dict[str, Any]] = {
    "truncated": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalized": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "biased": {"logit_bias": {5: 2.0, 6: -3.0}, "banned_token_ids": (9,), "min_new_tokens": 8},
    "allowed": {"allowed_token_ids": tuple(range(3, 60)), "logprobs": 4},
    "predicted": {"prediction": tuple(range(3, 30))},
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("setting", SETTINGS)
def test_sampling_settings_mean_the_same(setting: str, temperature: float, device: str) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=5, **SETTINGS[setting])

    def decoded(on: str) -> list[list[int]]:
        model = target_on(on)
        ours, _, engine = run(model, PROMPTS[:1], params, drafter=HeadDrafter(_head(model), VOCAB), gamma=4)
        assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
        return ours

    assert decoded(device) == decoded("cpu")


@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrent_target(family: str, device: str) -> None:
    params = SamplingParams(max_new_tokens=32)
    wanted = run(RecurrentModel(make(family)), PROMPTS, params, gamma=0)[0]
    ours, steps, engine = run(
        RecurrentModel(make(family).to(device)),
        PROMPTS,
        params,
        drafter=Sometimes(wanted, VOCAB),
        gamma=4,
        join_later=2,
    )
    assert engine.draft_failures == 0
    assert ours == wanted
    assert {step.num_accepted == step.num_drafted for step in steps if step.num_drafted} == {True, False}


@pytest.mark.parametrize(
    ("family", "layers"), [("deepseek_v3", 1), ("deepseek_v3", 3), ("qwen3_next", 1), ("qwen3_5", 1)]
)
def test_layers_for_multi_token_prediction(family: str, layers: int, device: str, tmp_path: Path) -> None:
    more = {"num_nextn_predict_layers": layers} if layers > 1 else {}
    folder = str(save_with_mtp(tmp_path, family, vocab_size=264, **more))
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    wanted = run(load(folder, drafter="none", dtype="fp32", device="cpu").target.model, PROMPTS, params, gamma=0)[0]
    model: Any = load(folder, drafter="none", dtype="fp32", device=device).target.model
    drafter = HeadDrafter(MtpHead(model, name="tiny"), 264)
    ours, _, engine = run(model, PROMPTS, params, drafter=drafter, gamma=3, join_later=2)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert ours == wanted
