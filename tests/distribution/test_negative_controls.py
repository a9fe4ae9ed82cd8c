"""Broken versions that the distribution tests must kill, by name, at the same sample size and significance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foresay.decoding import acceptance, randomness
from foresay.decoding.acceptance import Block, Coupled, Match, Speculative
from foresay.decoding.distributions import Distributions
from foresay.decoding.draws import draw
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import Drafter, Rule
from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import draft_chain
from foresay.models.table import TableModel
from helpers.distribution_cells import ALPHA, DRAFT, LENGTH, PARAMS, PROMPT, SIZE, TARGET
from helpers.reference import joint
from helpers.sequential import value_of
from helpers.support import Loop, ModelDrafter, changed, run

Patch = pytest.MonkeyPatch
SAMPLES = 1500


def value(rule: type[Rule], drafter: Drafter | None = None) -> float:
    """The p-value of what a (broken) rule and drafter write."""
    drafter = drafter or ModelDrafter(DRAFT, SIZE)
    loop = Loop(TARGET, drafter=drafter, rule=rule(), gamma=3, max_batch_size=500)
    return value_of(loop, PROMPT, PARAMS["plain"], joint(TARGET, PARAMS["plain"], PROMPT, LENGTH), SAMPLES)


BOTH = pytest.mark.parametrize("rule", [Speculative, Block])


@pytest.mark.parametrize("rule", [Speculative, Block, Match, Coupled])
def test_the_intact_rule_survives(rule: type[Rule]) -> None:
    assert value(rule) > ALPHA


@BOTH
@pytest.mark.parametrize("broken", ["none", "of the wrong sign"])
def test_residuals(broken: str, rule: type[Rule], monkeypatch: Patch) -> None:
    """After a rejection the extra token is drawn from p, or from norm(max(0, q - p)), instead of norm(max(0, p - q))."""
    intact = acceptance.residual
    swapped = lambda p, q: p / p.sum(-1, keepdim=True) if broken == "none" else intact(q, p)  # noqa: E731
    monkeypatch.setattr(acceptance, "residual", swapped)
    assert value(rule) < ALPHA


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


def _drops_unlikely(full: Any) -> dict[str, Any]:
    """A sampled token is dropped because its own q is low: that conditions the distribution it was drawn from."""
    q = full.distributions[full.distribution_index.clamp(min=0), full.token_ids]
    keep = (q > 0.25).long().cumprod(-1).sum(-1)
    return {"num_tokens": torch.minimum(keep, torch.tensor(full.num_tokens)).tolist()}


def _mislabelled(full: Any) -> dict[str, Any]:
    """The recorded q is at another temperature than the tokens were drawn at."""
    return {"distributions": full.distributions.square() / full.distributions.square().sum(-1, keepdim=True)}


@pytest.mark.parametrize(
    ("change", "rule"), [(_drops_unlikely, Speculative), (_drops_unlikely, Block), (_mislabelled, Speculative)]
)
def test_a_dropped_unlikely_token_or_another_distribution_than_the_one_drawn_from(
    change: Callable[[Any], dict[str, Any]], rule: type[Rule]
) -> None:
    assert value(rule, changed(ModelDrafter(DRAFT, SIZE), change)) < ALPHA


@pytest.mark.parametrize("rule", [Speculative, Block, Match])
def test_an_index_off_by_one(rule: type[Rule]) -> None:
    """Each draft token is verified by the distribution one position further on."""

    class Shifted(rule):  # type: ignore[misc, valid-type]
        def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
            assert target.probs_row is not None
            index = torch.cat([target.probs_row[:, 1:], target.probs_row[:, -1:]], 1)
            return super().verify(Distributions(target.greedy_ids, target.probs, index), proposal, streams)

    assert value(Shifted) < ALPHA


@pytest.mark.parametrize(
    ("rule", "purpose"), [(Speculative, Purpose.ACCEPT), (Block, Purpose.ACCEPT), (Match, Purpose.TARGET)]
)
def test_a_stream_shared_by_draft_and_target(rule: type[Rule], purpose: Purpose, monkeypatch: Patch) -> None:
    """The draft draws its tokens with the numbers that will accept them. `match` still writes p, and must survive."""

    def shared(distributions: Distributions, streams: Streams, own: Purpose, first: int = 0) -> torch.Tensor:
        return draw(distributions, streams, purpose, first)

    monkeypatch.setattr(draft_chain, "draw", shared)
    assert (value(rule) < ALPHA) == (rule is not Match)


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

    params = SamplingParams(max_new_tokens=40, seed=1)
    plain = run(TARGET, [PROMPT], params)[0]
    for rule in (Speculative(), Ratio()):
        found = run(TARGET, [PROMPT], params, drafter=ModelDrafter(DRAFT, SIZE), rule=rule)[0]
        assert (found == plain) == (type(rule) is Speculative)
