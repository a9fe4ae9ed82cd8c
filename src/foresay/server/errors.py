"""Errors as OpenAI's clients read them: a status, and what was wrong with which parameter.

Owns which of our errors is whose fault. Knows no route.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from foresay.errors import (
    ConfigError,
    ContextLengthError,
    ForesayError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
)


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
        """What is answered."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """What is said beside it."""
        out = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return out | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def as_api_error(error: BaseException, log: logging.Logger) -> ApiError:
    """What a client is told about an error; what it cannot have caused is told in general words, and logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after=1)
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), param=_field_of(str(error)))
    if isinstance(error, OutOfMemoryError):
        return ApiError(503, str(error), code="out_of_memory", retry_after=5)
    if isinstance(error, RequestError) and isinstance(error.__cause__, ConfigError):
        return ApiError(
            400, str(error.__cause__), code="cannot_go_on"
        )  # such as a schema that cannot be followed further
    log.error("request failed", exc_info=error)
    code = "generation_failed" if isinstance(error, ForesayError) else "internal"
    return ApiError(500, "the server failed; its log says more", code=code)


_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


def _field_of(message: str) -> str | None:
    """The field that a ConfigError names: "top_p=2 must be ..." is about top_p."""
    name = message.partition("=")[0]
    return _RENAMED.get(name, name) if name.isidentifier() else None


def of_validation(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's errors."""
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("body",))
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{place!r} is not supported", param=place, code="unsupported_parameter")
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json"
        )
    return ApiError(400, f"{place or 'body'}: {first['msg']}", param=place or None)
