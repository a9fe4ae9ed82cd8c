"""Sharing between requests: kept texts are drafted, and neither texts of a key nor their lengths affect another key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import foresay
from foresay.spec.remembering import remembering
from foresay.text import schema_compiler
from helpers.refusals import refused, refuses
from helpers.serving import TALK, Running

PROMPT = list(range(70, 130))
KEYS = frozenset({"one", "two"})


def answer(running: Running, key: str, route: str = "completions", **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": 4, "temperature": 0, **more}
    if route == "completions":
        body.setdefault("prompt", PROMPT)
    return running.answer(f"/v1/{route}", headers={"Authorization": f"Bearer {key}"} if key else None, **body)


def cached(running: Running, key: str = "", **more: Any) -> int:
    """Prompt tokens that a request did not have to prefill."""
    usage = answer(running, key, **more)["usage"]
    return int((usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))["cached_tokens"])


def passes(running: Running, key: str = "", **more: Any) -> tuple[int, str]:
    """(target passes, text) of a completion."""
    body = {"max_tokens": 30, "foresay": {"stats": True}, **more}
    (choice,) = answer(running, key, **body)["choices"]
    for memory in running.model.memories:
        memory.flush()
    return choice["foresay"]["passes"], choice["text"]


def trials(running: Running, key: str, **more: Any) -> int:
    """Schemas that were tried for a request; one that its owner has used passes without."""
    with patch.object(schema_compiler, "asdict", side_effect=asdict) as tried:  # of the limits of each trial
        answer(running, key, "chat/completions", messages=TALK, guided_json={"enum": ["a", "b"]}, **more)
    return tried.call_count


KEEPING = [
    "suffix(keep=true)", "suffix_tree(keep=true)", "ngram_store(keep=true)", "hybrid(suffix(keep=true), self(1))",
]  # fmt: skip
"""Drafters that learn from earlier requests."""
SHARED: dict[str, tuple[str, Callable[..., Any]]] = {
    **{drafter: (drafter, passes) for drafter in KEEPING},
    "kept texts": ("suffix", passes),
    "prefixes": ("none", lambda *of, **more: -cached(*of, **more)),
    "schemas that passed": ("none", trials),
}
"""Things that requests share: the drafter, and a number that is smaller once an owner's earlier request is known."""
OWNERS: list[tuple[str, dict[str, str]]] = [(key, salt) for key in sorted(KEYS) for salt in ({}, {"cache_salt": "a"})]


@pytest.mark.parametrize("what", SHARED)
def test_what_requests_share_belongs_to_a_key_and_its_salt(
    what: str, serve: Any, chat_folder: Path, tmp_path: Path
) -> None:
    """With the control that each owner's second request knows its first one."""
    drafter, number = SHARED[what]
    memory, length = tmp_path / "texts" if what == "kept texts" else None, None if drafter == "none" else 8
    loaded = foresay.load(str(chat_folder), drafter=drafter, num_draft_tokens=length, memory=memory)
    running = serve(loaded, keys=KEYS)
    (first,) = {number(running, key, **salt) for key, salt in OWNERS}
    assert all(number(running, key, **salt) < first for key, salt in OWNERS)


@pytest.mark.parametrize(
    ("mode", "same_key", "other_key"), [("key", True, False), ("all", True, True), ("none", False, False)]
)
def test_modes(mode: str, same_key: bool, other_key: bool, serve: Any) -> None:
    running = serve(keys=KEYS, share_prefixes=mode)
    cached(running, "one")
    assert (cached(running, "two") > 0) == other_key
    assert (cached(running, "one") > 0) == same_key


@pytest.mark.parametrize("mode", ["key", "all"])
def test_salts_separate_requests_without_keys(mode: str, serve: Any) -> None:
    running = serve(share_prefixes=mode)
    for prompt in (
        {"prompt": PROMPT},
        {"messages": [{"role": "user", "content": "a" * 60}], "route": "chat/completions"},
        {"input": "b" * 60, "max_output_tokens": 16, "max_tokens": None, "route": "responses"},
    ):
        for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}):
            assert cached(running, **salt, **prompt) == 0, (prompt, salt)
        assert cached(running, cache_salt="a", **prompt) > 0
        assert cached(running, **prompt) > 0, "those without a salt share"


def test_the_first_of_several_outputs_counts(serve: Any) -> None:
    running = serve()
    assert cached(running, n=2) == 0 < cached(running, n=2) < len(PROMPT)


