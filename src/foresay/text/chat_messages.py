"""Chat messages in the form that a chat template reads.

Some templates test for a content that is None, others need a text; some need a call's arguments as an object, others as JSON.
What the template writes decides. Owns these forms; knows neither tokenizers nor token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from foresay.errors import PromptError
from foresay.text.tool_calls.loose_json import repaired

Message: TypeAlias = Mapping[str, Any]
KEEPS_NONE = (
    "{%- set kept = namespace(messages=[]) -%}{%- for one in messages -%}"
    "{%- set kept.messages = kept.messages + [one if one.content is defined else dict(one, content=none)] -%}"
    "{%- endfor -%}{%- set messages = kept.messages %}{{ '' }}"
)
"""The beginning of a template whose messages may have a content of None, which transformers removes."""
Render: TypeAlias = Callable[[Sequence[Message]], str]
"""Returns the text that a template makes of messages. May raise anything."""


def fitted(messages: Sequence[Message], render: Render) -> list[Message]:
    """Return the messages in the first form that the template reads, or in the first of all if it reads none.

    A missing content is None, or "" where the template raises or writes "None". Arguments are objects, or JSON texts where the
    template raises or writes Python's form of an object. Arguments that were cut off are closed, and brackets that are too many
    are dropped. Raises PromptError for arguments that are no object if the template would write them as a JSON string.
    """
    given = with_objects(messages)
    if not any(one.get("content") is None or _calls(one) for one in given):
        return given
    objects = [str(one) for one in _arguments(given) if isinstance(one, Mapping) and one]
    best: Rendered = None
    for form in (given, [_changed(one, _as_text) for one in given]):
        blank: list[Message] = [{**one, "content": ""} if one.get("content") is None else one for one in form]
        found = _rendered(form, render)
        if _has(found, ["None"]):
            found = _clearer(found, _rendered(blank, render), ["None"])
        best = _clearer(best, found, objects)
        if not _has(best, objects):
            break
    texts = [json.dumps(one, ensure_ascii=False) for one in _arguments(given) if isinstance(one, str)]
    if best is not None and _has(best, texts):
        text = f"{unread_arguments(given)} is no JSON object, and the chat template writes it as a string"
        raise PromptError(text, param="messages")
    return given if best is None else best[0]


def with_objects(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of calls as objects; those that are none as they are."""
    return [_changed(one, _as_object) for one in messages]


def unread_arguments(messages: Sequence[Message]) -> str | None:
    """Return where the first arguments are that are no object, such as "messages[1].tool_calls[0].function.arguments"."""
    for i, one in enumerate(with_objects(messages)):
        for j, call in enumerate(_calls(one)):
            if not isinstance(call.get("arguments", {}), Mapping):
                return f"messages[{i}].tool_calls[{j}].function.arguments"
    return None


Rendered: TypeAlias = tuple[list[Message], str] | None


def _rendered(form: list[Message], render: Render) -> Rendered:
    with suppress(Exception):  # a template is a program and may raise anything
        return form, render(form)
    return None


def _has(found: Rendered, signs: Sequence[str]) -> bool:
    """True if the template raised, or wrote one of the signs."""
    return found is None or any(one in found[1] for one in signs)


def _clearer(first: Rendered, second: Rendered, signs: Sequence[str]) -> Rendered:
    """Return the first form, or the second if the template raised at the first or writes fewer of a sign with the second."""
    if first is None or second is None:
        return first or second
    return second if any(first[1].count(one) > second[1].count(one) for one in signs) else first


def _calls(message: Message) -> list[Mapping[str, Any]]:
    """Return the functions of a message's calls."""
    calls = message.get("tool_calls")
    found = [one.get("function", one) for one in calls if isinstance(one, Mapping)] if isinstance(calls, list) else []
    return [one for one in found if isinstance(one, Mapping)]


def _arguments(messages: Sequence[Message]) -> list[Any]:
    """Return the arguments of all calls, None for missing ones."""
    return [call.get("arguments") for one in messages for call in _calls(one)]


def _changed(message: Message, change: Callable[[Any], Any]) -> Message:
    """Return a message with the arguments of its calls changed."""
    if not _calls(message):
        return message
    calls = []
    for call in message["tool_calls"]:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(inner, Mapping) and "arguments" in inner:
            inner = {**inner, "arguments": change(inner["arguments"])}
            call = {**call, "function": inner} if "function" in call else inner
        calls.append(call)
    return {**message, "tool_calls": calls}


def _as_object(arguments: Any) -> Any:
    """Return arguments as an object; those that are none as they are."""
    if not isinstance(arguments, str):
        return arguments
    with suppress(ValueError, RecursionError):
        found = json.loads(arguments or "{}")
        return found if isinstance(found, dict) else arguments
    with suppress(ValueError, RecursionError):
        found = repaired(arguments)
        return arguments if found is None else json.loads(found)
    return arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments
