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
    from foresay.decoding.outcome import FinishReason, Origin, Step
    from foresay.decoding.proposal import Proposal, Verdict
    from foresay.decoding.protocols import DraftStep
    from foresay.decoding.rows import Row, Rows
    from foresay.decoding.sampling_params import SamplingParams
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
    from foresay.generation.generator import Generator
    from foresay.generation.load import change, load
    from foresay.generation.result import Chunk, Generation
    from foresay.integrations.transformers import generate
    from foresay.lengths import ConfidenceLength, ConstantLength, EntropyLength, HeuristicLength, ThroughputLength
    from foresay.models.table import TableModel

_WHERE = {
    "foresay.decoding.outcome": ["FinishReason", "Origin", "Step"],
    "foresay.decoding.proposal": ["Proposal", "Verdict"],
    "foresay.decoding.protocols": ["DraftStep"],
    "foresay.decoding.rows": ["Row", "Rows"],
    "foresay.decoding.sampling_params": ["SamplingParams"],
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
    "foresay.generation.generator": ["Chunk", "Generation", "Generator"],
    "foresay.integrations.transformers": ["generate"],
    "foresay.lengths": [
        "ConfidenceLength",
        "ConstantLength",
        "EntropyLength",
        "HeuristicLength",
        "ThroughputLength",
    ],
    "foresay.generation.load": ["change", "load"],
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
    "DraftStep",
    "Engine",
    "EntropyLength",
    "FinishReason",
    "ForesayError",
    "Generation",
    "Generator",
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
