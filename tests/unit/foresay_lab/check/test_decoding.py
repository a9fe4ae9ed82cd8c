"""The run of a check: the recorded outputs come back where a seed or greedy decoding fixes them, and only there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from helpers import tiny
from helpers.families import make_seq2seq
from helpers.recordings import SAMPLED, Numbers, loaded, numbered
from helpers.refusals import refuses

GREEDY = SamplingParams(max_new_tokens=20, stop_token_ids=(36,))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny.one_thread()


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(loaded(), numbered(6), tmp_path_factory.mktemp("greedy") / "r.jsonl", GREEDY)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    params = replace(SAMPLED, temperature=1.5, top_p=1.0)
    return record(loaded(), numbered(6), tmp_path_factory.mktemp("sampled") / "r.jsonl", params)


class Failing(Stateless):
    """A drafter that fails in every step."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        raise RuntimeError("no drafts")


def differing(generator: Generator, recording: Recording) -> int:
    """Number of outputs that are not the recorded ones."""
    done = decode(generator, recording)
    return len(text_differences(recording.records, [one.token_ids for one in done]))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("drafter", ["none", "suffix", "self(1)", "cascade(self=1, max_gram; k=[[2, 2], [0, 2]])"])
def test_greedy_outputs_are_the_recorded_ones(greedy: Recording, drafter: str, batch: int) -> None:
    assert {one.finish_reason for one in greedy.records} == {"stop", "length"}
    generator = repeatable(loaded(drafter=drafter, batch=batch))
    assert why_not_compared(greedy, generator) is None
    assert differing(generator, greedy) == 0


def test_progress_is_told_in_order(greedy: Recording) -> None:
    seen: list[tuple[int, int]] = []
    decode(repeatable(loaded(drafter="suffix")), greedy, lambda *now: seen.append(now))
    assert seen[-1] == (6, greedy.num_tokens) and seen == sorted(seen)


@pytest.mark.parametrize(
    ("drafter", "rule", "reason"),
    [
        ("none", "speculative", None),
        ("suffix", "speculative", None),
        ("suffix", "block", None),
        ("suffix(keep=true)", "match", None),
        ("self(1)", "match", None),
        ("self(1)", "speculative", "depends on sampled draft tokens; rule 'match' keeps it"),
        ("self(1)", "block", "depends on sampled draft tokens"),
        ("suffix", "coupled", "rule 'coupled' samples with other random numbers"),
        ("suffix", "typical(0.001, 0.0001)", "rule 'typical' is lossy"),
    ],
)
def test_sampled_outputs_are_compared_where_a_seed_fixes_them(
    sampled: Recording, drafter: str, rule: str, reason: str | None
) -> None:
    """Where they are not compared, some differ although nothing is wrong."""
    generator = repeatable(loaded(drafter=drafter, rule=rule))
    why = why_not_compared(sampled, generator)
    assert why is None if reason is None else reason in (why or "")
    assert (differing(generator, sampled) == 0) is (reason is None)


def test_without_seeds_sampled_outputs_are_not_compared(sampled: Recording) -> None:
    bare = replace(sampled, records=tuple(replace(one, seed=None) for one in sampled.records))
    assert why_not_compared(bare, loaded()) == "the recording is sampled and lacks seeds"


def test_an_encoder_decoder(tmp_path: Path) -> None:
    recording = record(loaded(make_seq2seq("t5")), numbered(6), tmp_path / "r.jsonl", GREEDY)
    assert all(one.source for one in recording.records)
    assert differing(loaded(make_seq2seq("t5"), drafter="suffix", length=4), recording) == 0


def test_the_length_does_not_depend_on_time(greedy: Recording) -> None:
    assert isinstance(loaded(drafter="suffix").policy, ThroughputLength)
    for drafter, number in {"suffix": 12, "self(1)": 4, "none": 0}.items():
        policy = repeatable(loaded(drafter=drafter)).policy
        assert isinstance(policy, ConstantLength) and policy.num_draft_tokens == number, drafter
    kept = loaded(drafter="suffix", length="heuristic(3)")
    assert repeatable(kept) is kept and isinstance(kept.policy, HeuristicLength)
    assert settings_of(kept, greedy)["length"] == "heuristic(start=3)"


@pytest.mark.parametrize("length", [None, "4", "heuristic", "confidence(0.4)", "entropy"])
def test_a_length_of_the_row_alone_is_accepted(length: str | None) -> None:
    check_settings("suffix", length)


@pytest.mark.parametrize(
    ("drafter", "length", "param"),
    [
        *(("suffix", length, "length") for length in ("throughput", "throughput(sampled=4)", "throughput(high=8)")),
        ("suffix(memory=texts)", None, "drafter"),
        ("hybrid(suffix(memory=texts), model=A)", None, "drafter"),
    ],
)
def test_a_length_that_adapts_to_time_and_a_memory_are_refused(drafter: str, length: str | None, param: str) -> None:
    refuses(lambda: check_settings(drafter, length), param)


def test_a_recording_of_another_vocabulary_is_refused(greedy: Recording) -> None:
    generator = loaded()
    check_vocabulary(greedy, generator)
    check_vocabulary(replace(greedy, tokenizer=None), generator)
    check_vocabulary(greedy, loaded(tokenizer=Numbers()))
    changes: list[dict[str, Any]] = [{"vocab_size": generator.target.model.vocab_size + 1}, {"tokenizer": "0"}]
    for change in changes:
        refuses(lambda c=change: check_vocabulary(replace(greedy, model="other", **c), generator), "recording", None)  # type: ignore[misc]


def test_a_prompt_that_does_not_fit_is_named(greedy: Recording) -> None:
    long = replace(greedy.records[1], prompt=(1,) * 5000)
    with pytest.raises(ContextLengthError, match="prompt 'p1': the prompt has 5000 tokens"):
        decode(loaded(), replace(greedy, records=(greedy.records[0], long)))


def test_a_drafter_that_fails_is_an_error(greedy: Recording) -> None:
    with pytest.raises(DraftFailedError, match="the drafter failed"):
        decode(loaded(drafter=Failing), greedy)
