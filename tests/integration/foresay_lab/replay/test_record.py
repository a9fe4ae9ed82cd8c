"""Recording a target: what plain decoding writes, in any batch, and nothing lost or doubled when it is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from foresay.decoding.randomness import derive
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ContextLengthError, PromptError
from foresay.generation.generator import Generator
from foresay.records.recording import Record, Recording
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import RequestBuilder
from foresay_lab.replay.record import Progress, record
from helpers.families import VOCAB, make
from helpers.forks import fork
from helpers.recordings import SAMPLED, Numbers, loaded, numbered
from helpers.refusals import refused, refuses

GREEDY = SamplingParams(max_new_tokens=24, stop_token_ids=(36,))


def ids(item: PromptItem) -> list[int]:
    return [int(word) for word in str(item.prompt).split()]


def by_id(recording: Recording) -> dict[str, Record]:
    return {one.id: one for one in recording.records}


def test_greedy_outputs_are_those_of_generate(tmp_path: Path) -> None:
    """In any batch, whatever drafter or rule the generator has; read in the order of the prompts, written as they end."""
    items, path, seen = numbered(9), tmp_path / "r.jsonl", list[Progress]()
    generator = loaded(batch=4)
    recording = record(generator, items, path, GREEDY, on_progress=seen.append)
    wanted = generator.generate([ids(item) for item in items], GREEDY)
    for one, item, output in zip(recording.records, items, wanted, strict=True):
        assert (one.id, list(one.prompt), list(one.output)) == (item.id, ids(item), output.token_ids)
        assert (one.finish_reason, one.category) == (output.finish_reason.value, item.category)
        assert (one.seed, one.token_probs, one.logprobs, one.source) == (None, None, None, None)
    assert {one.finish_reason for one in recording.records} == {"stop", "length"}, "both kinds of end"
    assert recording.greedy and recording.vocab_size == VOCAB and recording.eos == {0}
    assert recording.settings["max_length"] == generator.target.model.max_length
    written = [json.loads(line)["id"] for line in path.read_text().splitlines()[1:]]
    assert [one.id for one in recording.records] != written
    assert seen[0] == Progress(0, 9, 0, 0) and [one.done for one in seen] == sorted(one.done for one in seen)
    assert seen[-1] == Progress(9, 9, 0, recording.num_tokens)
    for other in (loaded(batch=1), loaded(batch=3, drafter="suffix", rule="lenience(5)")):
        (tmp_path / "other.jsonl").unlink(missing_ok=True)
        assert record(other, items, tmp_path / "other.jsonl", GREEDY).records == recording.records


def test_parameters_are_kept_and_honoured(tmp_path: Path) -> None:
    changed: dict[str, Any] = {
        "max_new_tokens": 30,
        "repetition_penalty": 1.2,
        "banned_token_ids": (5,),
        "stop": ("7 ",),
    }
    params = SamplingParams(**changed, logit_bias={7: 2.0})
    generator, items = loaded(), numbered(5)
    recording = record(generator, items, tmp_path / "r.jsonl", params)
    wanted = generator.generate([ids(item) for item in items], params)
    assert [list(one.output) for one in recording.records] == [one.token_ids for one in wanted]
    assert any(one.finish_reason == "stop" and one.output[-1] == 7 for one in recording.records)
    kept = {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}
    assert recording.params == {**kept, "logit_bias": [[7, 2.0]]}
    assert record(generator, items, tmp_path / "r.jsonl", params) == recording, "going on with nothing to do"
    for count in (3, 0):
        params = SamplingParams(max_new_tokens=8, logprobs=count)
        [one] = record(generator, items[:1], tmp_path / f"{count}.jsonl", params).records
        entries = generator.generate(ids(items[0]), params).logprobs or []
        assert list(one.logprobs or ()) == pytest.approx([entry.logprob for entry in entries])
        likeliest = [[token for token, _ in entry.top] for entry in entries] if count else None
        assert likeliest == (one.top and [[token for token, _ in position] for position in one.top])


def test_sampled_outputs_and_their_probabilities(tmp_path: Path) -> None:
    """Seeds of their own fix them in any batch; probabilities are those under temperature and top-p, by the model's logits."""
    items, model, unlike = numbered(6), make("llama"), 0
    many, one = (record(loaded(batch=n), items, tmp_path / f"{n}.jsonl", SAMPLED) for n in (4, 1))
    assert [(r.output, r.seed) for r in many.records] == [(r.output, r.seed) for r in one.records]
    assert {r.id: r.seed for r in one.records} == {f"p{i}": derive(11, i, 0) for i in range(6)}
    assert len({r.output for r in one.records}) == 6
    for r in one.records:
        assert tuple(loaded(batch=1).generate(list(r.prompt), SAMPLED, seed=r.seed).token_ids) == r.output
        with torch.inference_mode():
            logits = model(torch.tensor([[*r.prompt, *r.output]])).logits[0, len(r.prompt) - 1 : -1]
        assert r.token_probs is not None
        for scores, token, kept in zip(logits, r.output, r.token_probs, strict=True):
            probs = (scores.double() / 0.8).softmax(-1)
            order = probs.argsort(descending=True)
            nucleus = probs.clone()
            nucleus[order[probs[order].cumsum(0) - probs[order] >= 0.7]] = 0
            assert kept == pytest.approx(float(nucleus[token] / nucleus.sum()), rel=1e-3, abs=1e-6)
            unlike += abs(kept - float(probs[token])) > 1e-3
    assert unlike > 10, "the distribution before top-p is another"
    unseeded = record(loaded(), items[:1], tmp_path / "s.jsonl", SamplingParams(max_new_tokens=1, temperature=1.0))
    assert unseeded.settings["seed"] == 0, "no seed is 0, so that it goes on as it began"


