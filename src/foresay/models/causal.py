"""Any Hugging Face decoder-only model over the slot cache.

Owns the adapter between transformers' model and cache classes and ours, and the knowledge of which models can be
rewound. Refuses to know what the tokens mean or why they are scored.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Cache, PreTrainedModel

from foresay.core import KVCache, Rows
from foresay.errors import UnsupportedModelError
from foresay.models import attention
from foresay.models.base import Logits, ModelOutput
from foresay.models.slots import Pass, SlotCache

UNLIMITED = 1 << 20
"""Context limit of a model whose positions have no bound (ALiBi without a configured length)."""
_RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "hybrid", "rwkv")
_BOUNDED_ROPE = ("dynamic", "longrope")


class TransformersCache(Cache):
    """The slot cache, as transformers' attention layers expect to find it."""

    def __init__(self, slots: SlotCache) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.at: Pass | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's keys and values and return what the rows see."""
        assert self.at is not None
        return self.slots.write(layer_idx, key_states, value_states, self.at)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(slots in sight, 0): slots are absolute."""
        assert self.at is not None
        return self.at.width, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """What a family that builds its own bias takes for the past: slots in sight less the pass's columns."""
        assert self.at is not None
        return self.at.width - int(self.at.positions.shape[1])


def unsupported_reasons(model: PreTrainedModel) -> list[str]:
    """Why this model cannot be decoded exactly; empty when it can."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = sorted(k for k in kinds if any(name in k for name in _RECURRENT_LAYERS))
    reasons = []
    if config.is_encoder_decoder or model.config.is_encoder_decoder:
        reasons.append("it is an encoder-decoder model, and this release decodes decoder-only models")
    if getattr(model, "_is_stateful", False) or recurrent:
        detail = f" (layers: {', '.join(recurrent)})" if recurrent else ""
        reasons.append(f"its recurrent state cannot be rewound to before a rejected token{detail}")
    accepted = inspect.signature(model.forward).parameters
    if not recurrent and "past_key_values" not in accepted:
        reasons.append("its forward takes no past_key_values, so nothing can be cached")
    if getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", 0):
        reasons.append("its layers share keys and values outside the cache interface")
    return reasons


def context_limit(model: PreTrainedModel) -> int:
    """Most tokens a row may hold.

    Position encodings whose frequencies depend on the longest row (dynamic, longrope) are served up to the length
    below which they do not: beyond it a draft token's position would change what its predecessors meant.
    """
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    limit = next((int(v) for n in names if (v := getattr(config, n, None))), UNLIMITED)
    for rope in _rope_parameters(config):
        if rope.get("rope_type") in _BOUNDED_ROPE:
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, int(original or limit))
    return limit


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope:
        return [rope]
    return [value for value in rope.values() if isinstance(value, dict)]


class CausalModel:
    """A decoder-only transformers model, scored over ragged rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedModelError when the model's state cannot be rewound. `model` is put in eval mode."""
        reasons = unsupported_reasons(model)
        if reasons:
            raise UnsupportedModelError(f"{type(model).__name__} cannot be decoded: {'; '.join(reasons)}")
        attention.register()
        self._was_training = model.training
        self.model = model.eval()
        self._configs: dict[int, tuple[Any, str]] = {}
        self._copied: list[tuple[Any, Any]] = []
        self._set_attention()
        config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.max_length = context_limit(model)
        # also the bound below which the frequencies of a longrope model stay what they are, pads included
        self.position_limit = min(
            self.max_length, int(getattr(config, "max_position_embeddings", None) or self.max_length)
        )
        self.device = model.get_input_embeddings().weight.device
        self.num_parameters = int(model.num_parameters())
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._body = model.base_model

    def _set_attention(self) -> None:
        """Route masks, and attention where the family lets it be chosen, through foresay.

        A family with attention code of its own (Falcon, BLOOM) keeps it, and only its masks are ours: its attention
        modules then read a copy of the configuration that still names the implementation they were built for.
        """
        pluggable = getattr(self.model, "_supports_attention_backend", False)
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if config is None or not hasattr(config, "_attn_implementation"):
                continue
            if not pluggable and not isinstance(module, PreTrainedModel):
                self._copied.append((module, config))
                module.config = copy.copy(config)
            else:
                self._configs.setdefault(id(config), (config, config._attn_implementation))
        for config, _ in self._configs.values():
            config._attn_implementation = attention.NAME

    def release(self) -> PreTrainedModel:
        """Give the model its own attention and mode back and return it; this object must not be used afterwards."""
        for config, implementation in self._configs.values():
            config._attn_implementation = implementation
        for module, config in self._copied:
            module.config = config
        return self.model.train(self._was_training)

    def uncached(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits of whole sequences by the model's own attention, [B, T] -> [B, T, V]; the reference of the self-check."""
        for config, implementation in self._configs.values():
            config._attn_implementation = implementation
        try:
            logits: torch.Tensor = self.model(input_ids=token_ids, use_cache=False).logits
        finally:
            for config, _ in self._configs.values():
                config._attn_implementation = attention.NAME
        return logits

    def new_cache(self) -> SlotCache:
        """A cache without rows."""
        return SlotCache()

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Give rows from place `first` on empty cache rows."""
        assert isinstance(cache, SlotCache) and len(cache.lengths) == first
        cache.add_rows(len(rows) - first)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        num_tokens: Sequence[int],
        cache: KVCache,
        *,
        first_row: int = 0,
        logits: Logits = Logits.ALL,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """One pass; see LanguageModel.forward."""
        assert isinstance(cache, SlotCache)
        batch, columns = token_ids.shape
        if batch * columns == 1:
            # one row and two rows take different matrix kernels on some CPUs; two are always asked for
            token_ids = torch.cat([token_ids, token_ids], 1)
        at = cache.begin_pass(first_row, batch, token_ids.shape[1], self.device)
        out = self._call(token_ids, at, cache, logits, bool(hidden_layers))
        for i, count in enumerate(num_tokens):
            cache.lengths[first_row + i] += count
        hidden = {layer: out.hidden_states[layer][:, :columns] for layer in hidden_layers}
        if logits is Logits.NONE:
            return ModelOutput(None, hidden)
        scores = out.logits[:, :columns]
        if scores.shape[-1] < self.vocab_size:
            # embeddings larger than the head: ids that can be read but not written
            scores = F.pad(scores, (0, self.vocab_size - scores.shape[-1]), value=-torch.inf)
        if logits is Logits.LAST and columns > 1:
            last = torch.tensor(num_tokens, device=scores.device).clamp(min=1) - 1
            scores = scores[torch.arange(batch, device=scores.device), last][:, None]
        return ModelOutput(scores, hidden)

    def _call(self, token_ids: torch.Tensor, at: Pass, cache: SlotCache, logits: Logits, hidden: bool) -> Any:
        adapter = TransformersCache(cache)
        adapter.at = at
        kwargs: dict[str, Any] = {"input_ids": token_ids, "past_key_values": adapter, "use_cache": True}
        if self._takes_positions:
            # pads may lie past the last position the model has; they are never read
            kwargs["position_ids"] = at.positions.clamp(max=self.position_limit - 1)
        if hidden:
            kwargs["output_hidden_states"] = True
        with attention.during(at):
            return self._body(**kwargs) if logits is Logits.NONE else self.model(**kwargs)
