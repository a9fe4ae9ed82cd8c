"""Errors that foresay raises deliberately.

    ForesayError
    ├── ConfigError (ValueError)            a parameter has a value that cannot be honoured
    │   ├── PromptError                     the prompt cannot be decoded as given
    │   └── UnknownNameError                an unknown drafter, rule, model alias or parameter
    ├── ContextLengthError (ValueError)     prompt, or prompt and output, exceed the context
    ├── OutOfMemoryError                    the request would not fit in the available memory
    ├── RequestError                        one request failed while running; the others continue
    ├── QueueFullError                      the queue of waiting requests is full
    ├── VocabularyMismatchError             target and draft have different token ids
    ├── UnsupportedModelError               the model cannot be rewound or batched exactly
    ├── ModelNotFoundError                  no model under that name or path
    └── ModelLoadError                      the model's files exist but cannot be read

A message names what is wrong, the value, what is allowed and what to do. `assert` is for foresay's own invariants.
"""

from collections.abc import Iterable
from copyreg import __newobj__  # type: ignore[attr-defined]
from difflib import get_close_matches
from typing import Any, Self


class ForesayError(Exception):
    """Base of all of foresay's errors."""

    subject: str | None = None
    """Subject that `about` has put in front of the message."""

    def about(self, subject: str) -> Self:
        """Return the same error with a subject in front of its message.

        Args:
            subject: Where the error occurred, such as a file and its line.
        """
        error = type(self).__new__(type(self))  # the constructors of subclasses take different arguments
        vars(error).update(vars(self))
        error.args, error.subject = (f"{subject}: {self}",), subject
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what another process rebuilds the error from, without the constructor, whose arguments are another's."""
        return __newobj__, (type(self), *self.args), vars(self)


_NOT_GIVEN = object()


class ConfigError(ForesayError, ValueError):
    """A parameter has a value that cannot be honoured."""

    def __init__(self, problem: str, *, param: str | None = None, value: Any = _NOT_GIVEN) -> None:
        """Compose the message.

        Args:
            problem: The message, which follows `param=value` if both are given.
            param: The parameter.
            value: Its value.
        """
        super().__init__(problem if value is _NOT_GIVEN else f"{param}={value!r} {problem}")
        self.param = param
        self.value = None if value is _NOT_GIVEN else value


class PromptError(ConfigError):
    """The prompt cannot be decoded as given."""


class UnknownNameError(ConfigError):
    """An unknown name; the message suggests the nearest known one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        choices = sorted(known)
        near = get_close_matches(str(name), choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(choices)}.")


class ContextLengthError(ForesayError, ValueError):
    """The prompt, or the prompt and the requested output, do not fit the model's context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """Take the message.

        Args:
            message: The message.
            param: The parameter that is too large; None for the prompt.
        """
        super().__init__(message)
        self.param = param


class OutOfMemoryError(ForesayError):
    """The request would not fit in the available memory."""


class RequestError(ForesayError):
    """One request cannot continue because of its own parameters, such as a processor; the others do."""

    def __init__(self, request_id: int, reason: str) -> None:
        """Compose the message.

        Args:
            request_id: Id of the request.
            reason: Why it cannot continue.
        """
        super().__init__(f"request {request_id} ended: {reason}")
        self.request_id = request_id


class QueueFullError(ForesayError):
    """The queue of waiting requests is full; try again later."""


class VocabularyMismatchError(ForesayError):
    """Target and draft have different vocabularies, so a draft's token ids mean other tokens."""


class UnsupportedModelError(ForesayError):
    """The model cannot be decoded exactly by this engine; the message names the reason."""


class ModelNotFoundError(ForesayError):
    """No model under that name or path."""


class ModelLoadError(ForesayError):
    """The model's files exist but cannot be read."""
