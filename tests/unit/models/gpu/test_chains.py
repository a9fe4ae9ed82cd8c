"""Chains drawn on the device: tokens and distributions are those of single passes, and outputs those of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import foresay
from foresay.decoding.proposal import Proposal
from foresay.decoding.rows import Rows
from foresay.drafters import ModelDrafter
from foresay.lengths.constant import ConstantLength
from foresay.models.gpu import chains, flat
from helpers.drafting_on_pages import BLOCKS, PROMPTS, SAMPLED, drafter_of, drafts, made
from helpers.support import run


def same(found: Proposal, expected: Proposal) -> bool:
    if list(found.num_tokens) != list(expected.num_tokens):
        return False
    for i, n in enumerate(found.num_tokens):
        if found.token_ids[i, :n].tolist() != expected.token_ids[i, :n].tolist():
            return False
        for j in range(n):
            rows = [-1 if p.distribution_index is None else int(p.distribution_index[i, j]) for p in (found, expected)]
            if (rows[0] < 0) != (rows[1] < 0):
                return False
            if rows[0] >= 0 and found.distributions is not None and expected.distributions is not None:
                torch.testing.assert_close(
                    found.distributions[rows[0]], expected.distributions[rows[1]], rtol=1e-3, atol=1e-5
                )
    return True


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, SAMPLED) for kind in ("head", "trimmed", "normed", "model", *BLOCKS)),  # one of its rows is greedy
        *((kind, [{}] * 3) for kind in ("head", "DFlash2")),
    ],
)
@torch.inference_mode()
def test_drafts_are_those_of_single_passes(
    kind: str, settings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = made(monkeypatch, pages=False)
    expected = drafts(drafter_of(kind, reference, monkeypatch, False), reference, settings)
    target = made(monkeypatch, pages=True)
    drafter = drafter_of(kind, target, monkeypatch, True)
    assert drafter.context.draws_chains
    monkeypatch.setattr(ModelDrafter, "_draw", None)
    found = drafts(drafter, target, settings)
    assert found[0] == expected[0] and len(found[1]) == len(expected[1])
    assert all(same(one, other) for one, other in zip(found[1], expected[1], strict=True))
    assert max(max(one.num_tokens) for one in found[1]) == 3


@torch.inference_mode()
def test_a_chain_whose_positions_stand_still_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    known = chains._Rows.begin

    def begin(self: Any, *given: Any) -> None:
        known(self, *given)
        self.buffers.fields[chains._POSITIONS] += 3

    monkeypatch.setattr(chains._Rows, "begin", begin)
    with pytest.raises(AssertionError):
        test_drafts_are_those_of_single_passes("head", SAMPLED, monkeypatch)


@torch.inference_mode()
def test_a_block_that_does_not_see_its_later_positions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    known = flat.Buffers.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        known(self, *given, **named)
        self.whole = self.visible

    monkeypatch.setattr(flat.Buffers, "__init__", init)
    with pytest.raises(AssertionError):
        test_drafts_are_those_of_single_passes("DFlash2", SAMPLED, monkeypatch)


@torch.inference_mode()
def test_convolutions_that_reach_another_row_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    known = flat.Buffers.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        known(self, *given, **named)
        self.indices = torch.full_like(self.indices, 9)

    monkeypatch.setattr(flat.Buffers, "__init__", init)
    with pytest.raises(AssertionError):
        test_drafts_are_those_of_single_passes("DFlash2", SAMPLED, monkeypatch)


class Longer(ConstantLength):
    """A policy of another package, whose drafts may be longer than those of ours."""

    def budget(self, rows: Rows) -> list[int]:
        return [70 for _ in rows]


@torch.inference_mode()
def test_longer_chains_than_a_captured_one_are_drawn_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    target = made(monkeypatch, pages=True)
    drafter = drafter_of("head", target, monkeypatch, True)
    drawn = []
    monkeypatch.setattr(ModelDrafter, "_draw", lambda self, chain, *_: drawn.append(chain.room))
    params = foresay.SamplingParams(max_new_tokens=80, ignore_eos=True)
    run(target, PROMPTS[2:], [params], drafter=drafter, policy=Longer(3), enough=1)
    assert drawn[0] == [70]


@torch.inference_mode()
def test_steps_are_captured_once_for_a_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    target = made(monkeypatch, pages=True)
    drafter = drafter_of("head", target, monkeypatch, True)
    counts = []
    for _ in range(2):
        drafts(drafter, target, [{}] * 3)
        counts.append(drafter.context.model.inner.paged.captures)
    assert counts[0] == counts[1]


@torch.inference_mode()
def test_more_rows_than_a_captured_step_has_are_drafted_for_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    target = made(monkeypatch, pages=True)
    expected = drafts(drafter_of("head", target, monkeypatch, True), target, [{}] * 3)[0]
    monkeypatch.setattr(flat, "SIZES", (1,))
    drafter = drafter_of("head", target, monkeypatch, True)
    assert drafts(drafter, target, [{}] * 3)[0] == expected
