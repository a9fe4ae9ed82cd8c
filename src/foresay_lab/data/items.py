"""One prompt of a data set, and its conversion to the input of a tokenizer.

Owns the items, their turns and order, and transcripts of messages. Knows neither files nor models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from foresay.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptItem:
    """One prompt of a data set."""

    id: str
    """Stable and unique in its data set: "gsm8k-12", "chat-03", "prompts-7" (the file's stem and the line number from 1)."""
    prompt: str | tuple[Mapping[str, str], ...]
    """A text, or chat messages."""
    category: str = ""
    """Empty if the data set has no categories."""
    followups: tuple[str, ...] = ()
    """The user's later messages, one after each answer, such as the second turns of MT-bench."""
    raw: bool = False
    """True for a text to be continued without the chat template, such as code to complete."""


def as_prompt(item: PromptItem, tokenizer: Any, *, chat: bool) -> Any:
    """Return the item's first turn as `foresay.text.prompts.encode` takes it: messages or a text.

    With `chat`, a text becomes a user message and messages are unchanged. Without it, or if the tokenizer has no chat
    template, a text is unchanged and messages become a transcript (see `transcript`). A raw text is never changed.
    """
    templated = chat and not item.raw and bool(getattr(tokenizer, "chat_template", None))
    if isinstance(item.prompt, str):
        return [_user(item.prompt)] if templated else item.prompt
    return list(item.prompt) if templated else transcript(item.prompt)


def next_turn(item: PromptItem, turn: int, answers: Sequence[str]) -> tuple[Mapping[str, str], ...]:
    """Return the chat messages that prompt turn `turn` (0 is the first), including earlier turns and answers.

    answers: at least the answers to the earlier turns. For a tokenizer without chat template, apply `as_prompt` to the result:
    `as_prompt(replace(item, prompt=next_turn(item, 1, answers)), tokenizer, chat=chat)`. Raises ConfigError for a turn that the
    item does not have, a missing answer and a raw item, which has no messages.
    """
    if item.raw:
        raise ConfigError("is raw: a text to be continued has no chat messages", param="item", value=item.id)
    if not 0 <= turn <= len(item.followups):
        raise ConfigError(f"of item {item.id!r} must be in [0, {len(item.followups)}]", param="turn", value=turn)
    if len(answers) < turn:
        text = f"of item {item.id!r} needs as many earlier answers, not {len(answers)}"
        raise ConfigError(text, param="turn", value=turn)
    messages = [_user(item.prompt)] if isinstance(item.prompt, str) else list(item.prompt)
    for answer, followup in zip(answers[:turn], item.followups, strict=False):
        messages += [{"role": "assistant", "content": answer}, _user(followup)]
    return tuple(messages)


def transcript(messages: Sequence[Mapping[str, str]]) -> str:
    """Return messages as one text for a model without chat template, which ends where the assistant's answer begins.

    The text is "User: ...", "Assistant: ..." and so on, separated by empty lines, with "Assistant:" at the end.
    """
    lines = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return "\n\n".join([*lines, "Assistant:"])


def in_turns(values: Sequence[T], group: Callable[[T], Hashable]) -> list[T]:
    """Order values: the first of every group, then the second of every group, and so on."""
    seen: Counter[Hashable] = Counter()
    turns = []
    for value in values:
        turns.append(seen[group(value)])
        seen[group(value)] += 1
    return [value for _, value in sorted(zip(turns, values, strict=True), key=lambda pair: pair[0])]


def _user(text: str) -> Mapping[str, str]:
    return {"role": "user", "content": text}
