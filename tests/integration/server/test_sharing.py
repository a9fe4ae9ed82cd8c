"""Sharing between requests: neither the texts of an API key nor their lengths affect what another key receives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import foresay
from foresay.text.schema_compiler import SchemaCompiler
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


def passes(running: Running, key: str, **more: Any) -> int:
    found = answer(running, key, max_tokens=30, foresay={"stats": True}, **more)
    for memory in running.model.memories:
        memory.flush()
    return int(found["choices"][0]["foresay"]["passes"])


def trials(running: Running, key: str, **more: Any) -> int:
    """Schemas that were tried for a request; one that its owner has used passes without."""
    with patch.object(SchemaCompiler, "_try", autospec=True, side_effect=SchemaCompiler._try) as tried:
        answer(running, key, "chat/completions", messages=TALK, guided_json={"enum": ["a", "b"]}, **more)
    return tried.call_count


KEEPING = [
    "suffix(keep=true)", "suffix_tree(keep=true)", "ngram_store(keep=true)", "hybrid(suffix(keep=true), self(1))",
]  # fmt: skip
"""Drafters that learn from earlier requests."""
SHARED: dict[str, tuple[str, Callable[..., int]]] = {
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
    first = {number(running, key, **salt) for key, salt in OWNERS}
    assert len(first) == 1
    assert all(number(running, key, **salt) < min(first) for key, salt in OWNERS)


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
