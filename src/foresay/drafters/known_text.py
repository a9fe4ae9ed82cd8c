"""Tokens that a row's next ones are known to be, or are predicted to be by the request: no drafter has to find them.

A grammar or a limit on reasoning may leave one continuation; a request may bring a text that its output probably repeats, such
as a file to edit. After a difference the prediction is continued where the last tokens of the output occur in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from foresay.decoding.protocols import ForcesTokens
from foresay.decoding.rows import Row
from foresay.decoding.state import StateKey

MATCH_LENGTH = 1 << 10
"""Length of the match that known tokens count as, for policies that select tokens by it."""
_LONG, _SHORT, _NEAR = 3, 2, 32
"""Output tokens that continue a prediction anywhere, and those that continue it at most _NEAR tokens further on."""


@lru_cache(maxsize=2)
def _ends(tokens: tuple[int, ...]) -> Mapping[tuple[int, ...], list[int]]:
    """Return the indices after each run of _LONG or _SHORT tokens. The outputs of a request share them."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for length in (_SHORT, _LONG):
        for end in range(length, len(tokens) + 1):
            found[tokens[end - length : end]].append(end)
    return dict(found)


class _Prediction:
    """The position in a predicted text that a row's output has reached."""

    __slots__ = ("_after", "_next", "_reached", "_read", "_tokens")

    def __init__(self, tokens: tuple[int, ...], start: int) -> None:
        """start: length of the row's prompt."""
        self._tokens, self._read = tokens, start
        self._next: int | None = 0
        """Index of the token that is predicted next; None after a difference."""
        self._reached = 0
        self._after = _ends(tokens)

    def following(self, row: Row, count: int) -> list[int]:
        """Return up to `count` predicted tokens after a row's output."""
        new = row.tokens[self._read :].tolist()
        for i, token in enumerate(new):
            if self._next is not None and self._next < len(self._tokens) and self._tokens[self._next] == token:
                self._next += 1
                self._reached = self._next
            else:
                self._next = self._found(
                    row.tokens[max(row.prompt_length, self._read + i + 1 - _LONG) : self._read + i + 1].tolist()
                )
        self._read = row.size
        return [] if self._next is None else list(self._tokens[self._next : self._next + count])

    def _found(self, last: list[int]) -> int | None:
        """Return the index after the last tokens of the output: the next one that was not reached, else the latest."""
        ends = self._after.get(tuple(last), []) if len(last) == _LONG else []
        further = self._further(ends)
        if further is None:
            near = self._further(self._after.get(tuple(last[-_SHORT:]), []))
            further = near if near is not None and near <= self._reached + _NEAR else None
        return further if further is not None else ends[-1] if ends else None

    def _further(self, ends: list[int]) -> int | None:
        """Return the first of some ends, in order, that was not reached."""
        at = bisect_right(ends, self._reached)
        return ends[at] if at < len(ends) else None


Lookup = Callable[[Row, int], list[int]]
"""Returns up to a number of tokens that may follow a row's tokens."""
_PREDICTION = StateKey[_Prediction | None](lambda: None)


def known_tokens(row: Row, count: int, lookup: Lookup) -> list[int]:
    """Return up to `count` known next tokens of a committed row: those that its processors force, else those that are predicted.

    lookup: finds what may be between forced tokens, such as white space, where there is no prediction.
    """
    if count <= 0 or row is not row.committed or not row.knows_text:
        return []
    predicted: list[int] = []
    if row.params.prediction:
        prediction = _PREDICTION.find(row) or _PREDICTION.put(
            row, _Prediction(row.params.prediction, row.prompt_length)
        )
        assert prediction is not None
        predicted = prediction.following(row, count)
    processors: tuple[object, ...] = row.params.processors
    forcing = [one for one in processors if isinstance(one, ForcesTokens)]
    if not forcing:
        return predicted
    forced = _forced(forcing, row.tokens[row.prompt_length :].tolist())
    return predicted if predicted and not forced else _completed(row, forcing, count, lookup)[:count]


def _forced(forcing: Sequence[ForcesTokens], output: list[int]) -> list[int] | None:
    """Return the tokens of the first processor that forces any after an output; None if one of them excludes the output."""
    found = [one.forced_tokens(output) for one in forcing]
    return None if None in found else next((one for one in found if one), [])


def _completed(row: Row, forcing: Sequence[ForcesTokens], count: int, lookup: Lookup) -> list[int]:
    """Return forced tokens, and between them those that a lookup finds; [] if none are forced."""
    before, draft = row.tokens[row.prompt_length :].tolist(), list[int]()
    num_known, found, has_looked = 0, list[int](), False
    while len(draft) < count:
        forced = _forced(forcing, before + draft)
        if forced is None:  # the last token cannot come
            return draft[: max(len(draft) - 1, 0)] if num_known else []
        if forced:
            draft += forced
            num_known, found, has_looked = num_known + len(forced), [], False
            continue
        if not found and not has_looked:
            found, has_looked = lookup(row.with_draft(draft, row.rng_key) if draft else row, count - len(draft)), True
        if not found:
            break
        draft.append(found[0])
        found = found[1:]
    return draft if num_known else []
