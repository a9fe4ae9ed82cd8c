"""Passes over flat tokens and pages: compiled kernels against the family's own code on the CPU, and the same bits in any pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foresay.decoding.protocols import ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import SelfDrafter
from foresay.engine.prefixes import PrefixStore
from foresay.models.hardware import Hardware
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_layers
from foresay.models.huggingface.linears import join_layers
from helpers.families import VOCAB, make
from helpers.support import ModelDrafter, Sometimes, run

PROMPTS = [[5, 6, 7], [8], [9] * 12, [3] * 70, [*[3] * 66, 1]]


SHAPES = {
    "one part": ({"hidden_size": 128, "intermediate_size": 256}, 1),
    "sums in parts": ({"hidden_size": 1024, "intermediate_size": 4096}, 2),
    "several waves": ({"hidden_size": 512, "intermediate_size": 32768}, 3),
}
"""Sizes on a GPU, and parts of the sums of every product in the interpreter, whose products are those of the first sizes."""


@pytest.fixture(autouse=True)
def on_pages(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU, in Triton's interpreter, a program takes a millisecond: few, and few tokens."""
    monkeypatch.setattr(Hardware, "gpu_kernels", True)
    if device != "cpu":
        yield
        return
    from foresay.models.gpu import attention
    from helpers.paged import few_programs, language_of_the_interpreter, sum_products_in_order

    sum_products_in_order(monkeypatch)
    few_programs(monkeypatch)  # layers are not joined there
    monkeypatch.setattr(attention, "SPLITS", 2)
    with language_of_the_interpreter():
        yield


def paged(family: str, device: str, seed: int = 0, **sizes: Any) -> CausalModel:
    model = make(family, seed, **sizes).to(device)
    join_layers(model)
    target = CausalModel(model)
    target.use_fused()
    assert target.paged is not None
    return target


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "olmo2"])
@torch.inference_mode()
def test_greedy_output_is_that_of_the_family_s_own_code(family: str, device: str) -> None:
    """With rows that join, common prefixes, drafts that are right now and then, and of models over pages."""
    params = [SamplingParams(max_new_tokens=24 if device == "cuda" else 3, ignore_eos=True) for _ in PROMPTS]
    wanted = run(CausalModel(make(family)), PROMPTS, params, gamma=0)[0]
    target, draft = paged(family, device), paged(family, device, 1)
    short = first_layers(target, 1)
    for drafter in (Sometimes(wanted, VOCAB), ModelDrafter(draft, VOCAB), SelfDrafter(short, VOCAB)):
        found, _, engine = run(
            target, PROMPTS, params, drafter=drafter, gamma=4, max_batch_size=3, prefixes=PrefixStore(1 << 22)
        )
        assert engine.draft_failures == 0 and found == wanted


@torch.inference_mode()
def test_a_second_call_captures_nothing(device: str) -> None:
    target = paged("llama", device)
    assert target.paged is not None
    params = [SamplingParams(max_new_tokens=24 if device == "cuda" else 3, ignore_eos=True) for _ in PROMPTS]
    for captures in (None, 0):
        before = target.paged.captures
        run(target, PROMPTS, params, gamma=0, max_batch_size=3)
        assert captures is None or target.paged.captures == before


def sizes_of(shape: str, device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    from foresay.models.gpu import product

    sizes, parts = SHAPES[shape]
    if device == "cpu":
        monkeypatch.setattr(product, "parts_of", lambda *_: parts)
        return SHAPES["one part"][0]
    assert (product.parts_of(*sizes.values()) > 1) == (shape != "one part")
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_a_token_has_the_same_bits_in_any_pass(
    shape: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch, in front of draft tokens, in a tree; in passes over up to 512 tokens."""
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no products in bfloat16")
    target = paged("llama", device, **sizes_of(shape, device, monkeypatch))
    target.model.to(dtype)
    target.use_fused()
    generator, lengths = torch.Generator().manual_seed(0), (3, 70, 130) if device == "cuda" else (3, 17, 20)
    prompts = [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]

    def scores(rows: list[int], columns: int, parents: list[int] | None = None) -> torch.Tensor:
        cache = target.new_cache()
        cache.add_rows(len(rows))
        for i, row in enumerate(rows):
            ids = torch.tensor([prompts[row]], device=target.device)
            target.forward(ModelInput(ids, [ids.shape[1]], first_row=i), cache)
        fed = torch.arange(5, 5 + columns, device=target.device).repeat(len(rows), 1)
        tree = None if parents is None else torch.tensor([parents] * len(rows), device=target.device)
        return target.forward(ModelInput(fed, [columns] * len(rows), parents=tree), cache).scores()[:, 0]

    alone = torch.cat([scores([row], 1) for row in range(3)])
    passes: list[tuple[int, int, list[int] | None]] = [(1, 1, None), (1, 6, None), (1, 4, [-1, 0, 0, 1])]
    if device == "cuda":  # 66, 144, 288 and 495 tokens
        passes += [(11, 2, None), (8, 6, None), (24, 4, [-1, 0, 0, 1]), (11, 15, None)]
    for times, columns, parents in passes:
        found = scores([0, 1, 2] * times, columns, parents)
        assert torch.equal(found, alone.repeat(times, 1)), (times, columns, parents)
