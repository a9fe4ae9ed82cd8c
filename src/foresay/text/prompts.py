"""Prompts as callers may pass them, and their token ids.

A prompt is a text, a list of chat messages, or token ids (a list, a NumPy array or a tensor); a list of prompts is a batch.
Owns the checks of prompts and the use of the chat template. Does not know the model's vocabulary or context length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from inspect import signature
from typing import Any, TypeAlias

import numpy as np
import torch
from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foresay.errors import PromptError
from foresay.text.chat_messages import KEEPS_NONE, fitted, unread_arguments, with_objects
from foresay.text.control_tokens import ControlTokens, control_tokens_of
from foresay.text.excess import Limits

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | torch.Tensor
_ROLES = ("system", "user", "assistant", "tool", "developer")
_ENVIRONMENT = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
_TRAINING_TAGS = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""Tags of transformers that mark the assistant's tokens for training."""
_OF_TEMPLATES = {"messages", "namespace", "range", "raise_exception", "strftime_now", "loop"}
"""Variables and functions of every template."""

NO_LIMITS = Limits()
_FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
)
"""Tokens before the text before a gap, before the text after it, and before the text that fills it, by family."""


@dataclass(frozen=True, slots=True)
class FillIn:
    """A prompt for the text between two texts (fill-in-the-middle)."""

    prefix: str
    suffix: str


def is_batch(prompt: Any) -> bool:
    """True for a list of prompts or token ids [B, T], False for one prompt.

    Raises PromptError for an empty list and for a type that is neither.
    """
    if isinstance(prompt, str):
        return False
    if isinstance(prompt, torch.Tensor | np.ndarray):
        return prompt.ndim > 1
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        text = f"a prompt of type {type(prompt).__name__} is not supported; give a text, messages, token ids or a list of these"
        raise PromptError(text, value=prompt)
    if not prompt:
        raise PromptError("the prompt is empty; give a text, messages or token ids")
    return isinstance(prompt[0], str | Sequence | torch.Tensor | np.ndarray)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of the chat template."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the template describes, in OpenAI's format."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as enable_thinking."""
    add_generation_prompt: bool = True
    """True to end the prompt with the beginning of the assistant's message."""
    continue_final_message: bool = False
    """True to end the prompt with the last message, which the output continues. Excludes add_generation_prompt."""
    control_tokens: bool = False
    """True if control tokens in messages and tools are control tokens; by default they are text."""


@lru_cache(maxsize=8)
def _undeclared(template: str) -> frozenset[str]:
    """Return the names that a template reads and does not set. Raises TemplateError."""
    return frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(_TRAINING_TAGS.sub("", template))))


def template_variables(tokenizer: Any, options: ChatOptions) -> frozenset[str]:
    """Return the names of the variables that a chat template reads and that a caller may set. Empty without a template."""
    try:
        found = _undeclared(tokenizer.get_chat_template(tools=list(options.tools) or None))
    except (ValueError, AttributeError, TemplateError):
        return frozenset()
    reserved = set(signature(tokenizer.apply_chat_template).parameters)
    return frozenset(found - reserved - set(tokenizer.special_tokens_map) - _OF_TEMPLATES)


def encode(prompt: Any, tokenizer: Any, options: ChatOptions | None = None, limits: Limits = NO_LIMITS) -> list[int]:
    """Return one prompt's token ids. A text is encoded unchanged, messages use the chat template, token ids are [T] integers.

    options: those of the template, for messages. limits: on the text, or on what a template makes of messages. Raises PromptError
    for an empty prompt, ids of another shape or type, messages that are malformed or that the template refuses, and texts or
    messages without a tokenizer or template; what the limits raise. A result may have more tokens than they permit.
    """
    if isinstance(prompt, FillIn):
        for one in (prompt.prefix, prompt.suffix):
            limits.check(tokenizer, one)
        return _fill_in(prompt, _require(tokenizer, "a text prompt"))
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError("the prompt is empty; give at least one character")
        limits.check(tokenizer, prompt)
        ids: list[int] = _require(tokenizer, "a text prompt")(prompt).input_ids
        return ids
    if isinstance(prompt, torch.Tensor | np.ndarray):
        if prompt.ndim != 1 or "int" not in str(prompt.dtype):
            text = f"token ids of shape {tuple(prompt.shape)} and dtype {prompt.dtype}; give one row of integers"
            raise PromptError(text, value=prompt)
        prompt = prompt.tolist()
    if isinstance(prompt, bytes | bytearray):
        raise PromptError("the prompt is bytes; decode it to a text first")
    items = list(prompt)
    if not items:
        raise PromptError("the prompt is empty; give a text, messages or token ids")
    if all(isinstance(item, Mapping) for item in items):
        return _chat(items, _require(tokenizer, "chat messages"), options or ChatOptions(), limits)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | np.integer):
            text = f"prompt item {item!r} of type {type(item).__name__} must be a token id or a message"
            raise PromptError(text, value=item)
    return [int(item) for item in items]


