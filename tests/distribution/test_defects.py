"""Distribution cells outside the matrix: stop tokens, least lengths, biases, bans, failing processors, and seeds given twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from foresay.decoding import acceptance
from foresay.decoding.acceptance import make_rule
from foresay.decoding.outcome import FinishReason
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import Drafter, LengthPolicy
from foresay.decoding.randomness import Purpose
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, MaxGram, Memory, ModelDrafter, NgramStore, NgramStoreDrafter, SuffixDrafter
from foresay.engine import Engine
from foresay.lengths import ConfidenceLength, ConstantLength, EntropyLength
from foresay.models.table import TableModel
from helpers.distribution_cells import ALPHA, DRAFT, PROMPT, RULES, SIZE, SMALL, TARGET
from helpers.reference import distribution, joint, p_value
from helpers.sequential import decided
from helpers.support import Loop, run

SAMPLES = 600
SECONDS = 400
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "model": lambda: ModelDrafter(DRAFT, SIZE),
    "perfect": lambda: ModelDrafter(TARGET, SIZE),
    "suffix": lambda: SuffixDrafter(Memory(max_tokens=256)),
    "cascade": lambda: Cascade([ModelDrafter(DRAFT, SIZE), MaxGram()], [[3, 2], [0, 2]]),
}
EOS = frozenset({2})
Outcome = tuple[tuple[int, ...], bool]


def outcomes(
    params: SamplingParams, drafter: str, rule: str, probs: dict[Outcome, float]
) -> tuple[float, list[Outcome]]:
    """The p-value of (tokens, whether the request failed) of many requests, and what was seen."""
    engine = Engine(TARGET, DRAFTERS[drafter](), make_rule(rule), ConstantLength(4), max_batch_size=250)
    seen, places, each = list[Outcome](), {one: [i] for i, one in enumerate(probs)}, np.array([*probs.values()])

    def look(seeds: range) -> float:
        written: dict[int, list[int]] = {}
        for seed in seeds:
            written[engine.submit(PROMPT, SamplingParams.of(params, seed=seed), eos=EOS)] = []
        while engine.has_work:
            for step in engine.step():
                written[step.request_id] += step.token_ids
                if step.finish_reason is not None:
                    seen.append((tuple(written[step.request_id]), step.finish_reason is FinishReason.ERROR))
        return p_value([places[one] for one in seen], each, len(each)) if places.keys() >= set(seen) else 0.0

    found = decided(look, SAMPLES, each)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    return found, seen


@cache
def enumerated(stops: str) -> dict[Outcome, float]:
    """Every output with its probability, by the definitions."""
    params = STOPS[stops]
    out: dict[Outcome, float] = {}
    going: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while going:
        output, prob = going.pop()
        ended = bool(output) and output[-1] in EOS and len(output) > params.min_new_tokens
        if ended or len(output) == params.max_new_tokens:
            out[output, False] = prob
            continue
        own = params
        if len(output) < params.min_new_tokens:
            own = SamplingParams.of(params, banned_token_ids=(*params.banned_token_ids, *EOS))
        for token, p in enumerate(distribution(TARGET, own, PROMPT, list(output))):
            if p > 0:
                going.append(((*output, token), prob * float(p)))
    return out


STOPS = {
    "stop token": SamplingParams(temperature=1.0, max_new_tokens=5),
    "least length": SamplingParams(temperature=1.0, max_new_tokens=5, min_new_tokens=3),
    "biases and bans": SamplingParams(
        temperature=0.9, max_new_tokens=5, logit_bias={0: 0.7, 2: -0.5}, banned_token_ids=(1,), min_new_tokens=2
    ),
}


PAIRS = [(drafter, rule) for drafter in DRAFTERS for rule in RULES]


def half(odd: int) -> list[Any]:
    """Every drafter with two rules and every rule with two or three drafters; the other half is long."""
    places = [i // len(RULES) + i % len(RULES) for i in range(len(PAIRS))]
    return [
        pytest.param(*pair, marks=[] if place % 2 == odd else [pytest.mark.long])
        for pair, place in zip(PAIRS, places, strict=True)
    ]


@pytest.mark.parametrize(("params", "drafter", "rule"), [([*STOPS][i % 3], *pair) for i, pair in enumerate(PAIRS)])
def test_outputs_that_end_by_themselves_have_the_targets_law(params: str, drafter: str, rule: str) -> None:
    assert outcomes(STOPS[params], drafter, rule, enumerated(params))[0] > ALPHA


# -- processors that meet what would never be written -------------------------------------------------------------------


class Grammar:
    """Allows 0 or 3 first, then anything but what stands last; knows no text that goes on after an end token."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = ids[0, len(PROMPT) :].tolist()
        if 2 in output:
            raise ValueError(f"nothing follows the end, and {output} goes on")
        out = scores.clone()
        if output:
            out[0, output[-1]] = -torch.inf
        else:
            out[0, [1, 2]] = -torch.inf
        return out


