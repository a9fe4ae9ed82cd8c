"""The multi-token-prediction layers of a checkpoint as a draft head (DeepSeek-V3, section 2.2).

The first layer reads the target's last hidden state at a position and the embedding of the token after it, and predicts the token
after that. The next one reads its output and the embedding of one token later, and so on. transformers knows the layouts and
builds the layers; this module runs them over a slot cache, one in a pass. Owns the forward pass and the completion of
configurations that name no such layers. drafters/mtp_cache.py chooses the layer of a pass.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.devices import is_remote
from foresay.decoding.protocols import KVCache, Logits, ModelInput, ModelOutput, learned_by
from foresay.errors import UnsupportedModelError
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.drafts.base import LAST, NEXT, OnLastStates, draft_on_pages
from foresay.models.huggingface import attention, linears
from foresay.models.huggingface.causal import CausalModel, TransformersCache
from foresay.models.huggingface.family_layers import NotFusedError, layer_kinds, norm_of, read_layer
from foresay.models.huggingface.left_out import unread
from foresay.models.huggingface.linears import MakeProduct
from foresay.models.huggingface.operations import RotaryTable
from foresay.models.huggingface.paged_chains import PagedChains

if TYPE_CHECKING:  # at run time this would import Triton
    from foresay.models.gpu.flat import Buffers
    from foresay.models.gpu.layers import PagedLayers, Turns
    from foresay.models.gpu.pages import PagePool
    from foresay.models.gpu.passes import PagedPasses, States

logger = logging.getLogger("foresay")

_MTP_OF_QWEN = re.compile(r"qwen3_(next|5)")
"""model_type of families whose checkpoints have one such layer that their configurations do not name."""


def num_mtp_layers(model: CausalModel) -> int:
    """Return the number of multi-token-prediction layers that a model's configuration names; 0 if it names none."""
    config = model.model.config.get_text_config(decoder=True)
    found = getattr(config, "num_mtp_layers", None) or getattr(config, "mtp_num_hidden_layers", None)
    return int(found or 0)


class MtpHead(OnLastStates, PagedChains):
    """The multi-token-prediction layers of the target's checkpoint."""

    def __init__(
        self, target: CausalModel, *, name: str, make: MakeProduct = linears.unquantized, layers: Any = None
    ) -> None:
        """layers: transformers' MtpModel; None to load it from the folder that the target was loaded from.

        name: of the target, for errors. make: builds the products. Raises UnsupportedModelError if it has none, or if
        transformers cannot load them.
        """
        model = target.model
        layers = _load(model, name) if layers is None else layers
        self.target, self.vocab_size, self.max_length = target, target.vocab_size, target.max_length
        self.device, self.dtype, self.learned = target.device, model.dtype, learned_by(target)
        self.width = int(model.config.get_text_config(decoder=True).hidden_size)
        self.hidden_layers: tuple[int, ...] = (target.num_layers,)
        self.num_mtp_layers, self.subset = len(layers.layers), None
        self._layers = layers.eval()
        self.paged = self._on_pages()
        if not (is_remote(self.device) or self.paged):
            linears.freeze_linears(layers.layers, make, all_dtypes=make is not linears.unquantized)

    def _on_pages(self) -> PagedPasses | None:
        """Return passes of a single layer over pages, if the target's are and the kernels compute it."""
        layers, (one, *others) = self._layers, self._layers.layers
        config = layers.config
        shared = (layers.use_shared_post_norm, layers.has_per_layer_rope, getattr(config, "unpadded_vocab_size", None))
        if not self.target.paged or others or any(shared) or one.post_norm is None:
            return None
        if getattr(config, "logits_mup_width_multiplier", None) is not None:
            return None
        linears.join_layers(one)
        try:
            layer = read_layer(one.mtp_block, layer_kinds(config)[0], config)
            joint, head = linears.product_of(one.eh_proj), linears.product_of(layers.shared_head)
            norms = [norm_of(norm) for norm in (one.enorm, one.hnorm, one.post_norm)]
        except (AttributeError, NotFusedError) as error:
            logger.warning("the multi-token-prediction layer is not run over pages: %s", error)
            return None
        hidden_first = bool(getattr(config, "mtp_hidden_states_first", False))
        before = [(norm.float32(), norm.eps) for norm in norms[:2]]

        def states(paged: PagedLayers, at: Buffers, pool: PagePool, turns: Mapping[str, Turns]) -> States:
            from foresay.models.gpu.layers import linear
            from foresay.models.gpu.rows import add_norm

            assert at.features is not None
            parts = [
                add_norm(x, None, after=None, before=norm)
                for x, norm in zip((layers.embed_tokens(at.token_ids), at.features), before, strict=True)
            ]
            read = torch.cat(parts[::-1] if hidden_first else parts, -1)
            x = linear(joint, read, by_library=at.visible.is_prompt)
            normed, _ = paged.run(x, at, pool, turns)
            return normed, {NEXT: normed, LAST: normed}

        return draft_on_pages(
            self.target,
            [layer],
            norms[2],
            head,
            RotaryTable(layers.rotary_emb),
            str(config.hidden_act),
            states,
            width=self.width,
            features=True,
            first_position=1,
        )

    def _passes(self) -> PagedPasses | None:
        return self.paged

    def _chain_states(self) -> tuple[int, int | None]:
        return LAST, NEXT

    @property
    def capabilities(self) -> Capabilities:
        """See LanguageModel."""
        return self._capabilities(trees=self.num_mtp_layers == 1, alone=True)

    @torch.inference_mode()
    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one layer over pairs of a token and, in `ModelInput.features` [B, T, H], the hidden state before it."""
        if self.paged is not None:
            scores, found = self.paged(dataclasses.replace(model_input, hidden_layers=(NEXT, LAST)), cast(Any, cache))
            return ModelOutput(scores, found)
        assert isinstance(cache, SlotCache) and model_input.features is not None
        tokens, features = model_input.token_ids, model_input.features
        batch, columns = tokens.shape
        alone = columns == 1 and model_input.parents is None  # products over one row take another kernel
        if alone:
            tokens, features = tokens.expand(-1, 2), features.expand(-1, 2, -1)
        at = cache.begin_pass(model_input.first_row, batch, tokens.shape[1], self.device, model_input.parents)
        layer = model_input.mtp_layer
        positions = (at.positions + 1 + layer).clamp(max=self.max_length - 1)
        with attention.during(at):
            states = self._layers.forward_layer(
                layer, features, positions, _MtpCache(cache, at), input_ids=tokens.to(self.device)
            )
        states = states[:, :columns]
        for i, count in enumerate(model_input.num_tokens):
            cache.lengths[model_input.first_row + i] += count
        hidden = {NEXT: states, LAST: states}
        if model_input.logits is Logits.NONE:
            return ModelOutput(None, hidden)
        scores = self._layers._project_to_logits(model_input.scored(states))
        return ModelOutput(F.pad(scores, (0, self.vocab_size - scores.shape[-1]), value=-torch.inf), hidden)


class _MtpCache(TransformersCache):
    """The slot cache under the interface by which transformers makes masks for these layers."""

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the pass's first token, of which our masks do not make use."""
        return 0


