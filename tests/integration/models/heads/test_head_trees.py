"""Trees of a head in one call of the kernels: the nodes of a plain search, the rule that ends them, and who drafts them so."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.decoding.continuation import Branching, Drawn
from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, HeadDrafter, Hybrid, SuffixDrafter
from foresay.errors import ConfigError
from foresay.lengths import ConfidenceLength, ConstantLength
from foresay.models.cpu.chain import Limits, NativeChain
from foresay.models.heads.config import NEXT
from foresay.models.heads.model import HeadModel
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import quantizer, unquantized
from helpers.broken_kernels import broken_kernels
from helpers.families import VOCAB, make
from helpers.heads import random_head
from helpers.support import run

PROMPTS = [[5, 6, 1, 2, 3, 4, 5], [2], [1, 2, 1]]
Path_ = tuple[int, ...]


def target(dtype: torch.dtype, vocab: int = VOCAB) -> CausalModel:
    model = CausalModel(make("llama", 3, vocab_size=vocab, tie_word_embeddings=False).to(dtype))
    model.use_fused()
    return model


def pairs(head: HeadModel, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(length)
    tokens = torch.randint(2, VOCAB, (length,), generator=numbers)
    return tokens, torch.randn(length, head.width, generator=numbers).to(head.dtype)


def probabilities(head: HeadModel, length: int, path: Path_) -> torch.Tensor:
    """The head's distribution after the pairs and a path, by single passes over a cache of its own."""
    tokens, features = pairs(head, length)
    cache = head.new_cache()
    cache.add_rows(1)
    out = head.forward(ModelInput(tokens[None], [length], logits=Logits.LAST, features=features[None]), cache)
    for token in path:
        before = out.hidden[NEXT][:, -1:]
        out = head.forward(ModelInput(torch.tensor([[token]]), [1], logits=Logits.LAST, features=before), cache)
    return out.scores()[0, -1].float().softmax(-1)


def searched(head: HeadModel, length: int, limits: Limits, rule: Branching) -> tuple[dict[Path_, float], int]:
    """The kept nodes, as paths with their probabilities, and the number of passes: the rule read once more."""
    found: dict[Path_, float] = {}
    level: list[Path_] = [()]
    passes = 0
    while True:
        newest: list[Path_] = []
        for path in level:
            top = probabilities(head, length, path).topk(limits.branches)
            for probability, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                newest.append((*path, token))
                found[newest[-1]] = found.get(path, 1.0) * probability
        passes += 1
        best = sorted(found.values(), reverse=True)
        last = best[limits.most - 1] if len(best) >= limits.most else -1.0
        open_ = sorted((path for path in newest if path[-1] not in limits.ends), key=lambda path: -found[path])
        level = [path for path in open_[: limits.width] if rule.scale * found[path] > rule.each and found[path] > last]
        gain = sum(rule.scale * found[path] - rule.each for path in level)
        if passes == limits.levels or not level or gain <= rule.threshold:
            break
    kept = sorted(found, key=lambda path: -found[path])[: limits.most]
    return {path: found[path] for i, path in enumerate(kept) if i == 0 or rule.scale * found[path] > rule.least}, passes


def grown(
    head: HeadModel, length: int, known: int, limits: Limits, rule: Branching
) -> tuple[dict[Path_, float], Drawn]:
    """The same by the kernels. known: pairs that are not in the cache before."""
    tokens, features = pairs(head, length)
    cache = head.new_cache()
    cache.add_rows(1)
    first = length - known
    model_input = ModelInput(tokens[None, :first], [first], logits=Logits.NONE, features=features[None, :first])
    head.forward(model_input, cache)
    drawn = head.draft_at_once(tokens[first:], features[first:], cache, limits, rule)
    assert drawn is not None and drawn.parents is not None and cache.lengths == [length]
    paths: list[Path_] = []
    for token, parent in zip(drawn.token_ids, drawn.parents, strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, drawn.confidences, strict=True)), drawn


KINDS: dict[str, tuple[torch.dtype, Any, dict[str, Any]]] = {
    "float32": (torch.float32, unquantized, {}),
    "bf16": (torch.bfloat16, unquantized, {"ids": range(1, 80, 3)}),
    "8 bits": (torch.bfloat16, quantizer(8), {"ids": range(1, 80, 3)}),
    "normalized": (torch.float32, unquantized, {"before": True}),
}


