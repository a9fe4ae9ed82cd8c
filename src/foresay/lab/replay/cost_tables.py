"""Cost tables by name or file, and the number of passes of each draft model of a method.

Owns reading tables, the names of an expression's drafters in a table, and counting passes. Does not know the meaning of a cost
or the formula of SWI (theory.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from foresay.decoding.protocols import Drafter
from foresay.drafters import Cascade, ModelDrafter
from foresay.errors import ConfigError
from foresay.json_files import Schema, read_limited
from foresay.lab.replay.theory import COST_TABLES, NO_COST, CostModel
from foresay.spec.expressions import Call, parse

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
    members = [(key, value) for key, value in call.values if key in (None, "model", "self")]
    return [
        _name(value if isinstance(value, Call) else Call(str(value)) if key is None else Call(key, ((None, value),)))
        for key, value in members
    ]


def _name(call: Call) -> str:
    return (
        str(call.values[0][1])
        if call.name == "model" and call.values
        else str(call)
        if call.name == "self"
        else call.name
    )


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
