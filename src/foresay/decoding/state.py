"""Typed state that length policies, drafters and caches keep with a row, or with the rows of a batch.

A key is an object, not a string: two owners never share a value by accident, and its type is known. State lives as long as its
holder, so that nothing has to be removed when a request ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class HoldsState(Protocol):
    """A `Row` or `Rows`."""

    state: dict[StateKey[Any], Any]


class StateKey(Generic[T]):
    """Key of one value of type T per holder."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], T]) -> None:
        """make: creates the value of a holder that has none."""
        self._make = make

    def of(self, holder: HoldsState) -> T:
        """Return the holder's value; create it if there is none."""
        if self not in holder.state:
            holder.state[self] = self._make()
        value: T = holder.state[self]
        return value

    def find(self, holder: HoldsState) -> T | None:
        """Return the holder's value, or None if there is none."""
        return holder.state.get(self)

    def put(self, holder: HoldsState, value: T) -> T:
        """Replace the holder's value and return it."""
        holder.state[self] = value
        return value

    def drop(self, holder: HoldsState) -> None:
        """Remove the holder's value, if there is one."""
        holder.state.pop(self, None)
