"""Chains drawn on the device: tokens and distributions are those of single passes, and outputs those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import foresay
from foresay.decoding import sampling_kernels
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.drafters import ModelDrafter
from foresay.drafters.hidden_states import BlockDrafter, HeadDrafter
from foresay.lengths.constant import ConstantLength
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.drafts import base, block
from foresay.models.drafts.block import BlockModel
from foresay.models.drafts.block_config import SELECTOR, PathShape, Sight
from foresay.models.drafts.head import HeadModel
from foresay.models.gpu import attention, chains, flat, passes
from foresay.models.huggingface import causal, family_layers, fused
from foresay.models.huggingface.causal import CausalModel
from helpers.blocks import random_block
from helpers.families import whole_product
from helpers.heads import random_head
from helpers.support import run

VOCAB, NEW = 61, 6
PROMPTS = [[i * 7 % VOCAB for i in range(9)], [5, 6, 7], [3, 4]]
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1, "top_k": 20},
    {"seed": 2},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
]

BLOCKS: dict[str, dict[str, Any]] = {
    "block of DSpark": {"ids": range(3, 50)},
    "block with a recurrent Markov head and windows": {
        "path": PathShape("rnn", 6),
        "sights": [Sight(window=3), Sight(causal=True)],
    },
    "DFlash2": {"path": PathShape(SELECTOR, 6, candidates=5), "taps": (2, 4), "from_anchor": False, "depth": 1},
}


def on_pages(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    for module in (causal, base):
        monkeypatch.setattr(module, "uses_kernels", lambda device: on)

    def capture(run: Any) -> Any:
        """As graphs are captured: after a run of the pass."""
        run()
        return run

    for other in (causal, base, block):
        monkeypatch.setattr(other, "capture_on", lambda device: capture)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the interpreter takes a millisecond."""
    monkeypatch.setattr(attention, "SPLITS", 1)
    monkeypatch.setattr(sampling_kernels, "SPAN", 128)
    monkeypatch.setattr(passes, "MAX_ROWS", 4)
    for module in (family_layers, fused):
        monkeypatch.setattr(module, "product_of", whole_product)


def made(monkeypatch: pytest.MonkeyPatch, pages: bool, seed: int = 0) -> CausalModel:
    on_pages(monkeypatch, pages)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=1, head_dim=16, max_position_embeddings=192, **sizes)
    found = CausalModel(LlamaForCausalLM(config).eval())
    if pages:
        found.use_fused()
        assert found.paged is not None
        if not seed:  # the target's own passes take long in the interpreter, and are tested elsewhere
            monkeypatch.setattr(found, "new_cache", SlotCache)
    return found


class Recorded(ConstantLength):
    """Ragged budgets: of 3 tokens, of one, of none."""

    def budget(self, rows: Rows) -> list[int]:
        return [(3, 1, 2, 0)[(row.size + row.request_id) % 4] for row in rows]


