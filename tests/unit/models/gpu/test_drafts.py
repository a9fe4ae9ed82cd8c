"""Chains and trees drafted on the device: tokens, nodes and distributions are those of single passes, and so are outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.modeling_layers import MtpModel

import foresay
from foresay.decoding import sampling_rows
from foresay.decoding.proposal import Proposal
from foresay.decoding.rows import Rows
from foresay.drafters import model
from foresay.drafters.draft_chain import DraftChain
from foresay.drafters.hidden_states import HeadDrafter
from foresay.drafters.model_tree import ModelTreeDrafter
from foresay.drafters.tree import Grower
from foresay.lengths.constant import ConstantLength
from foresay.models.drafts import mtp
from foresay.models.drafts.mtp import MtpHead
from foresay.models.gpu import chains, flat, layers, trees
from foresay.models.huggingface import linears
from foresay.models.huggingface.causal import CausalModel
from helpers.drafting_on_pages import BLOCKS, PROMPTS, SAMPLED, VOCAB, Recorded, drafter_of, drafts, made, on_pages
from helpers.families import make, whole_product
from helpers.paged import few_programs
from helpers.support import run

GREEDY: list[dict[str, Any]] = [{}] * 3
Settings = list[dict[str, Any]]


def drafter_on(kind: str, pages: bool, nodes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, CausalModel]:
    """A drafter and its target. nodes: of trees, whose target has weights that make them deep; 0 for chains."""
    if "layer" in kind:
        drafter, target = layer_on(pages, kind != "layer", monkeypatch)
    else:
        target = made(monkeypatch, pages, spread=1.0 if nodes else 0.02)
        drafter = drafter_of("head" if nodes and kind == "model" else kind, target, monkeypatch, pages)
    if nodes and kind == "model":
        return ModelTreeDrafter(made(monkeypatch, pages, 1, spread=1.0), VOCAB, branches=3, width=2), target
    if nodes:
        drafter.nodes, drafter.samples = nodes, False
    return drafter, target


def layer_on(pages: bool, is_dense: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[HeadDrafter, CausalModel]:
    """A multi-token-prediction layer, a mixture of experts unless it is dense; without pages by transformers' own code."""
    few_programs(monkeypatch)
    on_pages(monkeypatch, pages)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "max_position_embeddings": 192}
    sizes |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 9 * is_dense}
    target = CausalModel(make("glm4_moe", 1, num_nextn_predict_layers=1, **sizes))
    torch.manual_seed(5)
    found = MtpModel(target.model, 1).eval()
    for weight in found.layers.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.3)
    if pages:
        monkeypatch.setattr(linears, "product_of", whole_product)
        target.use_fused()
    head = MtpHead(target, name="tiny", layers=found)
    target.fused = None  # its own passes are tested elsewhere
    assert (head.paged is not None) == pages
    return HeadDrafter(head, VOCAB), target


def same(found: Proposal, expected: Proposal) -> bool:
    """True if tokens and their parents are equal, and drawn from distributions that are close."""
    if list(found.num_tokens) != list(expected.num_tokens):
        return False
    for i, n in enumerate(found.num_tokens):
        above = [torch.arange(-1, n - 1) if p.parents is None else p.parents[i, :n] for p in (found, expected)]
        index = [
            torch.full((n,), -1) if p.distribution_index is None else p.distribution_index[i, :n]
            for p in (found, expected)
        ]
        drawn = [one >= 0 for one in index]
        if not torch.equal(found.token_ids[i, :n], expected.token_ids[i, :n]) or not torch.equal(*above):
            return False
        if not torch.equal(*drawn):
            return False
        if bool(drawn[0].any()) and found.distributions is not None and expected.distributions is not None:
            one, other = found.distributions[index[0][drawn[0]]], expected.distributions[index[1][drawn[1]]]
            if not torch.allclose(one, other, rtol=1e-3, atol=1e-5):
                return False
    return True


