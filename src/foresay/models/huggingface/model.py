"""A transformers model as a LanguageModel: the base class of decoder-only and encoder-decoder models.

Owns the routing of masks and attention through `attention`, its removal on release, and the steps that every forward pass
takes around the model's own forward. Subclasses implement the call of one kind of model. Does not import transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from foresay import distributed
from foresay.decoding.capabilities import Capabilities
from foresay.decoding.distributions import VocabularySubset
from foresay.decoding.protocols import KVCache, ModelInput, ModelOutput, PreparedPrompt
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.cache.memory import free_bytes, kv_bytes
from foresay.models.cache.slot_cache import Placement, SlotCache, visible_width
from foresay.models.hardware import Hardware
from foresay.models.huggingface import attention, linears

MAX_TOKENS = 256
"""Most tokens of a forward pass or prompt chunk on a CPU; matrix products over many more rows sum in another order."""
UNLIMITED = 1 << 20
"""Context limit of a model with unbounded positions (ALiBi without a configured length, T5)."""


class TransformersModel:
    """A transformers model that scores ragged rows."""

    reads_source = False
    """True if each row has an encoder source."""
    max_length: int
    """Most tokens of a row: prompt and output together."""
    takes_trees: bool = True
    """True if foresay controls all positions that reach attention, so that several columns may share one."""
    num_layers: int
    """Number of layers whose hidden states a forward pass can return."""
    max_source_length: int | None = None
    """Most tokens of an encoder source; None if unbounded."""
    subset: VocabularySubset | None = None
    """Tokens that a trimmed output head scores; None if output i of the head is token id i."""

    def __init__(self, model: Any, *, pluggable: bool) -> None:
        """Put `model` in eval mode and route its attention. pluggable: True if the family's attention function can be chosen."""
        attention.register()
        self._was_training = model.training
        self.model = model.eval()
        self._configs: dict[int, tuple[Any, str]] = {}
        self._copied: list[tuple[Any, Any]] = []
        self._token_bytes: dict[torch.dtype, int] = {}
        self._set_attention(pluggable)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.device = linears.device_of(model.get_input_embeddings())
        self.hardware = Hardware(self.device)
        self.num_parameters = linears.count_parameters(model)
        self.is_shared = _is_sharded(model)
        """True if several processes compute the model together (`tp_plan`)."""

    def _set_attention(self, pluggable: bool) -> None:
        """Route masks through foresay, and attention too if the family's attention function can be chosen.

        Families with custom attention code (Falcon, BLOOM) keep it and get only foresay's masks: their attention modules then
        read a copy of the configuration that still names the implementation they were built for.
        """
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if config is None or not hasattr(config, "_attn_implementation"):
                continue
            if not pluggable and not hasattr(module, "base_model_prefix"):  # an attention module, not a model
                self._copied.append((module, config))
                module.config = copy.copy(config)
            else:
                self._configs.setdefault(id(config), (config, config._attn_implementation))
        for config, _ in self._configs.values():
            config._attn_implementation = attention.NAME

    def release(self) -> Any:
        """Restore the model's attention and training mode and return it; this object must not be used afterwards."""
        for config, implementation in self._configs.values():
            config._attn_implementation = implementation
        for module, config in self._copied:
            module.config = config
        return self.model.train(self._was_training)

    def uncached(self, token_ids: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of whole sequences by the model's own attention, [B, T] -> [B, T, V]; the self-check's reference.

        source: [B, S], the encoder source of an encoder-decoder.
        """
        inputs = {"input_ids": token_ids} if source is None else {"input_ids": source, "decoder_input_ids": token_ids}
        for config, implementation in self._configs.values():
            config._attn_implementation = implementation
        try:
            logits: torch.Tensor = self.model(**inputs, use_cache=False).logits
        finally:
            for config, _ in self._configs.values():
                config._attn_implementation = attention.NAME
        return logits

    @property
    def capabilities(self) -> Capabilities:
        """See LanguageModel. Without our kernels, prompts are prefilled singly on a CPU: larger products sum in another order."""
        on_cpu = self.hardware.on_cpu
        return Capabilities(
            trees=self.takes_trees,
            num_layers=self.num_layers,
            reads_source=self.reads_source,
            max_source_length=self.max_source_length,
            prefill_chunk=MAX_TOKENS,
            prefill_together=not on_cpu or self.batch_invariant,
            prefill_in_any_pieces=on_cpu,
            ragged=self.batch_invariant,
            own_threads=self.batch_invariant,
        )

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See LanguageModel. Counts the decoder's cache only. Without our kernels, all rows get as many slots as the longest."""
        if (dtype := self.cache_dtype) not in self._token_bytes:
            self._token_bytes[dtype] = kv_bytes(self.model.config.get_text_config(decoder=True), dtype)
        longest = visible_width(max(lengths, default=0), self.device)
        slots = sum(lengths) if self.batch_invariant else len(lengths) * longest
        return slots * self._token_bytes[dtype]

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def free_bytes(self) -> int:
        """See LanguageModel. The sum over all devices that the model is spread over."""
        device_map = getattr(self.model, "hf_device_map", None) or {}
        devices = {self.device, *(torch.device(one) for one in device_map.values() if one != "disk")}
        free = sum(map(free_bytes, devices))
        return distributed.minimum(free) if self.is_shared else free

    def borrowed(self, owner: SlotCache) -> SlotCache:
        """Return a cache over the owner's slots and encoded sources, for a draft model of the owner's first layers."""
        return SlotCache(owner=owner)

    def prepare_prompt(self, prompt: Sequence[int], params: SamplingParams) -> PreparedPrompt:
        """Return the prompt and parameters unchanged."""
        return PreparedPrompt(prompt, params)

    @torch.inference_mode()
    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one forward pass: logits [B, T, V], or [B, 1, V] with Logits.LAST, and hidden states [B, T, D]."""
        assert isinstance(cache, SlotCache)
        token_ids = model_input.token_ids
        batch, columns = token_ids.shape
        rows_per_part = max(1, MAX_TOKENS // columns) if self.hardware.on_cpu else batch
        if batch > rows_per_part:
            parts = [(i, min(i + rows_per_part, batch)) for i in range(0, batch, rows_per_part)]
            return _joined([self.forward(model_input.part(a, b), cache) for a, b in parts])
        parents = model_input.parents
        if batch * columns == 1 and not self.batch_invariant:
            # some CPUs use different matrix kernels for one row and for two, so a pass has at least two
            token_ids, parents = torch.cat([token_ids, token_ids], 1), None
        at = cache.begin_pass(model_input.first_row, batch, token_ids.shape[1], self.device, parents)
        with attention.during(at):
            scores, states = self._call(model_input, token_ids, at, cache)
        for i, count in enumerate(model_input.num_tokens):
            cache.lengths[model_input.first_row + i] += count
        hidden = {layer: states[layer][:, :columns] for layer in model_input.hidden_layers}
        if scores is None:
            return ModelOutput(None, hidden)
        return ModelOutput(self._padded(model_input.scored(scores[:, :columns])), hidden, subset=self.subset)

    @property
    def batch_invariant(self) -> bool:
        """True if a token's scores have the same bits alone and in any batch."""
        return False

    def _padded(self, scores: torch.Tensor) -> torch.Tensor:
        """Pad logits to [..., V] with -inf for ids without an output; those of a trimmed head are unchanged."""
        # the embedding may have more rows than the head has outputs
        missing = 0 if self.subset is not None else self.vocab_size - scores.shape[-1]
        return F.pad(scores, (0, missing), value=-torch.inf) if missing > 0 else scores

    def _call(
        self, model_input: ModelInput, token_ids: torch.Tensor, at: Placement, cache: SlotCache
    ) -> tuple[torch.Tensor | None, Mapping[int, torch.Tensor]]:
        """Return the logits and the requested hidden states.

        Logits are [B, T, V], or [B, 1, V] if only the last are requested, or None with Logits.NONE. token_ids: [B, T], the
        input's, possibly with one column more.
        """
        raise NotImplementedError


def _is_sharded(model: Any) -> bool:
    """True if some weights are shards distributed over several processes."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(one, DTensor) for one in model.parameters())


def _joined(parts: Sequence[ModelOutput]) -> ModelOutput:
    """Concatenate the outputs of a pass that was computed in parts over rows."""
    hidden = {layer: torch.cat([part.hidden[layer] for part in parts]) for layer in parts[0].hidden}
    if parts[0].logits is None:
        return ModelOutput(None, hidden)
    scores = torch.cat([part.logits for part in parts if part.logits is not None])
    return ModelOutput(scores, hidden, subset=parts[0].subset)
