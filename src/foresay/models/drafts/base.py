"""A draft on hidden states, bound to its target: its products, norms and draft vocabulary, and features of the hidden states.

Owns the choice of what runs its layers: the compiled CPU kernels, those of GPUs over pages, or else its module, whose bits may
depend on the size of a pass. A kind of draft describes its layers, and adds its forward pass.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from foresay.decoding.capabilities import PAGED_CHUNK, PREFILL_CHUNK, Capabilities
from foresay.decoding.devices import is_remote, launching_on
from foresay.decoding.distributions import VocabularySubset
from foresay.decoding.protocols import KVCache, LanguageModel
from foresay.decoding.rows import Rows
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cpu.layers import NativeLayers
from foresay.models.cpu.product import NativeProduct, Product
from foresay.models.drafts.config import DraftConfig
from foresay.models.drafts.layers import Attend, DraftModule, FeedForward, Projections
from foresay.models.gpu.capture import capture_on
from foresay.models.hardware import Hardware
from foresay.models.huggingface import attention, linears
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.frozen import FrozenEmbedding
from foresay.models.huggingface.linears import MakeProduct, unquantized
from foresay.models.huggingface.operations import RotaryTable
from foresay.models.layer import Layer, Norm

if TYPE_CHECKING:  # at run time this would import Triton
    from foresay.models.gpu.flat import Buffers
    from foresay.models.gpu.layers import PagedLayers, Turns
    from foresay.models.gpu.pages import PagePool
    from foresay.models.gpu.passes import PagedPasses, States

    StatesOf = Callable[[PagedLayers, Buffers, PagePool, Mapping[str, Turns]], States]

logger = logging.getLogger("foresay")
NEXT, LAST = 0, 1
"""Keys of a pass's hidden states: NEXT replaces the target's features in the next pass, LAST is the output layer's input."""
M = TypeVar("M", bound=DraftModule)


@dataclass(frozen=True, slots=True)
class StoredDraft:
    """A stored draft: its configuration, its weights and the tokens that it can draft."""

    config: DraftConfig
    module: DraftModule
    token_ids: torch.Tensor | None
    """[K] int64, ascending; None for the whole vocabulary of the target."""
    learned: bytes = b""
    """Digest of its files; see learned_by."""

    def stored_in(self, dtype: torch.dtype) -> StoredDraft:
        """Return a copy to be written, whose weights have another dtype."""
        return replace(self, module=copy.deepcopy(self.module).to(dtype))