class Fails(Grammar):
    """As Grammar, and raises after 3 0."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids[0, len(PROMPT) :].tolist()[-2:] == [3, 0]:
            raise ValueError("3 0")
        return super().__call__(ids, scores)


@cache
def grammatical(failure: tuple[int, ...], length: int = 5) -> dict[Outcome, float]:
    """failure: the last two tokens after which a request fails."""
    out: dict[Outcome, float] = {}
    going: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while going:
        output, prob = going.pop()
        if (output and output[-1] in EOS) or len(output) == length:
            out[output, False] = prob
        elif output[-2:] == failure:
            out[output, True] = prob
        else:
            banned = (output[-1],) if output else (1, 2)
            probs = distribution(TARGET, SamplingParams(temperature=1.0, banned_token_ids=banned), PROMPT, list(output))
            going += [((*output, t), prob * float(p)) for t, p in enumerate(probs) if p > 0]
    return out


@pytest.mark.parametrize(("drafter", "rule"), half(0))
def test_a_grammar_under_drafts_fails_nobody(drafter: str, rule: str) -> None:
    """A processor that raises after a drafted end token: no request fails, and the distribution is that of plain decoding."""
    asked = SamplingParams(temperature=1.0, max_new_tokens=5, processors=(Grammar(),))
    found, seen = outcomes(asked, drafter, rule, grammatical((-1, -1)))
    assert found > ALPHA and not any(failed for _, failed in seen)


@pytest.mark.parametrize(("drafter", "rule"), half(1))
def test_a_failure_belongs_to_its_place(drafter: str, rule: str) -> None:
    """Requests fail exactly if they would have failed in plain decoding, after the same tokens, and with the same odds."""
    asked = SamplingParams(temperature=1.0, max_new_tokens=5, processors=(Fails(),))
    found, seen = outcomes(asked, drafter, rule, grammatical((3, 0)))
    assert found > ALPHA and any(failed for _, failed in seen)


@pytest.mark.parametrize("drafter", ["model", "perfect", "suffix"])
def test_a_greedy_grammar_under_drafts(drafter: str) -> None:
    params = SamplingParams(max_new_tokens=12, processors=(Grammar(),))
    for prompt in ([1], [3, 0], [0, 1, 3], [2, 1]):

        class Own(Grammar):
            def __call__(self, ids: torch.Tensor, scores: torch.Tensor, start: int = len(prompt)) -> torch.Tensor:
                if 2 in ids[0, start:].tolist():
                    raise ValueError("after the end")
                return scores

        own = SamplingParams.of(params, processors=(Own(),))
        want, _, _ = run(TARGET, [prompt], own, eos=EOS)
        ours, steps, engine = run(TARGET, [prompt], own, eos=EOS, drafter=DRAFTERS[drafter]())
        assert ours == want and engine.draft_failures == 0 and all(step.error is None for step in steps)


def test_a_processor_that_fails_on_the_drafts_side_hurts_nobody() -> None:
    """The draft takes raw scores there; the drafter has not failed, and neighbours' seeded texts stay."""

    class DraftOnly:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if scores.argmax() == int(DRAFT.distribution(ids[0].tolist()).argmax()) and not torch.allclose(
                scores[0].softmax(-1), TARGET.distribution(ids[0].tolist()).float(), atol=1e-4
            ):
                self.calls += 1
                raise ValueError("a draft's scores")
            return scores

    bad = DraftOnly()
    params = [
        SamplingParams(temperature=1.0, seed=1, max_new_tokens=20),
        SamplingParams(temperature=1.0, seed=2, max_new_tokens=20, processors=(bad,)),
        SamplingParams(temperature=1.0, seed=3, max_new_tokens=20),
    ]
    drafter = lambda: ModelDrafter(DRAFT, SIZE)  # noqa: E731
    ours, _, engine = run(TARGET, [PROMPT] * 3, params, drafter=drafter())
    assert bad.calls > 0 and engine.draft_failures == 0
    for i in (0, 2):
        alone, _, _ = run(TARGET, [PROMPT], params[i], drafter=drafter())
        assert ours[i] == alone[0]


