"""Trees over real attention: greedy equality in every family that takes the mask, and what the cache holds afterwards."""

from __future__ import annotations

import copy

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
from helpers.comparing import NEW, assert_same, plain, prompts, reference_of
from helpers.families import FAMILIES, SEQ2SEQ, VOCAB, make, make_seq2seq
from helpers.support import run
from helpers.trees import RightTree

TAKES = [name for name in FAMILIES if name not in ("bloom", "falcon_alibi")]
PARENTS = torch.tensor([[-1, -1, 0, 0, 1, 2], [-1, 0, 0, -1, 3, 4]])


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral_sliding", "phi3_longrope", "deepseek_v3", "opt"])
def test_greedy_output_over_trees_equals_transformers(family: str) -> None:
    reference, outputs = reference_of(family)
    target = CausalModel(copy.deepcopy(reference))
    wanted = [one[: target.max_length - len(prompt)] for prompt, one in zip(prompts(), outputs, strict=True)]
    params = SamplingParams(max_new_tokens=NEW)
    ours, steps, engine = run(target, prompts(), params, drafter=RightTree(wanted, VOCAB), gamma=12, join_later=3)
    assert engine.draft_failures == 0
    assert any(step.num_accepted == 0 and step.num_drafted for step in steps)
    assert any(step.num_accepted >= 3 for step in steps)
    assert any(max(step.tested, default=0) == 3 for step in steps), "the last of three siblings was reached"
    for prompt, one, theirs in zip(prompts(), ours, wanted, strict=True):
        assert_same(reference, prompt, one, theirs)


@pytest.mark.parametrize("family", list(SEQ2SEQ))
def test_greedy_output_over_trees_of_encoder_decoders(family: str) -> None:
    target = Seq2SeqModel(make_seq2seq(family))
    sources = prompts()
    starts = [list(target.prepare_prompt(source, SamplingParams()).prompt) for source in sources]
    params = SamplingParams(max_new_tokens=30)
    wanted, _, _ = run(target, starts, params, sources=sources)
    ours, steps, engine = run(
        target, starts, params, sources=sources, drafter=RightTree(wanted, target.vocab_size), gamma=12
    )
    assert engine.draft_failures == 0 and any(step.num_accepted >= 3 for step in steps)
    assert ours == wanted


@pytest.mark.parametrize("family", ["bloom", "falcon_alibi"])
def test_the_others_refuse_trees_by_name(family: str) -> None:
    target = CausalModel(make(family))
    with pytest.raises(UnsupportedModelError, match="RightTree proposes trees, and CausalModel does not support them"):
        run(target, [[1, 2]], SamplingParams(max_new_tokens=4), drafter=RightTree([[1]], VOCAB))
    with pytest.raises(UnsupportedModelError, match="CausalModel does not take trees"):
        ModelTreeDrafter(target, VOCAB)


@pytest.mark.parametrize("family", TAKES)
def test_each_node_is_scored_after_its_own_path(family: str) -> None:
    """Also a control: with siblings in sight of each other some node's scores are far off."""
    model = CausalModel(make(family))
    texts = [prompts()[3][:9], prompts()[4][:4]]
    nodes = torch.randint(2, VOCAB, (2, 6), generator=torch.Generator().manual_seed(1))

    def filled() -> object:
        cache = model.new_cache()
        model.admit(Rows([Row(i, text, SamplingParams(), limit=64) for i, text in enumerate(texts)]), 0, cache)
        padded = torch.tensor([text + [0] * (9 - len(text)) for text in texts])
        model.forward(ModelInput(padded, [len(text) for text in texts]), cache)
        return cache

    scores = model.forward(ModelInput(nodes, [6, 6], parents=PARENTS), filled()).scores()  # type: ignore[arg-type]
    for i, text in enumerate(texts):
        for column in range(6):
            path = []
            at = column
            while at >= 0:
                path.append(int(nodes[i, at]))
                at = int(PARENTS[i, at])
            with torch.no_grad():
                alone = model.uncached(torch.tensor([text + path[::-1]]))[0, -1]
            assert torch.allclose(scores[i, column], alone, atol=2e-3), (i, column)


def test_a_mask_that_lets_siblings_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placement, "mask_other_paths", lambda self, seen: seen)
    with pytest.raises(AssertionError):
        test_each_node_is_scored_after_its_own_path("llama")


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
    model = CausalModel(make("llama").to(dtype))
    fed = torch.randint(2, VOCAB, (2, 5), generator=torch.Generator().manual_seed(1))
    out = []
    for parents in (None, torch.arange(-1, 4).repeat(2, 1)):
        cache = model.new_cache()
        model.admit(Rows([Row(i, [1], SamplingParams(), limit=64) for i in range(2)]), 0, cache)
        model.forward(ModelInput(fed, [5, 3]), cache)
        out.append(model.forward(ModelInput(fed.flip(1), [5, 5], parents=parents), cache).scores())
    assert torch.equal(*out)


def test_kept_columns_are_as_if_they_alone_had_been_fed() -> None:
    model = CausalModel(make("mistral"))
    nodes = torch.randint(2, VOCAB, (2, 6), generator=torch.Generator().manual_seed(1))
    prompt = torch.tensor([[3, 4, 5], [6, 7, 0]])
    rows = Rows([Row(i, [1], SamplingParams(), limit=64) for i in range(2)])

    def begun() -> object:
        cache = model.new_cache()
        model.admit(rows, 0, cache)
        model.forward(ModelInput(prompt, [3, 2]), cache)
        return cache

    tree, chain = begun(), begun()
    model.forward(ModelInput(nodes, [6, 6], parents=PARENTS), tree)  # type: ignore[arg-type]
    paths = [[0, 2, 5], [3, 4]]
    tree.keep([3, 2], paths)  # type: ignore[attr-defined]
    fed = torch.tensor([[int(nodes[0, c]) for c in paths[0]], [int(nodes[1, c]) for c in paths[1]] + [0]])
    model.forward(ModelInput(fed, [3, 2]), chain)  # type: ignore[arg-type]
    assert tree.lengths == chain.lengths == [6, 4]  # type: ignore[attr-defined]
    after = torch.tensor([[9, 10], [11, 12]])
    scores = [model.forward(ModelInput(after, [2, 2]), cache).scores() for cache in (tree, chain)]  # type: ignore[arg-type]
    assert torch.allclose(*scores, atol=1e-5)


def test_the_tree_drafters_at_work() -> None:
    reference, _ = reference_of("llama")
    target, draft = CausalModel(copy.deepcopy(reference)), CausalModel(make("llama", num_hidden_layers=2))
    draft.model.load_state_dict(reference.state_dict(), strict=False)
    repeated = [prompt[:12] * 4 for prompt in prompts()[1:4]]
    params = SamplingParams(max_new_tokens=40)
    wanted = [plain(reference, prompt, 40) for prompt in repeated]
    tokens_per_pass = {}
    for name, drafter in {
        "tree": ModelTreeDrafter(draft, VOCAB, branches=3),
        "chain": ModelDrafter(draft, VOCAB),
        "suffix": SuffixTreeDrafter(branches=3),
    }.items():
        ours, steps, engine = run(target, repeated, params, drafter=drafter, gamma=3 if name == "chain" else 9)
        assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
        for prompt, one, theirs in zip(repeated, ours, wanted, strict=True):
            assert_same(reference, prompt, one, theirs)
        tokens_per_pass[name] = sum(len(step.token_ids) for step in steps) / len(steps)
    assert tokens_per_pass["tree"] > tokens_per_pass["chain"], "three tries find more than one"
