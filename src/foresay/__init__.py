"""foresay: exact speculative decoding. Language models that generate faster and write the same.

import foresay
model = foresay.load("smollm2-135m")
print(model.generate([{"role": "user", "content": "Name three rivers."}]).text)
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pkgutil import get_data
from typing import TYPE_CHECKING, Any

from foresay.version import __version__ as __version__

# fmt: off
# isort: off
if TYPE_CHECKING:  # the list of public names, which _modules reads too; a name is imported when it is used
    from foresay.decoding.acceptance import Speculative as Speculative
    from foresay.decoding.capabilities import Capabilities as Capabilities
    from foresay.decoding.distributions import Distributions as Distributions
    from foresay.decoding.outcome import FinishReason as FinishReason, Step as Step
    from foresay.decoding.passes import Logits as Logits, ModelInput as ModelInput, ModelOutput as ModelOutput
    from foresay.decoding.proposal import Proposal as Proposal, Verification as Verification
    from foresay.decoding.protocols import Drafter as Drafter, KVCache as KVCache, LanguageModel as LanguageModel
    from foresay.decoding.protocols import LengthPolicy as LengthPolicy, Rule as Rule
    from foresay.decoding.rows import Row as Row, Rows as Rows, RuleNeeds as RuleNeeds
    from foresay.decoding.sampling_params import SamplingParams as SamplingParams
    from foresay.decoding.stopping import Stopping as Stopping, StoppingRule as StoppingRule
    from foresay.drafters.ngram import NgramDrafter as NgramDrafter
    from foresay.drafters.proposal_builder import ProposalBuilder as ProposalBuilder
    from foresay.drafters.stateless import Stateless as Stateless
    from foresay.engine import Engine as Engine, Stats as Stats
    from foresay.errors import ConfigError as ConfigError, ContextLengthError as ContextLengthError
    from foresay.errors import ForesayError as ForesayError, ModelLoadError as ModelLoadError
    from foresay.errors import ModelNotFoundError as ModelNotFoundError, OutOfMemoryError as OutOfMemoryError
    from foresay.errors import QueueFullError as QueueFullError, RequestError as RequestError
    from foresay.errors import UnsupportedModelError as UnsupportedModelError
    from foresay.errors import VocabularyMismatchError as VocabularyMismatchError
    from foresay.generation.generator import Generator as Generator
    from foresay.generation.load import change as change, load as load
    from foresay.generation.result import Chunk as Chunk, Generation as Generation
    from foresay.generation.session import Session as Session
    from foresay.generation.session_thread import SessionThread as SessionThread
    from foresay.integrations.transformers import generate as generate
    from foresay.lengths import ConstantLength as ConstantLength
    from foresay.models.table import TableModel as TableModel
# isort: on
# fmt: on


@cache
def _modules() -> dict[str, str]:
    """Return the module of each public name."""
    source = get_data(__name__, "__init__.py")
    if source is None:
        raise ImportError("foresay's public names are read from its source, which is missing; import from its modules")
    imports = re.findall(r"^    from (\S+) import (.*)", source.decode(), re.MULTILINE)
    return {name: module for module, names in imports for name in re.findall(r"as (\w+)", names)}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name not in _modules():
        raise AttributeError(f"module 'foresay' has no attribute {name!r}")
    return getattr(import_module(_modules()[name]), name)


def __dir__() -> list[str]:
    return sorted([*_modules(), "__version__"])
