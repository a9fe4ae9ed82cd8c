"""foresay's drafters inside vLLM, as the class of its speculative method "custom_class".

    LLM(model, speculative_config={"method": "custom_class", "model": "foresay.integrations.vllm.Proposer",
                                   "num_speculative_tokens": 12},
        additional_config={"foresay": {"drafter": "suffix", "length": "throughput"}})

vLLM scores and accepts by its own rules; drafts are point masses, like those of its n-gram method. Owns the reading of vLLM's
configuration and arrays. Once running, no exception reaches vLLM; a setting that is not supported is an error at startup. Imports
nothing of vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foresay.checks import check_int
from foresay.decoding.protocols import Drafter, ProposesTrees
from foresay.errors import ConfigError, UnknownNameError, UnsupportedModelError
from foresay.integrations.following import EngineText, Follower
from foresay.lengths import AcceptanceLength
from foresay.models.recording import RecordedText, RecordingModel
from foresay.models.sources.wrapping import LoadedModel
from foresay.spec.recipe import Recipe, Resources
from foresay.spec.recipes import read_drafter, read_length
from foresay.text.tokenizer import Tokenizer

logger = logging.getLogger("foresay")

SETTINGS = {"drafter": "suffix", "length": "throughput"}
"""Settings of `additional_config["foresay"]` and their defaults."""


def check_settings(configured: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings with defaults filled in. Raises ConfigError for settings that this integration does not support."""
    for name in configured:
        if name not in SETTINGS:
            raise UnknownNameError("setting of foresay in vLLM", name, set(SETTINGS))
    out = {name: str(configured.get(name, default)) for name, default in SETTINGS.items()}
    recipe = _ngram_recipe(out["drafter"])
    if not recipe.reads_target:  # otherwise checked after its table is loaded
        _check_chain(_build_drafter(recipe, "", 1, None), out["drafter"])
    policy = read_length(out["length"])
    if isinstance(policy, AcceptanceLength):
        raise ConfigError(f"length={out['length']!r} needs a draft's hidden states, which vLLM does not provide")
    return out


def _ngram_recipe(drafter: str) -> Recipe:
    recipe = read_drafter(drafter)
    if recipe.loads_model or recipe.samples:
        raise UnsupportedModelError(
            f"drafter={drafter!r} needs a model; inside vLLM, foresay runs n-gram drafters only. vLLM runs trained heads and "
            "draft models itself: see `foresay export` and `foresay vllm-config`"
        )
    if recipe.num_draft_tokens == 0:
        raise ConfigError(f"drafter={drafter!r} drafts nothing; remove speculative_config instead")
    return recipe


def _check_engine(config: Any) -> None:
    """Raise ConfigError for settings of a VllmConfig that are not supported together with the drafter."""
    rule = getattr(config.speculative_config, "rejection_sample_method", "standard")
    if rule == "block":
        raise ConfigError("rejection_sample_method='block': vLLM ignores it for a custom class; remove it")
    stages = getattr(getattr(config, "parallel_config", None), "pipeline_parallel_size", 1)
    if stages > 1:
        raise ConfigError(
            f"pipeline_parallel_size={stages}: vLLM then passes each step to the drafter in parts; only 1 is supported"
        )


def _check_chain(drafter: Drafter, expression: str) -> None:
    """Raise UnsupportedModelError for a drafter that proposes trees or learns from scores."""
    if isinstance(drafter, ProposesTrees) and drafter.branches > 1:
        raise UnsupportedModelError(
            f"drafter={expression!r} proposes trees, and vLLM scores only chains of a custom drafter"
        )
    if getattr(drafter, "filler_top_k", 1) > 1:
        raise UnsupportedModelError(
            f"drafter={expression!r} learns from the target's scores, which vLLM does not provide"
        )


class Proposer:
    """The class that vLLM instantiates; see the module's docstring."""

    def __init__(self, vllm_config: Any) -> None:
        """vllm_config: vLLM's. Raises ConfigError, UnsupportedModelError and the errors of loading an n-gram table."""
        extra = getattr(vllm_config, "additional_config", None)
        configured = extra.get("foresay", {}) if isinstance(extra, Mapping) else {}
        if not isinstance(configured, Mapping):
            raise ConfigError(f"additional_config['foresay']={configured!r} must be a table of settings")
        settings = check_settings(configured)
        _check_engine(vllm_config)
        model = vllm_config.model_config
        max_draft_tokens = check_int("num_speculative_tokens", vllm_config.speculative_config.num_speculative_tokens, 1)
        drafter = _load_drafter(_ngram_recipe(settings["drafter"]), model)
        _check_chain(drafter, settings["drafter"])
        self.follower = Follower(
            drafter,
            read_length(settings["length"]),
            int(model.get_vocab_size()),
            max_draft_tokens=max_draft_tokens,
            max_length=int(model.max_model_len),
        )
        self._failed = False

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[Any],
        token_ids_cpu: npt.NDArray[Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return draft tokens for each request of the batch; none for requests in prefill.

        sampled_token_ids: B lists of the tokens generated in the last step. num_tokens_no_spec: [>= B], tokens of each request,
        including those. token_ids_cpu: [>= B, >= tokens] int32, the texts. slot_mappings: ignored.
        """
        if self._failed:
            return [[] for _ in sampled_token_ids]
        try:
            texts = [
                EngineText(np.asarray(token_ids_cpu[i, : int(num_tokens_no_spec[i])]), len(new)) if len(new) else None
                for i, new in enumerate(sampled_token_ids)
            ]
            return self.follower.propose(texts)
        except Exception as error:
            self._failed = True
            logger.warning(
                "foresay stopped drafting after an error (%s: %s); vLLM continues without it",
                type(error).__name__,
                error,
            )
            logger.debug("following vLLM failed", exc_info=error)
            return [[] for _ in sampled_token_ids]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: vLLM calls this for drafts with weights."""


def _load_drafter(recipe: Recipe, model: Any) -> Drafter:
    """Return a drafter for the vocabulary of vLLM's model. model: its ModelConfig."""
    tokenizer = None
    if recipe.reads_target:  # an n-gram table records its tokenizer
        from transformers import AutoTokenizer

        trust = bool(getattr(model, "trust_remote_code", False))
        tokenizer = AutoTokenizer.from_pretrained(str(model.tokenizer), trust_remote_code=trust)
    return _build_drafter(recipe, str(model.model), int(model.get_vocab_size()), tokenizer)


def _build_drafter(recipe: Recipe, name: str, vocab_size: int, tokenizer: Tokenizer | None) -> Drafter:
    """Return a drafter for a vocabulary size, without a model."""
    token_only_resources = RecordingModel([RecordedText([0], [0])], vocab_size)
    drafter = recipe.prepare(Resources(LoadedModel(name, token_only_resources, tokenizer, frozenset())))()
    assert drafter is not None, "drafters that draft nothing are rejected"
    return drafter
