"""Gemma 4's assistants as draft heads: a small model that attends to the target's keys and values, and has none of its own.

An assistant reads the embedding of the last token and the target's hidden state before it, as a head does, and then its own
output in place of the hidden state. All tokens of a draft have the position of the last committed token and attend to what the
target has cached before it: in layers with windows and without, to the target's last layer of that kind which keeps keys and
values.
transformers computes the layers; this module owns what they read, and the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedTextModel

from foresay.decoding.ahead import lend
from foresay.decoding.capabilities import Capabilities
from foresay.decoding.devices import is_remote
from foresay.decoding.protocols import KVCache, Logits, ModelInput, ModelOutput
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.drafts.base import LAST, NEXT, OnLastStates
from foresay.models.drafts.fields import FULL, SLIDING
from foresay.models.huggingface import linears
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import MakeProduct


class _Readers:
    """Part of a configuration: no layer has keys and values of its own."""

    num_hidden_layers: int

    @property
    def kv_sharing_modes(self) -> list[str]:
        return ["reuse"] * self.num_hidden_layers


class _TextConfig(_Readers, Gemma4TextConfig):  # type: ignore[misc]
    pass


class _UnifiedTextConfig(_Readers, Gemma4UnifiedTextConfig):  # type: ignore[misc]
    pass


KINDS: Mapping[str, tuple[type[Any], type[Any]]] = {
    "gemma4_assistant": (_TextConfig, Gemma4TextModel),
    "gemma4_unified_assistant": (_UnifiedTextConfig, Gemma4UnifiedTextModel),
}
"""model_type of a config.json -> classes of the layers' configuration and of the layers."""


