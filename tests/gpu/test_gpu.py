"""Families and every kind of drafter on a GPU: batched, ragged, greedy and sampled, without a failed draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.decoding.protocols import Drafter
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import (
    BlockDrafter,
    Cascade,
    HeadDrafter,
    Hybrid,
    MaxGram,
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
from foresay.models.huggingface.linears import join_layers
from foresay.models.huggingface.recurrent import RecurrentModel
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from helpers.blocks import random_block
from helpers.families import RECURRENT, SEQ2SEQ, VOCAB, make, make_seq2seq
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
    "cascade": lambda model: Cascade(
        [SelfDrafter(first_layers(model, 2), VOCAB), ModelDrafter(_draft(model), VOCAB), MaxGram()],
        [[3, 2, 2], [0, 2, 1], [0, 0, 2]],
    ),
    "recycling": lambda model: NgramStoreDrafter(3, filler_top_k=4, device=model.device),
}
TREES: dict[str, Callable[[CausalModel], Drafter]] = {
    "head tree": lambda model: HeadDrafter(_head(model), VOCAB, nodes=9),
    "block tree": lambda model: BlockDrafter(_block(model), VOCAB, sample=False, nodes=9),
    "model tree": lambda model: ModelTreeDrafter(_draft(model), VOCAB, branches=2, width=2),
    "suffix tree": lambda model: SuffixTreeDrafter(device=model.device),
}


def decoded(model: Any, prompts: Any, params: Any, drafter: Any = None, **options: Any) -> tuple[list[list[int]], Any]:
    """Outputs, and steps; without a failed draft."""
    outputs, steps, engine = run(model, prompts, params, drafter=drafter, **options)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    return outputs, steps


GREEDY = SamplingParams(max_new_tokens=32, ignore_eos=True)


@pytest.mark.parametrize("kind", CHAINS | TREES)
def test_greedy_output_is_that_of_plain_decoding(kind: str, device: str) -> None:
    wanted = run(CausalModel(make("llama")), PROMPTS, GREEDY, gamma=0)[0]
    model = target_on(device)
    drafter = (CHAINS | TREES)[kind](model)
    ours, steps = decoded(model, PROMPTS, GREEDY, drafter, gamma=6, join_later=2, max_batch_size=3)
    assert ours == wanted and any(step.num_drafted for step in steps)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bloom", *RECURRENT, "t5", "bart", "m2m_100"])
def test_greedy_output_on_the_gpu_equals_the_cpu(family: str, device: str) -> None:
    """Of the family's own code, of states, and of encoders."""
    kind = RecurrentModel if family in RECURRENT else CausalModel
    prompts: Any = PROMPTS
    options: dict[str, Any] = {}
    if family in SEQ2SEQ:
        kind, options = Seq2SeqModel, {"sources": [[5, 6, 7], [8] * 140, [9] * 12]}
    built = make_seq2seq if family in SEQ2SEQ else make
    cpu = kind(built(family))
    if family in SEQ2SEQ:
        prompts = [[cpu.decoder_start_token_id]] * 3
    wanted = run(cpu, prompts, GREEDY, gamma=0, **options)[0]
    target, drafter = kind(built(family).to(device)), Sometimes(wanted, VOCAB)
    ours, steps = decoded(target, prompts, GREEDY, drafter, gamma=4, join_later=2, **options)
    assert ours == wanted
    assert {step.num_accepted == step.num_drafted for step in steps if step.num_drafted} == {True, False}


SETTINGS: dict[str, dict[str, Any]] = {
    "truncated": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalized": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "biased": {"logit_bias": {5: 2.0, 6: -3.0}, "banned_token_ids": (9,), "min_new_tokens": 8},
    "allowed": {"allowed_token_ids": tuple(range(3, 60)), "logprobs": 4},
    "predicted": {"prediction": tuple(range(3, 30))},
}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True}


@pytest.mark.parametrize(
    ("kind", "rule", "setting"),
    [
        *((kind, rule, SAMPLED) for kind in CHAINS | TREES for rule in ("speculative", "match", "coupled")),
        *(("head", "speculative", {"temperature": t, **one}) for t in (0.0, 0.8) for one in SETTINGS.values()),
    ],
)
def test_a_row_alone_samples_what_the_cpu_samples(kind: str, rule: str, setting: dict[str, Any], device: str) -> None:
    """The same seed gives the same draft tokens, the same acceptance and the same output on both devices."""
    params, outputs = SamplingParams(max_new_tokens=24, seed=5, **setting), []
    for on in (device, "cpu"):
        model = target_on(on)
        drafter = (CHAINS | TREES)[kind](model)
        outputs.append(decoded(model, PROMPTS[:1], params, drafter, rule=rule, gamma=6)[0])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("rule", ["speculative", "block", "match", "coupled"])
def test_sampled_rows_equal_single_requests_on_the_gpu(rule: str, device: str) -> None:
    target = CausalModel(make("llama").to(device))
    params = [SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.9, seed=i) for i in range(5)]

    def sampled(rows: slice) -> list[list[int]]:
        return decoded(target, PROMPTS[rows], params[rows], ModelDrafter(target, VOCAB), rule=rule)[0]

    assert sampled(slice(0, 5)) == [sampled(slice(i, i + 1))[0] for i in range(5)]


@pytest.mark.parametrize(
    ("family", "layers"), [("deepseek_v3", 1), ("deepseek_v3", 3), ("qwen3_next", 1), ("qwen3_5", 1)]
)
def test_layers_for_multi_token_prediction(family: str, layers: int, device: str, tmp_path: Path) -> None:
    more = {"num_nextn_predict_layers": layers} if layers > 1 else {}
    folder = str(save_with_mtp(tmp_path, family, vocab_size=264, **more))
    wanted = run(load(folder, drafter="none", dtype="fp32", device="cpu").target.model, PROMPTS, GREEDY, gamma=0)[0]
    model: Any = load(folder, drafter="none", dtype="fp32", device=device).target.model
    drafter = HeadDrafter(MtpHead(model, name="tiny"), 264)
    assert decoded(model, PROMPTS, GREEDY, drafter, gamma=3, join_later=2)[0] == wanted


def test_joined_weights_are_in_memory_once(device: str) -> None:
    model = make("llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=8).to(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    assert join_layers(model) == 16
    target = CausalModel(model)
    target.use_fused()
    pages = 0 if target.paged is None else target.paged.pool.nbytes
    assert device != "cuda" or torch.cuda.memory_allocated() - before - pages < 8e6
    first = model.model.layers[0].self_attn
    assert first.q_proj.weight.untyped_storage().data_ptr() == first.v_proj.weight.untyped_storage().data_ptr()