@pytest.mark.parametrize(("length", "known"), [(2, 1), (40, 1), (40, 4), (12, 9)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_has_the_nodes_of_a_search_by_single_passes(kind: str, length: int, known: int) -> None:
    dtype, quantized, more = KINDS[kind]
    model = target(dtype)
    limits = Limits(13, (), branches=3, width=3, levels=5)
    for seed in range(20):
        head = HeadModel(random_head(model, gain=1.2, seed=seed, **more), model, make=quantized)
        wanted, passes = searched(head, length, limits, Branching())
        if len({path[0] for path in wanted}) > 1 and max(map(len, wanted)) > 2:
            break
    else:
        pytest.fail("no tree, but chains or single levels")
    found, drawn = grown(head, length, known, limits, Branching())
    assert drawn.passes == passes and found == pytest.approx(wanted, rel=1e-4)


def test_a_tree_grows_by_its_rule() -> None:
    model = target(torch.float32)
    head = HeadModel(random_head(model, gain=1.5), model)
    shapes = set()
    for scale, threshold, each, least in itertools.product((0.7, 1.3), (0.0, 0.3, 0.8), (0.0, 0.1), (0.0, 0.05, 0.5)):
        rule, limits = Branching(scale, threshold, each, least), Limits(16, (), branches=4, width=2, levels=6)
        wanted, passes = searched(head, 20, limits, rule)
        found, drawn = grown(head, 20, 2, limits, rule)
        assert found == pytest.approx(wanted, rel=1e-4) and drawn.passes == passes
        shapes.add((len(found), passes))
    assert len(shapes) > 8


def test_a_tree_ends_at_its_limits_and_at_end_tokens() -> None:
    model = target(torch.float32)
    head = HeadModel(random_head(model, gain=1.5), model)
    for most, branches, width, levels in ((1, 1, 1, 1), (5, 4, 4, 1), (4, 2, 1, 4), (30, 3, 2, 3), (6, 64, 2, 2)):
        limits = Limits(most, (), branches=branches, width=width, levels=levels)
        found, drawn = grown(head, 9, 1, limits, Branching())
        assert (found, drawn.passes) == (
            pytest.approx(searched(head, 9, limits, Branching())[0], rel=1e-4),
            drawn.passes,
        )
        assert len(found) <= most and max(map(len, found)) <= levels and drawn.passes <= levels
    limits = Limits(12, (), branches=3, width=3, levels=4)
    inner = [path[0] for path in grown(head, 9, 1, limits, Branching())[0] if len(path) > 1]
    ended = Limits(12, (inner[0],), branches=3, width=3, levels=4)
    found = grown(head, 9, 1, ended, Branching())[0]
    assert found == pytest.approx(searched(head, 9, ended, Branching())[0], rel=1e-4)
    assert (inner[0],) in found and not any(path[0] == inner[0] and len(path) > 1 for path in found)


FAULTS = {
    "a node that sees its siblings": (
        "for (int64_t at = fed_[i]; at >= 0; at = nodes_[at].parent) seen_[i * columns + nodes_[at].column] = 1;",
        "for (int64_t at = fed_[i]; at >= 0; at = nodes_[at].parent) seen_[i * columns + nodes_[at].column] = 1;\n"
        "            for (int64_t c = 0; c < num_fed_; c++) seen_[i * columns + c] = 1;",
    ),
    "outputs of another parent": ("before_.data() + node.row * hidden_", "before_.data()"),
    "a position too far": ("position = position_ + level;", "position = position_ + level + 1;"),
    "children without their path": ("double probability = path * likeliest", "double probability = likeliest"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_trees_are_found(fault: str, tmp_path: Path) -> None:
    """Control: the search differs from kernels with a fault."""
    with broken_kernels(tmp_path, "tree.h", FAULTS[fault]):
        model = target(torch.float32)
        head = HeadModel(random_head(model, gain=1.5), model)
        limits = Limits(13, (), branches=3, width=3, levels=5)
        try:
            found = grown(head, 40, 2, limits, Branching())[0]
        except ValueError:  # the kernels' own checks
            return
        assert found != pytest.approx(searched(head, 40, limits, Branching())[0], rel=1e-4)


def test_scores_that_are_no_numbers_give_no_nodes() -> None:
    model = target(torch.float32)
    made = random_head(model)
    made.module.norm.weight.data[:] = float("nan")
    head = HeadModel(made, model)
    tokens, features = pairs(head, 3)
    cache = head.new_cache()
    cache.add_rows(1)
    drawn = head.draft_at_once(tokens, features, cache, Limits(8, (), 3, 3, 3), Branching())
    assert drawn is not None and not drawn.token_ids


@pytest.mark.parametrize("length", [ConstantLength(9), ConfidenceLength(0.0, high=8)])
@pytest.mark.parametrize("hybrid", [False, True])
def test_who_drafts_trees(length: Any, hybrid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single rows whose output does not depend on the draft; and the output is plain decoding's."""
    model = target(torch.float32, vocab=7)
    head = HeadModel(random_head(model, seed=5, gain=1.0), model)
    trees = []
    original = NativeChain._tree
    monkeypatch.setattr(NativeChain, "_tree", lambda self, *args: trees.append(1) or original(self, *args))

    def decoded(batch: int, rule: str = "speculative", nodes: int = 9, **more: Any) -> list[tuple[int, int]]:
        trees.clear()
        params = SamplingParams(max_new_tokens=60, ignore_eos=True, **more)
        made = HeadDrafter(head, 7, sample=False, nodes=nodes)
        drafter = Hybrid(SuffixDrafter(), made, min_match=9, k=9) if hybrid else made
        out, steps, engine = run(
            model, PROMPTS, params, drafter=drafter, policy=length, max_batch_size=batch, rule=rule
        )
        assert engine.draft_failures == 0
        if params.greedy or rule == "match":
            assert out == run(model, PROMPTS, params, gamma=0, rule=rule, max_batch_size=batch)[0]
        return [(step.num_drafted, step.num_accepted) for step in steps]

    drafted = decoded(1)
    assert bool(trees) == (not isinstance(length, ConfidenceLength))
    if not isinstance(length, ConstantLength):
        assert max(n for n, _ in drafted) == 3, "a chain of a quarter"
        return
    assert any(0 < accepted < n for n, accepted in drafted) and max(accepted for _, accepted in drafted) > 1
    decoded(1, rule="match", temperature=1.0, seed=3)
    assert trees
    for refused in (
        {"rule": "block"},
        {"temperature": 1.0, "seed": 3},
        {"repetition_penalty": 1.2},
        {"nodes": 0},
        {"nodes": 1},
    ):
        steps = decoded(1, **refused)  # type: ignore[arg-type]
        assert not trees, refused
        assert max(n for n, _ in steps) <= (9 if refused == {"nodes": 0} else 3), "chains of a quarter"
    decoded(3)
    assert not trees


def test_a_head_whose_rotation_depends_on_the_length_drafts_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target(torch.float32, vocab=7)
    head = HeadModel(random_head(model, seed=5, gain=1.0), model)
    assert head.drafts_at_once
    monkeypatch.setattr(head._rotary_table, "is_static", False)
    assert not head.drafts_at_once
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    _, steps, engine = run(model, PROMPTS, params, drafter=HeadDrafter(head, 7, nodes=9), gamma=9, max_batch_size=1)
    assert engine.draft_failures == 0 and max(step.num_drafted for step in steps) == 3


def test_a_cascade_keeps_its_lengths() -> None:
    model = target(torch.float32, vocab=7)
    head = HeadModel(random_head(model, seed=5, gain=1.0), model)
    cascade = Cascade([HeadDrafter(head, 7, nodes=9)], [[8]])
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    out, steps, engine = run(model, PROMPTS, params, drafter=cascade, gamma=8, max_batch_size=1)
    assert engine.draft_failures == 0 and max(step.num_drafted for step in steps) == 8
    assert out == run(model, PROMPTS, params, gamma=0)[0]


def test_numbers_of_nodes_are_checked() -> None:
    model = target(torch.float32)
    head = HeadModel(random_head(model), model)
    for nodes in (-1, 1 << 20, 1.5):
        with pytest.raises(ConfigError, match="nodes"):
            HeadDrafter(head, VOCAB, nodes=nodes)  # type: ignore[arg-type]
