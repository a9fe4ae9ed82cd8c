"""A budget of reasoning gives one text: without drafts, with drafts of any length, in batches, sampled, under a grammar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

import foresay
from foresay import SamplingParams
from foresay.generation.result import Generation
from foresay.text.thinking_budget import BudgetProcessor, ThinkingBudget
from helpers import tiny
from helpers.families import make
from helpers.serving import Running, choice_of, events_of
from helpers.tool_chats import TALK, TEMPLATE

OPENS = TEMPLATE.replace("<assistant>", "<assistant><think>") + "{# </think> #}"
MARKS = ("<think>", "</think>")
PROMPTS = ["hello there", "the number 7 and 8 and 7 and 8", "ab"]
Loaded = dict[str, foresay.Generator]


@pytest.fixture(scope="module", params=["token", "text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reasons at random; its marks are special tokens, or texts of eight tokens."""
    folder, tokenizer = tmp_path_factory.mktemp("thinks"), tiny.tokenizer()
    if request.param == "token":
        tokenizer.add_tokens([AddedToken(one, special=True, normalized=False) for one in MARKS])
        model = make("llama", vocab_size=len(tokenizer), max_position_embeddings=4096)
        texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
        silent = [i for i, one in enumerate(texts) if not one.isascii() or not one.isprintable() or len(one) > 4]
        model.lm_head.weight.data[silent] = 0
    else:
        model = tiny.llama()
    model.save_pretrained(folder)
    tokenizer.chat_template = OPENS
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    """One target with drafters that are right, wrong and absent; a seed's text depends on none of them."""
    own = {"rule": "coupled"}
    found = {"plain": foresay.load(str(folder), drafter="none", **own)}
    for length in (1, 5, 8):
        drafter = "prompt_lookup(min_ngram=1)"
        found[f"ngram {length}"] = foresay.change(found["plain"], drafter=drafter, num_draft_tokens=length)
    found["model 3"] = foresay.load(str(folder), str(folder), drafter="model", num_draft_tokens=3, **own)
    return found


def outputs(generator: foresay.Generator, budget: int, *, batch: bool = True, **params: Any) -> list[Generation]:
    """The outputs of the prompts, decoded as a batch or alone."""
    tokenizer = generator.tokenizer
    prompts = [tokenizer(f"<user>{one}<assistant><think>").input_ids for one in PROMPTS]
    limit = ThinkingBudget(budget, tokenizer)
    each = [SamplingParams(max_new_tokens=28, processors=(limit.after(one),), **params) for one in prompts]
    if batch:
        return list(generator.generate(prompts, each))
    return [generator.generate(one, own) for one, own in zip(prompts, each, strict=True)]


@pytest.mark.parametrize(
    ("params", "budgets"), [({}, (0, 6)), ({"temperature": 1.3, "seed": 7}, (1, 13))], ids=["greedy", "sampled"]
)
def test_one_text_whatever_is_drafted(params: dict[str, Any], budgets: tuple[int, ...], loaded: Loaded) -> None:
    inside = 0
    for budget in budgets:
        wanted = outputs(loaded["plain"], budget, batch=False, **params)
        for one in wanted:
            before, _, after = one.tokenizer.decode(one.token_ids).partition("</think>")
            assert len(one.tokenizer(before).input_ids) == budget and after, (
                "the mark ends the last token of the budget"
            )
        for name, generator in loaded.items():
            found = outputs(generator, budget, **params)
            assert [one.token_ids for one in found] == [one.token_ids for one in wanted], (name, budget)
            for one in found:
                done = 0
                for step in one.steps:
                    inside += done < budget < done + step.num_drafted
                    done += len(step.token_ids)
    assert inside > 2, "the limit lies inside drafts"