def test_follow_ups_wait_for_their_answers_and_go_on_where_they_ended(tmp_path: Path) -> None:
    path, part = tmp_path / "r.jsonl", tmp_path / "s.jsonl"
    items = [
        PromptItem("a", "5 6 7", followups=("8 9",)),
        PromptItem("b", "10 11"),
        PromptItem("c", "12", followups=("13", "14 15")),
    ]
    params = SamplingParams(max_new_tokens=6, temperature=0.9, seed=4, ignore_eos=True)
    wanted = by_id(record(loaded(batch=2), items, path, params))
    assert set(wanted) == {"a", "a/2", "b", "c", "c/2", "c/3"}
    assert wanted["a/2"].prompt == (5, 6, 7, *wanted["a"].output, 8, 9)
    assert wanted["c/3"].prompt == (12, *wanted["c"].output, 13, *wanted["c/2"].output, 14, 15)
    asks = {ask.id: ask.token_ids for ask in RequestBuilder(loaded(batch=2)).all(items, params)}
    assert set(asks) == set(wanted) and asks["a/2"][:3] == (5, 6, 7)
    lines = path.read_text().splitlines(keepends=True)
    for kept in range(1, 7):
        part.write_text("".join(lines[: 1 + kept]))
        seen: list[Progress] = []
        again = by_id(record(loaded(batch=3), items, part, params, on_progress=seen.append))
        assert {name: (r.prompt, r.output, r.seed) for name, r in again.items()} == {
            name: (r.prompt, r.output, r.seed) for name, r in wanted.items()
        }
        assert (seen[-1].resumed, seen[-1].done, seen[-1].total) == (kept, 6, 6)


