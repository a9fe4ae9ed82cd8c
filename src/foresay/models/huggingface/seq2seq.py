"""Any Hugging Face encoder-decoder model over the slot cache.

A row's source is encoded once, when the row is admitted, and alone, so that no other row's padding changes it. Its
cross-attention keys and values are cached next to the decoder's. Owns the patches that give each row its own positions in
families with one past length per batch (position embeddings, T5's position bias), and their removal on release. Does not know
what the tokens mean or why they are scored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import EncoderDecoderCache, PreTrainedModel

from foresay.decoding.protocols import KVCache, Logits, ModelInput, PreparedPrompt
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import PromptError, UnsupportedModelError
from foresay.models.cache.slot_cache import Placement, SlotCache, visible_width
from foresay.models.huggingface import attention
from foresay.models.huggingface.causal import TransformersCache
from foresay.models.huggingface.model import UNLIMITED, TransformersModel


def unsupported_reasons(model: PreTrainedModel) -> list[str]:
    """Return the reasons why this encoder-decoder model cannot be decoded exactly; empty if it can."""
    config, accepted = model.config, inspect.signature(model.forward).parameters
    reasons = []
    if not config.is_encoder_decoder:
        reasons.append("it has no encoder")
    if model.main_input_name != "input_ids":
        reasons.append(f"its encoder reads {model.main_input_name}, not tokens")
    if not {"decoder_input_ids", "encoder_outputs", "past_key_values"} <= set(accepted):
        reasons.append("its forward takes no decoder_input_ids, encoder_outputs and past_key_values")
    decoder_vocab = getattr(config, "decoder_vocab_size", None) or config.get_text_config(decoder=True).vocab_size
    if decoder_vocab != config.get_text_config(encoder=True).vocab_size or not getattr(
        config, "share_encoder_decoder_embeddings", True
    ):
        reasons.append("its encoder and decoder have different vocabularies")
    if getattr(model, "_is_stateful", False):
        reasons.append("its recurrent state cannot be rewound to before a rejected token")
    if not reasons and _start_token(model) is None:
        reasons.append("its decoder_start_token_id is not set")
    return reasons


def layers_within(decoder: nn.Module) -> str | None:
    """Return the dotted path of a decoder's list of layers, the outermost module list; None if there is none."""
    lists = [name for name, part in decoder.named_modules() if isinstance(part, nn.ModuleList)]
    return min(lists, key=lambda name: name.count("."), default=None)


def _start_token(model: PreTrainedModel) -> int | None:
    """Return the decoder start token, found as transformers does; None if there is none."""
    generation = model.generation_config
    for value in (generation.decoder_start_token_id, getattr(model.config, "decoder_start_token_id", None)):
        if value is not None:
            return int(value)
    return None if generation.bos_token_id is None else int(generation.bos_token_id)


def _limit(config: Any, own: str) -> int | None:
    """Return the number of positions of the encoder or decoder, from its own field `own` (LED) or the common one."""
    limit = getattr(config, own, None) or getattr(config, "max_position_embeddings", None)
    return None if limit is None else int(limit)