def compare(
    kind: str,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int = 0,
    new: int = 4,
    enough: int | None = None,
) -> tuple[list[Proposal], Any, CausalModel]:
    """Assert that drafts on pages are those of single passes and of the host; return them, the drafter and its target."""
    if nodes:
        new, enough = 11, enough or 2
        monkeypatch.setattr(Recorded, "sizes", (4, 9, 0, 4) if nodes == 9 else (4, 3, 4, 0))
        monkeypatch.setattr(model, "MAX_DRAFT_TOKENS", 3)  # levels, which end by themselves on the host only
    expected = drafts(*drafter_on(kind, False, nodes, monkeypatch), settings, new, enough)
    drafter, target = drafter_on(kind, True, nodes, monkeypatch)
    assert drafter.context.draws_chains
    with monkeypatch.context() as patch:
        patch.setattr(DraftChain, "add", None)
        if kind not in BLOCKS:  # whose trees grow from the scores of one pass
            patch.setattr(Grower, "grow", None)
        found = drafts(
            drafter, target, settings, new, enough, lambda i, one: i < len(expected[1]) and same(one, expected[1][i])
        )
    assert found[0] == expected[0] and len(found[1]) == len(expected[1])
    return found[1], drafter, target


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, SAMPLED) for kind in ("trimmed and normed", "model", "parallel head", *BLOCKS)),
        ("head", GREEDY),
        ("layer", SAMPLED),
    ],
    ids=["trimmed and normed", "model", "parallel head", *BLOCKS, "greedy", "layer"],
)  # one of the rows of SAMPLED is greedy
@torch.inference_mode()
def test_chains_are_those_of_single_passes(kind: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured once for a number of rows. A model's scores are too many for one launch."""
    monkeypatch.setattr(sampling_rows, "MOST", 0 if kind == "model" else sampling_rows.MOST)
    found, drafter, target = compare(kind, settings, monkeypatch, enough=None if kind == "model" else 2)
    assert max(max(one.num_tokens) for one in found) == 3
    if kind == "head":
        captures = drafter.context.model.inner.paged.captures
        drafts(drafter, target, GREEDY[:2], 2)
        assert drafter.context.model.inner.paged.captures == captures


@pytest.mark.parametrize(
    ("kind", "settings", "nodes"),
    [
        ("trimmed and normed", SAMPLED[:2], 9),
        ("block of DSpark", GREEDY[:2], 9),
        ("model", GREEDY[:2], 9),
        ("dense layer", GREEDY[:2], 4),
    ],
    ids=["head", "block", "model", "layer"],
)
@torch.inference_mode()
def test_nodes_are_those_of_the_host(
    kind: str, settings: Settings, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are captured once for a shape."""
    found, drafter, target = compare(kind, settings, monkeypatch, nodes)
    wide = [one for one in found if max(one.num_tokens) == nodes]
    assert wide and any(int(one.depths().max()) > 1 for one in wide)
    if kind == "trimmed and normed":
        captures = drafter.context.model.inner.paged.captures
        drafts(drafter, target, settings, 11, 2)
        assert drafter.context.model.inner.paged.captures == captures


def _standing_positions(patch: pytest.MonkeyPatch) -> None:
    begin = chains._Rows.begin

    def begun(self: Any, *given: Any) -> None:
        begin(self, *given)
        self.buffers.fields[chains._POSITIONS] += 50

    patch.setattr(chains._Rows, "begin", begun)


def _buffers(patch: pytest.MonkeyPatch, change: Any) -> None:
    init = flat.Buffers.__init__
    patch.setattr(flat.Buffers, "__init__", lambda self, *given, **named: change(self, init(self, *given, **named)))


def _later_positions_unseen(patch: pytest.MonkeyPatch) -> None:
    _buffers(patch, lambda self, _: setattr(self, "whole", self.visible))


def _convolutions_of_another_row(patch: pytest.MonkeyPatch) -> None:
    _buffers(patch, lambda self, _: setattr(self, "indices", torch.full_like(self.indices, 9)))


def _expanded(patch: pytest.MonkeyPatch, change: Callable[[Any, int], object]) -> None:
    """Change a tree's state after each level that gets another one."""
    known = trees.DecoderTrees._expand

    def expand(self: Any, scores: torch.Tensor, shape: Any, state: Any, level: int) -> None:
        known(self, scores, shape, state, level)
        if level < len(state.passes):
            change(state, level)

    patch.setattr(trees.DecoderTrees, "_expand", expand)


def _a_level_at_the_position_before(patch: pytest.MonkeyPatch) -> None:
    _expanded(patch, lambda state, level: state.passes[level].fields[1].sub_(min(level, 1)))


def _nodes_that_do_not_see_their_parents(patch: pytest.MonkeyPatch) -> None:
    _expanded(patch, lambda state, level: state.passes[level].visible.seen.fill_(1))


def _features_of_another_path(patch: pytest.MonkeyPatch) -> None:
    _expanded(patch, lambda state, level: state.sources[level].copy_(state.sources[level].flip(0)))


def _paths_of_their_last_node(patch: pytest.MonkeyPatch) -> None:
    _expanded(patch, lambda state, level: state.expanded.fill_(1))


def _half_positions(patch: pytest.MonkeyPatch) -> None:
    known = layers.place
    patch.setattr(layers, "place", lambda *given, **how: known(*given[:4], given[4] // 2, *given[5:], **how))


def _norms_of_nothing(patch: pytest.MonkeyPatch) -> None:
    norm_of = mtp.norm_of
    patch.setattr(mtp, "norm_of", lambda module: norm_of(torch.nn.RMSNorm(32, 1e-5)))


@pytest.mark.parametrize(
    ("breaks", "kind", "nodes"),
    [
        (_standing_positions, "head", 0),
        (_later_positions_unseen, "DFlash2", 0),
        (_convolutions_of_another_row, "DFlash2", 0),
        (_a_level_at_the_position_before, "model", 9),
        (_nodes_that_do_not_see_their_parents, "model", 9),
        (_features_of_another_path, "head", 9),
        (_paths_of_their_last_node, "model", 9),
        (_half_positions, "dense layer", 0),
        (_norms_of_nothing, "dense layer", 0),
    ],
)
@torch.inference_mode()
def test_a_broken_draft_is_found(breaks: Any, kind: str, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls."""
    breaks(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        compare(kind, GREEDY[:2] if nodes else SAMPLED, monkeypatch, nodes, enough=1)


class Longer(ConstantLength):
    """A policy of another package, whose drafts may be longer than those of ours."""

    def budget(self, rows: Rows) -> list[int]:
        return [70 for _ in rows]


@torch.inference_mode()
def test_longer_chains_or_more_rows_than_are_captured_are_drawn_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drafts(*drafter_on("head", False, 0, monkeypatch), GREEDY[:2], 3)
    drafter, target = drafter_on("head", True, 0, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(flat, "SIZES", (1,))
        found = drafts(drafter, target, GREEDY[:2], 3)
    assert found[0] == expected[0] and all(map(same, found[1], expected[1]))
    drawn = []
    monkeypatch.setattr(DraftChain, "add", lambda self, *_: drawn.append(self.room))
    params = foresay.SamplingParams(max_new_tokens=80, ignore_eos=True)
    drafter, target = drafter_on("head", True, 0, monkeypatch)
    run(target, PROMPTS[2:], [params], drafter=drafter, policy=Longer(3), enough=1)
    assert drawn[0] == [70]


@torch.inference_mode()
def test_other_trees_are_grown_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more rows than are captured, with more nodes than a mask has, and at the end of the context."""
    monkeypatch.setattr(Recorded, "sizes", (4, 9, 0, 4))
    monkeypatch.setattr(model, "MAX_DRAFT_TOKENS", 3)
    expected = drafts(*drafter_on("head", False, 9, monkeypatch), GREEDY[:2], 11, 1)[0]
    grown, known = [], Grower.grow
    monkeypatch.setattr(Grower, "grow", lambda self, *given: grown.append(known(self, *given)))
    for module, name, value in ((flat, "SIZES", (1,)), (trees, "NODES", 3), (trees, "PAGE", 1)):
        drafter, target = drafter_on("head", True, 9, monkeypatch)
        grown.clear()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert drafts(drafter, target, GREEDY[:2], 11, 1)[0] == expected and grown, name


def test_passes_of_trees_have_the_masks_of_their_paths() -> None:
    """Against a loop over the nodes."""
    torch.manual_seed(0)
    for _ in range(50):
        width, known = int(torch.randint(1, 12, ())), int(torch.randint(1, 4, ()))
        above = [*range(-1, known - 1), *(int(torch.randint(known - 1, known + i, ())) for i in range(width))]
        found = flat._Trees.of(torch.tensor([[*above, -1]]), [known + width])
        trunk = min([known + width, *(parent + 1 for i, parent in enumerate(above) if parent != i - 1)])
        for node, parent in enumerate(above):
            path = {node}
            while parent >= 0:
                path.add(parent)
                parent = above[parent]
            assert int(found.positions[node]) == len(path) - 1 - node
            expected = sum(1 << (one - trunk) for one in path if one >= trunk) if node >= trunk else 1
            assert int(found.seen[node]) == expected
            assert int(found.firsts[node]) == (trunk - node if node >= trunk else 0)
