"""Same bits: in bf16, what a position scores does not depend on how many columns or rows its pass has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresay.decoding.prefill import prefill_chunk
from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.cache import slot_cache as slots
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.huggingface import attention
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_layers
from foresay.models.sources.wrapping import LoadedModel
from helpers.passes import started


@pytest.fixture(scope="module")
def model(smollm2_bf16: LoadedModel) -> CausalModel:
    """Two of SmolLM2's layers and its head: the same products as in all thirty, a fraction of the time."""
    assert isinstance(smollm2_bf16.model, CausalModel)
    return first_layers(smollm2_bf16.model, 2)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 40000, (1, 300), generator=torch.Generator().manual_seed(0))


BEGIN, END = 60, 134
"""The first passes end before the 128 slots that a cache begins with, the last ones after them."""


def filled_to(model: CausalModel, tokens: torch.Tensor, *lengths: int) -> SlotCache:
    """A cache of rows of these lengths."""
    cache = started(model, len(lengths))
    for row, length in enumerate(lengths):
        model.forward(ModelInput(tokens[:, :length], [length], first_row=row, logits=Logits.NONE), cache)
    return cache


@pytest.mark.slow
def test_a_position_scores_the_same_in_any_pass(model: CausalModel, tokens: torch.Tensor) -> None:
    """One by one, in blocks of any size, and as the last of rows of different lengths."""
    cache, single = filled_to(model, tokens, BEGIN), tokens[:, BEGIN:END].split(1, 1)
    wanted = [model.forward(ModelInput(one, [1]), cache).scores()[0, 0].clone() for one in single]
    for columns in (5, 33):
        cache = filled_to(model, tokens, BEGIN)
        for start in range(BEGIN, END, columns):
            fed = tokens[:, start : min(start + columns, END)]
            for j, scores in enumerate(model.forward(ModelInput(fed, [fed.shape[1]]), cache).scores()[0]):
                assert torch.equal(scores, wanted[start + j - BEGIN]), (columns, start + j)
    for start, columns, rows in ((61, 1, 2), (61, 11, 12), (127, 2, 1), (130, 1, 2), (130, 4, 8)):
        cache = filled_to(model, tokens, *(7 + 29 * row % 140 for row in range(rows - 1)), start)
        fed = torch.stack([tokens[0, n : n + columns] for n in cache.lengths])
        scores = model.forward(ModelInput(fed, [columns] * rows), cache).scores()[-1, 0]
        assert torch.equal(scores, wanted[start - BEGIN]), (start, columns, rows)


def prefilled(model: CausalModel, items: list[Row], most: int | None = None) -> list[torch.Tensor]:
    """The keys and values of rows, which a prefill leaves. most: tokens of a pass, as a clock gives them."""
    cache, rows = model.new_cache(), Rows(items)
    model.admit(rows, 0, cache)
    while prefill_chunk(model, cache, rows, 0, most=most):
        pass
    assert cache.lengths == [row.size - 1 for row in items]
    parts = [part for i, row in enumerate(items) for part in cache.save_prefix(i, row.size - 1).parts]
    return [tensor for part in parts for tensor in part or ()]


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_prefilling_together_and_in_pieces_gives_the_bits_of_prefilling_alone(
    model: CausalModel, tokens: torch.Tensor, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fused:
        monkeypatch.setattr(model, "fused", None)
    rows = [Row(i, tokens[0, :n].tolist(), SamplingParams(), limit=999) for i, n in enumerate((150, 200, 290))]
    alone = [prefilled(model, [row]) for row in rows]
    cases = [(rows[1:2], 37, alone[1]), (rows[1:2], 150, alone[1])]
    for some, most, wanted in [*cases, (rows, None, [*alone[0], *alone[1], *alone[2]])] if fused else cases:
        for one, other in zip(prefilled(model, some, most), wanted, strict=True):
            assert torch.equal(one, other), most


# Negative controls. Which sums a kernel takes in another order is up to the processor, so the kernel is stood in for by one
# that takes them as the slowest do: what is not kept from it then shows, whatever the tests run on.


def _halves(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp; the values are summed in two halves of the keys, each rounded to bf16.

    A block, of 32 query rows, of fewer than 4 sums its keys by turns instead. All else is exact.
    """
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scores = query.double() @ key.double().transpose(-1, -2) * scale + mask.double()
    weights, mass = scores.softmax(-1).float().double(), scores.logsumexp(-1).float()
    blocks = []
    for some in weights.split(32, dim=-2):
        turns = torch.arange(key.shape[-2])
        first = turns % 2 == 0 if some.shape[-2] < 4 else turns < key.shape[-2] // 2
        parts = [((some * half) @ value.double()).bfloat16() for half in (first, ~first)]
        blocks.append(parts[0] + parts[1])
    return torch.cat(blocks, -2), mass


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash(q: Any, k: Any, v: Any, dropout: float, causal: bool, *, attn_mask: Any, scale: Any) -> Any:
        return _halves(q, k, v, attn_mask, scale)

    def fused(q: Any, k: Any, v: Any, *, attn_mask: Any, scale: Any) -> Any:
        return _halves(q, k, v, attn_mask, scale)[0]

    monkeypatch.setattr(attention, "_FLASH", flash)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)


HEADS, GROUP, DIM, LENGTH = 2, 3, 16, 160


def _attended(columns: int) -> torch.Tensor:
    """The values that each of `LENGTH` positions gathers, [LENGTH, heads * DIM], in passes of so many columns after one of 60."""
    random = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(1, heads, LENGTH, DIM, generator=random, dtype=torch.bfloat16)
        for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    cache = SlotCache()
    cache.add_rows(1)
    out = []
    begin = 0
    while begin < LENGTH:
        end = min(LENGTH, begin + columns if begin >= 60 else 60)
        at = cache.begin_pass(0, 1, end - begin, torch.device("cpu"))
        keys, values = cache.write(0, key[:, :, begin:end], value[:, :, begin:end], at)
        cache.lengths[0] = end
        with attention.during(at):
            mask = attention.additive_mask(mask_function=lambda b, h, q, k: k <= q, dtype=torch.bfloat16)
            module = torch.nn.Module()
            gathered, _ = attention.attention(module, query[:, :, begin:end], keys, values, mask)
        out.append(gathered[0].flatten(1))
        begin = end
    return torch.cat(out)


@pytest.mark.usefixtures("halves")
def test_a_kernel_whose_sums_depend_on_the_pass_gets_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: widths in steps of 64, summed whole; 11 columns of 3 folded heads as a block of 32 query rows and one of 1."""
    plain = _attended(1)
    assert all(torch.equal(_attended(columns), plain) for columns in (2, 5, 9, 11, 33))
    with monkeypatch.context() as patch:
        patch.setattr(attention, "QUERY_ROWS", 11)
        assert not torch.equal(_attended(11), _attended(1))
    monkeypatch.setattr(slots, "visible_width", lambda needed, device: slots.round_up(needed, 64))
    monkeypatch.setattr(attention, "spans", lambda width: [(0, width)])
    plain = _attended(1)
    assert not any(torch.equal(_attended(columns), plain) for columns in (5, 9, 11, 33))
