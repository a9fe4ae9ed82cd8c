"""What guesses tokens, one file each."""

from foresay.drafters.model import ModelDrafter
from foresay.drafters.prompt_lookup import PromptLookup

__all__ = ["ModelDrafter", "PromptLookup"]
