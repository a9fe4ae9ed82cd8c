"""OLMo 2 and 3, whose norms of queries and keys are over all heads, and EXAONE 4: norms after their sublayers, and windows."""

from __future__ import annotations

import math
from typing import Any

from foresay.models.families.family import FULL, SLIDING, Architecture, Family, Kinds
from foresay.models.families.positions import USUAL_YARN, WINDOW, windows
from foresay.models.families.stated import Stated

_FACTORS = ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor")
"""Keys under which converters have stored OLMo-3's factor of the attention."""


def _olmo3(stated: Stated, fields: dict[str, Any]) -> dict[str, Any]:
    """Layers with windows have unscaled positions. YaRN's factor of the attention is the usual one, which may be stated."""
    full: dict[str, Any] = fields.pop("rope_parameters")
    theta = float(stated.get("rope.freq_base_swa", full["rope_theta"]))
    usual = 1.0 + 0.1 * math.log(max(1.0, float(full.get("factor", 1.0))))
    for name in _FACTORS:
        found = stated.get(name, usual)
        if type(found) is not float or not math.isclose(found, usual, rel_tol=1e-6):
            raise stated.invalid(name, f"{usual}; no other value is supported for this architecture")
    rope = {SLIDING: {"rope_type": "default", "rope_theta": theta}, FULL: full}
    return {**windows(stated, fields), "rope_parameters": rope}


def _rotates(attention: Any, config: Any) -> bool:
    """Next to layers with a window those without one have no positions."""
    return config.sliding_window is None or bool(attention.is_sliding)


FAMILIES = (
    Family("olmo2", wide_norms=True),
    Family("olmo3", Kinds.LISTED, wide_norms=True),
    Family("exaone4", Kinds.LISTED, rotates=_rotates),
)
_OLMO3 = Architecture(
    "olmo3",
    WINDOW,
    derive=_olmo3,
    derived=_FACTORS,
    neutral={name: one for name, one in USUAL_YARN.items() if name not in _FACTORS},
    yarn={},
)
ARCHITECTURES = {
    "olmo2": Architecture("olmo2", variants={"attention.sliding_window": _OLMO3}),
    "exaone4": Architecture("exaone4", WINDOW, derive=windows, scaled_by_tensor=True),
}
