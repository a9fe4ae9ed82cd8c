"""Clients of a server with keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from helpers.client_server import NAME, SEA, TALK, Served


def test_keys_of_a_file_by_either_header(folders: Path) -> None:
    """Another key is an error of each client's own class."""
    request: dict[str, Any] = {"model": NAME, "messages": TALK, "max_tokens": 64}
    keys = folders / "keys.txt"
    keys.write_text("sk-one\nsk-two\n", encoding="utf-8")
    served = Served(folders / "writer", "--keys-file", str(keys))
    try:
        for key in ("sk-one", "sk-two"):
            done = openai.OpenAI(base_url=served.url, api_key=key).chat.completions.create(**request)
            assert done.choices[0].message.content == SEA
            for named in ({"api_key": key}, {"auth_token": key}):
                message = anthropic.Anthropic(base_url=served.root, **named).messages.create(**request)
                assert message.content[0].text == SEA
        with pytest.raises(openai.AuthenticationError, match="key"):
            openai.OpenAI(base_url=served.url, api_key="none", max_retries=0).chat.completions.create(**request)
        with pytest.raises(anthropic.AuthenticationError, match="key") as refused:
            anthropic.Anthropic(base_url=served.root, api_key="none", max_retries=0).messages.create(**request)
        body: Any = refused.value.body
        assert body["error"]["type"] == "authentication_error"
    finally:
        served.close()
