"""The data that a worker and the coordinating process exchange. Knows neither jobs nor the transport."""

from __future__ import annotations

from typing import Any, NamedTuple

from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ForesayError

Plain = dict[str, Any]


class Failed(NamedTuple):
    """The error that prevented a task's result; a ForesayError itself cannot be pickled."""

    kind: type[ForesayError]
    arguments: tuple[Any, ...]
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: ForesayError) -> Failed:
        """Return the parts of an error."""
        return cls(type(error), error.args, vars(error))

    def error(self) -> ForesayError:
        """Return the error."""
        error = self.kind.__new__(self.kind)
        error.args = self.arguments
        vars(error).update(self.fields)
        return error


Result = tuple[int, Any]
"""A task's number, and its result or a Failed."""


def check_sendable(params: SamplingParams) -> SamplingParams:
    """Raise ConfigError for processors, which are functions."""
    if params.processors:
        raise ConfigError(
            "are functions, which cannot be sent to other processes; leave them out",
            param="processors",
            value=params.processors,
        )
    return params