class Seq2SeqModel(TransformersModel):
    """An encoder-decoder transformers model that scores ragged rows; `Row.source` is the encoder source."""

    reads_source = True

    def __init__(self, model: PreTrainedModel, *, part_of: Seq2SeqModel | None = None) -> None:
        """Put `model` in eval mode. Raises UnsupportedModelError if it cannot be decoded exactly.

        part_of: the model that shares these modules and owns their patches.
        """
        reasons = unsupported_reasons(model)
        if reasons:
            raise UnsupportedModelError(f"{type(model).__name__} cannot be decoded: {'; '.join(reasons)}")
        super().__init__(model, pluggable=model._supports_attention_backend or model._can_set_attn_implementation())
        self._encoder, self._decoder = model.get_encoder(), model.get_decoder()
        path = layers_within(self._decoder)
        self.num_layers = (  # the configuration may give the encoder's number
            int(model.config.get_text_config(decoder=True).num_hidden_layers)
            if path is None
            else len(list(self._decoder.get_submodule(path).children()))
        )
        self._width = int(model.get_input_embeddings().weight.shape[1])
        self._undo: list[Callable[[], None]] = []
        relative = [module for module in self._decoder.modules() if getattr(module, "relative_attention_bias", None)]
        absolute = [module for module in self._decoder.modules() if _embeds_positions(module)]
        # relative positions have no bound
        most = None if relative else _limit(model.config, "max_decoder_position_embeddings")
        self.max_length = most or UNLIMITED
        self.max_source_length = None if relative else _limit(model.config, "max_encoder_position_embeddings")
        if part_of is not None:
            return
        for module in relative:
            _bias_per_row(module, self._undo)
        for module in absolute:
            _positions_per_row(module, self.max_length, self._undo)

    @property
    def decoder_start_token_id(self) -> int:
        """The token that the decoder side of every row begins with."""
        token = _start_token(self.model)
        assert token is not None
        return token

    def release(self) -> Any:
        """Restore the model's attention, positions and training mode and return it."""
        while self._undo:
            self._undo.pop()()
        return super().release()

    def prepare_prompt(self, prompt: Sequence[int], params: SamplingParams) -> PreparedPrompt:
        """Return the decoder start tokens, the parameters, and the prompt as source.

        A forced first token belongs to the start tokens, not to the output.
        """
        forced = self.model.generation_config.forced_bos_token_id
        return PreparedPrompt([self.decoder_start_token_id, *([] if forced is None else [int(forced)])], params, prompt)

    def new_cache(self) -> SlotCache:
        """Return a cache without rows: of the decoder, and of the cross-attention over each row's source."""
        return SlotCache(sources=SlotCache())

    @torch.inference_mode()
    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add the rows from index `first` on and encode their sources, unless the cache's owner encoded them.

        Raises PromptError for a row without a source.
        """
        assert isinstance(cache, SlotCache) and cache.sources is not None and len(cache.lengths) == first
        sources = [self._source(row) for row in list(rows)[first:]] if cache.owner is None else []
        cache.add_rows(len(rows) - first)
        for index, source in enumerate(sources, first):
            self._encode(source, index, cache.sources)

    def _source(self, row: Row) -> torch.Tensor:
        """Return a row's source, [1, S], truncated to the limit of this model's encoder: a draft model's may be shorter."""
        if row.source is None:
            raise PromptError(
                "an encoder-decoder model needs a source, and this request has none; pass source=", param="source"
            )
        source = row.source[: self.max_source_length]
        return torch.from_numpy(np.minimum(source, self.vocab_size - 1))[None].to(self.device)

    def _encode(self, source: torch.Tensor, index: int, sources: SlotCache) -> None:
        """Encode one source [1, S] and cache its cross-attention keys and values of every layer for row `index`.

        The decoder runs over its start token, so that each layer computes and caches its own keys and values without knowledge of
        the family's modules. The start token is fed again in the row's first pass.
        """
        states = self._encoder(input_ids=source).last_hidden_state
        length = source.shape[1]
        scratch = SlotCache()
        scratch.add_rows(1)
        at = scratch.begin_pass(0, 1, 2, self.device)
        read = sources.begin_pass(index, 1, length, self.device)
        memory = EncoderDecoderCache(TransformersCache(scratch, at), TransformersCache(sources, read))
        with attention.during(at):
            self._decoder(
                input_ids=source.new_full((1, 2), self.decoder_start_token_id),
                encoder_hidden_states=states,
                encoder_attention_mask=self._cross_mask([length], 2, read.width),
                past_key_values=memory,
                use_cache=True,
            )
        sources.lengths[index] = length

    def _cross_mask(self, lengths: Sequence[int], columns: int, width: int) -> torch.Tensor:
        """Return the additive mask [B, 1, T, width]: 0 at the slots of each row's source, the dtype's minimum after them."""
        ends = torch.tensor(lengths, device=self.device)[:, None, None, None]
        past_end = torch.arange(width, device=self.device) >= ends
        mask = torch.zeros(len(lengths), 1, columns, width, dtype=self.model.dtype, device=self.device)
        return mask.masked_fill_(past_end, torch.finfo(mask.dtype).min)

    def _call(
        self, model_input: ModelInput, token_ids: torch.Tensor, at: Placement, cache: SlotCache
    ) -> tuple[torch.Tensor | None, Mapping[int, torch.Tensor]]:
        logits, hidden = model_input.logits, model_input.hidden_layers
        sources = cache.sources
        assert sources is not None
        lengths = sources.lengths[at.first_row : at.first_row + at.batch]
        width = visible_width(max(lengths), self.device)
        memory = EncoderDecoderCache(TransformersCache(cache, at), TransformersCache(sources))
        seen = [
            sources.read(layer, at.first_row, at.batch, width)
            for layer in range(min(self.num_layers, sources.tensors.num_layers))
        ]
        memory.cross_attention_cache.layers = [SimpleNamespace(keys=k, values=v) for k, v in seen]
        memory.is_updated = dict.fromkeys(range(len(seen)), True)
        mask = self._cross_mask(lengths, token_ids.shape[1], width)
        # the encoder's states are not read any more, but families check that they exist
        states = torch.zeros(at.batch, 1, self._width, dtype=self.model.dtype, device=self.device)
        common: dict[str, Any] = {"past_key_values": memory, "use_cache": True}
        if hidden:
            common["output_hidden_states"] = True
        if logits is Logits.NONE:
            common |= {"encoder_hidden_states": states, "encoder_attention_mask": mask}
            out = self._decoder(input_ids=token_ids, **common)
            return None, {layer: out.hidden_states[layer] for layer in hidden}
        out = self.model(decoder_input_ids=token_ids, encoder_outputs=(states,), attention_mask=mask, **common)
        return out.logits, {layer: out.decoder_hidden_states[layer] for layer in hidden}


