"""What a worker and who it works for say to each other, as plain data.

Owns the form of results, errors and parameters. Knows neither jobs nor who carries the messages.
"""

from __future__ import annotations

from typing import Any

import foresay.errors
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ForesayError
from foresay.lab.data.requests import recorded_params_of

Plain = dict[str, Any]
"""What JSON can hold."""
Result = tuple[int, Plain | ForesayError]
"""A task's number, and what came of it, or why nothing did."""


def refusal(error: ForesayError) -> Plain:
    """An error as plain data."""
    return {"error": str(error), "kind": type(error).__name__}


def told(number: int, result: Plain | ForesayError) -> Plain:
    """A result as a worker says it."""
    if isinstance(result, ForesayError):
        return {"failed": number, **refusal(result)}
    return {"done": number, "result": result}


def heard(said: Plain) -> Result:
    """A result that a worker told of."""
    return (said["failed"], raised(said)) if "failed" in said else (said["done"], said["result"])


def begun(said: Plain) -> tuple[Plain, int]:
    """(what a worker says of its job, tasks that it holds). Raises the error that its setup ended with."""
    if "error" in said:
        raise raised(said)
    return said["ready"], int(said["room"])


def plain_params(params: SamplingParams) -> Plain:
    """Parameters as plain data. Raises ConfigError for processors, which are code."""
    if params.processors:
        raise ConfigError(f"processors={params.processors!r} are functions, which no other process can be told")
    return recorded_params_of(params)


def read_params(plain: Plain) -> SamplingParams:
    """Parameters as `plain_params` wrote them, after JSON, whose keys are strings."""
    bias = {int(token): by for token, by in plain.get("logit_bias", {}).items()}
    return SamplingParams(**{**plain, "logit_bias": bias})


def raised(said: Plain) -> ForesayError:
    """The error that a worker told of."""
    kind = getattr(foresay.errors, str(said.get("kind")), ForesayError)
    error = ForesayError.__new__(kind if isinstance(kind, type) and issubclass(kind, ForesayError) else ForesayError)
    error.args = (str(said["error"]),)
    return error
