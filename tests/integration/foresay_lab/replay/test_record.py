"""Recording a target: what plain decoding writes, in any batch, and nothing lost or doubled when it is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from foresay.decoding.randomness import derive
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ContextLengthError, PromptError
from foresay.generation.generator import Generator
from foresay.models.table import TableModel
from foresay.records.recording import Recording
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import RequestBuilder
from foresay_lab.replay.record import Progress, record
from helpers import tiny
from helpers.families import VOCAB, make, make_seq2seq
from helpers.recordings import SAMPLED, Numbers, loaded, numbered
from helpers.refusals import refused


def ids(item: PromptItem) -> list[int]:
    return [int(word) for word in str(item.prompt).split()]


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_outputs_are_those_of_generate(tmp_path: Path, batch: int) -> None:
    generator, items = loaded(batch=batch), numbered(7)
    params = SamplingParams(max_new_tokens=24, stop_token_ids=(36,))
    recording = record(generator, items, tmp_path / "r.jsonl", params)
    by_id = {r.id: r for r in recording.records}
    assert len(by_id) == len(items) == 7
    for item, wanted in zip(items, generator.generate([ids(item) for item in items], params), strict=True):
        one = by_id[item.id]
        assert list(one.output) == wanted.token_ids and list(one.prompt) == ids(item)
        assert (one.finish_reason, one.category) == (wanted.finish_reason.value, item.category)
        assert (one.seed, one.token_probs, one.logprobs, one.source) == (None, None, None, None)
    assert {r.finish_reason for r in recording.records} == {"stop", "length"}, "both kinds of end"
    assert recording.greedy and recording.vocab_size == VOCAB and recording.eos == {0}
    assert recording.settings["max_length"] == generator.target.model.max_length


def test_a_drafter_or_a_lossy_rule_is_not_asked(tmp_path: Path) -> None:
    params, items = SamplingParams(max_new_tokens=12), numbered(4)
    wanted = record(loaded(), items, tmp_path / "a.jsonl", params)
    lossy = loaded(drafter="suffix", rule="lenience(5)")
    assert {r.id: r.output for r in record(lossy, items, tmp_path / "b.jsonl", params).records} == {
        r.id: r.output for r in wanted.records
    }


def test_parameters_are_kept_and_honoured(tmp_path: Path) -> None:
    params = SamplingParams(
        max_new_tokens=30, repetition_penalty=1.2, banned_token_ids=(5,), logit_bias={7: 2.0}, stop=("7 ",)
    )
    generator, items = loaded(), numbered(5)
    recording = record(generator, items, tmp_path / "r.jsonl", params)
    wanted = generator.generate([ids(item) for item in items], params)
    assert sorted(r.output for r in recording.records) == sorted(tuple(g.token_ids) for g in wanted)
    assert any(r.finish_reason == "stop" and r.output[-1] == 7 for r in recording.records)
    assert recording.params == {
        "max_new_tokens": 30,
        "repetition_penalty": 1.2,
        "banned_token_ids": [5],
        "logit_bias": [[7, 2.0]],
        "stop": ["7 "],
    }
    assert record(generator, items, tmp_path / "r.jsonl", params) == recording, "going on with nothing to do"


def test_an_encoder_decoder_keeps_its_sources(tmp_path: Path) -> None:
    generator, items = loaded(make_seq2seq("t5")), numbered(4)
    recording = record(generator, items, tmp_path / "r.jsonl", SamplingParams(max_new_tokens=10))
    for item in items:
        [one] = [r for r in recording.records if r.id == item.id]
        assert one.source == tuple(ids(item)) and one.prompt == (0,)
        assert list(one.output) == generator.generate(ids(item), max_new_tokens=10).token_ids


def test_outputs_are_read_in_the_order_of_their_prompts(tmp_path: Path) -> None:
    """They are written as they end: the shortest first."""
    generator, items = loaded(batch=4), numbered(9)
    params = SamplingParams(max_new_tokens=24, stop_token_ids=(36,))
    recording = record(generator, items, tmp_path / "r.jsonl", params)
    written = [json.loads(line)["id"] for line in (tmp_path / "r.jsonl").read_text().splitlines()[1:]]
    assert [one.id for one in recording.records] == [item.id for item in items] != written


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[Progress] = []
    items, params = numbered(5), SamplingParams(max_new_tokens=6)
    record(loaded(batch=2), items[:3], tmp_path / "r.jsonl", params, on_progress=told.append)
    assert told[0] == Progress(0, 3, 0, 0) and told[-1].done == told[-1].total == 3
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert told[-1].tokens == Recording.load(tmp_path / "r.jsonl").num_tokens


# -- sampled outputs ---------------------------------------------------------------------------------------------------


def test_sampled_outputs_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    items = numbered(6)
    many = record(loaded(batch=4), items, tmp_path / "a.jsonl", SAMPLED)
    one = record(loaded(batch=1), items, tmp_path / "b.jsonl", SAMPLED)
    assert {r.id: (r.output, r.seed) for r in many.records} == {r.id: (r.output, r.seed) for r in one.records}
    assert len({r.output for r in many.records}) == len({r.seed for r in many.records}) == 6
    assert {r.id: r.seed for r in one.records} == {f"p{i}": derive(11, i, 0) for i in range(6)}
    for r in one.records:
        wanted = loaded(batch=1).generate(list(r.prompt), SAMPLED, seed=r.seed)
        assert tuple(wanted.token_ids) == r.output


def test_laws_are_the_processed_ones(tmp_path: Path) -> None:
    """Each kept probability is that of the token under temperature and top-p, computed here from the model's logits."""
    model = make("llama")
    recording = record(loaded(make("llama")), numbered(3), tmp_path / "r.jsonl", SAMPLED)
    unlike = 0
    for r in recording.records:
        whole = torch.tensor([[*r.prompt, *r.output]])
        with torch.inference_mode():
            logits = model(whole).logits[0, len(r.prompt) - 1 : -1]
        assert r.token_probs is not None and len(r.token_probs) == len(r.output) == 20
        for scores, token, kept in zip(logits, r.output, r.token_probs, strict=True):
            probs = (scores.double() / 0.8).softmax(-1)
            order = probs.argsort(descending=True)
            before = probs[order].cumsum(0) - probs[order]
            nucleus = probs.clone()
            nucleus[order[before >= 0.7]] = 0
            assert kept == pytest.approx(float(nucleus[token] / nucleus.sum()), rel=1e-3, abs=1e-6)
            unlike += abs(kept - float(probs[token])) > 1e-3
    assert unlike > 10, "the distribution before top-p is another"


