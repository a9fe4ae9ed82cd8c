"""Cost tables by name or file, and how many passes each model of a method made."""

from __future__ import annotations

import json
from pathlib import Path

from foresay.engine import Stats
from foresay.errors import ConfigError
from foresay.expressions import parse
from foresay.theory import COST_TABLES, NO_COST, CostModel


def read_costs(name: str) -> CostModel:
    """A table of the sources, or a JSON object of name -> cost of a pass."""
    if name in COST_TABLES:
        return COST_TABLES[name]
    try:
        values = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(COST_TABLES)
        raise ConfigError(f"cost table {name!r} is none of {known}, and cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{name!r} is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name!r} must be a JSON object of model name -> cost of a pass")
    return CostModel(values)


def passes_of(drafter: str, stats: Stats) -> dict[str, int]:
    """Passes of each drafting model: one draft model makes one for each token it drafts.

    Raises ConfigError for a drafter whose Steps do not tell, as a cascade's.
    """
    call = parse(drafter)
    if call.name in NO_COST:
        return {}
    if call.name == "model":
        return {str(call.values[0][1]): stats.num_drafted}
    raise ConfigError(f"the passes of {drafter!r} are not counted; SWI needs look-ups or one draft model")
