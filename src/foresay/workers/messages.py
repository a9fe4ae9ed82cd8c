"""Messages between a worker and the coordinating process, as plain data.

Owns the form of results, errors and parameters. Knows neither jobs nor the transport.
"""

from __future__ import annotations

from typing import Any

import foresay.errors
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ForesayError
from foresay.lab.data.requests import changed_params

Plain = dict[str, Any]
"""A JSON object."""
Result = tuple[int, Plain | ForesayError]
"""A task's number, and its result or the error that prevented one."""


def error_fields(error: ForesayError) -> Plain:
    """Return an error as plain data."""
    return {"error": str(error), "kind": type(error).__name__}


def reply(number: int, result: Plain | ForesayError) -> Plain:
    """Return the reply of a worker to a task."""
    if isinstance(result, ForesayError):
        return {"failed": number, **error_fields(result)}
    return {"done": number, "result": result}


def parse_reply(message: Plain) -> Result:
    """Return the task number and the result or error of a reply."""
    return (message["failed"], error_of(message)) if "failed" in message else (message["done"], message["result"])


def parse_setup_reply(message: Plain) -> tuple[Plain, int]:
    """Return (description of the worker's job, its capacity in tasks). Raises the error of a failed setup."""
    if "error" in message:
        raise error_of(message)
    return message["ready"], int(message["room"])


def plain_params(params: SamplingParams) -> Plain:
    """Return parameters as plain data. Raises ConfigError for processors, which are functions."""
    if params.processors:
        raise ConfigError(
            f"processors={params.processors!r} are functions, which cannot be sent to other processes; leave them out"
        )
    return {**changed_params(params), **params.given_numbers}


def read_params(plain: Plain) -> SamplingParams:
    """Invert `plain_params` after a round trip through JSON, which turns keys into strings."""
    bias = {int(token): by for token, by in plain.get("logit_bias", {}).items()}
    return SamplingParams(**{**plain, "logit_bias": bias})


def error_of(message: Plain) -> ForesayError:
    """Rebuild the error in a worker's message."""
    kind = getattr(foresay.errors, str(message.get("kind")), ForesayError)
    error = ForesayError.__new__(kind if isinstance(kind, type) and issubclass(kind, ForesayError) else ForesayError)
    error.args = (str(message["error"]),)
    return error