class Candidates(nn.Module):
    """Choose C of G groups of tokens by products with their centres; scores of other tokens are not computed."""

    def __init__(self, width: int, vocab_size: int, groups: int, chosen: int) -> None:
        """Groups have V / G tokens each."""
        super().__init__()
        self.centroids = nn.Linear(width, groups, bias=False)
        self.token_ordering = nn.Buffer(torch.zeros(vocab_size, dtype=torch.long))
        """[V] int64, the tokens of the first group, then those of the second, ..."""
        self._groups, self._chosen = groups, chosen

    def forward(self, outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return scores [n, V] of outputs [n, D], -inf outside the chosen groups. rows: the output layer, [V, D]."""
        groups = self.token_ordering.view(self._groups, -1)
        ids = groups[self.centroids(outputs).topk(self._chosen, -1).indices].flatten(1)
        scores = (rows[ids] @ outputs[..., None]).squeeze(-1)
        return scores.new_full((len(outputs), len(rows)), -torch.inf).scatter(1, ids, scores)


class AssistantModule(nn.Module):
    """The weights of an assistant, under the names of published files."""

    def __init__(self, kind: str, text: Mapping[str, Any], width: int, candidates: tuple[int, int] | None) -> None:
        """text: fields of the layers. width: of the target. candidates: number of groups of tokens, and of those chosen."""
        super().__init__()
        config, layers = KINDS[kind]
        self.config = config(**text)
        self.width, own = width, int(self.config.hidden_size)
        self.model = layers(self.config)
        self.pre_projection = nn.Linear(2 * width, own, bias=False)
        self.post_projection = nn.Linear(own, width, bias=False)
        self.lm_head: nn.Linear | None = None
        """None before `finish`: the embeddings are the output layer too."""
        self.masked_embedding = (
            None if candidates is None else Candidates(own, int(self.config.vocab_size), *candidates)
        )

    def finish(self) -> None:
        """Compute what is no weight, after weights have replaced those on the meta device."""
        self.model.rotary_emb = type(self.model.rotary_emb)(self.config)
        if self.lm_head is None:
            self.lm_head = nn.Linear(1, 1, bias=False)
            self.lm_head.weight = self.model.embed_tokens.weight
        self.model.embed_tokens = nn.Identity()  # inputs are the target's embeddings

    def freeze(self, make: MakeProduct) -> None:
        """Multiply by products that `make` builds from now on; of rows that are chosen by candidates the weights stay."""
        holder = nn.ModuleDict(
            {k: v for k, v in self.named_children() if k != "lm_head" or self.masked_embedding is None}
        )
        linears.freeze_linears(holder, make, all_dtypes=make is not linears.unquantized)
        for name, part in holder.items():
            setattr(self, name, part)

    def forward(
        self, pairs: torch.Tensor, position: int, shared: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores [n, V] and outputs [n, H] of pairs [n, 2 H] of embedding and hidden state, which do not see each other.

        shared: kind of layer -> keys and values of the target, [1, heads, `position`, dim].
        """
        count = len(pairs)
        near = torch.arange(position, device=pairs.device) >= position - 1 - int(self.config.sliding_window)
        out = self.model(
            inputs_embeds=self.pre_projection(pairs)[:, None],
            attention_mask={FULL: None, SLIDING: near.expand(count, 1, 1, -1)},
            position_ids=torch.full((count, 1), position, device=pairs.device),
            shared_kv_states={
                kind: tuple(one.expand(count, -1, -1, -1) for one in pair) for kind, pair in shared.items()
            },
            use_cache=False,
        ).last_hidden_state[:, 0]
        assert self.lm_head is not None
        scores = self.lm_head(out) if self.masked_embedding is None else self.masked_embedding(out, self.lm_head.weight)
        return scores, self.post_projection(out)


@runtime_checkable
class _Readable(Protocol):
    """A cache that returns what it holds: in slots, or in pages."""

    lengths: list[int]

    def read(self, layer: int, first_row: int, batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class Assistant(OnLastStates):
    """An assistant bound to the target whose keys and values it reads. Rows are those of the target's cache."""

    def __init__(
        self, module: AssistantModule, target: CausalModel, *, name: str = "", make: MakeProduct = linears.unquantized
    ) -> None:
        """name: of the target, for errors. make: builds the products. Raises ConfigError if it does not fit the target."""
        config, own = target.model.config.get_text_config(decoder=True), module.config
        self.target, self.vocab_size, self.max_length = target, target.vocab_size, target.max_length
        self.width = module.width
        self.hidden_layers: tuple[int, ...] = (target.num_layers,)
        for quantity, expected, actual in (
            ("hidden size", self.width, int(config.hidden_size)),
            ("vocabulary", int(own.vocab_size), target.vocab_size),
        ):
            if expected != actual:
                text = f"of the assistant differs from {actual} of {name!r}"
                raise ConfigError(text, param=quantity, value=expected)
        self._layers = _stored_layers(config)
        if missing := {FULL, SLIDING} - set(self._layers):
            text = f"is read by the assistant, and {name!r} has no such layers"
            raise ConfigError(text, param="layer_types", value=min(missing))
        self._check_heads(own, config, name)
        self.device, self.dtype = target.device, target.model.dtype
        self.num_parameters = sum(weight.numel() for weight in module.parameters())
        self._module = module.to(self.device, self.dtype).eval()
        if not is_remote(self.device):
            self._module.freeze(make)
        self._embed = target.model.get_input_embeddings()
        self._source: _Readable | None = None
        self._read: dict[int, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
        """Row -> kind of layer -> the keys and values that are read in this step."""

    def _check_heads(self, own: Any, config: Any, name: str) -> None:
        """Raise ConfigError unless each kind of layer has the target's number and size of key heads."""
        for kind, layer in self._layers.items():
            mine = own.per_layer_config[list(own.layer_types).index(kind)] if kind in own.layer_types else None
            theirs = config.per_layer_config[layer] if hasattr(config, "per_layer_config") else config
            for field in ("num_key_value_heads", "head_dim"):
                if mine is not None and getattr(mine, field) != getattr(theirs, field):
                    text = f"differs from {getattr(theirs, field)} in layers of the kind {kind!r} of {name!r}"
                    raise ConfigError(text, param=field, value=getattr(mine, field))

    @property
    def capabilities(self) -> Capabilities:
        """See LanguageModel."""
        return Capabilities(trees=True, num_layers=LAST, prefill_together=True)

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Read keys and values of this cache from now on. Raises UnsupportedModelError if it has none to compute with."""
        if not isinstance(cache, _Readable) or self.target.cache_dtype is torch.int8:
            found = "in 8 bits (kv_cache_dtype)" if isinstance(cache, _Readable) else "in another layout or not at all"
            raise UnsupportedModelError(f"an assistant reads the target's keys and values, which are kept {found}")
        self._source = cache
        lend(cache)
        self.forget()

    def forget(self) -> None:
        """Forget the keys and values that were read; call it whenever the cache changes."""
        self._read = {}

    @torch.inference_mode()
    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one pass over pairs of a token and, in `ModelInput.features` [B, T, H], the hidden state before it.

        Of a chain only the last pair of each row is computed: the others change no state.
        """
        assert isinstance(cache, SlotCache) and model_input.features is not None
        batch, columns = model_input.token_ids.shape
        first, last = model_input.first_row, model_input.logits is Logits.LAST
        for i, count in enumerate(model_input.num_tokens):
            cache.lengths[first + i] += count
        if model_input.logits is Logits.NONE:
            return ModelOutput(None, {})
        scores = torch.zeros(batch, columns, self.vocab_size, device=self.device, dtype=self.dtype)
        hidden = {
            n: torch.zeros(batch, columns, self.width, device=self.device, dtype=self.dtype) for n in (NEXT, LAST)
        }
        for i, count in enumerate(model_input.num_tokens):
            if count:
                at = slice(count - 1 if last else 0, count)
                ids, features = model_input.token_ids[i, at], model_input.features[i, at]
                scores[i, at], hidden[NEXT][i, at] = self._row(ids, features, first + i)
        hidden[LAST] = hidden[NEXT]
        return ModelOutput(model_input.scored(scores), hidden)

    def _row(self, ids: torch.Tensor, features: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores [n, V] and outputs [n, H] of pairs of one row, which do not see each other."""
        assert self._source is not None, "the target's keys and values are not in slots"
        length = self._source.lengths[row]
        pairs = torch.cat([self._embed(ids.to(self.device)).to(self.dtype), features.to(self.dtype)], -1)
        if row not in self._read:
            found = {kind: self._source.read(layer, row, 1, length) for kind, layer in self._layers.items()}
            self._read[row] = {
                kind: (keys.to(self.dtype), values.to(self.dtype)) for kind, (keys, values) in found.items()
            }
        scores, outputs = self._module(pairs, length, self._read[row])
        return F.pad(scores, (0, self.vocab_size - scores.shape[-1]), value=-torch.inf), outputs


def _stored_layers(config: Any) -> dict[str, int]:
    """Return the last layer of each kind that keeps keys and values of its own."""
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * int(config.num_hidden_layers))
    own = kinds[: len(kinds) - int(getattr(config, "num_kv_shared_layers", 0) or 0)]
    return {kind: layer for layer, kind in enumerate(own)}
