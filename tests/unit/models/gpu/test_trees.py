"""Trees grown on the device: nodes are those of the host, level by level, and outputs those of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import foresay
from foresay.decoding.proposal import Proposal
from foresay.drafters import model
from foresay.drafters.model_tree import ModelTreeDrafter
from foresay.drafters.tree import Grower
from foresay.models.gpu import attention, flat, trees
from foresay.models.huggingface.causal import CausalModel
from helpers.drafting_on_pages import (
    NEW,
    PROMPTS,
    SAMPLED,
    VOCAB,
    Recorded,
    drafter_of,
    drafts,
    made,
)
from helpers.refusals import refused
from helpers.support import run

GREEDY: list[dict[str, Any]] = [{}] * 3


@pytest.fixture(autouse=True)
def larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "sizes", (4, 9, 0, 4))
    monkeypatch.setattr(model, "MAX_DRAFT_TOKENS", 3)  # levels, which end by themselves on the host only


def sharp(monkeypatch: pytest.MonkeyPatch, pages: bool, seed: int = 0) -> CausalModel:
    """A target whose weights make deep trees."""
    return made(monkeypatch, pages, seed, spread=1.0)


def tree_drafter(kind: str, target: Any, monkeypatch: pytest.MonkeyPatch, pages: bool) -> Any:
    if kind == "model":
        drafter_of("head", target, monkeypatch, pages)
        return ModelTreeDrafter(sharp(monkeypatch, pages, 1), VOCAB, branches=3, width=2)
    drafter = drafter_of(kind, target, monkeypatch, pages)
    drafter.nodes, drafter.samples = 9, False
    return drafter


def shapes(proposals: list[Proposal]) -> list[list[list[tuple[int, int]]]]:
    out = []
    for one in proposals:
        above = torch.arange(-1, one.width - 1).repeat(len(one.token_ids), 1) if one.parents is None else one.parents
        each = zip(above.tolist(), one.token_ids.tolist(), one.num_tokens, strict=True)
        out.append([list(zip(parents[:n], ids[:n], strict=True)) for parents, ids, n in each])
    return out


def compare(kind: str, settings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, enough: int) -> list[Proposal]:
    """Assert that nodes are those of the host; return the proposals."""
    reference = sharp(monkeypatch, False)
    expected = drafts(tree_drafter(kind, reference, monkeypatch, False), reference, settings, 11, enough)
    target = sharp(monkeypatch, True)
    drafter = tree_drafter(kind, target, monkeypatch, True)
    monkeypatch.setattr(Grower, "grow", None)
    found = drafts(drafter, target, settings, 11, enough)
    assert found[0] == expected[0] and shapes(found[1]) == shapes(expected[1])
    return found[1]


@pytest.mark.parametrize("kind", ["trimmed", "normed", "model"])
@torch.inference_mode()
def test_nodes_are_those_of_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(kind, SAMPLED if kind == "trimmed" else GREEDY, monkeypatch, 2)
    wide = [one for one in found if max(one.num_tokens) == 9]
    assert wide and any(int(one.depths().max()) > 1 for one in wide)


@pytest.mark.parametrize(
    "broken",
    {
        "a level at the position before": lambda level, *given: (level, *given[:-1], max(0, given[-1] - 1)),
        "nodes that do not see their parents": "bits",
        "the features of another path": "above",
    }.items(),
    ids=lambda one: one[0],
)
@torch.inference_mode()
def test_a_broken_level_is_found(broken: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    known, (_, how) = trees._expanded, broken
    if isinstance(how, str):

        def expanded(*given: Any) -> Any:
            out = known(*given)
            new = torch.ones_like(out.bits) if how == "bits" else out.above.flip(-1)
            fields = {name: getattr(out, name) for name in ("token_ids", "index", "scores", "above", "bits")}
            return trees._Expanded(**{**fields, how: new})

        monkeypatch.setattr(trees, "_expanded", expanded)
    else:
        placed = trees.DecoderTrees._place
        monkeypatch.setattr(trees.DecoderTrees, "_place", lambda *given: placed(*how(*given)))
    with pytest.raises(AssertionError):
        compare("head" if how == "above" else "model", GREEDY[:2], monkeypatch, 2)


@torch.inference_mode()
def test_graphs_are_captured_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    target = sharp(monkeypatch, True)
    drafter = tree_drafter("head", target, monkeypatch, True)
    counts = []
    for _ in range(2):
        drafts(drafter, target, GREEDY[:2], 11, 1)
        counts.append(drafter.context.model.inner.paged.captures)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "reason", ["more rows than are captured", "more nodes than a mask has", "the end of the context"]
)
@torch.inference_mode()
def test_other_trees_are_grown_by_the_host(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = sharp(monkeypatch, False)
    expected = drafts(tree_drafter("head", reference, monkeypatch, False), reference, GREEDY[:2], 11, 1)[0]
    target = sharp(monkeypatch, True)
    if reason == "more rows than are captured":
        monkeypatch.setattr(flat, "SIZES", (1,))
    elif reason == "more nodes than a mask has":
        monkeypatch.setattr(trees, "NODES", 3)
    else:
        monkeypatch.setattr(trees, "PAGE", 1)
    grown = []
    known = Grower.grow
    monkeypatch.setattr(Grower, "grow", lambda self, *given: grown.append(known(self, *given)))
    found = drafts(tree_drafter("head", target, monkeypatch, True), target, GREEDY[:2], 11, 1)[0]
    assert found == expected and grown


@pytest.mark.parametrize("kind", ["head", "block of DSpark"])
@torch.inference_mode()
def test_outputs_are_those_of_plain_decoding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = sharp(monkeypatch, True)
    params = foresay.SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    plain = run(target, PROMPTS, params, gamma=0)[0]
    drafter = drafter_of(kind, target, monkeypatch, True)
    drafter.nodes = 6
    outputs, steps, engine = run(target, PROMPTS, params, drafter=drafter, gamma=6, max_batch_size=2)
    assert outputs == plain and engine.draft_failures == 0 and any(step.num_drafted > 3 for step in steps)


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
    with refused("nodes", 65):
        flat._Trees.of(torch.full((1, attention.NODES + 1), -1), [attention.NODES + 1])
