"""Requests: an error names its prompt, whatever its constructor takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foresay.errors import UnknownNameError
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import RequestBuilder


def test_an_error_says_which_prompt_it_is_about() -> None:
    def refuse(text: str) -> None:
        raise UnknownNameError("token", text, ["b"])

    builder: Any = RequestBuilder(SimpleNamespace(tokenizer=refuse))  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match=r"^prompt 'chat-01': unknown token 'a'\. Known: b\.$"):
        builder.first([PromptItem("chat-01", "a")])
