"""foresay's drafters inside vLLM, as the class of its speculative method "custom_class".

    LLM(model, speculative_config={"method": "custom_class", "model": "foresay.integrations.vllm.Proposer",
                                   "num_speculative_tokens": 12},
        additional_config={"foresay": {"drafter": "suffix", "length": "throughput"}})

vLLM scores and accepts by its own rules; what is guessed are point masses, as its n-gram method's. Owns the reading of vLLM's
configuration and of the arrays it shows. Nothing that happens here reaches vLLM as an exception once it runs; a setting that
cannot be honoured is an error at its start. Imports nothing of vLLM.
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
from foresay.integrations.following import Follower, Shown
from foresay.models.recording import RecordedText, RecordingModel
from foresay.models.sources.catalog import LoadedModel
from foresay.spec.recipe import Recipe, Resources
from foresay.spec.recipes import read_drafter, read_length
from foresay.text.tokenizer import Tokenizer

logger = logging.getLogger("foresay")

SETTINGS = {"drafter": "suffix", "length": "throughput"}
"""What `additional_config["foresay"]` may name, and what is taken where it does not."""


def check_settings(given: Mapping[str, Any]) -> dict[str, str]:
    """The settings, those that were not given filled in. Raises ConfigError for what this integration cannot honour."""
    for name in given:
        if name not in SETTINGS:
            raise UnknownNameError("setting of foresay in vLLM", name, set(SETTINGS))
    out = {name: str(given.get(name, usual)) for name, usual in SETTINGS.items()}
    recipe = _looked_up(out["drafter"])
    if not recipe.reads_target:  # else it is checked once its table can be read
        _check_chain(_built(recipe, "", 1, None), out["drafter"])
    policy = read_length(out["length"])
    if policy.needs_hidden:
        raise ConfigError(f"length={out['length']!r} reads a draft's hidden states, of which vLLM shows none")
    return out


def _looked_up(drafter: str) -> Recipe:
    recipe = read_drafter(drafter)
    if recipe.loads_model or recipe.samples:
        raise UnsupportedModelError(
            f"drafter={drafter!r} needs a model: inside vLLM foresay looks guesses up. Trained heads and drafts are vLLM's own "
            "methods: see `foresay export` and `foresay vllm-config`"
        )
    if recipe.num_draft_tokens == 0:
        raise ConfigError(f"drafter={drafter!r} drafts nothing; leave speculative_config out")
    return recipe


def _check_engine(config: Any) -> None:
    """ConfigError for what a VllmConfig asks for beside the drafter that cannot be had with it."""
    rule = getattr(config.speculative_config, "rejection_sample_method", "standard")
    if rule == "block":
        raise ConfigError(
            "rejection_sample_method='block': vLLM does not look at it for a class of one's own; leave it out"
        )
    stages = getattr(getattr(config, "parallel_config", None), "pipeline_parallel_size", 1)
    if stages > 1:
        raise ConfigError(
            f"pipeline_parallel_size={stages}: vLLM then shows each pass to the drafter in parts; foresay follows one stage alone"
        )


def _check_chain(drafter: Drafter, said: str) -> None:
    """UnsupportedModelError for a drafter that guesses trees, or that learns from scores."""
    if isinstance(drafter, ProposesTrees) and drafter.branches > 1:
        raise UnsupportedModelError(
            f"drafter={said!r} proposes trees, and vLLM scores chains of a drafter of one's own"
        )
    if getattr(drafter, "filler_top_k", 1) > 1:
        raise UnsupportedModelError(f"drafter={said!r} learns from the target's scores, of which vLLM shows none")


class Proposer:
    """What vLLM makes of the class path; see the module."""

    def __init__(self, vllm_config: Any) -> None:
        """vllm_config: vLLM's. Raises ConfigError, UnsupportedModelError and what tables of n-grams raise."""
        extra = getattr(vllm_config, "additional_config", None)
        given = extra.get("foresay", {}) if isinstance(extra, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"additional_config['foresay']={given!r} must be a table of settings")
        settings = check_settings(given)
        _check_engine(vllm_config)
        model = vllm_config.model_config
        most = check_int("num_speculative_tokens", vllm_config.speculative_config.num_speculative_tokens, 1)
        drafter = _made(_looked_up(settings["drafter"]), model)
        _check_chain(drafter, settings["drafter"])
        self.follower = Follower(
            drafter,
            read_length(settings["length"]),
            int(model.get_vocab_size()),
            most=most,
            limit=int(model.max_model_len),
        )
        self._failed = False

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[Any],
        token_ids_cpu: npt.NDArray[Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Guesses for each request of the batch, none for those whose prompt is still being read.

        sampled_token_ids: B lists of what the last pass wrote. num_tokens_no_spec: [>= B] tokens of each request, those among
        them. token_ids_cpu: [>= B, >= tokens] int32, the texts. slot_mappings: not looked at.
        """
        if self._failed:
            return [[] for _ in sampled_token_ids]
        try:
            shown = [
                Shown(np.asarray(token_ids_cpu[i, : int(num_tokens_no_spec[i])]), len(new)) if len(new) else None
                for i, new in enumerate(sampled_token_ids)
            ]
            return self.follower.propose(shown)
        except Exception as error:
            self._failed = True
            logger.warning("foresay drafts no more (%s: %s); vLLM goes on without it", type(error).__name__, error)
            logger.debug("following vLLM failed", exc_info=error)
            return [[] for _ in sampled_token_ids]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: vLLM calls it for drafts with weights."""


def _made(recipe: Recipe, model: Any) -> Drafter:
    """A drafter over the tokens of vLLM's model. model: its ModelConfig."""
    tokenizer = None
    if recipe.reads_target:  # a table of n-grams names the tokenizer it was made with
        from transformers import AutoTokenizer

        trusts = bool(getattr(model, "trust_remote_code", False))
        tokenizer = AutoTokenizer.from_pretrained(str(model.tokenizer), trust_remote_code=trusts)
    return _built(recipe, str(model.model), int(model.get_vocab_size()), tokenizer)


def _built(recipe: Recipe, name: str, vocab_size: int, tokenizer: Tokenizer | None) -> Drafter:
    """A drafter over so many tokens, without a model."""
    stand_in = RecordingModel([RecordedText([0], [0])], vocab_size)
    drafter = recipe.prepare(Resources(LoadedModel(name, stand_in, tokenizer, frozenset())))()
    assert drafter is not None, "what drafts nothing was refused"
    return drafter
