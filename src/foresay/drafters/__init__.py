"""Drafters: how draft tokens are proposed, one method per file."""

from foresay.drafters.assistant import AssistantDrafter
from foresay.drafters.cascade import Cascade
from foresay.drafters.hidden_states import BlockDrafter, HeadDrafter
from foresay.drafters.hybrid import Hybrid
from foresay.drafters.max_gram import MaxGram
from foresay.drafters.memory import Memory
from foresay.drafters.model import ModelDrafter
from foresay.drafters.model_tree import ModelTreeDrafter
from foresay.drafters.ngram_store import NgramStore, NgramStoreDrafter
from foresay.drafters.prompt_lookup import PromptLookup
from foresay.drafters.self_draft import SelfDrafter
from foresay.drafters.suffix import SuffixDrafter
from foresay.drafters.suffix_tree import SuffixTreeDrafter

__all__ = [
    "AssistantDrafter",
    "BlockDrafter",
    "Cascade",
    "HeadDrafter",
    "Hybrid",
    "MaxGram",
    "Memory",
    "ModelDrafter",
    "ModelTreeDrafter",
    "NgramStore",
    "NgramStoreDrafter",
    "PromptLookup",
    "SelfDrafter",
    "SuffixDrafter",
    "SuffixTreeDrafter",
]