def drafts(
    drafter: Any, target: CausalModel, settings: Sequence[dict[str, Any]]
) -> tuple[list[list[int]], list[Proposal]]:
    """The outputs and proposals of a run in which rows join and leave."""
    proposals: list[Proposal] = []
    known = drafter.propose

    def propose(rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        proposals.append(known(rows, budget, policy))
        return proposals[-1]

    drafter.propose = propose
    params = [foresay.SamplingParams(max_new_tokens=NEW, ignore_eos=True, **one) for one in settings]
    outputs, _, engine = run(target, PROMPTS, params, drafter=drafter, policy=Recorded(3), max_batch_size=2)
    assert engine.draft_failures == 0
    return outputs, proposals


def same(found: Proposal, expected: Proposal) -> bool:
    if list(found.num_tokens) != list(expected.num_tokens):
        return False
    for i, n in enumerate(found.num_tokens):
        if found.token_ids[i, :n].tolist() != expected.token_ids[i, :n].tolist():
            return False
        for j in range(n):
            rows = [-1 if p.distribution_index is None else int(p.distribution_index[i, j]) for p in (found, expected)]
            if (rows[0] < 0) != (rows[1] < 0):
                return False
            if rows[0] >= 0 and found.distributions is not None and expected.distributions is not None:
                torch.testing.assert_close(
                    found.distributions[rows[0]], expected.distributions[rows[1]], rtol=1e-3, atol=1e-5
                )
    return True


def drafter_of(kind: str, target: CausalModel, monkeypatch: pytest.MonkeyPatch, pages: bool) -> Any:
    on_pages(monkeypatch, pages)
    if kind == "model":
        return ModelDrafter(made(monkeypatch, pages, seed=1), VOCAB)
    if kind in BLOCKS:
        return BlockDrafter(BlockModel(random_block(target, layers=(0, 1), gain=1.5, **BLOCKS[kind]), target), VOCAB)
    more: dict[str, Any] = {"ids": range(3, 50)} if kind == "trimmed" else {}
    if kind == "normed":
        more = {"before": True, "parts": {"norm_output": True}}
    return HeadDrafter(HeadModel(random_head(target, gain=1.5, **more), target), VOCAB)


@pytest.mark.parametrize("settings", [[{}] * 3, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["head", "trimmed", "normed", "model", *BLOCKS])
@torch.inference_mode()
def test_drafts_are_those_of_single_passes(
    kind: str, settings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = made(monkeypatch, pages=False)
    expected = drafts(drafter_of(kind, reference, monkeypatch, False), reference, settings)
    target = made(monkeypatch, pages=True)
    drafter = drafter_of(kind, target, monkeypatch, True)
    assert drafter.context.draws_chains
    monkeypatch.setattr(ModelDrafter, "_draw", None)
    found = drafts(drafter, target, settings)
    assert found[0] == expected[0] and len(found[1]) == len(expected[1])
    assert all(same(one, other) for one, other in zip(found[1], expected[1], strict=True))
    assert max(max(one.num_tokens) for one in found[1]) == 3


@torch.inference_mode()
def test_a_chain_whose_positions_stand_still_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    known = chains._Rows.begin

    def begin(self: Any, *given: Any) -> None:
        known(self, *given)
        self.buffers.fields[chains._POSITIONS] += 3

    monkeypatch.setattr(chains._Rows, "begin", begin)
    with pytest.raises(AssertionError):
        test_drafts_are_those_of_single_passes("head", SAMPLED, monkeypatch)


@torch.inference_mode()
def test_a_block_that_does_not_see_its_later_positions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    known = flat.Buffers.__init__

    def init(self: Any, *given: Any) -> None:
        known(self, *given)
        self.whole = self.visible

    monkeypatch.setattr(flat.Buffers, "__init__", init)
    with pytest.raises(AssertionError):
        test_drafts_are_those_of_single_passes("DFlash2", SAMPLED, monkeypatch)


@torch.inference_mode()
def test_convolutions_that_reach_another_row_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    known = flat.Buffers.__init__

    def init(self: Any, *given: Any) -> None:
        known(self, *given)
        self.indices = torch.full_like(self.indices, 9)

    monkeypatch.setattr(flat.Buffers, "__init__", init)
    with pytest.raises(AssertionError):
        test_drafts_are_those_of_single_passes("DFlash2", SAMPLED, monkeypatch)


class Longer(ConstantLength):
    """A policy of another package, whose drafts may be longer than those of ours."""

    def budget(self, rows: Rows) -> list[int]:
        return [70 for _ in rows]


@torch.inference_mode()
def test_longer_chains_than_a_captured_one_are_drawn_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    target = made(monkeypatch, pages=True)
    drafter = drafter_of("head", target, monkeypatch, True)
    drawn = []
    monkeypatch.setattr(ModelDrafter, "_draw", lambda self, chain, *_: drawn.append(chain.room))
    params = foresay.SamplingParams(max_new_tokens=80, ignore_eos=True)
    run(target, PROMPTS[2:], [params], drafter=drafter, policy=Longer(3), enough=1)
    assert drawn[0] == [70]


@torch.inference_mode()
def test_steps_are_captured_once_for_a_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    target = made(monkeypatch, pages=True)
    drafter = drafter_of("head", target, monkeypatch, True)
    counts = []
    for _ in range(2):
        drafts(drafter, target, [{}] * 3)
        counts.append(drafter.context.model.inner.paged.captures)
    assert counts[0] == counts[1]


@torch.inference_mode()
def test_more_rows_than_a_captured_step_has_are_drafted_for_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    target = made(monkeypatch, pages=True)
    expected = drafts(drafter_of("head", target, monkeypatch, True), target, [{}] * 3)[0]
    monkeypatch.setattr(flat, "SIZES", (1,))
    drafter = drafter_of("head", target, monkeypatch, True)
    assert drafts(drafter, target, [{}] * 3)[0] == expected


@pytest.mark.parametrize("kind", ["head", "block of DSpark"])
@torch.inference_mode()
def test_trees_over_pages(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = made(monkeypatch, pages=True)
    plain = run(target, PROMPTS, foresay.SamplingParams(max_new_tokens=NEW, ignore_eos=True), gamma=0)[0]
    drafter = drafter_of(kind, target, monkeypatch, True)
    drafter.nodes = 6
    params = foresay.SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    outputs, steps, engine = run(target, PROMPTS, params, drafter=drafter, gamma=6, max_batch_size=2)
    assert outputs == plain and engine.draft_failures == 0 and any(step.num_drafted > 3 for step in steps)
