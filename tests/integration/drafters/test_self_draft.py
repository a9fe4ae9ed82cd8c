"""Self-speculation in the target's cache: the output of plain decoding, and the draft tokens of the same layers elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import foresay
from foresay import Drafter, ModelInput, Row, Rows, SamplingParams, Step, UnsupportedModelError
from foresay.drafters import Cascade, ModelDrafter, PromptLookup, SelfDrafter
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


def decode(target: CausalModel, drafter: Drafter | None, **options: Any) -> tuple[list[list[int]], list[Step]]:
    params = options.pop("params", SamplingParams(max_new_tokens=NEW))
    outputs, steps, engine = run(target, PROMPTS, params, drafter=drafter, join_later=2, **options)
    assert engine.draft_failures == 0
    return outputs, steps


def plain(target: CausalModel) -> list[list[int]]:
    return decode(target, None, gamma=0)[0]


def alike(target: CausalModel, make_with: Callable[[type[ModelDrafter]], Drafter], **options: Any) -> list[Step]:
    """Steps with a drafter in the target's cache, which are those of the same layers with a cache of their own."""
    ours, borrowed = decode(target, make_with(SelfDrafter), **options)
    theirs, own = decode(target, make_with(ModelDrafter), **options)
    work = [[(step.request_id, step.num_drafted, step.num_accepted) for step in steps] for steps in (borrowed, own)]
    assert ours == theirs and work[0] == work[1]
    if "params" not in options:
        assert ours == plain(target)
    return borrowed


@pytest.mark.parametrize("family", [one for one in sorted(FAMILIES) if not one.startswith("gemma4")])
def test_the_targets_cache_serves_as_well_as_one_of_its_own(family: str) -> None:
    target, short = shallow(family)
    steps = alike(target, lambda kind: kind(short, VOCAB))
    assert {s.num_accepted for s in steps if s.num_drafted == 4} > {4}, "rejections and whole drafts"


def test_layers_that_depend_on_their_number_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="its layers have inputs of their own, or read the keys"):
        shallow("gemma4")


