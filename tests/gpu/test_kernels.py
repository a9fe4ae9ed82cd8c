"""Sampling, quantized products and drafts by our kernels, against PyTorch's operations and against plain decoding."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from foresay.decoding import draws, truncation
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters.hidden_states import BlockDrafter, HeadDrafter
from foresay.models.drafts.block import BlockModel
from foresay.models.drafts.block_config import SELECTOR, PathShape
from foresay.models.drafts.head import HeadModel
from foresay.models.hardware import Hardware
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import join_layers
from helpers.blocks import random_block
from helpers.families import VOCAB, make
from helpers.heads import random_head
from helpers.support import run

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 50},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
]


@pytest.fixture(autouse=True)
def in_an_interpreter(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where a program takes a millisecond: few programs."""
    monkeypatch.setattr(Hardware, "gpu_kernels", True)
    if device == "cpu":
        from helpers.paged import few_programs

        few_programs(monkeypatch)


def test_probabilities_and_draws_are_those_of_the_operations(device: str) -> None:
    from foresay.decoding import sampling_kernels

    vocab = 128256 if device == "cuda" else 600
    rows = Rows([Row(i, [1], SamplingParams(**one), seed=i, limit=9) for i, one in enumerate(PARAMS)])
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(len(PARAMS), vocab, generator=generator) * 4
    plan = truncation.plan_of(rows, torch.device("cpu"))
    expected = truncation.probabilities(scores.clone(), plan, 1)
    cuts = sampling_kernels.Cuts(plan.top_k.to(device), plan.top_p.to(device), plan.min_p.to(device))
    found = sampling_kernels.probabilities(scores.to(device), plan.temperature.to(device), cuts).cpu()
    assert ((found > 0) != (expected > 0)).sum() <= len(PARAMS), "at most a token at each border"
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    uniform = torch.rand(64, dtype=torch.float64, generator=generator)
    index = torch.arange(64) % len(PARAMS)
    drawn = sampling_kernels.inverse_cdf(expected.to(device), uniform.to(device), index.to(device)).cpu()
    assert (drawn == draws.inverse_cdf(expected, uniform, index)).float().mean() > 0.95
    assert (expected[index, drawn] > 0).all()
    likeliest, _ = sampling_kernels.likeliest(scores.to(device))
    assert likeliest.tolist() == scores.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantized_products(kind: str, device: str) -> None:
    from foresay.models.gpu.blocks import BlockProduct
    from foresay.models.levels import Levels

    generator = np.random.default_rng(0)
    weight = generator.normal(size=(96, 512 if device == "cuda" else 64)).astype(np.float32)
    data = gguf.quantize(weight, gguf.GGMLQuantizationType[kind])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    product = BlockProduct(Levels.of_file(kind, data), dtype, torch.device(device), None)
    x = torch.from_numpy(generator.normal(size=(70, weight.shape[1])).astype(np.float32)).to(device, dtype)
    expected = (
        x.float() @ torch.from_numpy(np.array(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))).to(device).T
    )
    torch.testing.assert_close(product(x).float(), expected, rtol=2e-2, atol=2e-1 if device == "cuda" else 1e-3)
    assert torch.equal(product(x[3:5]), product(x)[3:5]), "a token's bits depend on the others"


@pytest.mark.parametrize(
    "settings", [[{}] * 3, [{"temperature": 1.0, "seed": 3, "top_k": 30}] * 3], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("kind", ["head", "tree", "block", "DFlash2"])
@torch.inference_mode()
def test_drafts_over_pages(kind: str, settings: list[dict[str, Any]], device: str) -> None:
    """Greedy outputs are those of plain decoding; sampled ones are drawn without a failure."""
    model = make("llama").to(device)
    join_layers(model)
    target = CausalModel(model)
    target.use_fused()
    assert target.paged is not None
    prompts = [[5, 6, 7], [8], [9] * 6]
    params = [SamplingParams(max_new_tokens=16 if device == "cuda" else 4, ignore_eos=True, **one) for one in settings]
    if kind in ("head", "tree"):
        drafter: Any = HeadDrafter(HeadModel(random_head(target), target), VOCAB, nodes=8 * (kind == "tree"))
    else:
        more: dict[str, Any] = {}
        if kind == "DFlash2":
            more = {"path": PathShape(SELECTOR, 6, candidates=5), "taps": (2, 4), "from_anchor": False}
        drafter = BlockDrafter(BlockModel(random_block(target, **more), target), VOCAB)
    assert drafter.context.draws_chains
    plain = run(CausalModel(make("llama")), prompts, params, gamma=0)[0]
    found, steps, engine = run(target, prompts, params, drafter=drafter, gamma=4, max_batch_size=2)
    assert engine.draft_failures == 0 and any(step.num_drafted > 1 for step in steps)
    assert found == plain or not params[0].greedy
