"""Trees over real attention: greedy equality in every family that takes the mask, and what the cache holds afterwards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from foresay.decoding.proposal import ancestors_of, depths_of
from foresay.decoding.protocols import ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter, ModelTreeDrafter, SuffixTreeDrafter
from foresay.errors import UnsupportedModelError
from foresay.models.cache.slot_cache import Placement
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from helpers.comparing import NEW, prompts
from helpers.families import FAMILIES, VOCAB, make, make_seq2seq
from helpers.guarantees import assert_greedy, on, outputs_of, reference_of, target_of
from helpers.support import run
from helpers.trees import RightTree

TAKES = [name for name in FAMILIES if name not in ("bloom", "falcon_alibi")]
PARENTS = torch.tensor([[-1, -1, 0, 0, 1, 2], [-1, 0, 0, -1, 3, 4]])


@pytest.mark.parametrize("family", ["gemma3", "phi3_longrope", "deepseek_v3", "opt"])
def test_greedy_output_over_trees_equals_transformers(family: str) -> None:
    [cell] = on("own code", family)
    target, wanted, params = target_of(cell), outputs_of(cell), SamplingParams(max_new_tokens=NEW)
    ours, steps, engine = run(target, prompts(), params, drafter=RightTree(wanted, VOCAB), gamma=12, join_later=3)
    assert engine.draft_failures == 0
    assert any(step.num_accepted == 0 and step.num_drafted for step in steps)
    assert any(step.num_accepted >= 3 for step in steps)
    assert any(max(step.tested, default=0) == 3 for step in steps), "the last of three siblings was reached"
    for prompt, one, theirs in zip(prompts(), ours, wanted, strict=True):
        if one != theirs:
            assert_greedy(reference_of(family), prompt, one)


@pytest.mark.parametrize("family", ["t5_gated", "bart"])
def test_greedy_output_over_trees_of_encoder_decoders(family: str) -> None:
    target = Seq2SeqModel(make_seq2seq(family))
    sources = prompts()
    starts = [list(target.prepare_prompt(source, SamplingParams()).prompt) for source in sources]
    params = SamplingParams(max_new_tokens=30)
    wanted, _, _ = run(target, starts, params, sources=sources)
    drafter = RightTree(wanted, target.vocab_size)
    ours, steps, engine = run(target, starts, params, sources=sources, drafter=drafter, gamma=12)
    assert engine.draft_failures == 0 and any(step.num_accepted >= 3 for step in steps)
    assert ours == wanted


@pytest.mark.parametrize("family", ["bloom", "falcon_alibi"])
def test_the_others_refuse_trees_by_name(family: str) -> None:
    target = CausalModel(make(family))
    with pytest.raises(UnsupportedModelError, match="RightTree proposes trees, and CausalModel does not support them"):
        run(target, [[1, 2]], SamplingParams(max_new_tokens=4), drafter=RightTree([[1]], VOCAB))
    with pytest.raises(UnsupportedModelError, match="CausalModel does not take trees"):
        ModelTreeDrafter(target, VOCAB)


def started(model: CausalModel, *texts: list[int]) -> Any:
    """A cache of rows with these texts."""
    cache, counts = model.new_cache(), list(map(len, texts))
    model.admit(Rows([Row(i, text, SamplingParams(), limit=64) for i, text in enumerate(texts)]), 0, cache)
    padded = torch.tensor([text + [0] * (max(counts) - len(text)) for text in texts])
    model.forward(ModelInput(padded, counts), cache)
    return cache


def path_of(row: int, column: int) -> list[int]:
    """Columns from a root to a node of PARENTS."""
    parent = int(PARENTS[row, column])
    return [*(path_of(row, parent) if parent >= 0 else ()), column]


NODES = torch.randint(2, VOCAB, (2, 6), generator=torch.Generator().manual_seed(1))


def each_node_is_scored_after_its_own_path(family: str) -> bool:
    model, texts = CausalModel(make(family)), [prompts()[3][:9], prompts()[4][:4]]
    scores = model.forward(ModelInput(NODES, [6, 6], parents=PARENTS), started(model, *texts)).scores()
    for i, column in itertools.product(range(2), range(6)):
        with torch.no_grad():
            alone = model.uncached(torch.tensor([[*texts[i], *NODES[i, path_of(i, column)].tolist()]]))[0, -1]
        if not torch.allclose(scores[i, column], alone, atol=2e-3):
            return False
    return True


@pytest.mark.parametrize("family", TAKES)
def test_each_node_is_scored_after_its_own_path(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: siblings see each other."""
    assert each_node_is_scored_after_its_own_path(family)
    if family == "llama":
        monkeypatch.setattr(Placement, "mask_other_paths", lambda self, seen: seen)
        assert not each_node_is_scored_after_its_own_path(family)


