"""Self-speculation in the target's cache: the output of plain decoding, and the draft tokens of the same layers elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import foresay
from foresay.decoding.acceptance import make_rule
from foresay.decoding.outcome import Step
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import Drafter, ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, ModelDrafter, PromptLookup, SelfDrafter
from foresay.engine import Engine
from foresay.errors import UnsupportedModelError
from foresay.lengths import ConfidenceLength, ConstantLength
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_layers, trimmed_head
from helpers.families import FAMILIES, VOCAB, make
from helpers.support import Fake, run

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 40, 13], [60] * 9]
NEW = 20


def shallow(family: str = "llama", layers: int = 2, seed: int = 0) -> tuple[CausalModel, CausalModel]:
    """A target whose last layer matters little, so that its first layers often agree with it; and those layers."""
    whole = make(family, seed, tie_word_embeddings=False)
    with torch.no_grad():
        for name, weight in whole.named_parameters():
            last = f".{whole.config.num_hidden_layers - 1}."
            if last in name and weight.dim() >= 2:
                weight *= 0.6
    target = CausalModel(whole)
    return target, first_layers(target, layers)


def work(steps: Sequence[Step]) -> list[tuple[int, int, int]]:
    return [(step.request_id, step.num_drafted, step.num_accepted) for step in steps]


def decode(target: CausalModel, drafter: Drafter | None, **options: Any) -> tuple[list[list[int]], list[Step]]:
    params = options.pop("params", SamplingParams(max_new_tokens=NEW))
    outputs, steps, engine = run(target, PROMPTS, params, drafter=drafter, join_later=2, **options)
    assert engine.draft_failures == 0
    return outputs, steps


def test_layers_that_depend_on_their_number_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="its layers have inputs of their own, or read the keys"):
        shallow("gemma4")


@pytest.mark.parametrize("family", [one for one in sorted(FAMILIES) if not one.startswith("gemma4")])
def test_the_targets_cache_serves_as_well_as_one_of_its_own(family: str) -> None:
    target, short = shallow(family)
    plain, _ = decode(target, None, gamma=0)
    ours, borrowed = decode(target, SelfDrafter(short, VOCAB))
    theirs, own = decode(target, ModelDrafter(short, VOCAB))
    assert ours == theirs == plain
    assert work(borrowed) == work(own)
    assert {s.num_accepted for s in borrowed if s.num_drafted == 4} > {4}, "rejections and whole drafts"


@pytest.mark.parametrize("rule", ["speculative", "block", "match", "coupled"])
def test_sampled_rows_too(rule: str) -> None:
    target, short = shallow(seed=3)
    params = [SamplingParams(temperature=i % 3 * 0.5, seed=i, max_new_tokens=NEW) for i in range(len(PROMPTS))]
    ours, borrowed = decode(target, SelfDrafter(short, VOCAB), params=params, rule=rule)
    theirs, own = decode(target, ModelDrafter(short, VOCAB), params=params, rule=rule)
    assert ours == theirs and work(borrowed) == work(own)
    assert any(s.num_accepted for s in borrowed) and any(s.num_accepted < s.num_drafted for s in borrowed)


def test_a_policy_that_stops_rows_one_by_one() -> None:
    target, short = shallow(seed=1)
    policy = ConfidenceLength(0.5, high=6)
    ours, borrowed = decode(target, SelfDrafter(short, VOCAB), policy=policy)
    theirs, own = decode(target, ModelDrafter(short, VOCAB), policy=policy)
    assert ours == theirs == decode(target, None, gamma=0)[0] and work(borrowed) == work(own)
    assert len({s.num_drafted for s in borrowed}) > 3


class Junk(Fake):
    """Draft tokens that are hardly ever right, of lengths that vary by row."""

    def draft_tokens(self, row: int, rows: Rows, budget: int) -> list[int]:
        return [(rows[row].size * 5 + i) % VOCAB for i in range((rows[row].size + row) % 4)]


PLANS = [[[4, 0], [0, 3]], [[2, 3], [0, 0]], [[2, 3], [0, 2]]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("last", [Junk, lambda: PromptLookup(min_ngram=1)], ids=["junk", "lookup"])
@pytest.mark.parametrize("k", PLANS, ids=str)
def test_inside_a_cascade(k: list[list[int]], last: Any, temperature: float) -> None:
    target, short = shallow(seed=2)
    params = [SamplingParams(temperature=temperature, seed=i, max_new_tokens=NEW) for i in range(len(PROMPTS))]
    ours, borrowed = decode(target, Cascade([SelfDrafter(short, VOCAB), last()], k), params=params, gamma=8)
    theirs, own = decode(target, Cascade([ModelDrafter(short, VOCAB), last()], k), params=params, gamma=8)
    assert ours == theirs and work(borrowed) == work(own)
    assert temperature or ours == decode(target, None, gamma=0)[0]


def test_behind_a_model_that_reviews() -> None:
    """Called again and again within one step, about contexts that were drafted and partly taken back."""
    target, short = shallow(seed=2)
    large = CausalModel(make("llama", 7))
    k = [[5, 0, 0], [0, 2, 1], [0, 0, 2]]

    def cascade(kind: type[ModelDrafter]) -> Cascade:
        return Cascade([ModelDrafter(large, VOCAB), kind(short, VOCAB), Junk()], k)

    ours, borrowed = decode(target, cascade(SelfDrafter), gamma=8)
    theirs, own = decode(target, cascade(ModelDrafter), gamma=8)
    assert ours == theirs == decode(target, None, gamma=0)[0] and work(borrowed) == work(own)


def two_depths(kind: type[ModelDrafter], target: CausalModel, large: CausalModel) -> Cascade:
    """A review of draft tokens by two layers, then by one layer, both in the same slots."""
    parts = [ModelDrafter(large, VOCAB), *(kind(first_layers(target, n), VOCAB) for n in (2, 1)), Junk()]
    return Cascade(parts, [[6, 0, 0, 0], [0, 2, 2, 2], [0, 0, 2, 1], [0, 0, 0, 2]])


def test_two_depths_of_the_target_in_one_cascade_keep_the_output() -> None:
    target, _ = shallow(seed=2)
    large = CausalModel(make("llama", 7))
    ours, _ = decode(target, two_depths(SelfDrafter, target, large), gamma=9)
    assert ours == decode(target, None, gamma=0)[0]


def test_a_trimmed_head_on_top() -> None:
    target, short = shallow()
    ids = sorted({token for output in decode(target, None, gamma=0)[0] for token in output})[::2]
    ours, steps = decode(target, SelfDrafter(trimmed_head(short, ids), VOCAB))
    assert ours == decode(target, None, gamma=0)[0]
    assert any(step.num_accepted for step in steps) and any(step.num_accepted < step.num_drafted for step in steps)


class Seen(SelfDrafter):
    """Compares what it proposes with the same layers fed afresh."""

    checked = 0

    def propose(self, rows: Rows, budget: Sequence[int], policy: Any) -> Proposal:
        proposal = super().propose(rows, budget, policy)
        short = self.context.model.inner
        assert isinstance(short, CausalModel) and self.context.cache.owner is not None
        for i, row in enumerate(rows):
            context = row.tokens.tolist()
            for token in proposal.token_ids[i, : proposal.num_tokens[i]].tolist():
                cache = short.new_cache()
                cache.add_rows(1)
                scores = short.forward(ModelInput(torch.tensor([context]), [len(context)]), cache).scores()[0, -1]
                assert float(scores.max() - scores[token]) < 1e-3
                context.append(token)
                self.checked += 1
        return proposal


def test_every_guess_is_that_of_a_fresh_pass_and_the_targets_cache_is_untouched() -> None:
    target, short = shallow(seed=4)
    drafter = Seen(short, VOCAB)
    engine = Engine(target, drafter, make_rule("speculative"), ConstantLength(4), max_batch_size=3)
    contexts = {engine.submit(p, SamplingParams(max_new_tokens=4 + 5 * i)): list(p) for i, p in enumerate(PROMPTS)}
    while engine.has_work:
        for step in engine.step():
            contexts[step.request_id] += step.token_ids
        cache, rows = engine._cache, engine._items
        assert isinstance(cache, SlotCache)
        if rows:
            before = list(cache.lengths)
            last = torch.tensor([[int(row.tokens[-1])] for row in rows])
            cached = target.forward(ModelInput(last, [1] * len(rows)), cache).scores()[:, 0]
            cache.truncate(before)
            for i, row in enumerate(rows):
                with torch.no_grad():
                    fresh = target.uncached(torch.tensor([contexts[row.request_id]]))[0, -1]
                assert float((cached[i] - fresh).abs().max()) < 1e-3
    assert engine.draft_failures == 0 and drafter.checked >= 40


def test_without_an_engine_it_has_a_cache_of_its_own() -> None:
    _, short = shallow()
    alone, model = SelfDrafter(short, VOCAB), ModelDrafter(short, VOCAB)
    rows = Rows([Row(i, [5, 6, 7], SamplingParams(), limit=99) for i in range(2)])
    for drafter in (alone, model):
        drafter.admit(rows, 0)
    policy = ConstantLength(3)
    assert torch.equal(alone.propose(rows, [3, 2], policy).token_ids, model.propose(rows, [3, 2], policy).token_ids)


def lent(target: CausalModel, *drafters: SelfDrafter) -> tuple[Rows, SlotCache]:
    """Two rows whose prompts are in the target's cache, which the drafters use_cache_of_target."""
    rows = Rows([Row(i, [5, 6, 7 + i], SamplingParams(), limit=99) for i in range(2)])
    owner = target.new_cache()
    target.admit(rows, 0, owner)
    target.forward(ModelInput(torch.tensor([row.tokens[:2].tolist() for row in rows]), [2, 2]), owner)
    for drafter in drafters:
        drafter.use_cache_of_target(owner)
        drafter.admit(rows, 0)
    return rows, owner


