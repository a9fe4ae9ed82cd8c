"""A transformers model as a LanguageModel: what decoder-only and encoder-decoder models have in common.

Owns routing masks and attention through `attention`, giving the model back as it was, and what every pass does around the
model's own forward. Subclasses know how to call a kind of model. Imports nothing of transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from foresay import distributed
from foresay.decoding.distributions import VocabularySubset
from foresay.decoding.protocols import Capabilities, KVCache, Logits, ModelInput, ModelOutput, PreparedPrompt
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.cache.memory import free_bytes, kv_bytes
from foresay.models.cache.slot_cache import BorrowedSlots, Placement, SlotCache, visible_width
from foresay.models.huggingface import attention, linears

MAX_TOKENS = 256
"""Tokens of a pass on a CPU, a chunk of a prompt too; products over many more rows sum in another order."""
UNLIMITED = 1 << 20
"""Context limit of a model whose positions have no bound (ALiBi without a configured length, T5)."""


class TransformersModel:
    """A transformers model, scored over ragged rows."""

    reads_source = False
    """Whether each row has an encoder source."""
    max_length: int
    """Most tokens of a row, prompt and output together."""
    takes_trees: bool = True
    """Whether positions reach attention only where foresay sets them, so that several columns may share one."""
    num_layers: int
    """Layers whose hidden states a pass can return."""
    max_source_length: int | None = None
    """Most tokens of an encoder source; None without a bound."""
    subset: VocabularySubset | None = None
    """Which tokens a trimmed head scores; None where column i of the head is id i."""

    def __init__(self, model: Any, *, pluggable: bool) -> None:
        """`model` is put in eval mode. pluggable: whether the family lets its attention function be chosen."""
        attention.register()
        self._was_training = model.training
        self.model = model.eval()
        self._configs: dict[int, tuple[Any, str]] = {}
        self._copied: list[tuple[Any, Any]] = []
        self._set_attention(pluggable)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.device = linears.device_of(model.get_input_embeddings())
        self.num_parameters = linears.count_parameters(model)
        self.is_shared = _has_shares(model)
        """Whether several processes compute it together (`tp_plan`)."""

    def _set_attention(self, pluggable: bool) -> None:
        """Route masks, and attention where the family lets it be chosen, through foresay.

        A family with attention code of its own (Falcon, BLOOM) keeps it, and only its masks are ours: its attention
        modules then read a copy of the configuration that still names the implementation they were built for.
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
        """Give the model its own attention and mode back and return it; this object must not be used afterwards."""
        for config, implementation in self._configs.values():
            config._attn_implementation = implementation
        for module, config in self._copied:
            module.config = config
        return self.model.train(self._was_training)

    def uncached(self, token_ids: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of whole sequences by the model's own attention, [B, T] -> [B, T, V]; the reference of the self-check.

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
        """See LanguageModel. On a CPU, most kernels sum larger products in another order; prompts are then filled one by one."""
        on_cpu = self.device.type == "cpu"
        return Capabilities(
            trees=self.takes_trees,
            num_layers=self.num_layers,
            reads_source=self.reads_source,
            max_source_length=self.max_source_length,
            prefill_chunk=MAX_TOKENS,
            prefill_together=not on_cpu or self.one_row_at_a_time,
            prefill_in_any_pieces=on_cpu,
            ragged=self.one_row_at_a_time,
            own_threads=self.one_row_at_a_time,
        )

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See LanguageModel. Of an encoder-decoder, the decoder's. Without our kernels, all rows get the longest one's slots."""
        config = self.model.config.get_text_config(decoder=True)
        longest = visible_width(max(lengths, default=0), self.device)
        slots = sum(lengths) if self.one_row_at_a_time else len(lengths) * longest
        return slots * kv_bytes(config, self.model.dtype.itemsize)

    def free_bytes(self) -> int:
        """See LanguageModel. Of a model spread over devices, what they have together."""
        spread = getattr(self.model, "hf_device_map", None) or {}
        devices = {self.device, *(torch.device(one) for one in spread.values() if one != "disk")}
        room = sum(map(free_bytes, devices))
        return distributed.minimum(room) if self.is_shared else room

    def borrowed(self, owner: SlotCache) -> SlotCache:
        """A cache over another's slots, for a model of the owner's first layers."""
        return BorrowedSlots(owner)

    def prepare_prompt(self, prompt: Sequence[int], params: SamplingParams) -> PreparedPrompt:
        """The prompt and parameters unchanged."""
        return PreparedPrompt(prompt, params)

    @torch.inference_mode()
    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """One pass, logits [B, T, V] ([B, 1, V] with Logits.LAST) and hidden states [B, T, D]; see LanguageModel.forward."""
        assert isinstance(cache, SlotCache)
        token_ids = model_input.token_ids
        batch, columns = token_ids.shape
        at_once = max(1, MAX_TOKENS // columns) if self.device.type == "cpu" else batch
        if batch > at_once:
            parts = [(i, min(i + at_once, batch)) for i in range(0, batch, at_once)]
            return _joined([self.forward(model_input.part(a, b), cache) for a, b in parts])
        parents = model_input.parents
        passed = self._replayed(model_input, cache)
        if passed is None:
            if batch * columns == 1 and not self.one_row_at_a_time:
                # one row and two rows take different matrix kernels on some CPUs, so there are at least two
                token_ids, parents = torch.cat([token_ids, token_ids], 1), None
            at = cache.begin_pass(model_input.first_row, batch, token_ids.shape[1], self.device, parents)
            with attention.during(at):
                passed = self._call(model_input, token_ids, at, cache)
        scores, states = passed
        for i, count in enumerate(model_input.num_tokens):
            cache.lengths[model_input.first_row + i] += count
        hidden = {layer: states[layer][:, :columns] for layer in model_input.hidden_layers}
        if scores is None:
            return ModelOutput(None, hidden)
        scores = scores[:, :columns]
        if model_input.logits is Logits.LAST and scores.shape[1] > 1:
            scores = scores[torch.arange(batch, device=scores.device), model_input.last_columns()][:, None]
        return ModelOutput(self._padded(scores), hidden, subset=self.subset)

    @property
    def one_row_at_a_time(self) -> bool:
        """Whether a token has the same bits whatever else a pass holds, and also alone."""
        return False

    def _padded(self, scores: torch.Tensor) -> torch.Tensor:
        """The logits of a head that was not trimmed over all ids [..., V]; ids that it lacks get -inf."""
        # embeddings may be larger than the head
        missing = 0 if self.subset is not None else self.vocab_size - scores.shape[-1]
        return F.pad(scores, (0, missing), value=-torch.inf) if missing > 0 else scores

    def _replayed(
        self, model_input: ModelInput, cache: SlotCache
    ) -> tuple[torch.Tensor | None, Mapping[int, torch.Tensor]] | None:
        """What `_call` gives, if the pass could be replayed from a recording."""
        return None

    def _call(
        self, model_input: ModelInput, token_ids: torch.Tensor, at: Placement, cache: SlotCache
    ) -> tuple[torch.Tensor | None, Mapping[int, torch.Tensor]]:
        """The logits [B, T, V], or [B, 1, V] where the last are asked for, None with Logits.NONE; the hidden states asked for.

        token_ids: [B, T], those of the feed, perhaps with a column more.
        """
        raise NotImplementedError


def _has_shares(model: Any) -> bool:
    """Whether some weights are shares of what several processes hold together."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(one, DTensor) for one in model.parameters())


def _joined(parts: Sequence[ModelOutput]) -> ModelOutput:
    """The outputs of a pass computed in parts, concatenated over rows."""
    hidden = {layer: torch.cat([part.hidden[layer] for part in parts]) for layer in parts[0].hidden}
    if parts[0].logits is None:
        return ModelOutput(None, hidden)
    scores = torch.cat([part.logits for part in parts if part.logits is not None])
    return ModelOutput(scores, hidden, subset=parts[0].subset)
