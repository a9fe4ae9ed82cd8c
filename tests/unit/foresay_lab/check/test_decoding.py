"""The run of a check: the recorded outputs come back where a seed or greedy decoding fixes them, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters.stateless import Stateless
from foresay.errors import ContextLengthError
from foresay.generation.generator import Generator
from foresay.lengths import ConstantLength, HeuristicLength, ThroughputLength
from foresay.records.recording import Recording
from foresay_lab.check.compare import text_differences
from foresay_lab.check.decoding import (
    check_settings,
    check_vocabulary,
    decode,
    repeatable,
    settings_of,
    why_not_compared,
)
from foresay_lab.measure.live_run import DraftFailedError
from foresay_lab.replay.record import record
from helpers.families import make_seq2seq
from helpers.recordings import SAMPLED, Numbers, loaded, numbered
from helpers.refusals import refuses

GREEDY = SamplingParams(max_new_tokens=20, stop_token_ids=(36,))
CASCADE = "cascade(self=1, max_gram; k=[[2, 2], [0, 2]])"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    folder, hot = tmp_path_factory.mktemp("recordings"), replace(SAMPLED, temperature=1.5, top_p=1.0)
    made = {"greedy": (None, GREEDY), "sampled": (None, hot), "t5": (make_seq2seq("t5"), GREEDY)}
    return {name: record(loaded(target), numbered(6), folder / name, p) for name, (target, p) in made.items()}


@pytest.fixture
def greedy(recordings: dict[str, Recording]) -> Recording:
    return recordings["greedy"]


class Failing(Stateless):
    """A drafter that fails in every step."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        raise RuntimeError("no drafts")


def differing(generator: Generator, recording: Recording) -> int:
    """Number of outputs that are not the recorded ones."""
    done = decode(generator, recording)
    return len(text_differences(recording.records, [one.token_ids for one in done]))


@pytest.mark.parametrize(
    ("kind", "drafter", "rule", "reason"),
    [
        *(("greedy", drafter, "speculative", None) for drafter in ("none", "self(1)", CASCADE)),
        ("sampled", "none", "speculative", None),
        ("sampled", "suffix", "speculative", None),
        ("sampled", "suffix", "block", None),
        ("sampled", "suffix(keep=true)", "match", None),
        ("sampled", "self(1)", "match", None),
        ("sampled", "self(1)", "speculative", "depends on sampled draft tokens; rule 'match' keeps it"),
        ("sampled", "self(1)", "block", "depends on sampled draft tokens"),
        ("sampled", "suffix", "coupled", "rule 'coupled' samples with other random numbers"),
        ("sampled", "suffix", "typical(0.001, 0.0001)", "rule 'typical' is lossy"),
    ],
)
def test_outputs_are_compared_where_greedy_decoding_or_a_seed_fixes_them(
    recordings: dict[str, Recording], kind: str, drafter: str, rule: str, reason: str | None
) -> None:
    """Where they are not compared, some differ although nothing is wrong."""
    recording, generator = recordings[kind], repeatable(loaded(drafter=drafter, rule=rule))
    why = why_not_compared(recording, generator)
    assert why is None if reason is None else reason in (why or "")
    assert (differing(generator, recording) == 0) is (reason is None)


def test_outputs_of_stops_encoders_and_without_seeds(recordings: dict[str, Recording]) -> None:
    greedy, sampled, t5 = recordings.values()
    seen: list[tuple[int, int]] = []
    assert {one.finish_reason for one in greedy.records} == {"stop", "length"}
    done = decode(repeatable(loaded(drafter="suffix", batch=1)), greedy, lambda *now: seen.append(now))
    assert not text_differences(greedy.records, [one.token_ids for one in done])
    assert seen[-1] == (6, greedy.num_tokens) and seen == sorted(seen)
    assert all(one.source for one in t5.records)
    assert differing(loaded(make_seq2seq("t5"), drafter="suffix", length=4), t5) == 0
    bare = replace(sampled, records=tuple(replace(one, seed=None) for one in sampled.records))
    assert why_not_compared(bare, loaded()) == "the recording is sampled and lacks seeds"


def test_the_length_does_not_depend_on_time(greedy: Recording) -> None:
    assert isinstance(loaded(drafter="suffix").policy, ThroughputLength)
    for drafter, number in {"suffix": 12, "self(1)": 4, CASCADE: 4, "none": 0}.items():
        policy = repeatable(loaded(drafter=drafter)).policy
        assert isinstance(policy, ConstantLength) and policy.num_draft_tokens == number, drafter
    kept = loaded(drafter="suffix", length="heuristic(3)")
    assert repeatable(kept) is kept and isinstance(kept.policy, HeuristicLength)
    assert settings_of(kept, greedy)["length"] == "heuristic(start=3)"
    for length in (None, "4", "heuristic", "confidence(0.4)", "entropy"):
        check_settings("suffix", length)
    refuses(lambda: check_settings("suffix", "throughput(sampled=4)"), "length")
    refuses(lambda: check_settings("hybrid(suffix(memory=texts), model=A)", None), "drafter")


def test_recordings_and_drafters_that_cannot_be_checked(greedy: Recording) -> None:
    check_vocabulary(replace(greedy, tokenizer=None), loaded())
    check_vocabulary(greedy, loaded(tokenizer=Numbers()))
    long = replace(greedy.records[1], prompt=(1,) * 5000)
    with pytest.raises(ContextLengthError, match="prompt 'p1': the prompt has 5000 tokens"):
        decode(loaded(), replace(greedy, records=(greedy.records[0], long)))
    with pytest.raises(DraftFailedError, match="the drafter failed"):
        decode(loaded(drafter=Failing), greedy)
