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


GREEDY: list[dict[str, Any]] = [{}] * 3
CASES = [
    *((kind, SAMPLED) for kind in ("trimmed", "normed", "model", *BLOCKS)),  # one of its rows is greedy
    *((kind, GREEDY) for kind in ("head", "DFlash2")),
]


def compare(kind: str, settings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, new: int = 4) -> list[Proposal]:
    """Assert that drafts on pages are those of single passes; return them."""
    reference = made(monkeypatch, pages=False)
    expected = drafts(drafter_of(kind, reference, monkeypatch, False), reference, settings, new)
    target = made(monkeypatch, pages=True)
    drafter = drafter_of(kind, target, monkeypatch, True)
    assert drafter.context.draws_chains
    monkeypatch.setattr(ModelDrafter, "_draw", None)
    found = drafts(drafter, target, settings, new)
    assert found[0] == expected[0] and len(found[1]) == len(expected[1])
    assert all(same(one, other) for one, other in zip(found[1], expected[1], strict=True))
    return found[1]


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=lambda one: one if isinstance(one, str) else f"{one[0]}")
@torch.inference_mode()
def test_drafts_are_those_of_single_passes(
    kind: str, settings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(max(one.num_tokens) for one in compare(kind, settings, monkeypatch)) == 3


@pytest.mark.parametrize("fault", ["positions", "later positions", "convolutions"])
@torch.inference_mode()
def test_a_broken_chain_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: positions stand still, a block does not see its later positions, convolutions reach another row."""
    begin, init = chains._Rows.begin, flat.Buffers.__init__

    def begun(self: Any, *given: Any) -> None:
        begin(self, *given)
        self.buffers.fields[chains._POSITIONS] += 50

    def built(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        if fault == "convolutions":
            self.indices = torch.full_like(self.indices, 9)
        else:
            self.whole = self.visible

    if fault == "positions":
        monkeypatch.setattr(chains._Rows, "begin", begun)
    else:
        monkeypatch.setattr(flat.Buffers, "__init__", built)
    with pytest.raises(AssertionError):
        compare("head" if fault == "positions" else "DFlash2", SAMPLED, monkeypatch)


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
        drafts(drafter, target, GREEDY[:2], 2)
        counts.append(drafter.context.model.inner.paged.captures)
    assert counts[0] == counts[1]


@torch.inference_mode()
def test_more_rows_than_a_captured_step_has_are_drafted_for_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = made(monkeypatch, pages=False)
    expected = drafts(drafter_of("head", reference, monkeypatch, False), reference, GREEDY[:2], 3)
    target = made(monkeypatch, pages=True)
    monkeypatch.setattr(flat, "SIZES", (1,))
    found = drafts(drafter_of("head", target, monkeypatch, True), target, GREEDY[:2], 3)
    assert found[0] == expected[0] and all(map(same, found[1], expected[1]))
