"""Distribution tests of drafts that read the target: blocks, MTP layers, heads, and Gemma 4's assistants; with controls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import Drafter
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import AssistantDrafter, BlockDrafter, HeadDrafter, Hybrid, SuffixDrafter
from foresay.models.drafts.assistant import Assistant
from foresay.models.drafts.block import BlockModel
from foresay.models.drafts.block_config import DOMINO, SELECTOR, PathShape, Sight
from foresay.models.drafts.head import HeadModel
from foresay.models.drafts.mtp import MtpHead
from foresay.models.drafts.parallel_config import ParallelHeadConfig
from foresay.models.drafts.parallel_head import ParallelHeadModel
from foresay.models.huggingface.causal import CausalModel
from helpers.assistants import assistant_model, read
from helpers.blocks import random_block
from helpers.distribution_cells import ALPHA
from helpers.families import make
from helpers.heads import random_head
from helpers.mtp import save_with_mtp
from helpers.reference import enumerated, joint
from helpers.sequential import value_of
from helpers.support import Loop, changed

SIZE, LENGTH, SAMPLES, PROMPT = 5, 4, 1200, [1, 2, 1]
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
    save_with_mtp(folder, "glm4_moe", vocab_size=SIZE, num_nextn_predict_layers=2, num_hidden_layers=2, **specials)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():  # leaves each next token likely enough
        model.lm_head.weight *= 2.5 / model.lm_head.weight.norm(dim=1).mean()
    found = CausalModel(model)
    assert found.use_fused() is None
    return found


def _ignoring(drafter: BlockDrafter) -> Any:
    """Draws given the tokens before, and records the distributions of the layers alone."""

    def base(proposal: Proposal) -> dict[str, Any]:
        scores = drafter.context._scores
        assert scores is not None
        probs = torch.softmax(scores[:, : proposal.width].float() / 2.0, -1)  # at the rows' temperature
        return {"distributions": probs.transpose(0, 1).flatten(0, 1).contiguous()}

    return changed(drafter, base)


def _first_for_all(drafter: Drafter) -> Any:
    """Draws as the drafter does, and records the first distribution of each row for all of its tokens."""

    def first(proposal: Proposal) -> dict[str, Any]:
        index = proposal.distribution_index
        assert index is not None
        return {"distribution_index": torch.where(index >= 0, index[:, :1], index)}

    return changed(drafter, first)


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
    "first layer": lambda block: _first_for_all(HeadDrafter(MtpHead(block.target, name="tiny"), SIZE)),
    "roots": lambda block: _first_for_all(BlockDrafter(block, SIZE, nodes=8)),
    "ignores": lambda block: _ignoring(BlockDrafter(block, SIZE)),
    "parallel": lambda block: BlockDrafter(_parallel(block.target), SIZE),
    "parallel tree": lambda block: BlockDrafter(_parallel(block.target), SIZE, nodes=8),
    "parallel first": lambda block: _first_for_all(BlockDrafter(_parallel(block.target), SIZE)),
}


def _head(target: CausalModel) -> HeadModel:
    return HeadModel(random_head(target, gain=1.5), target)


def _parallel(target: CausalModel) -> ParallelHeadModel:
    parts = {"num_hidden_layers": 2, "mask_token_id": 3, "block_size": 4}
    return ParallelHeadModel(random_head(target, gain=2.0, parts=parts, kind=ParallelHeadConfig), target)


PATHS = {
    "selector": PathShape(SELECTOR, 6, candidates=3),
    "domino": PathShape(DOMINO, 6, state=8),
    "rnn": PathShape("rnn", 6),
    "gated": PathShape("gated", 6),
}


def compared(
    target: CausalModel,
    drafter: Drafter,
    rule: str,
    *,
    nodes: int = 0,
    length: int = LENGTH,
    gamma: int = 3,
    samples: int = SAMPLES,
    **changes: Any,
) -> float:
    """The p-value. nodes: of trees, whose budgets reach past the tokens that are compared, so that they have levels.

    changes: of the parameters.
    """
    params = SamplingParams.of(PARAMS, max_new_tokens=length + nodes, **changes)
    loop = Loop(target, drafter=drafter, rule=rule, gamma=nodes or gamma, max_batch_size=samples // 12)
    probs = joint(enumerated(target), params, PROMPT, length)
    found = value_of(loop, PROMPT, params, probs, samples, enough=length)
    requests = len({step.request_id for step in loop.steps})
    assert sum(step.num_accepted for step in loop.steps) > requests / 4
    assert sum(step.num_accepted < step.num_drafted for step in loop.steps) > requests / 8
    assert not nodes or max(step.num_accepted for step in loop.steps) > 1, "trees of one level"
    return found


def value(target: CausalModel, drafter: str, rule: str, *, path: str = "", **changes: Any) -> float:
    """path: one of PATHS. changes: of `compared`."""
    made: dict[str, Any] = {"path": PATHS[path], "from_anchor": path in ("rnn", "gated")} if path else {}
    if path == "selector":
        made |= {"taps": (2, 8), "sights": [Sight(window=3)] * 2}
    made |= {name: changes.pop(name) for name in ("from_anchor",) if name in changes}
    block = BlockModel(random_block(target, gain=4.0 if path else 2.0, **made), target)
    return compared(target, DRAFTERS[drafter](block), rule, **changes)


RULES = ("speculative", "block", "match", "coupled")
TREES = [(drafter, rule) for drafter in DRAFTERS if "drawn" in drafter for rule in RULES if rule != "block"]
BY_DEFAULT = [("drawn", "speculative"), ("drawn", "match"), ("drawn by a head", "speculative")]
BY_DEFAULT += [("drawn by a head", "coupled"), ("drawn by a head in a hybrid", "speculative")]
CELLS: list[tuple[str, str, dict[str, Any]]] = [
    *((drafter, rule, {}) for drafter in ("chain", "confident", "likeliest") for rule in RULES),
    ("chain", "speculative", {"from_anchor": False}),  # without a Markov head
    *(("layers", rule, {}) for rule in ("speculative", "coupled")),
    *(("parallel", rule, {}) for rule in RULES),
    ("parallel tree", "speculative", {"nodes": 8}),
    *(("best first", rule, {"nodes": 8}) for rule in ("speculative", "match", "coupled")),
    *((*one, {"nodes": 8}) for one in BY_DEFAULT),
    # tokens that depend on those before, in chains and trees, and by candidate selectors with every rule and truncation
    *(("chain", "speculative", {"path": path}) for path in PATHS),
    ("drawn", "speculative", {"path": "selector", "nodes": 8}),
    *(("chain", rule, {"path": "selector"}) for rule in ("block", "match", "coupled")),
    ("chain", "speculative", {"path": "selector", "temperature": 1.3, "top_k": 4, "top_p": 0.9}),
]
LONG: list[tuple[str, str, dict[str, Any]]] = [
    *((*one, {"nodes": 8}) for one in TREES if one not in BY_DEFAULT),
    *(("drawn", "speculative", {"path": path, "nodes": 8}) for path in PATHS if path != "selector"),
]
CONTROLS: list[tuple[str, str, dict[str, Any]]] = [
    ("ignores", "speculative", {}),
    ("ignores", "block", {}),
    *(("ignores", "speculative", {"path": path}) for path in PATHS),
    ("roots", "speculative", {"nodes": 8}),
    ("first layer", "speculative", {}),
    ("parallel first", "speculative", {}),
]
"""The conditioning ignored, and the distribution of the roots, of the first layer or of the first token for all tokens."""


@pytest.mark.parametrize(
    ("drafter", "rule", "changes"), [*CELLS, *CONTROLS, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)]
)
def test_drafts_leave_the_distribution(
    drafter: str, rule: str, changes: dict[str, Any], target: CausalModel, layered: CausalModel
) -> None:
    found = value(layered if "layer" in drafter else target, drafter, rule, **changes)
    assert (found < ALPHA) if (drafter, rule, changes) in CONTROLS else (found > ALPHA)


# -- assistants, whose drafts depend on the target's keys and values ---------------------------------------------------


@pytest.fixture(scope="module")
def gemma() -> CausalModel:
    model = CausalModel(make("gemma4", 3, vocab_size=SIZE, vocab_size_per_layer_input=SIZE))
    assert model.use_fused() is None
    return model


@pytest.mark.parametrize(
    ("rule", "nodes", "assistant", "others"),
    [
        ("speculative", 0, {"gain": 16.0}, False),
        ("block", 0, {"ordered": True}, False),
        ("speculative", 6, {}, False),
        ("speculative", 0, {"gain": 16.0}, True),
    ],
)
def test_assistants_leave_the_distribution(
    rule: str, nodes: int, assistant: dict[str, Any], others: bool, gemma: CausalModel
) -> None:
    """Control: the probabilities that are recorded are those of other tokens. A sharp draft shows it by few outputs."""
    drafts = Assistant(read(assistant_model(vocab_size=SIZE, **{"gain": 2.0, **assistant})), gemma)
    drafter: Any = AssistantDrafter(drafts, SIZE, nodes=nodes)
    if others:
        drafter = changed(drafter, lambda one: {"distributions": one.distributions.roll(1, -1).contiguous()})
    found = compared(gemma, drafter, rule, nodes=nodes, length=3, gamma=2, samples=400, temperature=1.5)
    assert (found < ALPHA) == others
