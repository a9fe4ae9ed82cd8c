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
    from foresay.decoding.acceptance import Block, Coupled, Lenience, Match, Speculative, Typical
    from foresay.decoding.distributions import Distributions, build_distributions
    from foresay.decoding.outcome import FinishReason, Origin, Step
    from foresay.decoding.proposal import Proposal, Verification
    from foresay.decoding.protocols import (
        Capabilities,
        Drafter,
        DraftStep,
        KVCache,
        LanguageModel,
        LengthPolicy,
        Logits,
        ModelInput,
        ModelOutput,
        Observer,
        PreparedPrompt,
        Rule,
    )
    from foresay.decoding.randomness import Streams
    from foresay.decoding.rows import Row, Rows, RuleNeeds
    from foresay.decoding.sampling_params import SamplingParams
    from foresay.drafters import (
        Cascade,
        MaxGram,
        ModelDrafter,
        ModelTreeDrafter,
        NgramStore,
        NgramStoreDrafter,
        PastRequests,
        PromptLookup,
        SelfDrafter,
        SuffixDrafter,
        SuffixTreeDrafter,
    )
    from foresay.drafters.ngram import NgramDrafter
    from foresay.drafters.ngram_table import NgramTable
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
        PromptError,
        QueueFullError,
        RequestError,
        UnknownNameError,
        UnsupportedModelError,
        VocabularyMismatchError,
    )
    from foresay.generation.generator import Generator
    from foresay.generation.load import change, load
    from foresay.generation.result import Chunk, Generation
    from foresay.generation.session import Session
    from foresay.generation.session_thread import SessionThread
    from foresay.integrations.transformers import generate
    from foresay.lengths import ConfidenceLength, ConstantLength, EntropyLength, HeuristicLength, ThroughputLength
    from foresay.models.table import TableModel
    from foresay.text.tokenizer import Tokenizer

_WHERE = {
    "foresay.decoding.acceptance": ["Block", "Coupled", "Lenience", "Match", "Speculative", "Typical"],
    "foresay.decoding.distributions": ["Distributions", "build_distributions"],
    "foresay.decoding.outcome": ["FinishReason", "Origin", "Step"],
    "foresay.decoding.proposal": ["Proposal", "Verification"],
    "foresay.decoding.protocols": [
        "PreparedPrompt",
        "Capabilities",
        "DraftStep",
        "Drafter",
        "ModelInput",
        "KVCache",
        "LanguageModel",
        "LengthPolicy",
        "Logits",
        "ModelOutput",
        "Observer",
        "Rule",
    ],
    "foresay.decoding.randomness": ["Streams"],
    "foresay.decoding.rows": ["Row", "Rows", "RuleNeeds"],
    "foresay.decoding.sampling_params": ["SamplingParams"],
    "foresay.drafters": [
        "Cascade",
        "MaxGram",
        "ModelDrafter",
        "ModelTreeDrafter",
        "NgramStore",
        "NgramStoreDrafter",
        "PastRequests",
        "PromptLookup",
        "SelfDrafter",
        "SuffixDrafter",
        "SuffixTreeDrafter",
    ],
    "foresay.drafters.ngram": ["NgramDrafter"],
    "foresay.drafters.proposal_builder": ["ProposalBuilder"],
    "foresay.drafters.stateless": ["Stateless"],
    "foresay.drafters.ngram_table": ["NgramTable"],
    "foresay.engine": ["Engine", "Stats"],
    "foresay.errors": [
        "ConfigError",
        "ContextLengthError",
        "ForesayError",
        "ModelLoadError",
        "ModelNotFoundError",
        "OutOfMemoryError",
        "PromptError",
        "QueueFullError",
        "RequestError",
        "UnknownNameError",
        "UnsupportedModelError",
        "VocabularyMismatchError",
    ],
    "foresay.generation.generator": ["Generator"],
    "foresay.generation.result": ["Chunk", "Generation"],
    "foresay.generation.session": ["Session"],
    "foresay.generation.session_thread": ["SessionThread"],
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
    "foresay.text.tokenizer": ["Tokenizer"],
}
_HOME = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "Block",
    "Capabilities",
    "Cascade",
    "Chunk",
    "ConfidenceLength",
    "ConfigError",
    "ConstantLength",
    "ContextLengthError",
    "Coupled",
    "Distributions",
    "DraftStep",
    "Drafter",
    "Engine",
    "EntropyLength",
    "FinishReason",
    "ForesayError",
    "Generation",
    "Generator",
    "HeuristicLength",
    "KVCache",
    "LanguageModel",
    "LengthPolicy",
    "Lenience",
    "Logits",
    "Match",
    "MaxGram",
    "ModelDrafter",
    "ModelInput",
    "ModelLoadError",
    "ModelNotFoundError",
    "ModelOutput",
    "ModelTreeDrafter",
    "NgramDrafter",
    "NgramStore",
    "NgramStoreDrafter",
    "NgramTable",
    "Observer",
    "Origin",
    "OutOfMemoryError",
    "PastRequests",
    "PreparedPrompt",
    "PromptError",
    "PromptLookup",
    "Proposal",
    "ProposalBuilder",
    "QueueFullError",
    "RequestError",
    "Row",
    "Rows",
    "Rule",
    "RuleNeeds",
    "SamplingParams",
    "SelfDrafter",
    "Session",
    "SessionThread",
    "Speculative",
    "Stateless",
    "Stats",
    "Step",
    "Streams",
    "SuffixDrafter",
    "SuffixTreeDrafter",
    "TableModel",
    "ThroughputLength",
    "Tokenizer",
    "Typical",
    "UnknownNameError",
    "UnsupportedModelError",
    "Verification",
    "VocabularyMismatchError",
    "__version__",
    "build_distributions",
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