def test_another_run_does_not_go_on_with_the_file(tmp_path: Path) -> None:
    items, short = numbered(3), SamplingParams(max_new_tokens=5)
    for params in (short, SAMPLED):
        record(loaded(), items, tmp_path / f"{params.seed}.jsonl", params)
    before = (tmp_path / "None.jsonl").read_bytes()
    cases: list[tuple[Generator, list[PromptItem], SamplingParams, str]] = [
        (loaded(), items[:2], short, "settings.prompts"),
        (loaded(), [*items[:2], PromptItem("p2", "5 5")], short, "settings.prompts"),
        (loaded(), items, SamplingParams(max_new_tokens=6), "params.max_new_tokens=5, and this run has 6"),
        (loaded(), items, SamplingParams(max_new_tokens=5, top_k=3, temperature=1.0), "params.temperature"),
        (loaded(make("mistral")), items, short, "model='LlamaForCausalLM', and this run has 'MistralForCausalLM'"),
        (loaded(make("llama").to(torch.bfloat16)), items, short, "settings.dtype='float32'"),
        (loaded(tokenizer=Numbers(90)), items, short, "tokenizer="),
        (loaded(), items, SamplingParams.of(SAMPLED, seed=12), "settings.seed=11, and this run has 12"),
        (loaded(), items, short, "settings.chat"),
    ]
    for generator, some, params, message in cases:
        path = tmp_path / ("11.jsonl" if params.seed else "None.jsonl")
        with pytest.raises(ConfigError) as caught:
            record(generator, some, path, params, chat=message != "settings.chat")
        assert message in str(caught.value) and str(path) in str(caught.value), str(caught.value)
    assert (tmp_path / "None.jsonl").read_bytes() == before


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    path, params = tmp_path / "r.jsonl", SamplingParams(max_new_tokens=2)
    twice = numbered(1200)
    twice[1100] = PromptItem("p3", "5")
    processed = SamplingParams(processors=(lambda ids, scores: scores,))
    for generator, items, given, param, value, kind in (
        (loaded(), [], params, "prompts", (), ConfigError),
        (loaded(), twice, params, "id", "p3", ConfigError),
        (loaded(), [PromptItem("p3", "6"), PromptItem("p3", "5")], params, "id", "p3", ConfigError),
        (loaded(), numbered(1), processed, "processors", ANY, ConfigError),
        (loaded(tokenizer=None), numbered(1), params, "tokenizer", ANY, PromptError),
    ):
        refuses(lambda: record(generator, items, path, given), param, value, kind)  # noqa: B023
        assert not path.exists()
    refuses(lambda: record(loaded(), [PromptItem("nothing", "")], path, params), "prompt", kind=PromptError)
    short, items = loaded(make("llama", max_position_embeddings=16)), [*numbered(2), PromptItem("endless", "5 " * 20)]
    with pytest.raises(ContextLengthError, match="prompt 'endless': the prompt has 20 tokens"):
        record(short, items, tmp_path / "s.jsonl", params)


WORKER = """
import signal, sys
from foresay_lab.replay.record import record
from helpers.recordings import SAMPLED, loaded, numbered
def hold(progress):
    if progress.done >= 5:
        print(progress.done, flush=True)
        signal.pause()
record(loaded(batch=3), numbered(16), sys.argv[1], SAMPLED, on_progress=hold)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """It stands still when at least 5 outputs are written, is killed, and a line is cut as a kill within a write leaves it."""
    items, path, seen = numbered(16), tmp_path / "killed.jsonl", list[Progress]()
    wanted = by_id(record(loaded(batch=3), items, tmp_path / "whole.jsonl", SAMPLED))
    (script := tmp_path / "worker.py").write_text(WORKER)
    os.mkfifo(pipe := tmp_path / "pipe")
    process = fork([str(script), str(path)], pipe)
    try:
        with open(pipe) as out:
            written = int(out.readline())
        with refused("path"):
            record(loaded(), items, path, SAMPLED)
    finally:
        process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    survived = path.read_bytes().count(b"\n") - 1
    assert 5 <= written == survived < 16, "it was killed in mid-run, and what was written is there"
    with open(path, "ab") as file:
        file.write(b'{"id": "p15", "prompt": [1')
    recording = record(loaded(batch=2), items, path, SAMPLED, on_progress=seen.append)
    assert len(recording.records) == 16
    for r in recording.records:
        other = wanted[r.id]
        assert (r.prompt, r.output, r.seed, r.finish_reason, r.category) == (
            *(other.prompt, other.output, other.seed),
            *(other.finish_reason, other.category),
        )
        assert r.token_probs == pytest.approx(other.token_probs, rel=1e-4), "of another batch: the last digits"
    assert seen[-1].resumed == survived
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert seen[-1].tokens == sum(len(line["output"]) for line in lines[1 + survived :]), "nothing is decoded twice"
