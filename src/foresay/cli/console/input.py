"""Reading entries: lines joined to messages, with editing and history on a terminal, plainly elsewhere.

A line that ends in a backslash continues on the next. A block between three double quotes is a message as it is, even if it
looks like a command.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

from foresay.errors import PromptError

PROMPT, MORE = "> ", ". "
_BLOCK = '"""'
Words = Mapping[str, Callable[[], Iterable[str]]]
"""Values of each command, for completion."""


class Entry(NamedTuple):
    """A message or a command; a block is never a command."""

    text: str
    block: bool = False


def is_open(text: str) -> bool:
    """True if the text continues on another line."""
    if text.lstrip().startswith(_BLOCK):
        return not text.strip()[len(_BLOCK) :].endswith(_BLOCK)
    return text.endswith("\\") and not text.endswith("\\\\")


def entry(text: str) -> Entry:
    """Return the entry of joined lines, without the marks that joined them. The end of the input closes a block."""
    bare = text.strip()
    if bare.startswith(_BLOCK):
        inner = bare[len(_BLOCK) :].removesuffix(_BLOCK)
        return Entry(inner.removeprefix("\n").removesuffix("\n"), block=True)
    return Entry(re.sub(r"(?<!\\)\\(\n|\Z)", r"\1", text).strip("\n"))


class Reader:
    """Reads one message or command at a time: by a line editor on a terminal, else lines of standard input.

    The editor has a history, Ctrl-R, completion with Tab, and Alt-Enter for a new line.
    """

    def __init__(self, words: Words, *, keep_history: bool) -> None:
        self._typed = sys.stdin is not None and sys.stdin.isatty()
        self._editor: PromptSession[str] | None = None
        if self._typed and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
            self._editor = PromptSession(
                PROMPT,
                multiline=True,
                prompt_continuation=MORE,
                history=_history(history_file() if keep_history else None),
                completer=_Completer(words),
                complete_while_typing=False,
                complete_style=CompleteStyle.READLINE_LIKE,
                key_bindings=_keys(),
                enable_suspend=True,
            )

    @property
    def left(self) -> str:
        """Text typed before Ctrl-C."""
        return "" if self._editor is None else self._editor.default_buffer.text

    def read(self) -> Entry:
        """Return the next entry. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C, PromptError unless it is UTF-8."""
        text = self._line(PROMPT) if self._editor is None else self._editor.prompt()
        if text is None:
            raise EOFError
        while self._editor is None and is_open(text) and (more := self._line(MORE)) is not None:
            text += "\n" + more
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise PromptError("the text is not UTF-8") from None
        return entry(text)

    def _line(self, prompt: str) -> str | None:
        if sys.stdin is None:
            return None
        if self._typed:
            click.echo(prompt, nl=False, err=True)
        raw = sys.stdin.buffer.readline()
        if not raw:
            if self._typed:
                click.echo(err=True)
            return None
        try:
            return raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise PromptError(f"a line is not UTF-8 text: byte {raw[error.start]:#04x} at {error.start}") from None


def _keys() -> KeyBindings:
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=typing)
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def _newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class _Completer(Completer):
    def __init__(self, words: Words) -> None:
        self._words = words

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        return [Completion(word, start_position=-typed) for word, typed in completions(document.text, self._words)]


def completions(text: str, words: Words) -> list[tuple[str, int]]:
    """Return (word, number of its characters already typed): command names, then values of a command."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return []
    name, space, argument = text[1:].partition(" ")
    if not space:
        return [(f"/{word}", len(text)) for word in words if word.startswith(name)]
    if name not in words:
        return []
    last = re.split(r"[\s(,;=]", argument)[-1]
    return [(word, len(last)) for word in words[name]() if word.startswith(last)]


def history_file() -> Path:
    """Return the file of a user's entries: $XDG_STATE_HOME/foresay/history."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "foresay" / "history"


def _history(path: Path | None) -> History:
    """The history in a file that only its user can read; in memory if there is no file, or it cannot be written."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        with path.open("ab"):
            return FileHistory(path)
    except OSError:
        return InMemoryHistory()