def test_logprobs_and_the_likeliest(tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=8, logprobs=3)
    generator, [item] = loaded(), numbered(1)
    [one] = record(generator, [item], tmp_path / "r.jsonl", params).records
    wanted = generator.generate(ids(item), params).logprobs
    assert wanted is not None and one.logprobs is not None and one.top is not None
    assert list(one.logprobs) == pytest.approx([e.logprob for e in wanted])
    assert [[i for i, _ in place] for place in one.top] == [[i for i, _ in e.top] for e in wanted]
    assert all(len(place) == 3 and place[0][0] == token for place, token in zip(one.top, one.output, strict=True))
    [bare] = record(generator, [item], tmp_path / "s.jsonl", SamplingParams(max_new_tokens=8, logprobs=0)).records
    assert bare.logprobs is not None and bare.top is None


def test_the_law_of_a_table_is_its_own(tmp_path: Path) -> None:
    table = TableModel.random(8, seed=3)
    generator = loaded(table, tokenizer=Numbers(8))
    recording = record(
        generator, numbered(5, high=8), tmp_path / "r.jsonl", SamplingParams(max_new_tokens=30, temperature=1.0)
    )
    for r in recording.records:
        whole = [*r.prompt, *r.output]
        distributions = [
            float(table.distribution(whole[: len(r.prompt) + i])[token]) for i, token in enumerate(r.output)
        ]
        assert r.token_probs == pytest.approx(distributions, rel=1e-4)
    assert recording.settings["seed"] == 0, "no seed is 0, so that it goes on as it began"


