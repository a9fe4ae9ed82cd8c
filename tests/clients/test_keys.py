"""Clients of a server with keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from langchain_openai import ChatOpenAI

from helpers.client_server import NAME, SEA, TALK, Served


@pytest.fixture(scope="module")
def guarded(folders: Path) -> Iterator[Served]:
    keys = folders / "keys.txt"
    keys.write_text("sk-one\nsk-two\n", encoding="utf-8")
    served = Served(folders / "writer", "--keys-file", str(keys))
    yield served
    served.close()


@pytest.mark.parametrize("key", ["sk-one", "sk-two"])
def test_a_key_of_the_file(key: str, guarded: Served) -> None:
    with openai.OpenAI(base_url=guarded.url, api_key=key, max_retries=0) as client:
        done = client.chat.completions.create(model=NAME, messages=TALK, max_tokens=64)
        assert done.choices[0].message.content == SEA
    with anthropic.Anthropic(base_url=guarded.root, api_key=key, max_retries=0) as client:
        assert client.messages.create(model=NAME, messages=TALK, max_tokens=64).content[0].text == SEA
    with anthropic.Anthropic(base_url=guarded.root, auth_token=key, max_retries=0) as client:
        assert client.messages.create(model=NAME, messages=TALK, max_tokens=64).content[0].text == SEA
    chat = ChatOpenAI(model=NAME, base_url=guarded.url, api_key=key, max_tokens=64, max_retries=0)
    assert chat.invoke("What colour is the sea?").text == SEA


def test_another_key(guarded: Served) -> None:
    with (
        openai.OpenAI(base_url=guarded.url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="key"),
    ):
        client.chat.completions.create(model=NAME, messages=TALK, max_tokens=64)
    with (
        anthropic.Anthropic(base_url=guarded.root, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError, match="key") as refused,
    ):
        client.messages.create(model=NAME, messages=TALK, max_tokens=64)
    body: Any = refused.value.body
    assert body["error"]["type"] == "authentication_error"
