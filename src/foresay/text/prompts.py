"""Prompts as callers may pass them, and their token ids.

A prompt is a text, a list of chat messages, or token ids (a list, a NumPy array or a tensor); a list of prompts is a batch.
Owns the checks of prompts and the use of the chat template. Does not know the model's vocabulary or context length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from foresay.errors import PromptError

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | torch.Tensor
_ROLES = ("system", "user", "assistant", "tool", "developer")


def is_batch(prompt: Any) -> bool:
    """True for a list of prompts or token ids [B, T], False for one prompt.

    Raises PromptError for an empty list and for a type that is neither.
    """
    if isinstance(prompt, str):
        return False
    if isinstance(prompt, torch.Tensor | np.ndarray):
        return prompt.ndim > 1
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise PromptError(
            f"a prompt of type {type(prompt).__name__} is not supported; give a text, messages, token ids or a list of these"
        )
    if not prompt:
        raise PromptError("the prompt is empty; give a text, messages or token ids")
    return isinstance(prompt[0], str | Sequence | torch.Tensor | np.ndarray)


def encode(prompt: Any, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
    """Return one prompt's token ids. A text is encoded unchanged, messages use the chat template, token ids are [T] integers.

    tools: functions that the messages' template describes, in OpenAI's format. Raises PromptError for an empty prompt, ids of
    another shape or type, messages that are malformed or that the template refuses, and texts or messages without a tokenizer
    or template.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError("the prompt is empty; give at least one character")
        ids: list[int] = _require(tokenizer, "a text prompt")(prompt).input_ids
        return ids
    if isinstance(prompt, torch.Tensor | np.ndarray):
        if prompt.ndim != 1 or "int" not in str(prompt.dtype):
            raise PromptError(
                f"token ids of shape {tuple(prompt.shape)} and dtype {prompt.dtype}; give one row of integers"
            )
        prompt = prompt.tolist()
    if isinstance(prompt, bytes | bytearray):
        raise PromptError("the prompt is bytes; decode it to a text first")
    items = list(prompt)
    if not items:
        raise PromptError("the prompt is empty; give a text, messages or token ids")
    if all(isinstance(item, Mapping) for item in items):
        return _chat(items, _require(tokenizer, "chat messages"), tools)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | np.integer):
            raise PromptError(f"prompt item {item!r} of type {type(item).__name__} must be a token id or a message")
    return [int(item) for item in items]


def _chat(messages: Sequence[Message], tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> list[int]:
    for i, message in enumerate(messages):
        if "role" not in message or "content" not in message:
            raise PromptError(f"message {i} has the keys {sorted(message)}; it needs 'role' and 'content'")
        if message["role"] not in _ROLES:
            raise PromptError(f"message {i} has role={message['role']!r}; known roles: {', '.join(_ROLES)}")
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError("this tokenizer has no chat template; pass a text instead of messages")
    try:
        more = {"tools": list(tools)} if tools else {}
        out = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True, **more)
    except Exception as error:  # a template is a program and may raise anything
        raise PromptError(f"the chat template refused the messages: {error}") from error
    ids: list[int] = out["input_ids"]
    return ids


def _require(tokenizer: Any, purpose: str) -> Any:
    if tokenizer is None:
        raise PromptError(f"{purpose} needs a tokenizer, and this model was loaded without one; pass token ids")
    return tokenizer


def as_chat(text: str, tokenizer: Any, *, raw: bool) -> Any:
    """Return a user message if the tokenizer has a chat template and `raw` is False, else the text itself."""
    if raw or not getattr(tokenizer, "chat_template", None):
        return text
    return [{"role": "user", "content": text}]
