"""Distribution cells outside the matrix: stop tokens, least lengths, biases, bans, failing processors, and seeds given twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from foresay.decoding import acceptance
from foresay.decoding.acceptance import make_rule
from foresay.decoding.outcome import FinishReason
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import Drafter, LengthPolicy
from foresay.decoding.randomness import Purpose
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, MaxGram, Memory, ModelDrafter, NgramStore, NgramStoreDrafter, SuffixDrafter
from foresay.engine import Engine
from foresay.lengths import ConfidenceLength, ConstantLength, EntropyLength
from helpers.distribution_cells import ALPHA, DRAFT, PROMPT, RULES, SIZE, SMALL, TARGET
from helpers.reference import distribution, p_value
from helpers.sequential import decided
from helpers.support import Loop, changed, run

SAMPLES = 500
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "model": lambda: ModelDrafter(DRAFT, SIZE),
    "perfect": lambda: ModelDrafter(TARGET, SIZE),
    "suffix": lambda: SuffixDrafter(Memory(max_tokens=256)),
    "cascade": lambda: Cascade([ModelDrafter(DRAFT, SIZE), MaxGram()], [[3, 2], [0, 2]]),
}
PAIRS = [(drafter, rule) for drafter in DRAFTERS for rule in RULES]
EOS = frozenset({2})
Outcome = tuple[tuple[int, ...], bool]


class Grammar:
    """Allows 0 or 3 first, then anything but what stands last; knows no text that breaks this or goes on after an end token."""

    failure = (-1, -1)
    """The last two tokens after which it raises."""

    def __init__(self, start: int = len(PROMPT)) -> None:
        self.start = start

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = ids[0, self.start :].tolist()
        if 2 in output or any(a == b for a, b in pairwise(output)) or tuple(output[-2:]) == self.failure:
            raise ValueError(f"{output} is no beginning of a text")
        out = scores.clone()
        out[0, output[-1:] or [1, 2]] = -torch.inf
        return out


class Fails(Grammar):
    failure = (3, 0)


PARAMS = {
    "stop token": SamplingParams(temperature=1.0, max_new_tokens=5),
    "least length": SamplingParams(temperature=1.0, max_new_tokens=5, min_new_tokens=3),
    "biases and bans": SamplingParams(
        temperature=0.9, max_new_tokens=5, logit_bias={0: 0.7, 2: -0.5}, banned_token_ids=(1,), min_new_tokens=2
    ),
    "grammar": SamplingParams(temperature=1.0, max_new_tokens=5, processors=(Grammar(),)),
    "failing grammar": SamplingParams(temperature=1.0, max_new_tokens=5, processors=(Fails(),)),
}


@cache
def enumerated(name: str) -> dict[Outcome, float]:
    """Every output, and whether the request then fails, with its probability by the definitions."""
    params, out = PARAMS[name], dict[Outcome, float]()
    going: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while going:
        output, prob = going.pop()
        ended = bool(output) and output[-1] in EOS and len(output) > params.min_new_tokens
        fails = name == "failing grammar" and output[-2:] == Fails.failure
        if ended or len(output) == params.max_new_tokens or fails:
            out[output, fails and len(output) < params.max_new_tokens] = prob
            continue
        banned = {*params.banned_token_ids, *(EOS if len(output) < params.min_new_tokens else ())}
        if params.processors:
            banned |= {*(output[-1:] or (1, 2))}
        own = SamplingParams.of(params, banned_token_ids=tuple(banned), processors=())
        probs = distribution(TARGET, own, PROMPT, list(output))
        going += [((*output, token), prob * float(p)) for token, p in enumerate(probs) if p > 0]
    return out


def outcomes(name: str, drafter: str, rule: str) -> float:
    """The p-value of (tokens, whether the request failed) of many requests."""
    probs = enumerated(name)
    engine = Engine(TARGET, DRAFTERS[drafter](), make_rule(rule), ConstantLength(4), max_batch_size=250)
    seen, places, each = list[Outcome](), {one: [i] for i, one in enumerate(probs)}, np.array([*probs.values()])

    def look(seeds: range) -> float:
        written: dict[int, list[int]] = {}
        for seed in seeds:
            written[engine.submit(PROMPT, SamplingParams.of(PARAMS[name], seed=seed), eos=EOS)] = []
        while engine.has_work:
            for step in engine.step():
                written[step.request_id] += step.token_ids
                if step.finish_reason is not None:
                    seen.append((tuple(written[step.request_id]), step.finish_reason is FinishReason.ERROR))
                    assert step.error is None or isinstance(step.error.__cause__, ValueError)
        return p_value([places[one] for one in seen], each, len(each)) if places.keys() >= set(seen) else 0.0

    found = decided(look, SAMPLES, each)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert any(failed for _, failed in seen) == (name == "failing grammar")
    return found


@pytest.mark.parametrize(("name", "drafter", "rule"), [([*PARAMS][i % 3], *pair) for i, pair in enumerate(PAIRS)])
def test_outputs_that_end_by_themselves_have_the_targets_distribution(name: str, drafter: str, rule: str) -> None:
    assert outcomes(name, drafter, rule) > ALPHA


def by_halves() -> list[Any]:
    """Each grammar with every drafter and two rules, and with every rule and two or three drafters; the other half is long."""
    odd = [(i // len(RULES) + i % len(RULES)) % 2 for i in range(len(PAIRS))]
    return [
        pytest.param(name, *pair, marks=[] if place == half else [pytest.mark.long])
        for half, name in enumerate(("grammar", "failing grammar"))
        for pair, place in zip(PAIRS, odd, strict=True)
    ]


@pytest.mark.parametrize(("name", "drafter", "rule"), by_halves())
def test_a_grammar_under_drafts_fails_where_plain_decoding_fails(name: str, drafter: str, rule: str) -> None:
    """A processor that raises after drafted tokens that plain decoding never generates: no request fails for it.

    Requests fail exactly if they would have failed in plain decoding, after the same tokens, and with the same odds.
    """
    assert outcomes(name, drafter, rule) > ALPHA


@pytest.mark.parametrize("drafter", ["model", "perfect", "suffix"])
def test_a_greedy_grammar_under_drafts(drafter: str) -> None:
    for prompt in ([1], [3, 0], [0, 1, 3], [2, 1]):
        params = SamplingParams(max_new_tokens=12, processors=(Grammar(len(prompt)),))
        want, _, _ = run(TARGET, [prompt], params, eos=EOS)
        ours, steps, engine = run(TARGET, [prompt], params, eos=EOS, drafter=DRAFTERS[drafter]())
        assert ours == want and engine.draft_failures == 0 and all(step.error is None for step in steps)


def test_a_processor_that_fails_on_the_drafts_side_hurts_nobody() -> None:
    """The draft takes raw scores there; the drafter has not failed, and neighbours' seeded texts stay."""
    calls = []

    def draft_only(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not torch.allclose(scores[0].softmax(-1), TARGET.distribution(ids[0].tolist()).float(), atol=1e-4):
            calls.append(ids)
            raise ValueError("a draft's scores")
        return scores

    params = [
        SamplingParams(temperature=1.0, seed=i, max_new_tokens=20, processors=(draft_only,) if i == 1 else ())
        for i in range(3)
    ]
    ours, _, engine = run(TARGET, [PROMPT] * 3, params, drafter=ModelDrafter(DRAFT, SIZE))
    assert calls and engine.draft_failures == 0
    for i in (0, 2):
        assert run(TARGET, [PROMPT], params[i], drafter=ModelDrafter(DRAFT, SIZE))[0] == [ours[i]]


# -- draft distributions that are not finite ----------------------------------------------------------------------------


def poisoned(place: int, poison: float) -> Any:
    """A draft model whose distributions turn into something else at one position."""

    def change(full: Any) -> dict[str, Any]:
        if full.width > place:
            full.distributions[full.distribution_index[:, place].clamp(min=0)] = poison
        return {}

    return changed(ModelDrafter(DRAFT, SIZE), change)


@pytest.mark.parametrize(("rule", "place"), [("speculative", 0), ("block", 1)])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 0.0, 0.7])
def test_a_draft_distribution_that_is_none_is_the_drafters_failure(rule: str, place: int, poison: float) -> None:
    params, firsts = SamplingParams(temperature=1.0, max_new_tokens=3), list[list[int]]()
    probs = distribution(TARGET, params, PROMPT, [])

    def look(seeds: range) -> float:
        each = [SamplingParams.of(params, seed=seed) for seed in seeds]
        loop = Loop(TARGET, drafter=poisoned(place, poison), rule=rule, max_batch_size=64)
        firsts.extend(one[:1] for one in loop.outputs([PROMPT] * len(each), each))
        assert "does not sum to 1" in str(loop.engine.drafter and loop.engine.drafter.last_error)
        assert loop.engine.draft_failures > 0
        return p_value(firsts, probs, SIZE)

    assert decided(look, SAMPLES, probs) > ALPHA


