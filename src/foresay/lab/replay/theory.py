"""Closed forms for tokens per pass, speed-up and the best draft length by acceptance rate; cost models of passes.

Symbols: alpha is the acceptance rate, gamma the draft length, c the cost of one draft token and v(gamma) the cost of scoring
gamma + 1 tokens, both in units of the target's cost for one token. Knows no model and measures nothing. Functions raise
ConfigError for arguments out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from foresay.checks import check_float, check_int
from foresay.errors import ConfigError, UnknownNameError
from foresay.spec.recipes import named


def flat(gamma: int) -> float:
    """Return v(gamma) = 1: a pass limited by reading the weights has the same cost for any number of tokens."""
    return 1.0


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return tokens per pass under i.i.d. acceptance: (1 - alpha^(gamma+1)) / (1 - alpha) (Leviathan et al. 2023, eq. 1)."""
    check_float("alpha", alpha, 0, 1)
    check_int("gamma", gamma, 0)
    return math.fsum(alpha**k for k in range(gamma + 1))  # the quotient is inaccurate if alpha is nearly 1


def tokens_per_pass(reached: Sequence[float]) -> float:
    """Return 1 + sum_k P(at least k draft tokens accepted), without assuming independence. reached: P for k = 1, 2, ..."""
    return 1.0 + math.fsum(reached)


def speed_up(alpha: float, gamma: int, c: float, v: Callable[[int], float] = flat) -> float:
    """Return the speed-up: expected_tokens / (c * gamma + v(gamma)) (Leviathan et al. 2023, theorem 3.8, extended by v)."""
    check_float("c", c, 0, math.inf)
    return expected_tokens(alpha, gamma) / (c * gamma + (v(gamma) if gamma else 1.0))


def best_length(alpha: float, c: float, v: Callable[[int], float] = flat, high: int = 64) -> int:
    """Return the smallest gamma in [0, high] with the maximum speed-up; 0 if drafting does not pay."""
    check_int("high", high, 0)
    return max(range(high + 1), key=lambda gamma: (speed_up(alpha, gamma, c, v), -gamma))


def acceptance_from_tokens(tokens: float, gamma: int) -> float:
    """Return the alpha with expected_tokens(alpha, gamma) = tokens, in [1, gamma + 1]; by bisection to 1e-12."""
    check_int("gamma", gamma, 1)
    check_float("tokens", tokens, 1, gamma + 1)
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return (low + high) / 2


MODEL_PARAMETERS: Mapping[str, float] = MappingProxyType(
    {
        "flan-t5-small": 60,
        "flan-t5-base": 220,
        "flan-t5-large": 770,
        "flan-t5-xl": 3000,
        "flan-t5-xxl": 11300,
        "llama-68m": 68,
        "llama-160m": 160,
        "llama-7b": 70000,
    }
)
"""Millions of parameters as in CS-Drafting's table (Chen et al. 2023); its entry for llama 7b is ten times too large."""

PREVIOUS_WORK: Mapping[str, float] = MappingProxyType(
    {"flan-t5-xxl": 1, "flan-t5-large": 0.11, "flan-t5-base": 0.04, "flan-t5-small": 0.02}
)
"""Costs per pass that CS-Drafting takes from Leviathan et al. 2023, relative to FLAN-T5 XXL."""

NO_COST = frozenset(named("lookup"))
"""Drafters that run no model; their cost is 0 in a cost model."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of one pass of each model, in any unit."""

    costs: Mapping[str, float]

    def __post_init__(self) -> None:
        for name, cost in self.costs.items():
            check_float(f"cost of {name!r}", cost, 0, math.inf)

    def cost(self, name: str) -> float:
        """Return the cost of one pass of a model; 0 for an n-gram drafter.

        A name that is not in the table matches entries with the same last part, so that a hub id or a folder finds its model.
        Raises UnknownNameError if no entry matches, ConfigError if several with different costs match.
        """
        if name in NO_COST:
            return 0.0
        found = [name] if name in self.costs else [one for one in self.costs if _last_part(one) == _last_part(name)]
        if not found:
            raise UnknownNameError("model in this cost table", name, {*self.costs, *NO_COST})
        if len({float(self.costs[one]) for one in found}) > 1:
            raise ConfigError(
                f"{name!r} may be {' or '.join(map(repr, found))} of this cost table, whose costs differ; give the full name"
            )
        return float(self.costs[found[0]])

    def swi(self, target: str, num_tokens: int, passes: Mapping[str, int]) -> float:
        """Return the standardised walltime improvement (Chen et al. 2023): tokens * cost(target) / sum(passes * cost).

        passes: of every model, including the target. Plain decoding has 1. Raises ConfigError if the target has no passes or the
        total cost is 0, UnknownNameError for a model that is not in the table.
        """
        check_int("num_tokens", num_tokens, 1)
        spent = math.fsum(check_int(f"passes of {name!r}", n, 0) * self.cost(name) for name, n in passes.items())
        if target not in passes or spent <= 0:
            raise ConfigError(
                f"passes={dict(passes)} must include passes of the target {target!r}, with a positive total cost"
            )
        return num_tokens * self.cost(target) / spent


def _last_part(name: str) -> str:
    """Return the model's name in a hub id or path: "google/flan-t5-xxl" -> "flan-t5-xxl", "llama_7b" -> "llama-7b"."""
    return name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")


COST_TABLES: Mapping[str, CostModel] = MappingProxyType(
    {"model_parameters": CostModel(MODEL_PARAMETERS), "previous_work": CostModel(PREVIOUS_WORK)}
)
