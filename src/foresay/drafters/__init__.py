"""What guesses tokens, one file each."""

from foresay.drafters.cascade import Cascade
from foresay.drafters.max_gram import MaxGram
from foresay.drafters.model import ModelDrafter
from foresay.drafters.ngram_store import NgramStore, NgramStoreDrafter
from foresay.drafters.prompt_lookup import PromptLookup
from foresay.drafters.self_draft import SelfDrafter
from foresay.drafters.suffix import PastRequests, SuffixDrafter

__all__ = [
    "Cascade",
    "MaxGram",
    "ModelDrafter",
    "NgramStore",
    "NgramStoreDrafter",
    "PastRequests",
    "PromptLookup",
    "SelfDrafter",
    "SuffixDrafter",
]
