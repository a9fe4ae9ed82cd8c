"""Drafters over pages in Triton's interpreter, and the same without pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import foresay
from foresay.decoding.proposal import Proposal
from foresay.decoding.rows import Rows
from foresay.drafters import ModelDrafter
from foresay.drafters.hidden_states import BlockDrafter, HeadDrafter
from foresay.lengths.constant import ConstantLength
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.drafts import base, block
from foresay.models.drafts.block import BlockModel
from foresay.models.drafts.block_config import SELECTOR, PathShape, Sight
from foresay.models.drafts.head import HeadModel
from foresay.models.drafts.parallel_config import ParallelHeadConfig
from foresay.models.drafts.parallel_head import ParallelHeadModel
from foresay.models.hardware import Hardware
from foresay.models.huggingface import causal
from foresay.models.huggingface.causal import CausalModel
from helpers.blocks import random_block
from helpers.drafting import watched
from helpers.heads import random_head
from helpers.paged import few_programs
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
    monkeypatch.setattr(Hardware, "gpu_kernels", on)

    def capture(run: Any) -> Any:
        """As graphs are captured: after a run of the pass."""
        run()
        return run

    for other in (causal, base, block):
        monkeypatch.setattr(other, "capture_on", lambda device: capture)


def made(monkeypatch: pytest.MonkeyPatch, pages: bool, seed: int = 0, spread: float = 0.02) -> CausalModel:
    few_programs(monkeypatch)
    on_pages(monkeypatch, pages)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_hidden_layers=1,
        head_dim=16,
        max_position_embeddings=192,
        initializer_range=spread,
        **sizes,
    )
    found = CausalModel(LlamaForCausalLM(config).eval())
    if pages:
        found.use_fused()
        assert found.paged is not None
        if not seed:  # the target's own passes take long in the interpreter, and are tested elsewhere
            monkeypatch.setattr(found, "new_cache", SlotCache)
    return found


class Recorded(ConstantLength):
    """Ragged budgets: of 3 tokens, of one, of none."""

    sizes = (3, 1, 2, 0)

    def budget(self, rows: Rows) -> list[int]:
        return [self.sizes[(row.size + row.request_id) % 4] for row in rows]


def drafts(
    drafter: Any,
    target: CausalModel,
    settings: Sequence[dict[str, Any]],
    new: int = NEW,
    enough: int | None = None,
    check: Callable[[int, Proposal], bool] = lambda number, proposal: True,
) -> tuple[list[list[int]], list[Proposal]]:
    """The outputs and proposals of a run in which rows join and leave, of a prompt for each of `settings`.

    check: of each proposal; the run ends with the first that is wrong, which the engine would not do.
    """
    proposals: list[Proposal] = []
    known = drafter.propose

    def see(rows: Rows, proposal: Proposal) -> None:
        proposals.append(proposal)
        if not check(len(proposals) - 1, proposal):
            pytest.fail("another draft")

    params = [foresay.SamplingParams(max_new_tokens=new, ignore_eos=True, **one) for one in settings]
    outputs, _, engine = run(
        target,
        PROMPTS[: len(params)],
        params,
        drafter=watched(drafter, see),
        policy=Recorded(3),
        max_batch_size=2,
        enough=enough,
    )
    drafter.propose = known  # for another run
    if engine.draft_failures:  # which no control is about
        raise RuntimeError(f"the drafter failed: {engine.drafter and engine.drafter.last_error}")
    return outputs, proposals


def drafter_of(kind: str, target: CausalModel, monkeypatch: pytest.MonkeyPatch, pages: bool) -> Any:
    on_pages(monkeypatch, pages)
    if kind == "model":
        return ModelDrafter(made(monkeypatch, pages, seed=1), VOCAB)
    sizes: dict[str, Any] = {"gain": 1.5, "num_attention_heads": 2, "num_key_value_heads": 1}
    if kind in BLOCKS:
        return BlockDrafter(BlockModel(random_block(target, layers=(0, 1), **sizes, **BLOCKS[kind]), target), VOCAB)
    if kind == "parallel head":
        parts = {"num_hidden_layers": 2, "mask_token_id": 6, "block_size": 4}
        found = random_head(target, parts=parts, kind=ParallelHeadConfig, **sizes)
        return BlockDrafter(ParallelHeadModel(found, target), VOCAB)
    if kind == "trimmed and normed":
        sizes |= {"ids": range(3, 50), "before": True, "parts": {"norm_output": True}}
    return HeadDrafter(HeadModel(random_head(target, **sizes), target), VOCAB)
