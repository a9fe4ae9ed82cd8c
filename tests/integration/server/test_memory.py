"""Texts that a server keeps: later requests draft from them, those of another key do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foresay
from foresay.errors import ConfigError, VocabularyMismatchError
from foresay.spec.remembering import remembering
from helpers import tiny
from helpers.families import make
from helpers.refusals import refused
from helpers.serving import Running

PROMPT = list(range(70, 90))


@pytest.fixture
def started(chat_folder: Path) -> Iterator[Any]:
    begun: list[Running] = []

    def start(memory: Path, drafter: str = "auto", prompts: bool = True, **settings: Any) -> Running:
        generator = foresay.load(
            str(chat_folder), drafter=drafter, memory=memory, memory_prompts=prompts, num_draft_tokens=8
        )
        begun.append(Running(generator, **settings))
        return begun[-1]

    yield start
    for one in begun:
        one.close()
        assert one.model.memories
        one.model.memories[0].close()


def passes(running: Running, key: str = "", **more: Any) -> tuple[int, str]:
    """(target passes, text) of a completion."""
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "foresay": {"stats": True}, **more}
    answer = running.post("/v1/completions", headers={"Authorization": f"Bearer {key}"} if key else None, **body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    memory = running.model.memories[0]
    assert memory is not None
    memory.flush()
    return choice["foresay"]["passes"], choice["text"]


def test_a_repeated_request_takes_fewer_passes_also_after_a_restart(started: Any, tmp_path: Path) -> None:
    first = started(tmp_path / "m")
    before = passes(first)
    after = passes(first)
    assert after[1] == before[1] and after[0] < before[0] / 2
    assert first.count("memory_tokens") > 2 * 50 and first.count("memory_bytes") == 8 * first.count("memory_tokens")
    assert first.count("memory_writes") == 1 and first.count("memory_dropped_texts") == 0
    assert first.count("memory_accepted_tokens") > 20 and first.count("memory_drafts") > 0
    first.close()
    first.model.memories[0].close()
    again = started(tmp_path / "m")
    again.model.memories[0].prepare("")
    again.model.memories[0].flush()
    assert passes(again) == after


@pytest.mark.parametrize("shared", [False, True])
def test_requests_of_another_key_draft_from_nothing(shared: bool, started: Any, tmp_path: Path) -> None:
    """Neither do their passes depend on the texts; with memory_shared they do (control)."""
    running = started(tmp_path / "m", keys=frozenset({"one", "two"}), memory_shared=shared)
    alone = passes(running, "two", prompt=PROMPT[::-1])
    before = passes(running, "one")
    other = passes(running, "two")
    assert other[1] == before[1] and (other[0] < before[0] / 2) == shared
    assert passes(running, "one")[0] < before[0] / 2
    assert alone[0] > 0
    names = list(running.model.memories[0].owners())
    assert len(names) == (1 if shared else 2) and not any(key in name for name in names for key in ("one", "two"))


def test_prompts_are_left_out_on_demand(started: Any, tmp_path: Path) -> None:
    running = started(tmp_path / "m", prompts=False)
    _, text = passes(running, echo=True)
    memory = running.model.memories[0]
    kept = [one.tolist() for texts in memory.owners().values() for one in texts]
    assert len(kept) == 1 and len(kept[0]) == 30 and kept[0] != PROMPT[: len(kept[0])]
    assert text


def test_a_method_chosen_by_a_client_reads_no_memory(started: Any, tmp_path: Path) -> None:
    running = started(tmp_path / "m")
    before = passes(running)
    chosen = passes(running, foresay={"stats": True, "drafter": "suffix", "length": 8})
    assert chosen == before, "a method that a client chooses is the same for every client"


def test_memories_of_other_models_are_refused(started: Any, tmp_path: Path, chat_folder: Path) -> None:
    started(tmp_path / "m")
    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.add_tokens(["another"])
    other = tmp_path / "other"
    make("llama", vocab_size=len(tokenizer)).save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(VocabularyMismatchError, match="another vocabulary"):
        foresay.load(str(other), memory=tmp_path / "m")


def test_a_draft_model_is_used_where_nothing_matches(started: Any, tmp_path: Path, chat_folder: Path) -> None:
    running = started(tmp_path / "m", drafter=f"model({chat_folder})")
    before = passes(running)
    assert before[0] < 15, "its own draft model"
    assert passes(running)[1] == before[1]
    assert running.count("memory_accepted_tokens") > 10


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        ("suffix", "suffix(memory=/m)"),
        ("suffix(scale=2, keep=true)", "suffix(scale=2, memory=/m)"),
        ("suffix_tree(branches=2)", "suffix_tree(branches=2, memory=/m)"),
        ("hybrid(suffix, head=x; k=3)", "hybrid(suffix(memory=/m), head=x, k=3)"),
        ("model(x)", "hybrid(suffix(memory=/m), model(x))"),
    ],
)
def test_expressions(drafter: str, expected: str) -> None:
    assert remembering(drafter, "/m") == expected


@pytest.mark.parametrize(
    ("drafter", "param", "value"),
    [
        *((one, "memory", "/m") for one in ("none", "prompt_lookup", "max_gram")),
        ("hybrid(max_gram, head=x)", "drafter", "max_gram"),
    ],
)
def test_drafters_without_a_memory(drafter: str, param: str, value: str) -> None:
    with refused(param, value):
        remembering(drafter, "/m")


def test_arguments_that_contradict(chat_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a drafter that is an expression"):
        foresay.load(str(chat_folder), drafter=lambda: None, memory=tmp_path / "m")  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="as an expression"):
        foresay.load(str(chat_folder), str(chat_folder), memory=tmp_path / "m")
