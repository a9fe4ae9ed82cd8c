"""Sharing between requests: neither the texts of an API key nor their lengths affect what another key receives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import foresay
from foresay.errors import ConfigError
from foresay.server.settings import ServerSettings
from foresay.text.schema_compiler import SchemaCompiler
from helpers.serving import TALK, Running

PROMPT = list(range(70, 130))
KEYS = frozenset({"one", "two"})


@pytest.fixture
def started(chat_folder: Path, serve: Any) -> Any:
    def start(drafter: str = "none", **settings: Any) -> Running:
        length = None if drafter == "none" else 8
        return serve(foresay.load(str(chat_folder), drafter=drafter, num_draft_tokens=length), **settings)

    return start


def answer(running: Running, key: str, route: str = "completions", **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": 4, "temperature": 0, **more}
    if route == "completions":
        body.setdefault("prompt", PROMPT)
    found = running.post(f"/v1/{route}", headers={"Authorization": f"Bearer {key}"} if key else None, **body)
    assert found.status_code == 200, found.text
    return dict(found.json())


def cached(running: Running, key: str, **more: Any) -> int:
    """Prompt tokens that a request did not have to prefill."""
    usage = answer(running, key, **more)["usage"]
    return int((usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))["cached_tokens"])


def test_a_key_learns_nothing_of_anothers_prompts(started: Any) -> None:
    """A secret of four digits after a known beginning could otherwise be confirmed digit by digit."""
    running = started(keys=KEYS)
    secret = [7, 3, 9, 1]
    assert cached(running, "one", prompt=[*PROMPT, *secret, 0]) == 0
    attempts = [
        cached(running, "two", prompt=[*PROMPT[:-1], *secret[:n], digit, 0]) for n in range(4) for digit in range(3)
    ]
    assert attempts[0] == 0 and attempts[1:] != [0] * 11, "its own prompts are shared"
    fresh = started(keys=KEYS)
    alone = [cached(fresh, "two", prompt=[*PROMPT[:-1], *secret[:n], digit, 0]) for n in range(4) for digit in range(3)]
    assert attempts == alone, "as on a server without other users"
    assert cached(running, "one", prompt=[*PROMPT, *secret, 0]) >= len(PROMPT)


@pytest.mark.parametrize(
    ("mode", "same_key", "other_key"), [("key", True, False), ("all", True, True), ("none", False, False)]
)
def test_modes(mode: str, same_key: bool, other_key: bool, started: Any) -> None:
    running = started(keys=KEYS, share_prefixes=mode)
    cached(running, "one")
    assert (cached(running, "two") > 0) == other_key
    assert (cached(running, "one") > 0) == same_key


@pytest.mark.parametrize("mode", ["key", "all"])
@pytest.mark.parametrize(
    ("route", "prompt"),
    [
        ("completions", {"prompt": PROMPT}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 60}]}),
        ("responses", {"input": "a" * 60, "max_output_tokens": 16}),
    ],
)
def test_salts_separate_requests_of_one_key(mode: str, route: str, prompt: dict[str, Any], started: Any) -> None:
    running = started(share_prefixes=mode)
    if route == "responses":
        prompt = {**prompt, "max_tokens": None}
    assert cached(running, "", route=route, cache_salt="a", **prompt) == 0
    assert cached(running, "", route=route, cache_salt="b", **prompt) == 0
    assert cached(running, "", route=route, **prompt) == 0
    assert cached(running, "", route=route, cache_salt="a", **prompt) > 0


def test_without_keys_all_requests_share(started: Any) -> None:
    running = started()
    cached(running, "")
    assert cached(running, "") > 0


KEEPING = [
    "suffix(keep=true)", "suffix_tree(keep=true)", "ngram_store(keep=true)", "hybrid(suffix(keep=true), self(1))",
]  # fmt: skip
"""Drafters that learn from earlier requests."""


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


SHARED: dict[str, tuple[str, Callable[..., int]]] = {
    **{drafter: (drafter, passes) for drafter in KEEPING},
    "kept texts": ("memory", passes),
    "prefixes": ("none", lambda *of, **more: -cached(*of, **more)),
    "schemas that passed": ("none", trials),
}
"""Things that requests share: the drafter, and a number that is smaller once an owner's earlier request is known."""
OWNERS: list[tuple[str, dict[str, str]]] = [
    (key, salt) for key in sorted(KEYS) for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
]


@pytest.mark.parametrize("what", SHARED)
def test_what_requests_share_belongs_to_a_key_and_its_salt(
    what: str, started: Any, chat_folder: Path, tmp_path: Path, serve: Any
) -> None:
    """With the control that each owner's second request knows its first one."""
    drafter, number = SHARED[what]
    if drafter == "memory":
        loaded = foresay.load(str(chat_folder), drafter="suffix", num_draft_tokens=8, memory=tmp_path / "texts")
        running = serve(loaded, keys=KEYS)
    else:
        running = started(drafter, keys=KEYS)
    first = {number(running, key, **salt) for key, salt in OWNERS}
    assert len(first) == 1
    assert all(number(running, key, **salt) < min(first) for key, salt in OWNERS)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="share_prefixes='some' must be one of key, all, none"):
        ServerSettings(share_prefixes="some")
