"""foresay: exact speculative decoding. Language models that generate faster and write the same.

import foresay
model = foresay.load("smollm2-135m")
print(model.generate([{"role": "user", "content": "Name three rivers."}]).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foresay.version import __version__

if TYPE_CHECKING:
    from foresay.decoding.acceptance import Speculative
    from foresay.decoding.capabilities import Capabilities
    from foresay.decoding.distributions import Distributions
    from foresay.decoding.outcome import FinishReason, Step
    from foresay.decoding.passes import Logits, ModelInput, ModelOutput
    from foresay.decoding.proposal import Proposal, Verification
    from foresay.decoding.protocols import (
        Drafter,
        KVCache,
        LanguageModel,
        LengthPolicy,
        Rule,
    )
    from foresay.decoding.rows import Row, Rows, RuleNeeds
    from foresay.decoding.sampling_params import SamplingParams
    from foresay.decoding.stopping import Stopping, StoppingRule
    from foresay.drafters.ngram import NgramDrafter
    from foresay.drafters.proposal_builder import ProposalBuilder
    from foresay.drafters.stateless import Stateless
    from foresay.engine import Engine, Stats
    from foresay.errors import (
        ConfigError,
        ContextLengthError,
        ForesayError,
        ModelLoadError,
        ModelNotFoundError,
        OutOfMemoryError,
        QueueFullError,
        RequestError,
        UnsupportedModelError,
        VocabularyMismatchError,
    )
    from foresay.generation.generator import Generator
    from foresay.generation.load import change, load
    from foresay.generation.result import Chunk, Generation
    from foresay.generation.session import Session
    from foresay.generation.session_thread import SessionThread
    from foresay.integrations.transformers import generate
    from foresay.lengths import ConstantLength
    from foresay.models.table import TableModel

_WHERE = {
    "foresay.decoding.acceptance": ["Speculative"],
    "foresay.decoding.distributions": ["Distributions"],
    "foresay.decoding.outcome": ["FinishReason", "Step"],
    "foresay.decoding.proposal": ["Proposal", "Verification"],
    "foresay.decoding.capabilities": ["Capabilities"],
    "foresay.decoding.passes": ["Logits", "ModelInput", "ModelOutput"],
    "foresay.decoding.protocols": ["Drafter", "KVCache", "LanguageModel", "LengthPolicy", "Rule"],
    "foresay.decoding.rows": ["Row", "Rows", "RuleNeeds"],
    "foresay.decoding.sampling_params": ["SamplingParams"],
    "foresay.decoding.stopping": ["Stopping", "StoppingRule"],
    "foresay.drafters.ngram": ["NgramDrafter"],
    "foresay.drafters.proposal_builder": ["ProposalBuilder"],
    "foresay.drafters.stateless": ["Stateless"],
    "foresay.engine": ["Engine", "Stats"],
    "foresay.errors": [
        "ConfigError",
        "ContextLengthError",
        "ForesayError",
        "ModelLoadError",
        "ModelNotFoundError",
        "OutOfMemoryError",
        "QueueFullError",
        "RequestError",
        "UnsupportedModelError",
        "VocabularyMismatchError",
    ],
    "foresay.generation.generator": ["Generator"],
    "foresay.generation.load": ["change", "load"],
    "foresay.generation.result": ["Chunk", "Generation"],
    "foresay.generation.session": ["Session"],
    "foresay.generation.session_thread": ["SessionThread"],
    "foresay.integrations.transformers": ["generate"],
    "foresay.lengths": ["ConstantLength"],
    "foresay.models.table": ["TableModel"],
}
_HOME = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "Capabilities",
    "Chunk",
    "ConfigError",
    "ConstantLength",
    "ContextLengthError",
    "Distributions",
    "Drafter",
    "Engine",
    "FinishReason",
    "ForesayError",
    "Generation",
    "Generator",
    "KVCache",
    "LanguageModel",
    "LengthPolicy",
    "Logits",
    "ModelInput",
    "ModelLoadError",
    "ModelNotFoundError",
    "ModelOutput",
    "NgramDrafter",
    "OutOfMemoryError",
    "Proposal",
    "ProposalBuilder",
    "QueueFullError",
    "RequestError",
    "Row",
    "Rows",
    "Rule",
    "RuleNeeds",
    "SamplingParams",
    "Session",
    "SessionThread",
    "Speculative",
    "Stateless",
    "Stats",
    "Step",
    "Stopping",
    "StoppingRule",
    "TableModel",
    "UnsupportedModelError",
    "Verification",
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