def test_kept_prompts_outlive_a_server_and_belong_to_an_owner(chat_folder: Path, tmp_path: Path, serve: Any) -> None:
    """Prompts that a request names, and beginnings that are used twice."""
    prompts = [[start, *range(70, 170)] for start in range(4)]

    def begun() -> Running:
        loaded = foresay.load(str(chat_folder), drafter="none", keep_prompts=tmp_path / "kept")
        running: Running = serve(loaded, keys=KEYS)
        return running

    first = begun()
    assert cached(first, "one", prompt=prompts[0]) == 0 == cached(first, "one", prompt=prompts[1], prompt_cache_key="k")
    marked = [
        {"role": "user", "content": [{"type": "text", "text": "x" * 100, "cache_control": {"type": "ephemeral"}}]}
    ]
    answer(first, "one", "messages", messages=marked)
    answer(first, "one", "chat/completions", messages=[{**marked[0], "role": "system"}, *TALK[1:]])
    assert [cached(first, "one", prompt=prompts[2]) > 0 for _ in range(2)] == [False, True]
    first.close()
    first.model.generator.close()
    assert len([*(tmp_path / "kept").glob("*.safetensors")]) == 4
    second = begun()
    assert [cached(second, "one", prompt=one) > 0 for one in prompts] == [False, True, True, False]
    assert answer(second, "one", "messages", messages=marked)["usage"]["cache_read_input_tokens"] > 0
    third = begun()
    assert cached(third, "two", prompt=prompts[1]) == 0 == cached(third, "one", prompt=prompts[1], cache_salt="a")


@pytest.fixture
def started(chat_folder: Path, tmp_path: Path) -> Iterator[Any]:
    begun: list[Running] = []

    def start(drafter: str = "auto", prompts: bool = True, **settings: Any) -> Running:
        options: dict[str, Any] = {"memory": tmp_path / "m", "memory_prompts": prompts, "num_draft_tokens": 8}
        begun.append(Running(foresay.load(str(chat_folder), drafter=drafter, **options), **settings))
        return begun[-1]

    yield start
    for one in begun:
        one.close()
        assert one.model.memories
        one.model.memories[0].close()


def test_a_repeated_request_takes_fewer_passes_also_after_a_restart(started: Any) -> None:
    first = started()
    before, after = passes(first), passes(first)
    assert after[1] == before[1] and after[0] < before[0] / 2
    assert first.count("memory_tokens") > 2 * 50 and first.count("memory_bytes") == 8 * first.count("memory_tokens")
    assert first.count("memory_writes") == 1 and first.count("memory_dropped_texts") == 0
    assert first.count("memory_accepted_tokens") > 20 and first.count("memory_drafts") > 0
    chosen = passes(first, foresay={"stats": True, "drafter": "suffix", "length": 8})
    assert chosen == before, "a method that a client chooses is the same for every client"
    first.close()
    first.model.memories[0].close()
    again = started()
    again.model.memories[0].prepare("")
    again.model.memories[0].flush()
    assert passes(again) == after


@pytest.mark.parametrize("shared", [False, True])
def test_requests_of_another_key_draft_from_nothing(shared: bool, started: Any) -> None:
    """With memory_shared they do (control)."""
    running = started(keys=frozenset({"one", "two"}), memory_shared=shared)
    before, other = passes(running, "one"), passes(running, "two")
    assert other[1] == before[1] and (other[0] < before[0] / 2) == shared
    assert passes(running, "one")[0] < before[0] / 2
    names = list(running.model.memories[0].owners())
    assert len(names) == (1 if shared else 2) and not any(key in name for name in names for key in ("one", "two"))


def test_prompts_are_left_out_on_demand(started: Any) -> None:
    running = started(prompts=False)
    assert passes(running, echo=True)[1]
    kept = [one.tolist() for texts in running.model.memories[0].owners().values() for one in texts]
    assert len(kept) == 1 and len(kept[0]) == 30 and kept[0] != PROMPT[: len(kept[0])]


def test_a_draft_model_is_used_where_nothing_matches(started: Any, chat_folder: Path) -> None:
    running = started(drafter=f"model({chat_folder})")
    before = passes(running)
    assert before[0] < 15, "its own draft model"
    assert passes(running)[1] == before[1] and running.count("memory_accepted_tokens") > 10


def test_expressions(chat_folder: Path, tmp_path: Path) -> None:
    for drafter, expected in {
        "suffix": "suffix(memory=/m)",
        "suffix(scale=2, keep=true)": "suffix(scale=2, memory=/m)",
        "suffix_tree(branches=2)": "suffix_tree(branches=2, memory=/m)",
        "hybrid(suffix, head=x; k=3)": "hybrid(suffix(memory=/m), head=x, k=3)",
        "model(x)": "hybrid(suffix(memory=/m), model(x))",
    }.items():
        assert remembering(drafter, "/m") == expected
    for drafter in ("none", "prompt_lookup", "max_gram"):
        refuses(lambda one=drafter: remembering(one, "/m"), "memory", "/m")  # type: ignore[misc]
    with refused("drafter", "max_gram"):
        remembering("hybrid(max_gram, head=x)", "/m")
    folder = str(chat_folder)
    for draft, drafter in ((None, lambda: None), (folder, "auto")):
        with pytest.raises(foresay.ConfigError, match="an expression"):
            foresay.load(folder, draft, drafter=drafter, memory=tmp_path / "m")  # type: ignore[call-overload]
