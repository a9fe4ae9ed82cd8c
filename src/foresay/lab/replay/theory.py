"""Closed forms: from acceptance to tokens per pass, speed-up and the best length; what passes cost in a cost model.

Letters: alpha the acceptance rate, gamma the draft length, c the cost of one draft token and v(gamma) that of scoring
gamma + 1 tokens, both in units of the target scoring one. Knows no model and measures nothing. Functions raise ConfigError for
arguments outside their bounds.
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
    """v(gamma) = 1: a pass bound by reading the weights costs the same however many tokens it scores."""
    return 1.0


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per target pass under i.i.d. acceptance: (1 - alpha^(gamma+1)) / (1 - alpha) (Leviathan et al. 2023, eq. 1)."""
    check_float("alpha", alpha, 0, 1)
    check_int("gamma", gamma, 0)
    return math.fsum(alpha**k for k in range(gamma + 1))  # the quotient cancels where alpha is nearly 1


def tokens_per_pass(reached: Sequence[float]) -> float:
    """1 + sum_k P(at least k draft tokens accepted), without assuming independence. reached: those shares for k = 1, 2, ..."""
    return 1.0 + math.fsum(reached)


def speed_up(alpha: float, gamma: int, c: float, v: Callable[[int], float] = flat) -> float:
    """Over plain decoding: expected_tokens / (c * gamma + v(gamma)) (Leviathan et al. 2023, theorem 3.8, with v)."""
    check_float("c", c, 0, math.inf)
    return expected_tokens(alpha, gamma) / (c * gamma + (v(gamma) if gamma else 1.0))


def best_length(alpha: float, c: float, v: Callable[[int], float] = flat, high: int = 64) -> int:
    """The gamma in [0, high] of the greatest speed-up, the least of several; 0 where no draft pays."""
    check_int("high", high, 0)
    return max(range(high + 1), key=lambda gamma: (speed_up(alpha, gamma, c, v), -gamma))


def acceptance_from_tokens(tokens: float, gamma: int) -> float:
    """The alpha whose `expected_tokens` at gamma is `tokens`, in [1, gamma + 1]; by bisection to 1e-12."""
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
"""Millions of parameters as CS-Drafting's table has them (Chen et al. 2023); its entry for llama 7b is ten times too large."""

PREVIOUS_WORK: Mapping[str, float] = MappingProxyType(
    {"flan-t5-xxl": 1, "flan-t5-large": 0.11, "flan-t5-base": 0.04, "flan-t5-small": 0.02}
)
"""Costs per pass that CS-Drafting takes from Leviathan et al. 2023, in units of FLAN-T5 XXL."""

NO_COST = frozenset(named("lookup"))
"""Drafters that run no model: their look-ups count nothing in a cost model."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What one pass of each model costs, in any unit."""

    costs: Mapping[str, float]

    def __post_init__(self) -> None:
        for name, cost in self.costs.items():
            check_float(f"cost of {name!r}", cost, 0, math.inf)

    def cost(self, name: str) -> float:
        """The cost of one pass of a model; 0 for an n-gram drafter.

        A name that the table lacks matches the entries with the same last part, so that a hub id or a folder finds its model.
        Raises UnknownNameError where there is none, ConfigError where there are several of different costs.
        """
        if name in NO_COST:
            return 0.0
        found = [name] if name in self.costs else [one for one in self.costs if _last_part(one) == _last_part(name)]
        if not found:
            raise UnknownNameError("model in this cost table", name, {*self.costs, *NO_COST})
        if len({float(self.costs[one]) for one in found}) > 1:
            raise ConfigError(
                f"{name!r} may be {' or '.join(map(repr, found))} of this cost table, whose costs differ; give the whole name"
            )
        return float(self.costs[found[0]])

    def swi(self, target: str, num_tokens: int, passes: Mapping[str, int]) -> float:
        """Standardised walltime improvement (Chen et al. 2023): tokens * cost(target) / sum over models of passes * cost.

        passes: of every model, the target included. Plain decoding has 1. Raises ConfigError where the target made no passes or
        nothing cost anything, UnknownNameError for a model that the table lacks.
        """
        check_int("num_tokens", num_tokens, 1)
        spent = math.fsum(check_int(f"passes of {name!r}", n, 0) * self.cost(name) for name, n in passes.items())
        if target not in passes or spent <= 0:
            raise ConfigError(f"passes={dict(passes)} must count those of the target {target!r}, which cost something")
        return num_tokens * self.cost(target) / spent


def _last_part(name: str) -> str:
    """The part of a hub id or path that names the model: "google/flan-t5-xxl" -> "flan-t5-xxl", "llama_7b" -> "llama-7b"."""
    return name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")


COST_TABLES: Mapping[str, CostModel] = MappingProxyType(
    {"model_parameters": CostModel(MODEL_PARAMETERS), "previous_work": CostModel(PREVIOUS_WORK)}
)
