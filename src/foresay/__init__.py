"""foresay: exact speculative decoding. Language models that write faster and write the same.

import foresay
model = foresay.load("smollm2-135m")
print(model.generate([{"role": "user", "content": "Name three rivers."}]).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from foresay.core import FinishReason, Origin, Proposal, Row, Rows, SamplingParams, Step, Verdict
    from foresay.drafters import ModelDrafter, PromptLookup
    from foresay.engine import Engine, Stats
    from foresay.errors import (
        ConfigError,
        ContextLengthError,
        ForesayError,
        ModelLoadError,
        ModelNotFoundError,
        PromptError,
        UnknownNameError,
        UnsupportedModelError,
        VocabularyMismatchError,
    )
    from foresay.generator import Chunk, Generation, Generator
    from foresay.integrations.transformers import generate
    from foresay.lengths import ConstantLength
    from foresay.loading import load
    from foresay.models.table import TableModel

_WHERE = {
    "foresay.core": ["FinishReason", "Origin", "Proposal", "Row", "Rows", "SamplingParams", "Step", "Verdict"],
    "foresay.drafters": ["ModelDrafter", "PromptLookup"],
    "foresay.engine": ["Engine", "Stats"],
    "foresay.errors": [
        "ConfigError",
        "ContextLengthError",
        "ForesayError",
        "ModelLoadError",
        "ModelNotFoundError",
        "PromptError",
        "UnknownNameError",
        "UnsupportedModelError",
        "VocabularyMismatchError",
    ],
    "foresay.generator": ["Chunk", "Generation", "Generator"],
    "foresay.integrations.transformers": ["generate"],
    "foresay.lengths": ["ConstantLength"],
    "foresay.loading": ["load"],
    "foresay.models.table": ["TableModel"],
}
_HOME = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "Chunk",
    "ConfigError",
    "ConstantLength",
    "ContextLengthError",
    "Engine",
    "FinishReason",
    "ForesayError",
    "Generation",
    "Generator",
    "ModelDrafter",
    "ModelLoadError",
    "ModelNotFoundError",
    "Origin",
    "PromptError",
    "PromptLookup",
    "Proposal",
    "Row",
    "Rows",
    "SamplingParams",
    "Stats",
    "Step",
    "TableModel",
    "UnknownNameError",
    "UnsupportedModelError",
    "Verdict",
    "VocabularyMismatchError",
    "__version__",
    "generate",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'foresay' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