# -- a seed given twice ---------------------------------------------------------------------------------------------------


def leave_texts(rule: str) -> bool:
    """True if n-gram drafters leave a seed's text, also where a second request copies from what the first one wrote."""
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=30) for seed in range(20)]
    plain, _, _ = run(TARGET, [PROMPT] * 20, params)
    memory, store = Memory(max_tokens=512), NgramStore(3)
    made = [lambda: None, lambda: SuffixDrafter(memory), lambda: NgramStoreDrafter(3, store=store)]
    for drafter in (one() for one in made for _ in range(2)):
        ours, steps, _ = run(TARGET, [PROMPT] * 20, params, drafter=drafter, rule=rule, gamma=5, max_batch_size=7)
        assert any(step.num_accepted for step in steps) == (drafter is not None)
        if ours != plain:
            return False
    return True


@pytest.mark.parametrize("rule", ["speculative", "block", "match"])
def test_a_seed_writes_the_text_of_plain_decoding_under_n_gram_drafters(rule: str) -> None:
    """In test_copied_texts.py, a model drafts too."""
    assert leave_texts(rule)


def test_draft_tokens_tested_by_the_numbers_they_were_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a point mass accepted while u < p(x), and a second number for what is written otherwise."""

    def verify(self: object, target: Any, proposal: Proposal, streams: Any) -> Verification:
        uniform = streams.uniform(Purpose.ACCEPT, torch.arange(proposal.width))
        accepted = (uniform < target.prob_of(proposal.token_ids)) & acceptance._valid(proposal)
        count = acceptance._leading(accepted)
        numbers = streams.uniform(Purpose.TARGET, torch.zeros(1, dtype=torch.int64))[:, 0]
        return Verification(count, acceptance._extra_tokens(target, proposal, count, numbers), count)

    monkeypatch.setattr(acceptance.Speculative, "verify", verify)
    assert not leave_texts("speculative")


# -- batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [ConstantLength(5), ConfidenceLength(0.5, low=2, high=6), EntropyLength(1.0, low=2, high=6)],
    ids=lambda one: type(one).__name__,
)  # fmt: skip
@pytest.mark.parametrize("rule", RULES)
def test_a_cascades_rows_are_the_same_alone_and_in_a_batch(rule: str, policy: LengthPolicy) -> None:
    prompts = [[1], [2, 3, 1], [0, 1, 2, 3, 0, 1], [3, 3]]
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=25) for seed in range(4)]

    def written(rows: slice) -> list[list[int]]:
        members = [ModelDrafter(DRAFT, SIZE), ModelDrafter(SMALL, SIZE), MaxGram()]
        drafter = Cascade(members, [[2, 2, 1], [0, 1, 2], [0, 0, 2]])
        found, _, engine = run(TARGET, prompts[rows], params[rows], drafter=drafter, rule=rule, policy=policy)
        assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
        return found

    assert written(slice(0, 4)) == [written(slice(i, i + 1))[0] for i in range(4)]


def test_logprobs_do_not_switch_a_cascade_off() -> None:
    for temperature in (0.0, 1.0):
        drafted = []
        for logprobs in (None, 2):
            params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=40, logprobs=logprobs)
            _, steps, engine = run(TARGET, [PROMPT] * 3, params, drafter=DRAFTERS["cascade"]())
            assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
            drafted.append(sum(step.num_drafted for step in steps))
        assert drafted[0] == drafted[1] > 0


def test_block_tests_every_token() -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=20) for seed in range(20)]
    _, steps, _ = run(TARGET, [PROMPT] * 20, params, drafter=ModelDrafter(DRAFT, SIZE), rule="block", gamma=4)
    whole = [step for step in steps if step.finish_reason is None]
    assert all(step.num_tested == step.num_drafted for step in whole)
    assert any(step.num_accepted + 1 < step.num_tested for step in whole)