class SlotCacheRows(LanguageModel):
    """Base of drafts that keep their keys and values in a slot cache, or in pages."""

    paged: PagedPasses | None = None
    """Passes over flat tokens and pages, as the target's, for a kind of draft that has them."""

    def new_cache(self) -> Any:
        """Return a cache without rows."""
        return self.paged.new_cache() if self.paged else SlotCache()

    def _capabilities(self, *, trees: bool = True, is_native: bool = False, alone: bool = False) -> Capabilities:
        """See LanguageModel. is_native: our CPU kernels run the passes. alone: without kernels prompts are prefilled singly."""
        paged = self.paged is not None
        return Capabilities(
            trees=trees,
            num_layers=LAST,
            prefill_together=not alone or is_native or paged or is_remote(self.device),
            prefill_chunk=PAGED_CHUNK if paged else PREFILL_CHUNK,
            ragged=is_native or paged,
            own_threads=is_native,
        )

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add an empty cache row for each row from index `first` on."""
        cast(SlotCache, cache).add_rows(len(rows) - first)


class OnLastStates(SlotCacheRows):
    """Base of drafts whose features are the target's last hidden states as they are."""

    hidden_layers: tuple[int, ...]
    dtype: torch.dtype

    def joined(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the target's last hidden states, given as layer -> [..., H]."""
        return hidden[self.hidden_layers[0]].to(self.device, self.dtype)

    def features(self, joint: torch.Tensor) -> torch.Tensor:
        """Return the features of hidden states [..., H]: these themselves."""
        return joint


class DraftModel(SlotCacheRows):
    """A draft bound to the target that it was trained for. L hidden states are read, width D, K tokens are drafted."""

    def __init__(
        self, draft: StoredDraft, target: CausalModel, *, name: str = "", make: MakeProduct = unquantized
    ) -> None:
        """name: of the target, for errors. make: builds the products. Raises ConfigError if the draft does not fit the target."""
        config, module, token_ids = draft.config, draft.module, draft.token_ids
        self.learned = draft.learned
        width = int(target.model.config.get_text_config(decoder=True).hidden_size)
        self.target, self.hidden_layers = target, config.check_target(target.vocab_size, width, target.num_layers, name)
        """Layers of the target whose hidden states it reads."""
        num_states = module.fc.in_features // width
        if len(self.hidden_layers) != num_states:
            text = f"must be as many as the {num_states} hidden states that fc.weight reads"
            raise ConfigError(text, param="hidden_layers", value=self.hidden_layers)
        self.vocab_size, self.max_length, self.device = target.vocab_size, target.max_length, target.device
        self.dtype, self._make, self.width = target.model.dtype, make, config.hidden_size
        self.subset = None if token_ids is None else VocabularySubset.of(token_ids.to(self.device), self.vocab_size)
        self._fc, self._norm = self._product(module.fc.weight), self._norm_of(module.norm)
        self._rotary = module.rotary.to(self.device)
        self._rotary_table = RotaryTable(self._rotary)
        own = module.embed_tokens
        self._embed = embeddings_of(target, config) if own is None else own.to(self.device, self.dtype)
        head = target_rows(target, token_ids) if module.lm_head is None else module.lm_head.weight
        self._head = self._product(head)
        self._native: NativeLayers | None = None
        self.num_parameters = sum(weight.numel() for weight in module.parameters())

    def _product(self, *weights: torch.Tensor) -> Any:
        """Return the product of weights [out, in], one below the other, that is fastest, or a linear layer."""
        parts = [one.detach().to(self.device, self.dtype) for one in weights]
        there = Hardware(self.device)
        if self._make is not unquantized or (not there.gpu_kernels and there.packs(self.dtype)):
            return self._make(torch.cat(parts), None)
        whole = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        layer = torch.nn.Linear(whole.shape[1], whole.shape[0], bias=False, device="meta")
        layer.weight = torch.nn.Parameter(whole, requires_grad=False)
        return layer

    def _plain(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight that is not multiplied, on the target's device and in its dtype."""
        return weight.detach().to(self.device, self.dtype)

    def _norm_of(self, norm: torch.nn.Module) -> Norm:
        assert isinstance(norm, torch.nn.RMSNorm) and norm.weight is not None
        return Norm(norm.weight.detach().to(self.device, self.dtype).contiguous(), float(norm.eps or 0.0))

    def _layer_of(
        self, attn: Projections, mlp: FeedForward, before_mlp: torch.nn.Module, before: torch.nn.Module | None = None
    ) -> Layer:
        """Return a layer for our passes. before: norm of the attention's input, if it is one of the layer's parts."""
        return Layer(
            kind="full_attention",
            before_attention=None if before is None else self._norm_of(before),
            qkv=self._product(attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight),
            heads=(attn.heads, attn.key_heads),
            dim=attn.dim,
            q_norm=None if attn.q_norm is None else self._norm_of(attn.q_norm),
            k_norm=None if attn.k_norm is None else self._norm_of(attn.k_norm),
            wide_norm=False,
            rotates=True,
            window=None,
            scaling=attn.dim**-0.5,
            softcap=None,
            output=self._product(attn.o_proj.weight),
            after_attention=None,
            before_mlp=self._norm_of(before_mlp),
            gate_up=self._product(mlp.gate_proj.weight, mlp.up_proj.weight),
            activation=mlp.activation,
            down=self._product(mlp.down_proj.weight),
            after_mlp=None,
        )

    def _compiled(self, layers: Sequence[Layer], activation: str, products: Sequence[Product]) -> NativeLayers | None:
        """Return the layers for the kernels; None without them. products: the others of a pass."""
        if is_remote(self.device) or not all(isinstance(one, NativeProduct) for one in (self._head, *products)):
            return None
        try:
            return NativeLayers(list(layers), self._norm, activation, 1.0, self.dtype)
        except LookupError:
            return None

    def _on_pages(
        self, layers: Sequence[Layer], activation: str, states: StatesOf, *, features: bool
    ) -> PagedPasses | None:
        """Return passes over pages of these layers, if the target's are. states, features: see Decoder."""
        return draft_on_pages(
            self.target,
            layers,
            self._norm,
            self._head,
            self._rotary_table,
            activation,
            states,
            width=self.width,
            features=features,
        )

    def new_cache(self) -> Any:
        """Return a cache without rows."""
        return self._native.new_cache() if self._native else super().new_cache()

    def joined(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the target's hidden states, given as layer -> [..., H], as one vector for each position, [..., L * H]."""
        return torch.cat([hidden[layer].to(self.device, self.dtype) for layer in self.hidden_layers], -1)

    @torch.inference_mode()
    def features(self, joint: torch.Tensor) -> torch.Tensor:
        """Return the features [..., D] of the target's hidden states, [..., L * H]; see `joined`."""
        return self.multiplied(self._fc, joint)

    def multiplied(self, product: Any, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out] by what multiplies in the layers."""
        if self.paged is None:
            out: torch.Tensor = product(x)
            return out
        from foresay.models.gpu.layers import linear

        with launching_on(self.device):
            return linear(product, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], product.out_features)

    def _run_module(self, module: M) -> M | None:
        """Return the module itself to run where no kernels run its layers; None where they do."""
        if self._native is not None or self.paged is not None:
            return None
        found = copy.deepcopy(module)
        found.lm_head = found.embed_tokens = None  # products of their own
        found = found.to(self.device, self.dtype).requires_grad_(False)
        linears.freeze_linears(found, self._make, all_dtypes=self._make is not unquantized)
        return found


def over_cache(cache: SlotCache, layer: int, at: Placement, mask: torch.Tensor) -> Attend:
    """Return attention of a pass's tokens to the slots of their rows, to which it adds theirs. mask: [B, 1, T, width]."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = cache.write(layer, key, value, at)
        out, _ = attention.attention(None, query, keys, values, mask, query.shape[-1] ** -0.5)
        return out.transpose(1, 2)

    return attend


def draft_on_pages(
    target: CausalModel,
    layers: Sequence[Layer],
    norm: Norm,
    head: Callable[[torch.Tensor], torch.Tensor],
    rotary: RotaryTable,
    activation: str,
    states: StatesOf,
    *,
    width: int,
    features: bool,
    first_position: int = 0,
) -> PagedPasses | None:
    """Return passes of a draft's layers over pages, if its target's are; None if the kernels do not compute them.

    norm: after the layers. head: the output layer, a product that the kernels read. rotary: of all layers. states, features: see
    Decoder. width: of the states. first_position: that of a row's first token.
    """
    pages = target.paged
    table = rotary.until(target.max_length + first_position) if pages else None
    if not pages or table is None:
        return None
    from foresay.models.gpu.layers import PagedLayers, check_linear, linear, outputs_of
    from foresay.models.gpu.passes import Decoder, passes_on

    dtype, device = norm.weight.dtype, target.device
    try:
        paged = PagedLayers(layers, norm, activation, 1.0)
        check_linear(head, dtype)
    except LookupError as error:
        logger.warning("the draft's passes are not made over pages: %s", error)
        return None
    turns = {layers[0].kind: (table[0][first_position:].to(device), table[1][first_position:].to(device))}
    decoder = Decoder(
        states=lambda at, pool, wanted: states(paged, at, pool, turns),
        scores=lambda normed: linear(head, normed),
        layers=paged.shapes,
        heads=layers[0].heads,
        like=norm.weight.new_empty(0, width),
        num_scores=outputs_of(head),
        features=features,
    )
    try:
        return passes_on(
            device,
            decoder,
            dtype,
            max_length=target.max_length,
            free_bytes=target.memory_bytes(),
            capture=capture_on(device),
            most_pages=pages.pool.num_pages,
        )
    except LookupError as error:
        logger.warning("the draft's passes are not made over pages: %s", error)
        return None


def embeddings_of(target: CausalModel, config: DraftConfig | None = None) -> torch.nn.Module:
    """Return the target's embeddings as a draft reads them: without the factor of Gemma's module, as other engines do, unless its
    files mean it (see DraftConfig.reads_factor).
    """
    module: torch.nn.Module = target.model.get_input_embeddings()
    if config is not None and config.reads_factor:
        return module
    if isinstance(module, FrozenEmbedding):
        return module.without_scale()
    if isinstance(module, torch.nn.Embedding) and hasattr(module, "embed_scale"):
        plain: torch.nn.Module = torch.nn.Embedding.from_pretrained(module.weight)  # type: ignore[no-untyped-call]
        return plain
    return module


def target_rows(target: CausalModel, token_ids: Sequence[int] | torch.Tensor | None) -> torch.Tensor:
    """Return the rows [K, H] of a target's output layer for some tokens, or all rows for None.

    Raises UnsupportedModelError if the target has no output layer over its whole vocabulary.
    """
    layer = target.model.get_output_embeddings()
    weight = None if layer is None else linears.weight_of(layer)
    if weight is None or target.subset is not None:
        raise UnsupportedModelError(
            f"{type(target.model).__name__} has no output layer over its whole vocabulary to share"
        )
    return weight if token_ids is None else weight[torch.as_tensor(token_ids, device=weight.device)]
