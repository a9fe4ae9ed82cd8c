"""Errors as OpenAI's clients read them: a status, and what was wrong with which parameter.

Owns which of our errors is whose fault. Knows no route.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import (
    ConfigError,
    ContextLengthError,
    ForesayError,
    OutOfMemoryError,
    PromptError,
    QueueFullError,
    RequestError,
)

GONE = 499
"""The status of an answer that nobody waits for."""
MAX_MESSAGE = 1000
"""Characters of an error's message and of a parameter's name; a client's own long values are cut there."""


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """param: the field that is wrong. retry_after: seconds."""
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def kind(self) -> str:
        """OpenAI's word for such errors."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The answer's body: JSON that any encoder takes, whatever the client's text contains."""
        param = None if self.param is None else _printable(self.param)
        return {"error": {"message": _printable(self.message), "type": self.kind, "param": param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """What is said beside it."""
        out = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return out | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def _printable(text: str) -> str:
    """A text that UTF-8 can encode, of at most MAX_MESSAGE characters."""
    cut = text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."
    return cut.encode("utf-8", "backslashreplace").decode("utf-8")


def as_api_error(error: BaseException, log: logging.Logger, *, prompt: str = "prompt") -> ApiError:
    """The error of the API for any exception; one that the client cannot have caused is described in general words, and logged.

    prompt: the request's field that contains the prompt.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after=1)
    if isinstance(error, ContextLengthError):
        return _about_field(error, prompt, code="context_length_exceeded")
    if isinstance(error, ConfigError):
        return _about_field(error, prompt)
    if isinstance(error, OutOfMemoryError):
        return ApiError(503, str(error), code="out_of_memory", retry_after=5)
    if isinstance(error, RequestError) and isinstance(error.__cause__, ConfigError):
        # such as a schema that cannot be followed further
        return ApiError(400, str(error.__cause__), param="response_format", code="cannot_go_on")
    log.error("request failed", exc_info=error)
    code = "generation_failed" if isinstance(error, ForesayError) else "internal"
    return ApiError(500, "the server failed; its log says more", code=code)


@contextmanager
def prompt_is(field: str, log: logging.Logger) -> Iterator[None]:
    """Raise our own errors as ApiErrors whose `param` is this field where they are about the prompt."""
    try:
        yield
    except ForesayError as error:
        raise as_api_error(error, log, prompt=field) from error


_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_PARAMETERS = {field.name for field in dataclasses.fields(SamplingParams)}


def _about_field(error: Exception, prompt: str, code: str | None = None) -> ApiError:
    """The error under the API's names: one of max_new_tokens is about max_tokens, and one of no field about the prompt."""
    message = str(error)
    for ours, theirs in _RENAMED.items():
        message = message.replace(ours, theirs)
    word = re.match(r"\w*", str(error))
    named = word is not None and word[0] in _PARAMETERS and not isinstance(error, PromptError)
    field = _RENAMED.get(word[0], word[0]) if named and word is not None else prompt
    return ApiError(400, message, param=field, code=code)