def _load(model: Any, name: str) -> Any:
    """Return transformers' model of the layers. Raises UnsupportedModelError if there are none or they cannot be loaded."""
    from transformers.modeling_layers import MtpModel

    with _completed(model.config.get_text_config(decoder=True)) as config:
        if not getattr(config, "num_mtp_layers", None):
            raise UnsupportedModelError(
                f"{name!r} has no multi-token-prediction layers: its configuration names none (num_nextn_predict_layers)"
            )
        try:
            with _found(
                model, range(int(config.num_hidden_layers), int(config.num_hidden_layers + config.num_mtp_layers))
            ):
                layers = _reported(MtpModel).from_pretrained(model, device_map={"": model.device})
        except Exception as error:  # files without these weights, or a family that transformers does not know
            reason = " ".join(str(error).split())[:300]
            if "mismatched" in reason:
                reason = "they have other shapes than the configuration gives"
            raise UnsupportedModelError(
                f"the multi-token-prediction layers of {name!r} cannot be loaded: {reason}"
            ) from error
    if layers.unread:
        raise UnsupportedModelError(
            f"the multi-token-prediction layers of {name!r} have tensors that none of them reads "
            f"({', '.join(layers.unread[:3])}): they are quantized, or of another layout"
        )
    return layers


def _reported(kind: Any) -> Any:
    """Return transformers' class with a list of the tensors that it leaves unread, which it drops."""

    class Reported(kind):  # type: ignore[misc]
        unread: list[str] = []  # noqa: RUF012 - of an instance, which transformers makes

        def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
            super()._adjust_missing_and_unexpected_keys(loading_info)
            self.unread = unread(loading_info.unexpected_keys, self.config, is_part=False)

    Reported.__name__, Reported.__module__ = kind.__name__, kind.__module__  # they choose the mapping of names
    return Reported


@contextmanager
def _completed(config: Any) -> Iterator[Any]:
    """Meanwhile, name the layers in a configuration that does not."""
    before = dict(config.__dict__)
    try:
        if not getattr(config, "num_mtp_layers", None):
            _complete(config)
        yield config
    finally:
        config.__dict__.clear()
        config.__dict__.update(before)


@contextmanager
def _found(model: Any, numbers: range) -> Iterator[None]:
    """Meanwhile, let transformers find the weights of the layers with these numbers in the files of the model."""
    known, path = model._keys_to_ignore_on_load_unexpected, model.config.name_or_path
    try:
        # transformers knows the layers by their numbers in published checkpoints; they follow the target's in all others, too
        model._keys_to_ignore_on_load_unexpected = [
            *(known or ()),
            *(rf"model\.layers\.{number}\." for number in numbers),
        ]
        model.config.name_or_path = _folder_of(model.config)
        yield
    finally:
        model._keys_to_ignore_on_load_unexpected, model.config.name_or_path = known, path


def _folder_of(config: Any) -> str:
    """Return the folder of the files that a model was loaded from: for a hub id its snapshot in the cache."""
    path, commit = str(config.name_or_path), getattr(config, "_commit_hash", None)
    if Path(path).is_dir():
        return path
    if commit is None:  # of a model that was not loaded from files
        raise FileNotFoundError(f"there is no folder {path!r}")
    from huggingface_hub import snapshot_download

    # the target's files are there already; transformers would fetch those of the latest commit
    return str(snapshot_download(path, revision=commit, local_files_only=True))


def _complete(config: Any) -> None:
    """Name the one layer that checkpoints of Qwen's hybrids have, in a configuration that does not."""
    if not _MTP_OF_QWEN.match(str(config.model_type)):
        return
    count = getattr(config, "mtp_num_hidden_layers", None)
    if count == 0:
        return
    if count is not None and count > 1:
        logger.warning("of %d multi-token-prediction layers, which share one projection, the first is used", count)
    config.num_mtp_layers = 1
    config.mtp_layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mtp_mlp_layer_types = [config.mlp_layer_types[-1]]
