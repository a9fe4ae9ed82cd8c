"""One prompt of a data set, and the forms in which a tokenizer takes it.

Owns what an item is, its turns, and messages written as plain text. Knows neither files nor models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foresay.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PromptItem:
    """One prompt of a data set."""

    id: str
    """Stable and unique in its set: "gsm8k-12", "chat-03", "prompts-7" (the file's stem and the line, counted from 1)."""
    prompt: str | tuple[Mapping[str, str], ...]
    """A text, or chat messages."""
    category: str = ""
    """Empty where the set has none."""
    followups: tuple[str, ...] = ()
    """The user's later messages, one after each answer, as in the second turns of MT-bench."""
    raw: bool = False
    """A text to be continued as it is, never through the chat template, as in code completion."""


def as_prompt(item: PromptItem, tokenizer: Any, *, chat: bool) -> Any:
    """The item's first turn as `foresay.text.prompts.encode` takes it: messages, or a text.

    With `chat`, a text becomes the user's message and messages stay what they are. Without it, or where the tokenizer has
    no chat template, a text stays a text and messages become a transcript (see `transcript`). A raw text is never changed.
    """
    templated = chat and not item.raw and bool(getattr(tokenizer, "chat_template", None))
    if isinstance(item.prompt, str):
        return [_user(item.prompt)] if templated else item.prompt
    return list(item.prompt) if templated else transcript(item.prompt)


def next_turn(item: PromptItem, turn: int, answers: Sequence[str]) -> tuple[Mapping[str, str], ...]:
    """The chat messages that turn `turn` is prompted with, earlier turns and answers included; 0 is the first turn.

    answers: at least those to the earlier turns. For a tokenizer without chat template these messages go through
    `as_prompt` again: `as_prompt(replace(item, prompt=next_turn(item, 1, answers)), tokenizer, chat=chat)`. Raises
    ConfigError for a turn that the item does not have, a missing answer and a raw item, which is no chat.
    """
    if item.raw:
        raise ConfigError(f"item {item.id!r} is raw: a text to be continued has no chat messages")
    if not 0 <= turn <= len(item.followups):
        raise ConfigError(f"turn={turn} of item {item.id!r} must be in [0, {len(item.followups)}]")
    if len(answers) < turn:
        raise ConfigError(f"turn {turn} of item {item.id!r} needs {turn} earlier answers, and got {len(answers)}")
    messages = [_user(item.prompt)] if isinstance(item.prompt, str) else list(item.prompt)
    for answer, followup in zip(answers[:turn], item.followups, strict=False):
        messages += [{"role": "assistant", "content": answer}, _user(followup)]
    return tuple(messages)


def transcript(messages: Sequence[Mapping[str, str]]) -> str:
    """Messages as one text for a model without chat template; it ends where the assistant's answer begins.

    "User: ...", "Assistant: ..." and so on, with an empty line between them, and "Assistant:" at the end.
    """
    lines = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return "\n\n".join([*lines, "Assistant:"])


def _user(text: str) -> Mapping[str, str]:
    return {"role": "user", "content": text}