# -- draft distributions that are not finite ----------------------------------------------------------------------------


class Poisoned(ModelDrafter):
    """A draft model whose distributions turn into something else at one position."""

    def __init__(self, place: int, poison: float) -> None:
        super().__init__(DRAFT, SIZE)
        self.place, self.poison = place, poison

    def propose(self, rows: Rows, budget: Any, policy: LengthPolicy) -> Proposal:
        full = super().propose(rows, budget, policy)
        if full.distributions is not None and full.distribution_index is not None and full.width > self.place:
            full.distributions[full.distribution_index[:, self.place].clamp(min=0)] = self.poison
        return full


@pytest.mark.parametrize(("rule", "place"), [("speculative", 0), ("block", 1)])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 0.0, 0.7])
def test_a_draft_law_that_is_none_is_the_drafters_failure(rule: str, place: int, poison: float) -> None:
    params, firsts, failures = SamplingParams(temperature=1.0, max_new_tokens=3), list[list[int]](), 0
    probs = distribution(TARGET, params, PROMPT, [])

    def look(seeds: range) -> float:
        nonlocal failures
        each = [SamplingParams.of(params, seed=seed) for seed in seeds]
        loop = Loop(TARGET, drafter=Poisoned(place, poison), rule=rule, max_batch_size=64)
        firsts.extend(one[:1] for one in loop.outputs([PROMPT] * len(each), each))
        assert "does not sum to 1" in str(loop.engine.drafter and loop.engine.drafter.last_error)
        failures += loop.engine.draft_failures
        return p_value(firsts, probs, SIZE)

    assert decided(look, SAMPLES, probs) > ALPHA and failures > 0


# -- a seed given twice ---------------------------------------------------------------------------------------------------

SHARP = TableModel(torch.tensor([0.8, 0.1, 0.1]).expand(3, 3, 3))
VAGUE = TableModel(torch.tensor([0.5, 0.3, 0.2]).expand(3, 3, 3))
KEPT: dict[str, Callable[[], Callable[[], Drafter]]] = {
    "ngram_store": lambda: (lambda store: lambda: NgramStoreDrafter(3, store=store))(NgramStore(3)),
    "suffix": lambda: (lambda past: lambda: SuffixDrafter(past))(Memory(max_tokens=512)),
    "cascade": lambda: (
        lambda store: lambda: Cascade([ModelDrafter(VAGUE, 3), NgramStoreDrafter(3, store=store)], [[3, 3], [0, 3]])
    )(NgramStore(3)),
}


def second_requests(kept: str, rule: str) -> float:
    """The p-value of the first tokens of second requests with the seed and prompt of a first one, over what the drafter kept."""
    params, firsts = SamplingParams(temperature=1.0, max_new_tokens=3), list[list[int]]()
    probs = joint(SHARP, params, [1, 0], 2)

    def look(seeds: range) -> float:
        for seed in seeds:
            make, one = KEPT[kept](), SamplingParams.of(params, seed=seed)
            _, second = (run(SHARP, [[1, 0]], one, drafter=make(), rule=rule, gamma=3)[0][0] for _ in range(2))
            firsts.append(second[:2])
        return p_value(firsts, probs, 3)

    return decided(look, SECONDS, probs)


