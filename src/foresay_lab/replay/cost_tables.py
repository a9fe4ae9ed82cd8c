"""Costs of passes by model (Chen et al. 2023), and the number of passes of each draft model of a method.

Owns the published tables, reading others, the names of an expression's drafters in a table, and counting passes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foresay.checks import check_float, check_int
from foresay.decoding.protocols import Drafter
from foresay.drafters import Cascade, ModelDrafter
from foresay.errors import ConfigError, UnknownNameError
from foresay.json_files import Schema, read_limited
from foresay.spec.expressions import Call, parse
from foresay.spec.recipes import named

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


COST_TABLES = {
    "model_parameters": CostModel(
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
    ),
    "previous_work": CostModel({"flan-t5-xxl": 1, "flan-t5-large": 0.11, "flan-t5-base": 0.04, "flan-t5-small": 0.02}),
}
"""CS-Drafting's tables (Chen et al. 2023): millions of parameters, with a llama 7b that is ten times too large, and costs
relative to FLAN-T5 XXL from Leviathan et al. 2023."""
_COSTS: Schema[dict[str, float]] = Schema(dict[str, float], "an object of model name -> cost of a pass")


def read_costs(name: str) -> CostModel:
    """Read a published table by name (see COST_TABLES), or a JSON file with an object of model name -> cost of a pass.

    Raises ConfigError for a file that cannot be read or is not such an object, and for a negative cost.
    """
    if name in COST_TABLES:
        return COST_TABLES[name]
    try:
        return CostModel(_COSTS.read(read_limited(name), repr(name)))
    except OSError as error:
        known = ", ".join(COST_TABLES)
        raise ConfigError(
            f"cost table {name!r} is not one of {known}, and cannot be read as a file: {error.strerror}"
        ) from None


def drafter_names(drafter: str) -> list[str]:
    """Return the cost table names of an expression's drafters, in order: "max_gram", a model's name, "self(6)".

    Raises ConfigError for an expression that does not parse.
    """
    call = parse(drafter)
    if call.name != "cascade":
        return [_name(call)]
    return [
        _name(value if isinstance(value, Call) else Call(str(value)) if key is None else Call(key, ((None, value),)))
        for key, value in call.values
        if key in (None, "model", "self")
    ]


def _name(call: Call) -> str:
    if call.name == "model" and call.values:
        return str(call.values[0][1])
    return str(call) if call.name == "self" else call.name


class PassCounter:
    """Counter of each draft model's passes per row, without prompt passes."""

    def __init__(self, drafter: Drafter | None, names: Sequence[str]) -> None:
        """names: of the drafters, in order. Raises ConfigError for other drafters than draft models and n-gram drafters."""
        members = drafter.drafters if isinstance(drafter, Cascade) else [] if drafter is None else [drafter]
        self._counted: list[tuple[str, ModelDrafter, int]] = []
        for member, name in zip(members, names, strict=False):
            if isinstance(member, ModelDrafter):
                self._counted.append((name, member, member.context.model.row_passes))
            elif name not in NO_COST:
                raise ConfigError(
                    f"the passes of {name!r} cannot be counted; SWI supports n-gram drafters and draft models"
                )

    @property
    def passes(self) -> Counter[str]:
        """Passes since this counter was created, by name."""
        out: Counter[str] = Counter()
        for name, member, before in self._counted:
            out[name] += member.context.model.row_passes - before
        return out
