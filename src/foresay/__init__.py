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
    from foresay.core import FinishReason, Guess, Origin, Proposal, Row, Rows, SamplingParams, Step, Verdict
    from foresay.drafters import (
        Cascade,
        MaxGram,
        ModelDrafter,
        NgramStore,
        NgramStoreDrafter,
        PastRequests,
        PromptLookup,
        SelfDrafter,
        SuffixDrafter,
    )
    from foresay.drafters.ngram_table import NgramTable
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
    from foresay.lengths import ConfidenceLength, ConstantLength, EntropyLength, HeuristicLength, ThroughputLength
    from foresay.loading import change, load
    from foresay.models.table import TableModel

_WHERE = {
    "foresay.core": ["FinishReason", "Guess", "Origin", "Proposal", "Row", "Rows", "SamplingParams", "Step", "Verdict"],
    "foresay.drafters": [
        "Cascade",
        "MaxGram",
        "ModelDrafter",
        "NgramStore",
        "NgramStoreDrafter",
        "PastRequests",
        "PromptLookup",
        "SelfDrafter",
        "SuffixDrafter",
    ],
    "foresay.drafters.ngram_table": ["NgramTable"],
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
    "foresay.lengths": [
        "ConfidenceLength",
        "ConstantLength",
        "EntropyLength",
        "HeuristicLength",
        "ThroughputLength",
    ],
    "foresay.loading": ["change", "load"],
    "foresay.models.table": ["TableModel"],
}
_HOME = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "Cascade",
    "Chunk",
    "ConfidenceLength",
    "ConfigError",
    "ConstantLength",
    "ContextLengthError",
    "Engine",
    "EntropyLength",
    "FinishReason",
    "ForesayError",
    "Generation",
    "Generator",
    "Guess",
    "HeuristicLength",
    "MaxGram",
    "ModelDrafter",
    "ModelLoadError",
    "ModelNotFoundError",
    "NgramStore",
    "NgramStoreDrafter",
    "NgramTable",
    "Origin",
    "PastRequests",
    "PromptError",
    "PromptLookup",
    "Proposal",
    "Row",
    "Rows",
    "SamplingParams",
    "SelfDrafter",
    "Stats",
    "Step",
    "SuffixDrafter",
    "TableModel",
    "ThroughputLength",
    "UnknownNameError",
    "UnsupportedModelError",
    "Verdict",
    "VocabularyMismatchError",
    "__version__",
    "change",
    "generate",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'foresay' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