@pytest.mark.parametrize(
    ("kept", "rule"), [(kept, ("speculative", "block")[i % 2]) for i, kept in enumerate(KEPT)] + [("cascade", "block")]
)
def test_a_second_request_of_one_seed_has_the_targets_law(kept: str, rule: str) -> None:
    assert second_requests(kept, rule) > ALPHA


def test_guesses_judged_by_the_numbers_they_were_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a point mass accepted while u < p(x), and a second number for what is written otherwise."""

    def verify(self: object, target: Any, proposal: Proposal, streams: Any) -> Any:
        from foresay.decoding.proposal import Verification

        batch = torch.arange(len(proposal.token_ids))
        uniform = streams.uniform(Purpose.ACCEPT, torch.arange(proposal.width))
        accepted = (uniform < target.prob_of(proposal.token_ids)) & acceptance._valid(proposal)
        count = acceptance._leading(accepted)
        numbers = streams.uniform(Purpose.TARGET, torch.zeros(1, dtype=torch.int64))[:, 0]
        extra = acceptance._extra_tokens(target, proposal, count, numbers)
        return Verification(count, extra[batch], count)

    monkeypatch.setattr(acceptance.Speculative, "verify", verify)
    assert second_requests("ngram_store", "speculative") < ALPHA


@pytest.mark.parametrize("drafter", ["none", "suffix"])
@pytest.mark.parametrize("rule", ["speculative", "block", "match"])
def test_a_seed_writes_the_text_of_plain_decoding_under_look_ups(drafter: str, rule: str) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=30) for seed in range(20)]
    plain, _, _ = run(TARGET, [PROMPT] * 20, params)
    ours, steps, _ = run(
        TARGET, [PROMPT] * 20, params, drafter=DRAFTERS[drafter](), rule=rule, gamma=5, max_batch_size=7
    )
    assert ours == plain
    assert drafter == "none" or any(step.num_accepted for step in steps)


# -- batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        lambda: ConstantLength(5),
        lambda: ConfidenceLength(0.5, low=2, high=6),
        lambda: EntropyLength(1.0, low=2, high=6),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_a_cascades_rows_are_the_same_alone_and_in_a_batch(rule: str, policy: Callable[[], LengthPolicy]) -> None:
    def drafter() -> Cascade:
        return Cascade(
            [ModelDrafter(DRAFT, SIZE), ModelDrafter(SMALL, SIZE), MaxGram()], [[2, 2, 1], [0, 1, 2], [0, 0, 2]]
        )

    prompts = [[1], [2, 3, 1], [0, 1, 2, 3, 0, 1], [3, 3]]
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=25) for seed in range(4)]
    together, _, engine = run(TARGET, prompts, params, drafter=drafter(), rule=rule, policy=policy())
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    for prompt, one, ours in zip(prompts, params, together, strict=True):
        alone, _, _ = run(TARGET, [prompt], one, drafter=drafter(), rule=rule, policy=policy())
        assert alone[0] == ours


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_do_not_switch_a_cascade_off(temperature: float) -> None:
    drafted = []
    for logprobs in (None, 2):
        params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=40, logprobs=logprobs)
        cascade = Cascade([ModelDrafter(DRAFT, SIZE), MaxGram()], [[3, 2], [0, 2]])
        _, steps, engine = run(TARGET, [PROMPT] * 3, params, drafter=cascade)
        assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
        drafted.append(sum(step.num_drafted for step in steps))
    assert drafted[0] == drafted[1] > 0


# -- counts under block ----------------------------------------------------------------------------------------------------


def test_block_tests_every_token() -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=20) for seed in range(20)]
    _, steps, _ = run(TARGET, [PROMPT] * 20, params, drafter=ModelDrafter(DRAFT, SIZE), rule="block", gamma=4)
    whole = [step for step in steps if step.finish_reason is None]
    assert all(step.num_tested == step.num_drafted for step in whole)
    assert any(step.num_accepted + 1 < step.num_tested for step in whole)
