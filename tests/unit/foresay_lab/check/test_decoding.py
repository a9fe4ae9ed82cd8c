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
from foresay.errors import ConfigError, ContextLengthError
from foresay.generation.generator import Generator
from foresay.lengths import ConstantLength, HeuristicLength, ThroughputLength
from foresay.records.recording import Recording
from foresay_lab.check.compare import text_differences
from foresay_lab.check.decoding import (
    check_settings,
    check_vocabulary,
    decode,
    digest,
    read_recording,
    repeatable,
    result_of,
    settings_of,
    why_not_compared,
)
from foresay_lab.check.result import CheckResult
from foresay_lab.measure.live_run import DraftFailedError
from foresay_lab.replay.record import record
from helpers import tiny
from helpers.families import make, make_seq2seq
from helpers.recordings import SAMPLED, Numbers, loaded, numbered


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny.one_thread()


class Failing(Stateless):
    """A drafter that fails in every step."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        raise RuntimeError("no drafts")


GREEDY = SamplingParams(max_new_tokens=20, stop_token_ids=(36,))


def recorded(path: Path, params: SamplingParams, target: Any = None, count: int = 6) -> Recording:
    return record(loaded(target), numbered(count), path / "r.jsonl", params)


def differing(generator: Generator, recording: Recording) -> int:
    """Number of outputs that are not the recorded ones."""
    done = decode(generator, recording)
    return len(text_differences(recording.records, [one.token_ids for one in done]))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("drafter", ["none", "suffix", "self(1)", "cascade(self=1, max_gram; k=[[2, 2], [0, 2]])"])
def test_greedy_outputs_are_the_recorded_ones(tmp_path: Path, drafter: str, batch: int) -> None:
    recording = recorded(tmp_path, GREEDY)
    assert {one.finish_reason for one in recording.records} == {"stop", "length"}
    generator = repeatable(loaded(drafter=drafter, batch=batch))
    assert why_not_compared(recording, generator) is None
    assert differing(generator, recording) == 0


def test_another_model_writes_other_outputs(tmp_path: Path) -> None:
    """Negative control."""
    assert differing(loaded(make("llama", 1)), recorded(tmp_path, GREEDY)) > 0


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
    tmp_path: Path, drafter: str, rule: str, reason: str | None
) -> None:
    """Where they are not compared, some differ although nothing is wrong."""
    recording = recorded(tmp_path, replace(SAMPLED, temperature=1.5, top_p=1.0))
    generator = repeatable(loaded(drafter=drafter, rule=rule))
    why = why_not_compared(recording, generator)
    assert why is None if reason is None else reason in (why or "")
    assert (differing(generator, recording) == 0) is (reason is None)


def test_without_seeds_sampled_outputs_are_not_compared(tmp_path: Path) -> None:
    recording = recorded(tmp_path, SAMPLED)
    bare = replace(recording, records=tuple(replace(one, seed=None) for one in recording.records))
    assert why_not_compared(bare, loaded()) == "the recording is sampled and lacks seeds"


def test_an_encoder_decoder(tmp_path: Path) -> None:
    recording = recorded(tmp_path, GREEDY, make_seq2seq("t5"))
    assert all(one.source for one in recording.records)
    assert differing(loaded(make_seq2seq("t5"), drafter="suffix", length=4), recording) == 0


def test_two_runs_have_the_same_counts(tmp_path: Path) -> None:
    recording = recorded(tmp_path, GREEDY)
    seen: list[tuple[int, int]] = []

    def run() -> CheckResult:
        generator = repeatable(loaded(drafter="suffix"))
        done = decode(generator, recording, lambda *now: seen.append(now))
        return result_of(generator, recording, done)

    first = run()
    assert seen[-1] == (6, recording.num_tokens) and seen == sorted(seen)
    assert run() == first
    assert {name: one.prompts for name, one in first.categories.items()} == {"c0": 3, "c1": 3}
    assert first.total.tokens == recording.num_tokens > first.total.passes


def test_the_length_does_not_depend_on_time() -> None:
    adaptive = loaded(drafter="suffix")
    assert isinstance(adaptive.policy, ThroughputLength)
    for drafter, number in {"suffix": 12, "self(1)": 4, "none": 0}.items():
        policy = repeatable(loaded(drafter=drafter)).policy
        assert isinstance(policy, ConstantLength) and policy.num_draft_tokens == number, drafter
    kept = loaded(drafter="suffix", length="heuristic(3)")
    assert repeatable(kept) is kept and isinstance(kept.policy, HeuristicLength)


def test_the_settings_of_a_run(tmp_path: Path) -> None:
    recording = recorded(tmp_path, GREEDY)
    settings = settings_of(repeatable(loaded(drafter="suffix(scale=2)", rule="block")), recording)
    wanted = {"drafter": "suffix(scale=2)", "length": "12", "rule": "block", "prompts": digest(recording.records)}
    assert settings | wanted == settings
    assert settings_of(loaded(drafter="suffix", length="heuristic(3)"), recording)["length"] == "heuristic(start=3)"


@pytest.mark.parametrize("length", ["throughput", "throughput(sampled=4)", "throughput(high=8)"])
def test_a_length_that_adapts_to_time_is_refused(length: str) -> None:
    with pytest.raises(ConfigError, match="adapts to measured time"):
        check_settings("suffix", length)


@pytest.mark.parametrize("length", [None, "4", "heuristic", "confidence(0.4)", "entropy"])
def test_a_length_of_the_row_alone_is_accepted(length: str | None) -> None:
    check_settings("suffix", length)


@pytest.mark.parametrize("drafter", ["suffix(memory=texts)", "hybrid(suffix(memory=texts), model=A)"])
def test_a_memory_is_refused(drafter: str) -> None:
    with pytest.raises(ConfigError, match="keeps texts in a folder"):
        check_settings(drafter, None)


def test_a_recording_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    recording, generator = recorded(tmp_path, GREEDY), loaded()
    check_vocabulary(recording, generator)
    check_vocabulary(replace(recording, tokenizer=None), generator)
    size = generator.target.model.vocab_size
    for changed, message in (
        ({"vocab_size": size + 1}, f"they have {size + 1} and {size} tokens"),
        ({"tokenizer": "0"}, "their tokenizers differ"),
    ):
        with pytest.raises(ConfigError, match=f"the recording is of 'other', and the target is '.+': {message}"):
            check_vocabulary(replace(recording, model="other", **changed), generator)
    check_vocabulary(recording, loaded(tokenizer=Numbers()))


def test_a_log_of_another_project_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"1_2": "1_2_3"}')
    with pytest.raises(ConfigError, match="is a CS-Drafting cache, which lacks the sampling parameters"):
        read_recording(path)


def test_a_limit_takes_the_first_prompts(tmp_path: Path) -> None:
    whole = recorded(tmp_path, GREEDY)
    assert read_recording(tmp_path / "r.jsonl", 2).records == whole.records[:2]
    assert read_recording(tmp_path / "r.jsonl", 99).records == whole.records
    assert digest(whole.records) != digest(whole.records[:2])
    with pytest.raises(ConfigError, match="limit=0"):
        read_recording(tmp_path / "r.jsonl", 0)


def test_a_prompt_that_does_not_fit_is_named(tmp_path: Path) -> None:
    recording = recorded(tmp_path, GREEDY)
    long = replace(recording.records[1], prompt=(1,) * 5000)
    with pytest.raises(ContextLengthError, match="prompt 'p1': the prompt has 5000 tokens"):
        decode(loaded(), replace(recording, records=(recording.records[0], long)))


def test_a_drafter_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DraftFailedError, match="the drafter failed"):
        decode(loaded(drafter=Failing), recorded(tmp_path, GREEDY))
