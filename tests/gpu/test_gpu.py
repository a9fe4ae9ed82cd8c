"""Tests that need a GPU; the only tests that may be skipped."""

from __future__ import annotations

import pytest
import torch

from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, MaxGram, SelfDrafter
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_layers
from foresay.models.huggingface.linears import join_layers
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from helpers.families import VOCAB, make, make_seq2seq
from helpers.support import ModelDrafter, Sometimes, run

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


@pytest.mark.parametrize("family", ["t5", "bart", "m2m_100"])
def test_an_encoder_decoder_on_the_gpu_equals_the_cpu(family: str) -> None:
    params, sources = SamplingParams(max_new_tokens=32), [[5, 6, 7], [8] * 140, [9] * 12]
    cpu = Seq2SeqModel(make_seq2seq(family))
    starts = [[cpu.decoder_start_token_id]] * 3
    wanted = run(cpu, starts, params, gamma=0, sources=sources)[0]
    target = Seq2SeqModel(make_seq2seq(family).to("cuda"))
    ours, _, engine = run(target, starts, params, drafter=Sometimes(wanted, VOCAB), gamma=4, sources=sources)
    assert engine.draft_failures == 0
    assert ours == wanted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_cascade_on_the_gpu_decodes_without_failing(temperature: float) -> None:
    """Models on the GPU, n-grams on the CPU, the first layers in the target's own cache."""
    target = CausalModel(make("llama").to("cuda"))
    draft, short = CausalModel(make("llama", seed=1).to("cuda")), first_layers(target, 2)
    params = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=i) for i in range(3)]
    drafters = [SelfDrafter(short, VOCAB), ModelDrafter(draft, VOCAB), MaxGram()]
    cascade = Cascade(drafters, [[3, 2, 2], [0, 2, 1], [0, 0, 2]])
    ours, _, engine = run(target, PROMPTS, params, drafter=cascade, gamma=7)
    assert engine.draft_failures == 0
    if temperature == 0:
        assert ours == run(target, PROMPTS, params, gamma=0)[0]


def test_joined_weights_are_in_memory_once() -> None:
    model = make("llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=8).to("cuda")
    before = torch.cuda.memory_allocated()
    assert join_layers(model) == 16
    target = CausalModel(model)
    target.use_fused()
    pages = 0 if target.paged is None else target.paged.pool.nbytes
    assert torch.cuda.memory_allocated() - before - pages < 8e6
    first = model.model.layers[0]
    assert first.self_attn.q_proj.weight.untyped_storage().data_ptr() == (
        first.self_attn.v_proj.weight.untyped_storage().data_ptr()
    )
