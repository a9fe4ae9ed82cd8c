from __future__ import annotations

import json

import pytest

from foresay.decoding.outcome import FinishReason, Origin, Step
from foresay.engine.stats import Stats

D, R, B = Origin.DRAFT, Origin.RESIDUAL, Origin.BONUS
TRACE = [
    Step(0, (1, 2, 3), (D, D, R), 4, 2, (1, 1, 1), draft_s=0.2, target_s=0.4, total_s=0.8),
    Step(0, (4, 5, 6, 7, 8), (D, D, D, D, B), 4, 4, (1, 1, 1, 1), batch_size=2, draft_s=0.2, target_s=0.4, total_s=0.8),
    Step(0, (9,), (R,), 3, 0, (2,), batch_size=4, draft_s=0.4, target_s=0.4, total_s=0.8),
    Step(0, (10,), (B,), 0, 0, target_s=0.1, total_s=0.1),
    # a stop cut an accepted block of three after its first token
    Step(0, (11,), (D,), 3, 3, (1, 1, 1), FinishReason.STOP),
]


def test_counts_of_a_trace_by_hand() -> None:
    """A tree tests several tokens at one depth, and seconds are each row's share; a cancellation is no pass."""
    stats = Stats.of(TRACE)
    assert (stats.num_passes, stats.num_tokens, stats.num_drafted) == (5, 11, 14)
    assert (stats.num_tested, stats.num_accepted) == (3 + 4 + 2 + 0 + 3, 2 + 4 + 0 + 0 + 3)
    assert stats.origins == {D: 7, R: 2, B: 2}
    assert stats.accepted_lengths == {2: 1, 4: 1, 0: 2, 3: 1}
    assert stats.tested_at == {0: 5, 1: 3, 2: 3, 3: 1}
    assert stats.accepted_at == {0: 3, 1: 3, 2: 2, 3: 1}
    assert (stats.acceptance_rate, stats.draft_utilization, stats.block_efficiency) == (9 / 12, 9 / 14, 11 / 5)
    assert (stats.discard_rate, stats.verification_rate) == ((14 - 9) / 11, 5 / 11)
    seconds = [0.2 + 0.1 + 0.1, 0.4 + 0.2 + 0.1 + 0.1, 0.8 + 0.4 + 0.2 + 0.1]
    assert [stats.draft_s, stats.target_s, stats.total_s] == pytest.approx(seconds)
    assert Stats.of([*TRACE, Step(0, (), (), 0, 0, finish_reason=FinishReason.CANCELLED)]) == stats


def test_nothing_tested_is_no_rate() -> None:
    for steps, efficiency, rates in (([], None, (None, None)), ([Step(0, (1,), (B,), 0, 0)], 1.0, (0.0, 1.0))):
        stats = Stats.of(steps)
        assert (stats.acceptance_rate, stats.draft_utilization, stats.block_efficiency) == (None, None, efficiency)
        assert (stats.discard_rate, stats.verification_rate) == rates


def test_merging_parts_gives_the_whole() -> None:
    for split in (0, 2, len(TRACE)):
        part, rest = Stats.of(TRACE[:split]), Stats.of(TRACE[split:])
        part.merge(rest)
        whole, merged = Stats.of(TRACE).as_dict(), part.as_dict()
        seconds = [name for name in whole if name.endswith("_s")]
        assert [merged.pop(name) for name in seconds] == pytest.approx([whole.pop(name) for name in seconds])
        assert merged == whole and rest == Stats.of(TRACE[split:])


def test_as_dict_is_json_and_complete_and_from_dict_undoes_it() -> None:
    stats = Stats.of(TRACE)
    out = json.loads(json.dumps(stats.as_dict()))
    again = Stats.from_dict(out)
    assert again.as_dict() == stats.as_dict() == out and +again.origins == +stats.origins
    assert all(getattr(again, name) == getattr(stats, name) for name in {*Stats.__slots__} - {"origins"})
    for name in ("num_passes", "origins", "tested_at"):
        with pytest.raises(KeyError, match=name):
            Stats.from_dict({key: value for key, value in out.items() if key != name})
    assert set(Stats.__slots__) <= set(out)
    assert out["origins"] == {"draft": 7, "residual": 2, "bonus": 2}
    assert out["accepted_lengths"] == {"0": 2, "2": 1, "3": 1, "4": 1} and out["block_efficiency"] == 2.2
