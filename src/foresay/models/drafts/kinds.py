"""The kinds of drafts on hidden states, which of them a config.json describes, and what runs them.

A new kind is an entry of KINDS and its classes here. Modules are imported when a draft is made: they need transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from foresay.errors import ConfigError
from foresay.models.drafts.block_config import BlockConfig
from foresay.models.drafts.config import KIND, DraftConfig, HeadConfig
from foresay.models.drafts.parallel_config import ParallelHeadConfig

if TYPE_CHECKING:
    from foresay.models.drafts.base import DraftModel
    from foresay.models.drafts.layers import DraftModule

KINDS: tuple[type[DraftConfig], ...] = (BlockConfig, ParallelHeadConfig, HeadConfig)
_ARCHITECTURES = ("dflash2", "dflash", "dspark", "eagle3", "assistant")
"""Part of the name of an architecture, which is the kind; the first one that is found counts."""


def kind_of(values: Mapping[str, Any]) -> str | None:
    """Return the kind of draft that a config.json describes, such as "dflash"; None for anything else."""
    named = values.get(KIND)
    if isinstance(named, str):
        return named
    listed = values.get("architectures")
    if ParallelHeadConfig.describes(values):
        return "peagle"
    text = " ".join(map(str, listed)).lower() if isinstance(listed, list) else ""
    if found := next((one for one in _ARCHITECTURES if one in text), None):
        return found
    own = values.get("dflash_config")
    if BlockConfig.describes(values):
        convolved = any(part.get("conv_kernel_size") for part in (values, own) if isinstance(part, Mapping))
        return "dflash2" if convolved else "dspark" if own is None else "dflash"
    return "eagle3" if "eagle_config" in values else None


def drafter_of(kind: str) -> str | None:
    """Return the name of the drafter that decodes a published kind; None if none does."""
    if kind in ("mtp", "model"):
        return kind
    return "head" if kind == "assistant" else next((one.DRAFTER for one in KINDS if kind in one.SPECULATORS), None)


def refusal(values: Mapping[str, Any]) -> str | None:
    """Return the reason for which the config.json of a head or block drafter is refused; None if it is accepted."""
    if kind_of(values) == "assistant":  # read with its weights
        return None
    try:
        reader(values).read(values)
    except ConfigError as error:
        return str(error)
    return None


def reader(values: Mapping[str, Any]) -> type[DraftConfig]:
    """Return the class that reads a config.json. Raises ConfigError for a kind in the speculators layout that none reads."""
    kind, known = values.get(KIND), [name for one in KINDS for name in one.SPECULATORS]
    if KIND in values and kind not in known:
        raise ConfigError(f"is not supported; it must be one of {', '.join(map(repr, known))}", param=KIND, value=kind)
    return next((one for one in KINDS if one.describes(values)), HeadConfig)


def new_module(config: DraftConfig, num_states: int) -> DraftModule:
    """Return the module of a configuration with random weights. num_states: number of the target's hidden states it reads."""
    make, _ = _classes()[type(config)]
    return make(config, num_states)


def model_of(config: DraftConfig) -> type[DraftModel]:
    """Return the class that runs drafts of a configuration for a target."""
    _, model = _classes()[type(config)]
    return model


def _classes() -> dict[type[DraftConfig], tuple[Callable[[Any, int], DraftModule], type[DraftModel]]]:
    from foresay.models.drafts.block import BlockModel
    from foresay.models.drafts.block_module import BlockModule
    from foresay.models.drafts.head import HeadModel, HeadModule
    from foresay.models.drafts.parallel_head import ParallelHeadModel, ParallelHeadModule

    return {
        BlockConfig: (lambda config, _: BlockModule(config), BlockModel),
        ParallelHeadConfig: (ParallelHeadModule, ParallelHeadModel),
        HeadConfig: (HeadModule, HeadModel),
    }
