"""Steps whose times are simulated, for the tests of length policies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import NO_NEEDS, Row, Rows, RuleNeeds
from helpers.making import make_row


def rows_of(
    count: int, *more: Row, ragged: bool = True, column_cost: float | None = None, needs: RuleNeeds = NO_NEEDS
) -> Rows:
    """Greedy rows, and more."""
    rows = [*(make_row() for _ in range(count)), *more]
    return Rows(rows, needs=needs, capabilities=Capabilities(ragged=ragged, column_cost=column_cost))


def accepted(count: int, chance: float, rng: random.Random) -> int:
    """How many of `count` draft tokens are accepted, each with this chance."""
    return next((i for i in range(count) if rng.random() >= chance), count)


def observe(
    policy: LengthPolicy, rows: Rows, drafted: Sequence[int], held: Sequence[int], total_s: float, draft_s: float = 0.0
) -> None:
    """Have a policy observe a step: drafted and accepted tokens of each row, and its seconds, of which some were drafting."""
    times = {"batch_size": len(drafted), "draft_s": draft_s, "total_s": total_s}
    policy.observe(rows, [Step(0, (0,) * (k + 1), (), n, k, **times) for n, k in zip(drafted, held, strict=True)])


def one_accepted(values: torch.Tensor) -> Callable[[], list[list[int]]]:
    """The numbers that a step reads of its verification: of each row a draft token is accepted, if there is any."""
    rest = values.shape[1] - 3
    return lambda: [[min(1, rest), 2, 1, *[0] * rest] for _ in range(len(values))]