def test_a_version_that_counts_drafts_differs(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a count of calls is the count of tokens in plain decoding only."""

    wanted = [one.token_ids[:7] for one in outputs(loaded["plain"], 6)]

    def counted(self: Any, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", -1) + 1
        if self.calls != 6:
            return scores
        token = self._limit.end[0]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)

    monkeypatch.setattr(BudgetProcessor, "__call__", counted)
    monkeypatch.setattr(BudgetProcessor, "forced_tokens", lambda self, output: [])
    assert [one.token_ids[:7] for one in outputs(loaded["plain"], 6)] == wanted, "right without drafts"
    for name in ("ngram 5", "model 3"):
        assert [one.token_ids[:7] for one in outputs(loaded[name], 6)] != wanted, name


def test_the_mark_is_drafted(loaded: Loaded) -> None:
    """The tokens after the first one of a mark of several tokens take one pass."""
    mark = len(ThinkingBudget(0, loaded["plain"].tokenizer).end)
    for one in outputs(loaded["ngram 8"], 0):
        assert len(one.steps[0].token_ids) >= mark and one.steps[0].num_accepted >= mark - 1


@pytest.fixture(scope="module")
def thinks(folder: Path) -> Iterator[Running]:
    with Running(foresay.load(str(folder), drafter="suffix", num_draft_tokens=4)) as running:
        yield running


def chat_of(running: Running, **body: Any) -> dict[str, Any]:
    answer = running.chat(**{"temperature": 0, "max_tokens": 40, **body})
    assert answer.status_code == 200 and "x-foresay-ignored" not in answer.headers, answer.text
    return dict(answer.json())


def test_every_api_has_it(thinks: Running) -> None:
    wanted = chat_of(thinks, thinking_token_budget=5, foresay={"drafter": "none"})["choices"][0]["message"]
    reasoning, content = wanted["reasoning_content"], wanted["content"]
    assert 1 <= len(thinks.model.tokenizer(reasoning).input_ids) <= 5 and content
    several = chat_of(thinks, thinking_token_budget=5, n=3)["choices"]
    assert [one["message"] for one in several] == [wanted] * 3
    assert chat_of(thinks, thinking_budget_tokens=5)["choices"][0]["message"] == wanted
    free = chat_of(thinks)["choices"][0]["message"]
    assert free["reasoning_content"].startswith(reasoning) and len(free["reasoning_content"]) > 5
    assert chat_of(thinks, thinking_token_budget=-1)["choices"][0]["message"] == free
    events = events_of(thinks.chat(temperature=0, max_tokens=40, thinking_token_budget=5, stream=True))
    for field in ("reasoning_content", "content"):
        assert "".join(one["choices"][0]["delta"].get(field) or "" for one in events) == wanted[field]
    own: dict[str, Any] = {"messages": TALK, "thinking": {"type": "enabled", "budget_tokens": 5}}
    blocks = thinks.answer("/v1/messages", temperature=0, max_tokens=40, **own)["content"]
    assert [one.get("thinking", one.get("text")) for one in blocks] == [reasoning, content]
    own = {"input": TALK, "max_output_tokens": 40, "thinking_token_budget": 5}
    items = thinks.answer("/v1/responses", temperature=0, **own)["output"]
    assert [one["content"][0]["text"] for one in items] == [reasoning, content]
    prompt = "<bos><user>hello there<assistant><think>"
    text = choice_of(thinks.complete(prompt, max_tokens=40, thinking_token_budget=5))["text"].replace("</think>", "")
    assert text.startswith(reasoning) and text.endswith(content)


def test_an_answer_by_a_grammar_follows(thinks: Running) -> None:
    (line,) = thinks.model.tokenizer("\n").input_ids
    sampled = {"temperature": 1.5, "seed": 3, "logit_bias": {str(line): -100}}
    for fields in (
        {"guided_choice": ["yes", "no"]},
        {"response_format": {"type": "json_object", "schema": {"enum": [7]}}},
    ):
        found = [
            chat_of(thinks, thinking_token_budget=9, **fields, foresay=one, **sampled)["choices"][0]
            for one in ({"drafter": "none"}, {"drafter": "suffix", "length": 8}, {"drafter": "suffix", "length": 3})
        ]
        assert found[0] == found[1] == found[2]
        assert found[0]["message"]["content"] in ("yes", "no", "7") and found[0]["finish_reason"] == "stop"
