"""Every error foresay raises on purpose.

    ForesayError
    ├── ConfigError (ValueError)            a parameter has a value that cannot be honoured
    │   ├── PromptError                     the prompt cannot be decoded as given
    │   └── UnknownNameError                a drafter, rule, model alias or parameter nobody knows
    ├── ContextLengthError (ValueError)     prompt, or prompt and output, exceed the context
    ├── OutOfMemoryError                    what was asked for would not fit the memory left
    ├── RequestError                        one request failed in mid-run; the others go on
    ├── QueueFullError                      as many requests wait as may
    ├── VocabularyMismatchError             target and draft do not share their tokens
    ├── UnsupportedModelError               a model that cannot be rewound or batched exactly
    ├── ModelNotFoundError                  no model under that name or path
    └── ModelLoadError                      files that are there but cannot be read

A message says what is wrong, the value, what is allowed and what to do. `assert` is for foresay's own invariants.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Self


class ForesayError(Exception):
    """Base of all of foresay's errors."""

    def about(self, subject: str) -> Self:
        """The same error, whose message begins with what it is about."""
        error = type(self).__new__(type(self))  # the constructors of subclasses take different arguments
        vars(error).update(vars(self))
        error.args = (f"{subject}: {self}",)
        return error


class ConfigError(ForesayError, ValueError):
    """A parameter has a value that cannot be honoured."""


class PromptError(ConfigError):
    """The prompt cannot be decoded as given."""


class UnknownNameError(ConfigError):
    """A name that is not among the known ones; the message offers the nearest."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        choices = sorted(known)
        near = get_close_matches(str(name), choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(choices)}.")


class ContextLengthError(ForesayError, ValueError):
    """The prompt, or the prompt and the output asked for, do not fit the model's context."""


class OutOfMemoryError(ForesayError):
    """What was asked for would not fit the memory that is left."""


class RequestError(ForesayError):
    """One request cannot go on, because of something of its own such as a processor; the others do."""

    def __init__(self, request_id: int, reason: str) -> None:
        super().__init__(f"request {request_id} ended: {reason}")
        self.request_id = request_id


class QueueFullError(ForesayError):
    """As many requests wait as may; try again later."""


class VocabularyMismatchError(ForesayError):
    """Target and draft do not share their tokens, so a draft's token ids mean something else."""


class UnsupportedModelError(ForesayError):
    """The model cannot be decoded exactly by this engine; the message names the reason."""


class ModelNotFoundError(ForesayError):
    """No model under that name or path."""


class ModelLoadError(ForesayError):
    """The model's files exist but cannot be read."""
