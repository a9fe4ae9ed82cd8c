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
"""

import os
from collections.abc import Callable, Iterable
from copyreg import __newobj__  # type: ignore[attr-defined]
from difflib import get_close_matches
from typing import Any, Self

MAX_SHOWN = 200  # characters of a value in a message


def shown(value: Any) -> str:
    """Return a value as errors show it: its `repr` on one line of at most MAX_SHOWN characters; a path is shown as its text."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    text = repr(value[: MAX_SHOWN + 1] if isinstance(value, str | bytes) else value).replace("\n", " ")
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def as_argument(name: str, *value: Any) -> str:
    """Return a parameter as Python names it: `name=value`, or its name alone."""
    return f"{name}={shown(value[0])}" if value else name


class ForesayError(Exception):
    """Base of all of foresay's errors."""

    subject: str | None = None
    """Subject that `about` has put in front of the message."""

    def __init__(self, problem: str = "", *, param: str | None = None, value: Any = ..., **others: Any) -> None:
        """Compose the message: the parameter with its value, then the problem.

        Args:
            problem: Rest of the sentence, with other parameters as `{name}`; without `param`, the message. A colon hides value.
            param: The parameter; for a file, its field, or the parameter that named the file.
            value: The parameter's value.
            **others: Values of other parameters that the problem names; `...` names one without a value.
        """
        self.param, self.value = param, None if value is ... else value
        is_hidden = value is ... or problem.startswith(":")
        self._named = () if param is None else (param,) if is_hidden else (param, value)
        self._problem, self._others, self._owned = problem, others, False
        super().__init__(self.worded(as_argument))

    def worded(self, named: Callable[..., str]) -> str:
        """Return the message with other names of parameters.

        Args:
            named: Returns one for a parameter and, if there is one, its value.
        """
        text = self._problem
        for name, value in self._others.items():
            text = text.replace(f"{{{name}}}", named(name) if value is ... else named(name, value))
        if self._named:
            text = f"{named(*self._named)}{'' if text.startswith(':') else ' '}{text}"
        return str(self) if self._owned else text if self.subject is None else f"{self.subject}: {text}"

    def about(self, subject: str, *, owned: bool = False) -> Self:
        """Return the same error with a subject in front of its message.

        Args:
            subject: Where the error occurred, such as a file and its line.
            owned: True if the parameters that the message names are the subject's.
        """
        error = type(self).__new__(type(self))  # the constructors of subclasses take different arguments
        vars(error).update(vars(self))
        error.args, error._owned = (f"{subject}: {self}",), owned or self._owned
        error.subject = subject if self.subject is None else f"{subject}: {self.subject}"
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what another process rebuilds the error from, without the constructor, whose arguments are another's."""
        return __newobj__, (type(self), *self.args), vars(self)


class ConfigError(ForesayError, ValueError):
    """A parameter has a value that cannot be honoured."""


class PromptError(ConfigError):
    """The prompt cannot be decoded as given; the message is a whole sentence."""

    def __init__(self, problem: str, *, param: str = "prompt", value: Any = None) -> None:
        super().__init__(problem)
        self.param, self.value = param, value


class UnknownNameError(ConfigError):
    """An unknown name; the message suggests the nearest known one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        choices = sorted(known)
        hint = "".join(f" Did you mean {near!r}?" for near in get_close_matches(str(name), choices, n=1))
        super().__init__(f"is unknown.{hint} Known: {', '.join(choices)}.", param=kind, value=name)


class ContextLengthError(ForesayError, ValueError):
    """The prompt, or the prompt and the requested output, do not fit the model's context; without `param`, the prompt."""


class OutOfMemoryError(ForesayError):
    """The request would not fit in the available memory."""


class RequestError(ForesayError):
    """One request cannot continue because of its own parameters, such as a processor; the others do."""

    def __init__(self, request_id: int, reason: str) -> None:
        """request_id: id of the request. reason: why it cannot continue."""
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