def sampled(temperature: float) -> list[SamplingParams]:
    """Every second row is greedy if others are sampled."""
    return [SamplingParams(temperature=i % 2 * temperature, seed=i, max_new_tokens=NEW) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("rule", ["speculative", "block", "match", "coupled"])
def test_sampled_rows_too(rule: str) -> None:
    target, short = shallow(seed=3)
    steps = alike(target, lambda kind: kind(short, VOCAB), params=sampled(0.8), rule=rule)
    assert any(s.num_accepted for s in steps) and any(s.num_accepted < s.num_drafted for s in steps)


def test_a_policy_that_stops_rows_one_by_one_and_a_trimmed_head() -> None:
    target, short = shallow(seed=1)
    steps = alike(target, lambda kind: kind(short, VOCAB), policy=ConfidenceLength(0.5, high=6))
    assert len({s.num_drafted for s in steps}) > 3
    ids = sorted({token for output in plain(target) for token in output})[::2]
    steps = alike(target, lambda kind: kind(trimmed_head(short, ids), VOCAB))
    assert any(s.num_accepted for s in steps) and any(s.num_accepted < s.num_drafted for s in steps)


class Junk(Fake):
    """Draft tokens that are hardly ever right, of lengths that vary by row."""

    def draft_tokens(self, row: int, rows: Rows, budget: int) -> list[int]:
        return [(rows[row].size * 5 + i) % VOCAB for i in range((rows[row].size + row) % 4)]


PLANS = [[[4, 0], [0, 3]], [[2, 3], [0, 0]], [[2, 3], [0, 2]]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("last", [Junk, lambda: PromptLookup(min_ngram=1)], ids=["junk", "lookup"])
def test_inside_a_cascade(last: Any, temperature: float) -> None:
    target, short = shallow(seed=2)
    options: dict[str, Any] = {"gamma": 8, **({"params": sampled(temperature)} if temperature else {})}
    for k in PLANS:
        alike(target, lambda kind, k=k: Cascade([kind(short, VOCAB), last()], k), **options)


def test_after_a_model_that_reviews_also_in_two_depths() -> None:
    """Called again and again within one step, about contexts that were drafted and partly taken back."""
    target, short = shallow(seed=2)
    large = CausalModel(make("llama", 7))
    k = [[5, 0, 0], [0, 2, 1], [0, 0, 2]]
    alike(target, lambda kind: Cascade([ModelDrafter(large, VOCAB), kind(short, VOCAB), Junk()], k), gamma=8)
    depths = [SelfDrafter(first_layers(target, n), VOCAB) for n in (2, 1)]  # both in the same slots
    k = [[6, 0, 0, 0], [0, 2, 2, 2], [0, 0, 2, 1], [0, 0, 0, 2]]
    cascade, few = Cascade([ModelDrafter(large, VOCAB), *depths, Junk()], k), SamplingParams(max_new_tokens=8)
    assert decode(target, cascade, params=few, gamma=9)[0] == [output[:8] for output in plain(target)]


def test_nothing_is_prefilled_or_caught_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass of the draft feeds one token of a row; that draft tokens and texts are right is in `alike`."""
    target, short = shallow(seed=4)
    drafter, fed, forward = SelfDrafter(short, VOCAB), list[int](), short.forward

    def watched(model_input: ModelInput, cache: Any) -> Any:
        fed.append(max(model_input.num_tokens))
        return forward(model_input, cache)

    monkeypatch.setattr(short, "forward", watched)
    params = [SamplingParams(max_new_tokens=4 + 5 * i) for i in range(len(PROMPTS))]
    _, steps = decode(target, drafter, params=params, max_batch_size=3)
    assert sum(step.num_drafted for step in steps) >= 40 and set(fed) == {1}


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


def test_draft_contexts_that_come_and_go_also_without_an_engine() -> None:
    """Each draft token is what a draft with a cache of its own makes, and what is still the same is not fed again."""
    target, short = shallow(seed=5)
    drafter, model, alone = SelfDrafter(short, VOCAB), ModelDrafter(short, VOCAB), SelfDrafter(short, VOCAB)
    rows, _ = lent(target, drafter)
    for one in (model, alone):
        one.admit(rows, 0)
    policy, generator = ConstantLength(3), torch.Generator().manual_seed(0)
    for step in range(30):
        size = int(torch.randint(1, 7, (1,), generator=generator))
        drafts = [(torch.arange(9) * (1 + step % 3) + 11 + i)[: size - i % size].tolist() for i in range(2)]
        ahead = rows.with_draft(drafts, step)
        ours, theirs, third = (one.propose(ahead, [3, step % 4], policy) for one in (drafter, model, alone))
        assert ours.num_tokens == theirs.num_tokens == third.num_tokens == [3, step % 4]
        for i, n in enumerate(ours.num_tokens):
            assert torch.equal(ours.token_ids[i, :n], theirs.token_ids[i, :n])
            assert torch.equal(ours.token_ids[i, :n], third.token_ids[i, :n])
        assert drafter.context.cache.lengths[0] == ahead[0].size + 2, "all but the last token it wrote"
        fresh = rows.with_draft([[*drafts[0], int(ours.token_ids[0, 0])], []], 0)
        drafter.context.prepare(fresh, [True, False])
        assert drafter.context.cache.lengths[0] == fresh[0].size - 1, "nothing is left to catch up on"


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
    target = foresay.load(make("llama"), drafter="none").target.model
    assert isinstance(target, CausalModel) and target.batch_invariant
    short = first_layers(target, 1)
    assert short.batch_invariant
    params = SamplingParams(max_new_tokens=12)
    expected, _, _ = run(target, [[5, 6, 7]], params)
    target.fused = None  # as `CausalModel.new_cache` leaves it
    ours, steps, engine = run(target, [[5, 6, 7]], params, drafter=SelfDrafter(short, target.vocab_size))
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert any(step.num_drafted for step in steps) and not short.batch_invariant
    assert ours == expected