def test_ancestors_by_hand() -> None:
    seen = ancestors_of(torch.tensor([[-1, -1, 0, 2, 1]]))[0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [0, 1, 0, 0, 1]]
    assert depths_of(torch.tensor([[-1, -1, 0, 2, 1]])).tolist() == [[0, 0, 1, 2, 1]]


def test_padding_may_have_any_parents() -> None:
    """A proposal of several rows is checked up to each row's last node."""
    parents = torch.tensor([[-1, -100, -9]])
    assert depths_of(parents).tolist() == [[0, 0, 0]]
    assert torch.equal(ancestors_of(parents)[0], torch.eye(3, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tree_with_one_branch_has_the_bits_of_the_chain(dtype: torch.dtype) -> None:
    model, out = CausalModel(make("llama").to(dtype)), []
    for parents in (None, torch.arange(-1, 5).repeat(2, 1)):
        cache = started(model, [3, 4, 5, 6, 7], [8, 9, 10])
        out.append(model.forward(ModelInput(NODES, [6, 6], parents=parents), cache).scores())
    assert torch.equal(*out)


def test_kept_columns_are_as_if_they_alone_had_been_fed() -> None:
    model = CausalModel(make("mistral"))
    tree, chain = (started(model, [3, 4, 5], [6, 7]) for _ in range(2))
    model.forward(ModelInput(NODES, [6, 6], parents=PARENTS), tree)
    tree.keep([3, 2], [[0, 2, 5], [3, 4]])
    fed = torch.stack([NODES[0, [0, 2, 5]], NODES[1, [3, 4, 0]]])
    model.forward(ModelInput(fed, [3, 2]), chain)
    assert tree.lengths == chain.lengths == [6, 4]
    after = ModelInput(torch.tensor([[9, 10], [11, 12]]), [2, 2])
    assert torch.allclose(*(model.forward(after, cache).scores() for cache in (tree, chain)), atol=1e-5)


def test_the_tree_drafters_at_work() -> None:
    reference = reference_of("llama")
    target, draft = CausalModel(make("llama")), CausalModel(make("llama", num_hidden_layers=2))
    draft.model.load_state_dict(reference.state_dict(), strict=False)
    repeated = [prompt[:12] * 4 for prompt in prompts()[1:4]]
    params, tokens_per_pass = SamplingParams(max_new_tokens=40), {}
    for name, drafter in {
        "tree": ModelTreeDrafter(draft, VOCAB, branches=3),
        "chain": ModelDrafter(draft, VOCAB),
        "suffix": SuffixTreeDrafter(branches=3),
    }.items():
        ours, steps, engine = run(target, repeated, params, drafter=drafter, gamma=3 if name == "chain" else 9)
        assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
        for prompt, one in zip(repeated, ours, strict=True):
            assert_greedy(reference, prompt, one)
        tokens_per_pass[name] = sum(len(step.token_ids) for step in steps) / len(steps)
    assert tokens_per_pass["tree"] > tokens_per_pass["chain"], "three tries find more than one"
