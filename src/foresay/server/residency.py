"""Which models are loaded, which requests use them, and who waits for which: the rule, without a clock or a thread.

The models are names here. Models get their turns in the order of the oldest waiting requests, and a turn takes all requests for
that model, so that two models that are used at once do not replace each other after every request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class Action(StrEnum):
    """A change of the loaded models or of their users."""

    ADMIT = "admit"
    LOAD = "load"
    UNLOAD = "unload"


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request that waits for a model."""

    name: str
    admitted: Callable[[], None]
    """Called when the request is counted as a user of the model."""
    failed: Callable[[Exception], None]
    """Called if the model cannot be loaded."""


@dataclass(slots=True)
class Residency:
    """Loaded models and waiting requests."""

    most: int
    """Models that may be loaded at a time."""
    users: dict[str, int] = field(default_factory=dict)
    """Loaded models and the number of requests that use each, the least recently requested first."""
    waiting: list[Waiting] = field(default_factory=list)

    def take(self, name: str) -> bool:
        """Count a request that uses a model; False if it has to wait: the model is not loaded, or others wait."""
        if self.waiting or name not in self.users:
            return False
        self._use(name)
        return True

    def release(self, name: str) -> None:
        """End a request."""
        self.users[name] -= 1

    def leave(self, waiting: Waiting) -> None:
        """Remove a request that gave up."""
        if waiting in self.waiting:
            self.waiting.remove(waiting)

    def next(self, fits: Callable[[str], bool]) -> tuple[Action, str] | None:
        """Return what is to be done next; None if nothing is, or only after a running request has ended.

        fits: returns True if a model can be loaded next to the loaded ones.
        """
        if not self.waiting:
            return None
        name = self.waiting[0].name
        if name in self.users:
            return Action.ADMIT, name
        if len(self.users) < self.most and (not self.users or fits(name)):
            return Action.LOAD, name
        idle = next((one for one, count in self.users.items() if not count), None)
        return None if idle is None else (Action.UNLOAD, idle)

    def admit(self, name: str) -> None:
        """Admit all requests that wait for a loaded model."""
        for one in self._taken(name):
            self._use(name)
            one.admitted()

    def loaded(self, name: str) -> None:
        """Add a model that was loaded."""
        self.users[name] = 0

    def refuse(self, name: str, error: Exception) -> None:
        """End all requests that wait for a model which cannot be loaded."""
        for one in self._taken(name):
            one.failed(error)

    def unloaded(self, name: str) -> None:
        """Remove an idle model."""
        assert not self.users[name], "requests use the model"
        del self.users[name]

    def _taken(self, name: str) -> list[Waiting]:
        found = [one for one in self.waiting if one.name == name]
        self.waiting = [one for one in self.waiting if one.name != name]
        return found

    def _use(self, name: str) -> None:
        self.users[name] = self.users.pop(name) + 1
