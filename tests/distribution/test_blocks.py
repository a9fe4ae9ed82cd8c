"""Distribution tests of drafts on hidden states: chains of blocks and MTP layers, trees of blocks and heads; with controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import BlockDrafter, HeadDrafter, Hybrid, SuffixDrafter
from foresay.models.drafts.block import BlockModel
from foresay.models.drafts.block_config import DOMINO, SELECTOR, PathShape, Sight
from foresay.models.drafts.head import HeadModel
from foresay.models.drafts.mtp import MtpHead
from foresay.models.huggingface.causal import CausalModel
from helpers.blocks import random_block
from helpers.distribution_cells import ALPHA
from helpers.families import make
from helpers.heads import random_head
from helpers.mtp import save_with_mtp
from helpers.reference import enumerated, joint
from helpers.sequential import value_of
from helpers.support import Loop

SIZE, LENGTH, SAMPLES, PROMPT = 5, 4, 1500, [1, 2, 1]
PARAMS = SamplingParams(temperature=2.0, max_new_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> CausalModel:
    model = CausalModel(make("llama", 3, vocab_size=SIZE, tie_word_embeddings=False))
    model.use_fused()
    return model


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    """A model with two multi-token-prediction layers."""
    specials = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    folder = tmp_path_factory.mktemp("layered")
    save_with_mtp(folder, "deepseek_v3", vocab_size=SIZE, num_nextn_predict_layers=2, num_hidden_layers=2, **specials)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():  # leaves each next token likely enough
        model.lm_head.weight *= 2.5 / model.lm_head.weight.norm(dim=1).mean()
    return CausalModel(model)


class _IgnoresPath(BlockDrafter):
    """Draws given the tokens before, and records the distributions of the layers alone."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        proposal = super().propose(rows, budget, policy)
        scores = self.context._scores
        if proposal.distributions is None or scores is None:
            return proposal
        base = torch.softmax(scores[:, : proposal.width].float() / 2.0, -1)  # at the rows' temperature
        return dataclasses.replace(proposal, distributions=base.transpose(0, 1).flatten(0, 1).contiguous())


class _RecordsFirst:
    """Draws as the drafter does, and records the first distribution of each row for all of its tokens."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        proposal: Proposal = super().propose(rows, budget, policy)  # type: ignore[misc]
        index = proposal.distribution_index
        if index is None:
            return proposal
        return dataclasses.replace(proposal, distribution_index=torch.where(index >= 0, index[:, :1], index))


class _FirstForAll(_RecordsFirst, HeadDrafter):
    """The first layer's distribution for every token."""


class _RootsForAll(_RecordsFirst, BlockDrafter):
    """The distribution of the roots for every node."""


DRAFTERS: dict[str, Callable[[BlockModel], Any]] = {
    "chain": lambda block: BlockDrafter(block, SIZE),
    "confident": lambda block: BlockDrafter(block, SIZE, confidence=0.4),
    "likeliest": lambda block: BlockDrafter(block, SIZE, sample=False),
    "best first": lambda block: BlockDrafter(block, SIZE, sample=False, nodes=8),
    "drawn": lambda block: BlockDrafter(block, SIZE, nodes=8),
    "drawn by a head": lambda block: HeadDrafter(_head(block.target), SIZE, nodes=8),
    "drawn by a head in a hybrid": lambda block: Hybrid(
        SuffixDrafter(), HeadDrafter(_head(block.target), SIZE, nodes=8), min_match=2, k=8
    ),
    "layers": lambda block: HeadDrafter(MtpHead(block.target, name="tiny"), SIZE),
    "first layer": lambda block: _FirstForAll(MtpHead(block.target, name="tiny"), SIZE),
    "roots": lambda block: _RootsForAll(block, SIZE, nodes=8),
    "ignores": lambda block: _IgnoresPath(block, SIZE),
}


def _head(target: CausalModel) -> HeadModel:
    return HeadModel(random_head(target, gain=1.5), target)


PATHS = {
    "selector": PathShape(SELECTOR, 6, candidates=3),
    "domino": PathShape(DOMINO, 6, state=8),
    "rnn": PathShape("rnn", 6),
    "gated": PathShape("gated", 6),
}