def _embeds_positions(module: nn.Module) -> bool:
    """True for a position embedding that counts from one past length per batch, and also accepts positions or ids."""
    names = set(inspect.signature(module.forward).parameters)
    return "past_key_values_length" in names and ("position_ids" in names or {"input_ids", "inputs_embeds"} <= names)


def _positions_per_row(module: Any, limit: int, undo: list[Callable[[], None]]) -> None:
    """Make a position embedding use each row's own positions during a pass. limit: number of positions.

    Families disagree on the shape of position_ids, but all of them embed a flat list [B * T]. A module without position_ids
    (M2M-100) is evaluated for all positions from 0 on, from which each row takes its own. Padding may exceed the last position;
    it is never read.
    """
    signature = inspect.signature(module.forward)
    takes_positions = "position_ids" in signature.parameters

    def set_positions(module: Any, args: Any, kwargs: Any) -> Any:
        at = attention.current_pass()
        if at is None:
            return None
        bound = signature.bind(*args, **kwargs)
        bound.arguments["past_key_values_length"] = 0
        if takes_positions:
            bound.arguments["position_ids"] = at.positions.clamp(max=limit - 1).flatten()
        return bound.args, bound.kwargs

    def select_rows(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        at = attention.current_pass()
        if at is None:
            return output
        if takes_positions:
            return output.reshape(*at.positions.shape, -1)
        ids = signature.bind(*args, **kwargs).arguments["input_ids"]
        one_row = ids.new_full((1, min(at.width, limit)), module.padding_idx + 1)
        own = type(module).forward(module, one_row)[0][at.positions.clamp(max=limit - 1)]
        # the padding token has the same embedding everywhere, without a position
        return torch.where(ids[..., None] == module.padding_idx, output, own)

    undo.append(module.register_forward_pre_hook(set_positions, with_kwargs=True).remove)
    undo.append(module.register_forward_hook(select_rows, with_kwargs=True).remove)


def _bias_per_row(module: Any, undo: list[Callable[[], None]]) -> None:
    """Make a layer with T5's relative position bias use each row's own positions during a pass."""
    module.compute_bias = MethodType(_row_bias, module)
    undo.append(lambda: delattr(module, "compute_bias"))


def _row_bias(
    layer: Any, query_length: int, key_length: int, device: torch.device | None = None, past_seen_tokens: int = 0
) -> torch.Tensor:
    """Return the bias of slot s for column t of each row, [B, H, T, S]; outside a pass, the family's own result.

    The family computes the bias of the last position towards all slots; an earlier position uses the end of this line.
    """
    compute_bias, at = type(layer).compute_bias, attention.current_pass()
    if at is None:
        shared: torch.Tensor = compute_bias(layer, query_length, key_length, device, past_seen_tokens)
        return shared
    line: torch.Tensor = compute_bias(layer, 1, key_length, device, key_length - 1)[0, :, 0]  # [H, S]
    slots = at.slot_positions().to(line.device)[:, None]
    distance = at.positions.to(line.device)[:, :, None] - slots  # [B, T, S], negative for masked slots
    return line[:, key_length - 1 - distance.clamp(min=0)].transpose(0, 1)
