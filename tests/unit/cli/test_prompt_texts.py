"""Texts that a user's editor wrote: a byte-order mark is no part of them, and only newlines end a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foresay.cli.common import read_prompt
from foresay.cli.generate import split_lines
from foresay.errors import PromptError
from foresay.server.settings import read_keys
from foresay.spec.settings_file import read_settings
from foresay_lab.replay.arrivals import from_trace

READERS: dict[str, tuple[str, Callable[[Path], Any], Any]] = {
    "a prompt": ("one\r\ntwo\n", lambda path: read_prompt(None, path), "one\r\ntwo\n"),
    "arrivals": ("0.0\n1.5\n", from_trace, [0.0, 1.5]),
    "keys": ("one\ntwo\n", read_keys, frozenset({"one", "two"})),
    "settings": ('target = "t"\n', lambda path: read_settings(path).target, "t"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_is_no_part_of_a_text(
    reader: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORESAY_API_KEYS", raising=False)
    text, read, wanted = READERS[reader]
    file = tmp_path / "file"
    file.write_bytes((mark + text).encode())
    assert read(file) == wanted


@pytest.mark.parametrize("other", ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\r"])
def test_a_prompt_may_contain_what_is_no_newline(other: str) -> None:
    assert split_lines(f"a{other}b\r\nc\n\n \t\nd") == [f"a{other}b", "c", "d"]


def test_a_file_without_a_prompt() -> None:
    with pytest.raises(PromptError, match="no line"):
        split_lines("\n \r\n")