def test_guessed_contexts_that_come_and_go() -> None:
    """Each draft token is what a draft with a cache of its own makes, and what is still the same is not fed again."""
    target, short = shallow(seed=5)
    drafter, model = SelfDrafter(short, VOCAB), ModelDrafter(short, VOCAB)
    rows, _ = lent(target, drafter)
    model.admit(rows, 0)
    policy, generator = ConstantLength(3), torch.Generator().manual_seed(0)
    for step in range(30):
        size = int(torch.randint(1, 7, (1,), generator=generator))
        drafts = [(torch.arange(9) * (1 + step % 3) + 11 + i)[: size - i % size].tolist() for i in range(2)]
        ahead = rows.with_draft(drafts, step)
        ours, theirs = (one.propose(ahead, [3, step % 4], policy) for one in (drafter, model))
        assert ours.num_tokens == theirs.num_tokens == [3, step % 4]
        for i, n in enumerate(ours.num_tokens):
            assert torch.equal(ours.token_ids[i, :n], theirs.token_ids[i, :n])
        assert drafter.context.cache.lengths[0] == ahead[0].size + 2, "all but the last token it wrote"
        fresh = rows.with_draft([[*drafts[0], int(ours.token_ids[0, 0])], []], 0)
        drafter.context.prepare(fresh, [True, False])
        assert drafter.context.cache.lengths[0] == fresh[0].size - 1, "nothing is left to catch up on"


