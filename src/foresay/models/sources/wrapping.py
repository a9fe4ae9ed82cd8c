"""A transformers model -> a LanguageModel that foresay decodes: checks, kernels, end tokens.

Owns LoadedModel. Does not know where models come from.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from foresay.decoding.protocols import LanguageModel, ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ForesayError, ModelLoadError
from foresay.models.hardware import Hardware
from foresay.models.huggingface import linears
from foresay.models.huggingface.frozen import FrozenLinear
from foresay.models.sources.generation_settings import UNCHANGED, GenerationSettings
from foresay.models.sources.load_options import LoadOptions
from foresay.text.tokenizer import Tokenizer

logger = logging.getLogger("foresay")

_NUM_PROBED = 4
"""Tokens whose scores are checked after loading."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A LanguageModel with its tokenizer and end-of-sequence ids."""

    name: str
    model: LanguageModel
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    weights: str = ""
    """"int8" or "int4" for rounded weights, "GGUF" for weights in the blocks of such a file, "MXFP4" for experts in those of
    a folder, "AWQ", "GPTQ", "FP8", "compressed-tensors ..." or "ModelOpt ..." for linear layers that stay as in a folder,
    "llama.cpp" for that backend."""
    generation: GenerationSettings = UNCHANGED
    """The model's generation config."""

    @property
    def precision(self) -> str:
        """Format of the weights, such as "bfloat16" or "bfloat16, int4 weights"."""
        if not self.dtype:
            return self.weights
        return f"{self.dtype}, {self.weights} weights" if self.weights else self.dtype

    @property
    def dtype(self) -> str:
        """dtype of the weights, such as "bfloat16"; empty for a model without weights."""
        return str(getattr(getattr(self.model, "model", None), "dtype", "")).removeprefix("torch.")


def wrap(name: str, weights: Any, tokenizer: Any, *, optimise: bool, options: LoadOptions | None = None) -> LoadedModel:
    """Wrap a transformers model as a LanguageModel; it uses foresay's attention until `model.release()`.

    optimise: arrange the linear layers for the processor, in the formats of `options`, and fuse the layers; only for a model that
    nothing else uses. Otherwise the weights stay where they are, and layers are fused where kernels can read them there. Raises
    UnsupportedModelError for a model that cannot be decoded exactly, which is then restored, and ConfigError for a format that
    the model's passes do not support.
    """
    from foresay.models.huggingface.causal import CausalModel, is_recurrent
    from foresay.models.huggingface.recurrent import RecurrentModel
    from foresay.models.huggingface.self_check import check
    from foresay.models.huggingface.seq2seq import Seq2SeqModel

    kind = (
        Seq2SeqModel if weights.config.is_encoder_decoder else RecurrentModel if is_recurrent(weights) else CausalModel
    )
    model = kind(weights)
    try:
        check(model)
    except BaseException:
        model.release()
        raise
    settings = GenerationSettings(weights.generation_config if weights.can_generate() else None)
    loaded = LoadedModel(name, model, tokenizer, end_tokens(weights, tokenizer), generation=settings)
    options = options or LoadOptions()
    if model.is_shared:  # by processes, each with a part of every product
        if options.reproducible is not None:
            text = "cannot be had of a model that several processes compute"
            raise ConfigError(text, param="reproducible", value=options.reproducible)
        return loaded
    if optimise:
        _arrange(weights, options)
    if isinstance(model, CausalModel):
        model.reproducible, model.is_loaded_here = options.reproducible, optimise
        _fuse(name, model, optimise=optimise)
        if not optimise:
            model.watch_for_changes()
    if options.reproducible and not (isinstance(model, CausalModel) and (model.batch_invariant or model.runs_on_pages)):
        text = "cannot be had of this model, whose passes are not computed by foresay's kernels"
        raise ConfigError(text, param="reproducible", value=True)
    if options.reproducible is False and (not isinstance(model, CausalModel) or not model.runs_on_pages):
        text = "applies to foresay's kernels for GPUs, which do not run this model"
        raise ConfigError(text, param="reproducible", value=False)
    if options.reproducible is False and any(isinstance(part, FrozenLinear) for part in weights.modules()):
        text = "has no effect on quantized weights, which no library multiplies; drop it"
        raise ConfigError(text, param="reproducible", value=False)
    if options.kv_cache_dtype != "auto":
        if not isinstance(model, CausalModel) or not model.batch_invariant:
            text = "applies to the compiled CPU kernels, which do not run this model"
            raise ConfigError(text, param="kv_cache_dtype", value=options.kv_cache_dtype)
        model.use_fused(torch.int8)
    return loaded


def _arrange(weights: Any, options: LoadOptions) -> None:
    """Arrange the linear layers for the processor."""
    if options.bits is not None:
        linears.freeze_model(weights, linears.quantizer(options.bits, Hardware(weights.device)), all_dtypes=True)
    else:
        linears.freeze_model(weights)
        linears.join_layers(weights)
    if options.activations != "auto":
        linears.set_activations(weights, options.activations)


def _fuse(name: str, model: Any, *, optimise: bool) -> None:
    """Fuse the layers, or log why they cannot be fused; a family's own code is then checked where fusing was expected."""
    from foresay.models.huggingface.self_check import confirm, use_fused_layers

    unfused = use_fused_layers(model, compiled=not optimise)
    if unfused is None:
        return
    if not unfused.expected:
        try:
            confirm(model, unfused.reason)
        except ForesayError as error:
            model.release()
            raise error.about(repr(name)) from None
    level = logging.INFO if unfused.expected or not optimise else logging.WARNING
    logger.log(level, "passes of %s are made by its family's own code: %s", name, unfused)


def end_tokens(weights: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end-of-sequence ids: of the generation config, else of the model's config, else of the tokenizer."""
    eos = getattr(weights.generation_config, "eos_token_id", None) if weights.can_generate() else None
    if eos is None:
        eos = weights.config.get_text_config(decoder=True).eos_token_id
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def check_scores(name: str, model: LanguageModel) -> None:
    """Score a few tokens, so that damaged weights are found at load and not by a request.

    Raises ModelLoadError for scores that are not finite, and any exception of the pass.
    """
    ids = torch.arange(min(_NUM_PROBED, model.max_length)) % model.vocab_size
    source = ids.tolist() if model.capabilities.reads_source else None
    cache = model.new_cache()
    model.admit(Rows([Row(0, ids.tolist(), SamplingParams(), limit=len(ids) + 1, source=source)]), 0, cache)
    scores = model.forward(ModelInput(ids[None].to(model.device), [len(ids)]), cache).scores()
    valid = torch.isfinite(scores) | (scores == -torch.inf)  # -inf: ids without an output
    if not bool(valid.all()) or not bool(torch.isfinite(scores).any(-1).all()):
        raise ModelLoadError(f"{name!r} cannot be used: it gives scores that are not finite; download its files again")
