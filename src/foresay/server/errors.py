"""Errors in OpenAI's shape: a status, a message and the wrong parameter.

Owns the mapping from exceptions to statuses. Knows no route.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import (
    ConfigError,
    ContextLengthError,
    ForesayError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
    as_argument,
)
from foresay.server.hints import NAMES

CLIENT_CLOSED = 499
"""Status logged for a client that disconnected before its response."""
logger = logging.getLogger("foresay.server")
MAX_MESSAGE = 1000
"""Limit in characters of an error message and of a parameter name; longer values sent by a client are cut."""

Names = Mapping[str, str]
"""Names in an API of a chat request's fields, or of their paths."""
MESSAGES_ROUTE = "/v1/messages"
"""Prefix of the routes of Anthropic's API."""
OLLAMA_ROUTES = "/api/"
"""Prefix of the routes of Ollama's API."""
_MESSAGES_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types of Anthropic's API."""


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """param: the wrong field. retry_after: seconds."""
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def kind(self) -> str:
        """OpenAI's error type for the status."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Return the response body: JSON that UTF-8 can encode, even if the client's text cannot be encoded."""
        param = None if self.param is None else _printable(self.param)
        return {"error": {"message": _printable(self.message), "type": self.kind, "param": param, "code": self.code}}

    def body_at(self, path: str) -> dict[str, Any]:
        """Return the response body of a route. Anthropic's and Ollama's routes have shapes of their own."""
        if path.startswith(OLLAMA_ROUTES):
            error = self.body()["error"]
            named = error["param"] is None or error["param"].rpartition(".")[2] in error["message"]
            return {"error": error["message"] if named else f"{error['param']}: {error['message']}"}
        if not path.startswith(MESSAGES_ROUTE):
            return self.body()
        kind = _MESSAGES_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {**self.body()["error"], "type": kind}}

    @property
    def headers(self) -> dict[str, str]:
        """Response headers."""
        out = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return out | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


class FieldError(ApiError):
    """A request that is refused for one of its fields."""

    def __init__(self, param: str, problem: str | ForesayError, *, code: str | None = None, **more: Any) -> None:
        """problem: see ForesayError, as for `more`; or the error whose message is taken."""
        self._refusal = ForesayError(problem, param=param, **more) if isinstance(problem, str) else problem
        super().__init__(400, "", param=param, code=code)
        self.rename({})

    def rename(self, names: Names) -> None:
        """Name fields in the message as an API does."""
        self.message = self._refusal.worded(
            lambda name, *value: as_argument(_renamed(_API_NAMES.get(name, name), names), *value)
        )
        self.args = (self.message,)


def _renamed(path: str, names: Names) -> str:
    """Return the name of a field in an API. path: names, joined by dots."""
    first, dot, rest = path.partition(".")
    return names.get(path, f"{names.get(first, first)}{dot}{rest}".replace(".function.", "."))


def _printable(text: str) -> str:
    """Return a text that UTF-8 can encode, of at most MAX_MESSAGE characters."""
    cut = text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."
    return cut.encode("utf-8", "backslashreplace").decode("utf-8")


def as_api_error(error: BaseException, prompt: str = "prompt", schema: str = "response_format") -> ApiError:
    """Return the API error for an exception. Errors that the client cannot have caused are logged and described in general terms.

    prompt, schema: names of the fields that contain the prompt and request the grammar of the output.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after=1)
    if isinstance(error, ConfigError | ContextLengthError):
        return _about_field(error, prompt)
    if isinstance(error, OutOfMemoryError):
        return ApiError(503, str(error), code="out_of_memory", retry_after=5)
    if isinstance(error, RequestError) and isinstance(error.__cause__, ConfigError):
        # for example, a schema with no allowed continuation
        return FieldError(schema, f": {error.__cause__}", code="cannot_go_on")
    logger.error("request failed", exc_info=error)
    code = "generation_failed" if isinstance(error, ForesayError) else "internal"
    return ApiError(500, "internal error; the server's log has the details", code=code)


@contextmanager
def as_api_errors(prompt: str, schema: str = "response_format") -> Iterator[None]:
    """Convert foresay's errors to ApiErrors; see as_api_error."""
    try:
        yield
    except ForesayError as error:
        raise as_api_error(error, prompt, schema) from error


@contextmanager
def renamed(names: Names) -> Iterator[None]:
    """Rename the parameter of an ApiError, which may be a path of names, and ignored hints. names: new names of fields."""
    before = NAMES.set(names)
    try:
        yield
    except ApiError as error:
        if isinstance(error, FieldError):
            error.rename(names)
        error.param = _renamed(error.param or "", names) or None
        raise
    finally:
        NAMES.reset(before)


_API_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_PARAMETERS = {field.name for field in dataclasses.fields(SamplingParams)}


def _about_field(error: ConfigError | ContextLengthError, prompt: str) -> ApiError:
    """Return a 400 error with the API's field names, such as max_tokens. An error that names no field is about the prompt."""
    field = (error.param or "").partition("[")[0]
    name = _API_NAMES.get(field, field) if field in _PARAMETERS else prompt
    return FieldError(name, error, code="context_length_exceeded" if isinstance(error, ContextLengthError) else None)