def test_nothing_is_prefilled_or_caught_up_on() -> None:
    target, short = shallow(seed=1)
    fed: list[int] = []
    forward = short.forward

    def spied(model_input: ModelInput, cache: Any) -> Any:
        fed.append(max(model_input.num_tokens))
        return forward(model_input, cache)

    short.forward = spied  # type: ignore[method-assign]
    decode(target, SelfDrafter(short, VOCAB))
    assert set(fed) == {1}


def test_two_depths_do_not_draft_from_what_the_other_overwrote() -> None:
    """Row 0 rides along as pads while the shallower draft works for row 1 alone: those pads are not draft tokens of its own."""
    target, _ = shallow()
    deep, flat = (SelfDrafter(first_layers(target, n), VOCAB) for n in (2, 1))
    rows, owner = lent(target, deep, flat)
    policy = ConstantLength(4)
    drafted = deep.propose(rows.with_draft([[], []], 0), [4, 4], policy).token_ids.tolist()
    held = deep.context.cache.lengths[0]
    before = owner.read(0, 0, 1, held)[0].clone()
    flat.propose(rows.with_draft(drafted, 1), [0, 3], policy)
    assert not torch.equal(owner.read(0, 0, 1, held)[0], before), "the pads did not land there: this test shows nothing"
    apart = ModelDrafter(first_layers(target, 2), VOCAB)
    apart.admit(rows, 0)
    ours, theirs = (one.propose(rows.with_draft(drafted, 2), [4, 4], policy) for one in (deep, apart))
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert torch.allclose(owner.read(0, 0, 1, held)[0], before, atol=1e-5), "the draft tokens were fed again"


def test_layers_of_a_target_that_lost_its_fused_passes_draft_all_the_same() -> None:
    """A watched model that is changed goes back to its family's own code, whose cache the fused layers cannot read."""
    loaded = foresay.load(make("llama"), drafter="none")
    target = loaded.target.model
    assert isinstance(target, CausalModel) and target.batch_invariant
    short = first_layers(target, 1)
    assert short.batch_invariant
    params = SamplingParams(max_new_tokens=12)
    plain, _, _ = run(target, [[5, 6, 7]], params)
    target.fused = None  # as `CausalModel.new_cache` leaves it
    ours, steps, engine = run(target, [[5, 6, 7]], params, drafter=SelfDrafter(short, target.vocab_size))
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert any(step.num_drafted for step in steps) and not short.batch_invariant
    assert ours == plain