# -- follow-ups --------------------------------------------------------------------------------------------------------


def test_follow_ups_wait_for_their_answers(tmp_path: Path) -> None:
    items = [
        PromptItem("a", "5 6 7", followups=("8 9",)),
        PromptItem("b", "10 11"),
        PromptItem("c", "12", followups=("13", "14 15")),
    ]
    generator = loaded(batch=2)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    recording = record(generator, items, tmp_path / "r.jsonl", params)
    by_id = {r.id: r for r in recording.records}
    assert set(by_id) == {"a", "a/2", "b", "c", "c/2", "c/3"}
    assert by_id["a/2"].prompt == (5, 6, 7, *by_id["a"].output, 8, 9)
    assert by_id["c/3"].prompt == (12, *by_id["c"].output, 13, *by_id["c/2"].output, 14, 15)
    asks = {ask.id: ask.token_ids for ask in RequestBuilder(generator).all(items, params)}
    assert set(asks) == set(by_id) and asks["a/2"][:3] == (5, 6, 7)


@pytest.mark.parametrize("kept", range(1, 7))
def test_follow_ups_go_on_where_they_ended(tmp_path: Path, kept: int) -> None:
    items = [
        PromptItem("a", "5 6 7", followups=("8 9",)),
        PromptItem("b", "10 11"),
        PromptItem("c", "12", followups=("13", "14 15")),
    ]
    params = SamplingParams(max_new_tokens=6, temperature=0.9, seed=4)
    wanted = {r.id: r for r in record(loaded(batch=2), items, tmp_path / "r.jsonl", params).records}
    lines = (tmp_path / "r.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "s.jsonl").write_text("".join(lines[: 1 + kept]))
    told: list[Progress] = []
    again = record(loaded(batch=3), items, tmp_path / "s.jsonl", params, on_progress=told.append)
    assert {r.id: (r.prompt, r.output, r.seed) for r in again.records} == {
        name: (r.prompt, r.output, r.seed) for name, r in wanted.items()
    }
    assert len(again.records) == 6
    assert told[-1].resumed == kept and told[-1].done == told[-1].total == 6


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long_is_named(tmp_path: Path) -> None:
    generator = loaded(make("llama", max_position_embeddings=16))
    items = [*numbered(2), PromptItem("endless", " ".join(["5"] * 20))]
    with pytest.raises(
        ContextLengthError, match="prompt 'endless': the prompt has 20 tokens; the model's context is 16"
    ):
        record(generator, items, tmp_path / "r.jsonl", SamplingParams(max_new_tokens=4))
    with refused("prompt", kind=PromptError):
        record(generator, [PromptItem("nothing", "")], tmp_path / "s.jsonl", SamplingParams(max_new_tokens=4))


def test_another_run_does_not_go_on_with_the_file(tmp_path: Path) -> None:
    path, items, params = tmp_path / "r.jsonl", numbered(3), SamplingParams(max_new_tokens=5)
    record(loaded(), items, path, params)
    before = path.read_bytes()
    cases: list[tuple[Generator, list[PromptItem], SamplingParams, bool, str]] = [
        (loaded(), items[:2], params, True, "settings.prompts"),
        (loaded(), [*items[:2], PromptItem("p2", "5 5")], params, True, "settings.prompts"),
        (loaded(), items, SamplingParams(max_new_tokens=6), True, "params.max_new_tokens=5, and this run has 6"),
        (loaded(), items, SamplingParams(max_new_tokens=5, top_k=3, temperature=1.0), True, "params.temperature"),
        (loaded(), items, params, False, "settings.chat"),
        (
            loaded(make("mistral")),
            items,
            params,
            True,
            "model='LlamaForCausalLM', and this run has 'MistralForCausalLM'",
        ),
        (loaded(make("llama").to(torch.bfloat16)), items, params, True, "settings.dtype='float32'"),
        (loaded(tokenizer=Numbers(90)), items, params, True, "tokenizer="),
    ]
    for generator, some, other, chat, message in cases:
        with pytest.raises(ConfigError) as caught:
            record(generator, some, path, other, chat=chat)
        assert message in str(caught.value) and str(path) in str(caught.value), str(caught.value)
    assert path.read_bytes() == before
    sampled = tmp_path / "s.jsonl"
    record(loaded(), items, sampled, SAMPLED)
    with pytest.raises(ConfigError, match=r"settings\.seed=11, and this run has 12"):
        record(loaded(), items, sampled, SamplingParams.of(SAMPLED, seed=12))


def test_bad_requests(tmp_path: Path) -> None:
    path, params = tmp_path / "r.jsonl", SamplingParams(max_new_tokens=2)
    with refused("prompts", ()):
        record(loaded(), [], path, params)
    twice = numbered(1200)
    twice[1100] = PromptItem("p3", "5")
    for items in (twice, [PromptItem("p3", "6"), PromptItem("p3", "5")]):
        with refused("id", "p3"):
            record(loaded(), items, path, params)
    with refused("processors"):
        record(loaded(), numbered(1), path, SamplingParams(processors=(lambda ids, scores: scores,)))
    with refused("tokenizer", kind=PromptError):
        record(loaded(tokenizer=None), numbered(1), path, params)
    assert not path.exists()


# -- killed ------------------------------------------------------------------------------------------------------------

WORKER = """
import sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from foresay_lab.replay.record import record
from helpers.recordings import SAMPLED, loaded, numbered
def hold(progress):
    if progress.done >= {at}:
        print(progress.done, flush=True)
        sys.stdin.read()
record(loaded(batch=3), numbered(16), sys.argv[1], SAMPLED, on_progress=hold)
"""


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n")


@contextmanager
def begun(path: Path, *, at: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A recording in a process of its own, which stands still when at least `at` outputs are written; and how many are."""
    command = [sys.executable, "-c", WORKER.format(paths=[p for p in sys.path if p], at=at), str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=tiny.environment()) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    items = numbered(16)
    wanted = {r.id: r for r in record(loaded(batch=3), items, tmp_path / "whole.jsonl", SAMPLED).records}
    path = tmp_path / "killed.jsonl"
    other = loaded()
    with begun(path, at=5) as (process, written):
        with refused("path"):
            record(other, items, path, SAMPLED)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    survived = lines_of(path) - 1
    assert 5 <= written == survived < 16, "it was killed in mid-run, and what was written is there"
    with open(path, "ab") as file:
        file.write(b'{"id": "p15", "prompt": [1')  # what a kill within a write leaves
    told: list[Progress] = []
    recording = record(loaded(batch=2), items, path, SAMPLED, on_progress=told.append)
    assert len(recording.records) == 16 and {r.id: r.output for r in recording.records} == {
        name: r.output for name, r in wanted.items()
    }
    for r in recording.records:
        other = wanted[r.id]
        assert (r.prompt, r.seed, r.finish_reason, r.category) == (
            *(other.prompt, other.seed),
            *(other.finish_reason, other.category),
        )
        assert r.token_probs == pytest.approx(other.token_probs, rel=1e-4), "of another batch: the last digits"
    assert told[-1].resumed == survived
    assert told[-1].tokens == sum(len(r.output) for r in recording.records[survived:]), "nothing is decoded twice"
    assert all(json.loads(line) for line in path.read_text().splitlines())