def fill_in_marks(tokenizer: Any) -> tuple[int, ...] | None:
    """Return the tokens before the text before a gap, before the text after it, and before the filling; None without them."""
    added = {one.content: index for index, one in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    found = next((marks for marks in _FILL_IN if all(mark in added for mark in marks)), None)
    return None if found is None else tuple(added[mark] for mark in found)


def _fill_in(prompt: FillIn, tokenizer: Any) -> list[int]:
    marks = fill_in_marks(tokenizer)
    if marks is None:
        raise PromptError("this model's tokenizer has no tokens for filling in text between two texts")
    before, after, middle = marks
    prefix, suffix = (
        tokenizer(text, add_special_tokens=False).input_ids if text else [] for text in (prompt.prefix, prompt.suffix)
    )
    return [before, *prefix, after, *suffix, middle]


def _chat(messages: Sequence[Message], tokenizer: Any, options: ChatOptions, limits: Limits) -> list[int]:
    for i, message in enumerate(messages):
        if "role" not in message or "content" not in message:
            problem = f"message {i} has the keys {sorted(message)}; it needs 'role' and 'content'"
            raise PromptError(problem, param="messages", value=message)
        if message["role"] not in _ROLES:
            problem = f"message {i} has role={message['role']!r}; known roles: {', '.join(_ROLES)}"
            raise PromptError(problem, param="messages", value=message["role"])
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError("this tokenizer has no chat template; pass a text instead of messages")
    more: dict[str, Any] = dict(options.variables)
    if options.tools:
        more["tools"] = list(options.tools)
    apply = partial(_applied, tokenizer=tokenizer, options=options, more=more)
    tokens = None if options.control_tokens else control_tokens_of(tokenizer)
    if tokens is None:
        limits.check(tokenizer, str(apply(messages, tokenize=False)))
        ids: list[int] = apply(messages, return_dict=True)["input_ids"]
        return ids
    template = tokens.hidden(tokenizer.get_chat_template(tools=more.get("tools")))
    names = {key: _hidden(value, tokens) for key, value in tokenizer.special_tokens_map.items()}
    render = partial(apply, tokenize=False, chat_template=template, **names)
    text = str(render(messages))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"the chat template wrote a lone surrogate at character {error.start}, which is no text"
        raise PromptError(problem) from None
    shown = tokens.shown(text)
    limits.check(tokenizer, shown)
    if tokens.are_in(text):
        return tokens.encode(text, (with_objects(messages), more), lambda form, others: str(render(form, more=others)))
    return list(tokenizer(shown, add_special_tokens=False).input_ids)


def _hidden(value: Any, tokens: ControlTokens) -> Any:
    """Return a special token, or several, by random names."""
    return [tokens.hidden(str(one)) for one in value] if isinstance(value, list) else tokens.hidden(str(value))


def _applied(
    messages: Sequence[Message],
    *,
    tokenizer: Any,
    options: ChatOptions,
    more: Mapping[str, Any],
    chat_template: str | None = None,
    **how: Any,
) -> Any:
    """Return the result of `apply_chat_template`. more: tools and variables. how: further arguments, such as tokenize.

    chat_template: None for the tokenizer's own. Raises PromptError for messages that the template refuses.
    """
    ending: dict[str, Any] = {"add_generation_prompt": options.add_generation_prompt}
    if options.continue_final_message:
        ending["continue_final_message"] = True

    def applied(form: Sequence[Message], **how: Any) -> Any:
        has_none = any(one.get("content", "") is None for one in form)
        template = chat_template
        if has_none:
            template = KEEPS_NONE + (template or tokenizer.get_chat_template(tools=more.get("tools")))
        return tokenizer.apply_chat_template(
            list(form), **more, **ending, **how, **({} if template is None else {"chat_template": template})
        )

    fixed = {key: value for key, value in how.items() if key not in ("tokenize", "return_dict")}
    messages = fitted(messages, lambda form: str(applied(form, tokenize=False, **fixed)))
    try:
        return applied(messages, **how)
    except Exception as error:  # a template is a program and may raise anything
        if (wrong := unread_arguments(messages)) is not None:
            raise PromptError(f"{wrong} is no JSON object, and the chat template refused it: {error}") from error
        raise PromptError(f"the chat template refused the messages: {error}") from error


def _require(tokenizer: Any, purpose: str) -> Any:
    if tokenizer is None:
        raise PromptError(
            f"{purpose} needs a tokenizer, and this model was loaded without one (tokenizer.json, tokenizer.model, ...); "
            "pass token ids, or tokenizer=",
            param="tokenizer",
        )
    return tokenizer


def as_chat(text: str, tokenizer: Any, *, raw: bool) -> Any:
    """Return a user message if the tokenizer has a chat template and `raw` is False, else the text itself."""
    if raw or not getattr(tokenizer, "chat_template", None):
        return text
    return [{"role": "user", "content": text}]
