"""SpecDec++'s result record: each field against a run of its own, and against transformers' forward passes."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.generator import Generator
from foresay_lab.bench.specdec import specdec_records
from foresay_lab.data.requests import RequestBuilder
from helpers import tiny
from helpers.families import make
from helpers.recordings import Numbers, loaded, noisy, numbered
from helpers.refusals import refused

GREEDY = SamplingParams(max_new_tokens=24, logit_bias={0: 3.0})
PARAMS = {"greedy": GREEDY, "sampled": replace(GREEDY, temperature=0.9, seed=5)}
ITEMS = numbered(4)


def draft() -> Any:
    return noisy(seed=3)


def drafting(**options: Any) -> Generator:
    return foresay.load(make("llama"), draft(), tokenizer=Numbers(), eos_token_ids=0, num_draft_tokens=3, **options)


@functools.cache
def recorded(kind: str) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """The records, and the prompts."""
    generator = drafting()
    requests = RequestBuilder(generator).first(ITEMS)
    return list(specdec_records(generator, requests, PARAMS[kind])), [list(one.token_ids) for one in requests]


def distributions(model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> torch.Tensor:
    """[N, V] the model's distribution at each of `tokens`, by one uncached pass of transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    logits[:, 0] += 3.0
    return (logits / temperature).softmax(-1)


def test_the_fields_of_standalone_runs_are_those_of_target_and_draft_alone() -> None:
    records, prompts = recorded("greedy")
    target, alone = (loaded(one, eos_token_ids=0).generate(prompts, GREEDY) for one in (None, draft()))
    both = drafting(max_batch_size=1).generate(prompts, GREEDY)
    for i, (record, prompt, item) in enumerate(zip(records, prompts, ITEMS, strict=True)):
        stats = both[i].stats
        assert record["tokens"] == target[i].token_ids == [int(word) for word in record["continuation"].split()]
        assert record["generated_length_target"] == len(target[i].token_ids)
        assert record["generated_length_draft"] == len(alone[i].token_ids)
        assert (record["generated_length"], record["num_LM_call"]) == (len(both[i].token_ids), stats.num_passes)
        assert record["num_mismatched_tokens"] == stats.num_drafted - stats.num_accepted
        assert (record["id"], record["prefix"], record["prompt"]) == (i, prompt, item.prompt)
        assert min(record["spec_time"], record["target_time"], record["draft_time"]) > 0
    assert sum(one["num_mismatched_tokens"] for one in records)
    assert any(a["generated_length_draft"] != a["generated_length_target"] for a in records), "they end elsewhere"


@pytest.mark.parametrize("kind", PARAMS)
def test_draft_tokens_and_their_acceptance(kind: str) -> None:
    """The draft model's likeliest token after the target's own text, or a drawn one, and its chance to be written."""
    params, (records, prompts) = PARAMS[kind], recorded(kind)
    chances, drawn = [], 0
    for record, prompt in zip(records, prompts, strict=True):
        temperature = params.temperature or 1.0
        q, p = (distributions(model, prompt, record["tokens"], temperature) for model in (draft(), make("llama")))
        index, ids = torch.arange(len(q)), torch.tensor(record["draft"])
        likeliest = ids == q.argmax(-1)
        expected = (p[index, ids] / q[index, ids]).clamp(max=1.0)
        if params.greedy:
            assert bool(likeliest.all())
            expected = (ids == p.argmax(-1)).double()
        torch.testing.assert_close(torch.tensor(record["p_acc"]).double(), expected, rtol=1e-3, atol=1e-5)
        chances += record["p_acc"]
        drawn += int((~likeliest).sum())
    assert {0.0, 1.0} == set(chances) if params.greedy else drawn, "drawn, not the likeliest"
    assert len({tuple(one["tokens"]) for one in records}) == 4


def test_a_drafter_that_cannot_decode_alone_is_refused() -> None:
    for drafter in ("suffix", "none"):
        generator = loaded(drafter=drafter)
        with refused("drafter"):
            next(specdec_records(generator, RequestBuilder(generator).first(ITEMS), GREEDY))


def test_the_command(folder: Path, tmp_path: Path, shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("hello world\none two\n")
    command = ["bench", "b.jsonl", "--model", str(folder), "--dtype", "fp32", "--prompts", "p.txt", "-n", "8"]
    command += ["--repeats", "1", "--drafter", "self(2)", "--specdec", "s.json"]
    assert shell(*command, "--length", "3")[0] == 0
    records = json.loads(Path("s.json").read_text())
    assert [(one["prompt"], len(one["p_acc"])) for one in records] == [("hello world", 8), ("one two", 8)]
    for more in (["--length", "2", "--length", "3"], ["--length", "3", "--batch-size", "2"]):
        assert shell.refused(*command, *more).startswith("--specdec ")
