"""Broken versions that the distribution tests must kill, by name, at the same sample size and significance."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foresay.decoding import acceptance, randomness
from foresay.decoding.acceptance import Block, Match, Speculative, make_rule
from foresay.decoding.distributions import Distributions
from foresay.decoding.draws import draw
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.table import TableModel
from helpers.distribution_cells import ALPHA, DRAFT, LENGTH, PARAMS, PROMPT, SAMPLES, SIZE, TARGET
from helpers.reference import joint
from helpers.sequential import value_of
from helpers.support import Loop, ModelDrafter, run

Patch = pytest.MonkeyPatch


def value(rule: object, *, drafter: ModelDrafter | None = None, gamma: int = 3) -> float:
    """The p-value of what a (broken) rule and drafter write."""
    drafter = drafter or ModelDrafter(DRAFT, SIZE)
    loop = Loop(TARGET, drafter=drafter, rule=rule, gamma=gamma, max_batch_size=500)  # type: ignore[arg-type]
    return value_of(loop, PROMPT, PARAMS["plain"], joint(TARGET, PARAMS["plain"], PROMPT, LENGTH), SAMPLES)


@pytest.mark.parametrize("rule", ["speculative", "block", "match", "coupled"])
def test_the_intact_rule_survives(rule: str) -> None:
    assert value(make_rule(rule)) > ALPHA


@pytest.mark.parametrize("rule", [Speculative, Block])
def test_no_residual(rule: type, monkeypatch: Patch) -> None:
    """After a rejection the extra token is drawn from p instead of norm(max(0, p - q))."""
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p / p.sum(-1, keepdim=True))
    assert value(rule()) < ALPHA


@pytest.mark.parametrize("rule", [Speculative, Block])
def test_residual_of_the_wrong_sign(rule: type, monkeypatch: Patch) -> None:
    intact = acceptance.residual
    monkeypatch.setattr(acceptance, "residual", lambda p, q: intact(q, p))
    assert value(rule()) < ALPHA


def _keyed_by_position(self: Streams, purpose: Purpose, offsets: torch.Tensor) -> torch.Tensor:
    position = self.starts[:, None] + offsets
    key = randomness._absorb(randomness._mix(self.seeds), int(purpose))[:, None]
    return randomness._unit(randomness._absorb(key, position))


def _long_blocks() -> float:
    """Block verification over two tokens and six positions, where a step often re-tests the positions of the one before."""
    target, draft = (TableModel.random(2, seed=seed, concentration=0.7) for seed in (1, 2))
    params = SamplingParams(temperature=1.0, max_new_tokens=6)
    loop = Loop(target, drafter=ModelDrafter(draft, 2), rule="block", gamma=5, max_batch_size=500)
    return value_of(loop, [1, 0, 1], params, joint(target, params, [1, 0, 1], 6), SAMPLES)


def test_uniforms_keyed_by_position(monkeypatch: Patch) -> None:
    """Block verification then meets uniforms that already failed in an earlier step."""
    assert _long_blocks() > ALPHA
    monkeypatch.setattr(Streams, "uniform", _keyed_by_position)
    assert _long_blocks() < ALPHA


class _DropsUnlikely(ModelDrafter):
    """Drops a sampled token because its own q is low: that conditions the distribution it was drawn from."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        full = super().propose(rows, budget, policy)
        if full.distributions is None or full.distribution_index is None:
            return full
        q = full.distributions[full.distribution_index.clamp(min=0), full.token_ids]
        keep = (q > 0.25).long().cumprod(-1).sum(-1)
        counts = torch.minimum(keep, torch.tensor(full.num_tokens)).tolist()
        return Proposal(full.token_ids, counts, full.distributions, full.distribution_index)


@pytest.mark.parametrize("rule", [Speculative, Block])
def test_a_dropped_unlikely_token(rule: type) -> None:
    assert value(rule(), drafter=_DropsUnlikely(DRAFT, SIZE)) < ALPHA


def _shifted(rule: type) -> object:
    """Verifies each draft token by the distribution one position further on."""

    class Shifted(rule):  # type: ignore[misc]
        def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
            assert target.probs_row is not None
            index = torch.cat([target.probs_row[:, 1:], target.probs_row[:, -1:]], 1)
            return super().verify(Distributions(target.greedy_ids, target.probs, index), proposal, streams)

    return Shifted()


@pytest.mark.parametrize("rule", [Speculative, Block, Match])
def test_an_index_off_by_one(rule: type) -> None:
    assert value(_shifted(rule)) < ALPHA


@pytest.mark.parametrize("rule", [Speculative, Block])
def test_a_stream_shared_by_draft_and_target(rule: type, monkeypatch: Patch) -> None:
    """The draft draws its tokens with the numbers that will accept them."""
    from foresay.drafters import draft_chain as module

    def shared(distributions: Distributions, streams: Streams, purpose: Purpose, first: int = 0) -> torch.Tensor:
        return draw(distributions, streams, Purpose.ACCEPT, first)

    monkeypatch.setattr(module, "draw", shared)
    assert value(rule()) < ALPHA


def test_match_with_the_drafts_own_numbers(monkeypatch: Patch) -> None:
    """Only the coupled rule may share noise: match with shared uniforms still writes p, so this one must survive."""
    from foresay.drafters import draft_chain as module

    def shared(distributions: Distributions, streams: Streams, purpose: Purpose, first: int = 0) -> torch.Tensor:
        return draw(distributions, streams, Purpose.TARGET, first)

    monkeypatch.setattr(module, "draw", shared)
    assert value(Match()) > ALPHA


def test_a_law_other_than_the_one_drawn_from() -> None:
    """q recorded at another temperature than the tokens were drawn at."""

    class Mislabelled(ModelDrafter):
        def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
            full = super().propose(rows, budget, policy)
            if full.distributions is None:
                return full
            cooler = full.distributions.square() / full.distributions.square().sum(-1, keepdim=True)
            return Proposal(full.token_ids, full.num_tokens, cooler, full.distribution_index)

    assert value(Speculative(), drafter=Mislabelled(DRAFT, SIZE)) < ALPHA


def test_greedy_accepted_by_the_ratio_of_temperature_one() -> None:
    """A greedy target that accepts by p(x) / q(x) of the unscaled distributions writes something else than its argmax."""

    class Ratio(Speculative):
        def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
            warm = [[i] for i in range(len(target.greedy_ids))]
            probs = TARGET.table[PROMPT[-2], PROMPT[-1]].float().expand(len(warm), -1)
            index = torch.tensor(warm).expand(-1, target.greedy_ids.shape[1])
            return super().verify(
                Distributions(target.greedy_ids, probs.contiguous(), index.contiguous()), proposal, streams
            )

    plain, _, _ = run(TARGET, [PROMPT], SamplingParams(max_new_tokens=40))
    broken, _, _ = run(
        TARGET, [PROMPT], SamplingParams(max_new_tokens=40, seed=1), drafter=ModelDrafter(DRAFT, SIZE), rule=Ratio()
    )
    intact, _, _ = run(TARGET, [PROMPT], SamplingParams(max_new_tokens=40), drafter=ModelDrafter(DRAFT, SIZE))
    assert intact == plain
    assert broken != plain