def value(target: CausalModel, drafter: str, rule: str, *, nodes: int = 0, path: str = "", **changes: Any) -> float:
    """nodes: of trees, whose budgets reach past the tokens that are compared, so that they have levels. path: one of PATHS.

    changes: of the parameters.
    """
    made: dict[str, Any] = {"path": PATHS[path], "from_anchor": path in ("rnn", "gated")} if path else {}
    if path == "selector":
        made |= {"taps": (2, 8), "sights": [Sight(window=3)] * 2}
    made |= {name: changes.pop(name) for name in ("from_anchor",) if name in changes}
    block = BlockModel(random_block(target, gain=4.0 if path else 2.0, **made), target)
    new = LENGTH + nodes
    params = SamplingParams.of(PARAMS, max_new_tokens=new, **changes)
    loop = Loop(target, drafter=DRAFTERS[drafter](block), rule=rule, gamma=nodes or 3, max_batch_size=125)
    probs = joint(enumerated(target), params, PROMPT, LENGTH)
    found = value_of(loop, PROMPT, params, probs, SAMPLES, enough=LENGTH)
    requests = len({step.request_id for step in loop.steps})
    assert sum(step.num_accepted for step in loop.steps) > requests / 4
    assert sum(step.num_accepted < step.num_drafted for step in loop.steps) > requests / 4
    assert not nodes or max(step.num_accepted for step in loop.steps) > 1, "trees of one level"
    return found


@pytest.mark.parametrize("rule", ["speculative", "block", "match", "coupled"])
@pytest.mark.parametrize("drafter", ["chain", "confident", "likeliest"])
def test_chains(drafter: str, rule: str, target: CausalModel) -> None:
    assert value(target, drafter, rule) > ALPHA


TREES = [(drafter, rule) for drafter in DRAFTERS if "drawn" in drafter for rule in ("speculative", "match", "coupled")]
BY_DEFAULT = [("drawn", "speculative"), ("drawn", "match"), ("drawn by a head", "speculative")]
BY_DEFAULT += [("drawn by a head", "coupled"), ("drawn by a head in a hybrid", "speculative")]


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        *(("best first", rule) for rule in ("speculative", "match", "coupled")),
        *(pytest.param(*one, marks=[] if one in BY_DEFAULT else [pytest.mark.long]) for one in TREES),
    ],
)
def test_trees(drafter: str, rule: str, target: CausalModel) -> None:
    assert value(target, drafter, rule, nodes=8) > ALPHA


def test_the_distribution_of_the_roots_for_all_nodes(target: CausalModel) -> None:
    assert value(target, "roots", "speculative", nodes=8) < ALPHA


def test_blocks_without_a_markov_head(target: CausalModel) -> None:
    assert value(target, "chain", "speculative", from_anchor=False) > ALPHA


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_the_conditioning_ignored(rule: str, target: CausalModel) -> None:
    assert value(target, "ignores", rule) < ALPHA


@pytest.mark.parametrize("rule", ["speculative", "coupled"])
def test_layers_of_multi_token_prediction(rule: str, layered: CausalModel) -> None:
    assert value(layered, "layers", rule) > ALPHA


def test_the_distribution_of_the_first_layer_for_all_tokens(layered: CausalModel) -> None:
    assert value(layered, "first layer", "speculative") < ALPHA


DRAWN = [pytest.param("drawn", path, marks=[] if path == "selector" else [pytest.mark.long]) for path in PATHS]


@pytest.mark.parametrize(("drafter", "path"), [*(("chain", path) for path in PATHS), *DRAWN])
def test_paths(drafter: str, path: str, target: CausalModel) -> None:
    """Chains and trees of blocks whose tokens depend on those before."""
    assert value(target, drafter, "speculative", path=path, nodes=8 * (drafter == "drawn")) > ALPHA


@pytest.mark.parametrize("rule", ["block", "match", "coupled"])
def test_candidate_selectors(rule: str, target: CausalModel) -> None:
    assert value(target, "chain", rule, path="selector") > ALPHA


def test_candidate_selectors_under_truncation(target: CausalModel) -> None:
    assert value(target, "chain", "speculative", path="selector", temperature=1.3, top_k=4, top_p=0.9) > ALPHA


@pytest.mark.parametrize("path", PATHS)
def test_a_walk_with_probabilities_that_it_was_not_drawn_from(path: str, target: CausalModel) -> None:
    assert value(target, "ignores", "speculative", path=path) < ALPHA
