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
from helpers.chat_prompts import PROMPTS
from helpers.support import PromptLookup, run


@pytest.fixture(scope="module")
def model(smollm2_bf16: LoadedModel) -> CausalModel:
    """Two of SmolLM2's layers and its head: the same products as in all thirty, a fraction of the time."""
    assert isinstance(smollm2_bf16.model, CausalModel)
    return first_layers(smollm2_bf16.model, 2)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 40000, (1, 300), generator=torch.Generator().manual_seed(0))


def _scores(model: CausalModel, tokens: torch.Tensor, start: int, columns: int, rows: int) -> torch.Tensor:
    """Logits of position `start` scored in a pass of so many columns, as the last of so many rows of different lengths."""
    cache = model.new_cache()
    cache.add_rows(rows)
    for row in range(rows):
        length = start if row == rows - 1 else 7 + 29 * row % 140
        model.forward(ModelInput(tokens[:, :length], [length], first_row=row, logits=Logits.NONE), cache)
    fed = torch.stack([tokens[0, n : n + columns] for n in cache.lengths])
    return model.forward(ModelInput(fed, [columns] * rows), cache).scores()[-1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("start", [61, 200])
def test_a_position_scores_the_same_in_any_pass(model: CausalModel, tokens: torch.Tensor, start: int) -> None:
    """More columns in one row are compared below, at every position."""
    plain = _scores(model, tokens, start, 1, 1)
    many = ((1, 8), (13, 24)) if start == 61 else ()
    for columns, rows in ((2, 1), (9, 1), (1, 2), (4, 8), *many):
        assert torch.equal(_scores(model, tokens, start, columns, rows), plain), (columns, rows)


BEGIN, END = 60, 200


def _filled_up_to(model: CausalModel, tokens: torch.Tensor, count: int) -> SlotCache:
    cache = model.new_cache()
    cache.add_rows(1)
    model.forward(ModelInput(tokens[:, :count], [count], logits=Logits.NONE), cache)
    return cache


@pytest.fixture(scope="module")
def one_by_one(model: CausalModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The scores of each position from BEGIN on, decoded one by one."""
    cache = _filled_up_to(model, tokens, BEGIN)
    return [
        model.forward(ModelInput(tokens[:, i : i + 1], [1]), cache).scores()[0, 0].clone() for i in range(BEGIN, END)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [5, 11, 33])
def test_decoding_in_blocks_gives_the_bits_of_decoding_one_by_one(
    model: CausalModel, tokens: torch.Tensor, one_by_one: list[torch.Tensor], columns: int
) -> None:
    cache = _filled_up_to(model, tokens, BEGIN)
    for start in range(BEGIN, END, columns):
        fed = tokens[:, start : min(start + columns, END)]
        together = model.forward(ModelInput(fed, [fed.shape[1]]), cache).scores()[0]
        for j, scores in enumerate(together):
            assert torch.equal(scores, one_by_one[start + j - BEGIN]), start + j


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
def test_a_kernel_whose_sums_depend_on_the_pass_is_never_asked_differently() -> None:
    plain = _attended(1)
    for columns in (2, 5, 9, 11, 33):
        assert torch.equal(_attended(columns), plain), columns


@pytest.mark.usefixtures("halves")
def test_keys_taken_in_one_range_of_any_width_are_seen_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths in steps of 64, summed whole, as they were before the fixed spans."""
    monkeypatch.setattr(slots, "visible_width", lambda needed, device: slots.round_up(needed, 64))
    monkeypatch.setattr(attention, "spans", lambda width: [(0, width)])
    plain = _attended(1)
    assert not any(torch.equal(_attended(columns), plain) for columns in (5, 9, 11, 33))


@pytest.mark.usefixtures("halves")
def test_query_rows_that_are_not_filled_up_are_seen_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """11 columns of 3 folded heads are 33 query rows, a block of 32 and one of 1."""
    intact = attention._padded
    monkeypatch.setattr(attention, "_padded", lambda folded: intact(folded) if folded.shape[-2] < 4 else folded)
    assert not torch.equal(_attended(11), _attended(1))


@pytest.mark.slow
def test_prefilling_together_gives_the_bits_of_prefilling_alone(model: CausalModel, tokens: torch.Tensor) -> None:
    everyone = [Row(i, tokens[0, :n].tolist(), SamplingParams(), limit=999) for i, n in enumerate((150, 200, 290))]
    together = _filled(model, everyone)
    for place, row in enumerate(everyone):
        alone = _filled(model, [row])
        shared, own = together.save_prefix(place, row.size - 1), alone.save_prefix(0, row.size - 1)
        for ours, theirs in zip(shared.parts, own.parts, strict=True):
            assert ours is not None and theirs is not None
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_prefilling_in_pieces_gives_the_bits_of_whole_chunks(
    model: CausalModel, tokens: torch.Tensor, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces follow a clock. `test_keys_taken_in_one_range_of_any_width_are_seen_to_differ` is the control."""
    if not fused:
        monkeypatch.setattr(model, "fused", None)
    row = [Row(0, tokens[0, :200].tolist(), SamplingParams(), limit=999)]
    whole = _filled(model, row).save_prefix(0, 199)
    for most in (37, 150):
        pieces = _filled(model, row, most).save_prefix(0, 199)
        for ours, theirs in zip(pieces.parts, whole.parts, strict=True):
            assert ours is not None and theirs is not None
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), most


def _filled(model: CausalModel, items: list[Row], most: int | None = None) -> SlotCache:
    cache = model.new_cache()
    rows = Rows(items)
    model.admit(rows, 0, cache)
    while prefill_chunk(model, cache, rows, 0, most=most):
        pass
    assert cache.lengths == [row.size - 1 for row in items]
    return cache


@pytest.mark.slow
def test_bf16_output_does_not_depend_on_speculation_or_batch(smollm2_bf16: LoadedModel) -> None:
    template = smollm2_bf16.tokenizer.apply_chat_template
    chats = [[{"role": "user", "content": text}] for text in PROMPTS[5:8]]
    prompts = [template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats]
    params = SamplingParams(max_new_tokens=16)
    plain = [run(smollm2_bf16.model, [p], params, gamma=0, eos=frozenset([2]))[0][0] for p in prompts]
    for size in (1, 3):
        ours, steps, _ = run(
            smollm2_bf16.model,
            prompts,
            params,
            drafter=PromptLookup(),
            gamma=8,
            max_batch_size=size,
            eos=frozenset([2]),
        )
        assert ours == plain
        assert sum(s.num_accepted for s in steps) > 5
