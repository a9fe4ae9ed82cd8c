"""SpecDec++'s result record: each field against a run of its own, and against transformers' forward passes."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from helpers.recordings import Numbers, loaded, numbered
from helpers.refusals import refused

PARAMS = SamplingParams(max_new_tokens=24, logit_bias={0: 3.0})
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.9, seed=5, logit_bias={0: 3.0})
ITEMS = numbered(4)


def draft() -> Any:
    """A model that often, and not always, agrees with the target."""
    model = make("llama")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.15 * weight.std())
    return model


def drafting(**options: Any) -> Generator:
    return foresay.load(make("llama"), draft(), tokenizer=Numbers(), eos_token_ids=0, num_draft_tokens=3, **options)


def recorded(params: SamplingParams) -> tuple[list[dict[str, Any]], list[list[int]]]:
    generator = drafting()
    requests = RequestBuilder(generator).first(ITEMS)
    return list(specdec_records(generator, requests, params)), [list(one.token_ids) for one in requests]


def distributions(model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> torch.Tensor:
    """[N, V] the model's distribution at each of `tokens`, by one uncached pass of transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    logits[:, 0] += 3.0
    return (logits / temperature).softmax(-1)


def test_the_fields_of_standalone_runs_are_those_of_target_and_draft_alone() -> None:
    records, prompts = recorded(PARAMS)
    target = loaded(eos_token_ids=0).generate(prompts, PARAMS)
    alone = loaded(draft(), eos_token_ids=0).generate(prompts, PARAMS)
    both = drafting(max_batch_size=1).generate(prompts, PARAMS)
    assert [one["tokens"] for one in records] == [one.token_ids for one in target]
    assert [one["generated_length_target"] for one in records] == [len(one.token_ids) for one in target]
    assert [one["generated_length_draft"] for one in records] == [len(one.token_ids) for one in alone]
    assert [one["generated_length"] for one in records] == [len(one.token_ids) for one in both]
    assert [one["num_LM_call"] for one in records] == [one.stats.num_passes for one in both]
    wasted = [one.stats.num_drafted - one.stats.num_accepted for one in both]
    assert [one["num_mismatched_tokens"] for one in records] == wasted and sum(wasted)
    assert any(a["generated_length_draft"] != a["generated_length_target"] for a in records), "they end elsewhere"
    for record, prompt, item in zip(records, prompts, ITEMS, strict=True):
        assert record["prefix"] == prompt and record["prompt"] == item.prompt
        assert [int(word) for word in record["continuation"].split()] == record["tokens"]
        assert min(record["spec_time"], record["target_time"], record["draft_time"]) > 0
    assert [one["id"] for one in records] == [0, 1, 2, 3]


def test_the_draft_tokens_of_a_greedy_record() -> None:
    """The draft model's likeliest token after the target's own text, and whether the target writes it."""
    records, prompts = recorded(PARAMS)
    chances = []
    for record, prompt in zip(records, prompts, strict=True):
        q, p = (distributions(model, prompt, record["tokens"], 1.0) for model in (draft(), make("llama")))
        assert record["draft"] == q.argmax(-1).tolist()
        assert record["p_acc"] == [float(a == b) for a, b in zip(record["draft"], p.argmax(-1).tolist(), strict=True)]
        chances += record["p_acc"]
    assert {0.0, 1.0} == set(chances)


def test_the_acceptance_probabilities_of_a_sampled_record() -> None:
    records, prompts = recorded(SAMPLED)
    drawn = []
    for record, prompt in zip(records, prompts, strict=True):
        q, p = (distributions(model, prompt, record["tokens"], 0.9) for model in (draft(), make("llama")))
        place, ids = torch.arange(len(q)), torch.tensor(record["draft"])
        expected = (p[place, ids] / q[place, ids]).clamp(max=1.0)
        assert len(record["draft"]) == len(record["tokens"])
        assert torch.allclose(torch.tensor(record["p_acc"], dtype=torch.float64), expected, rtol=1e-3)
        drawn += [int(a != b) for a, b in zip(record["draft"], q.argmax(-1).tolist(), strict=True)]
    assert sum(drawn), "drawn, not the likeliest"
    assert len({tuple(one["tokens"]) for one in records}) == 4


@pytest.mark.parametrize("drafter", ["suffix", "none"])
def test_a_drafter_that_cannot_decode_alone_is_refused(drafter: str) -> None:
    generator = loaded(drafter=drafter)
    with refused("drafter"):
        next(specdec_records(generator, RequestBuilder(generator).first(ITEMS), PARAMS))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shell, folder = tiny.Shell(monkeypatch, capsys), tiny.save(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("hello world\none two\n")
    command = ["bench", "b.jsonl", "--model", str(folder), "--dtype", "fp32", "--prompts", "p.txt", "-n", "8"]
    command += ["--repeats", "1", "--drafter", "self(2)", "--specdec", "s.json"]
    assert shell(*command, "--length", "3")[0] == 0
    records = json.loads(Path("s.json").read_text())
    assert [len(one["p_acc"]) for one in records] == [8, 8]
    assert [one["prompt"] for one in records] == ["hello world", "one two"]
    for more in (["--length", "2", "--length", "3"], ["--length", "3", "--batch-size", "2"]):
        assert shell.refused(*command, *more).startswith("--specdec ")
