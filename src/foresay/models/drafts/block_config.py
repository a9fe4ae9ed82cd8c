"""Configurations of block drafters, in the layouts of config.json that other engines read and write.

DFlash's and DFlash2's files have a `dflash_config`, DSpark's the same fields at the top, and vLLM's speculators layout has all
kinds. Layers of the target are counted from 0 for the output of the first layer in the first two, and as here in the other: 0 is
the embeddings. Owns the field names and defaults.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from foresay.checks import check_flag, check_int
from foresay.errors import ConfigError, shown
from foresay.models.drafts.block_fields import MAX_BLOCK, BlockFields, block_fields_of, sights_of
from foresay.models.drafts.config import DraftConfig
from foresay.models.drafts.fields import (
    BLOCKS,
    FULL,
    LAYER,
    LAYER_PARTS,
    READ_ELSEWHERE,
    SLIDING,
    WINDOWS,
    Fields,
    check_layer,
    fields_of,
    layers_of,
    merged,
    object_of,
    refuse_parts,
    report_unread,
    verifier_of,
    windows_of,
)

logger = logging.getLogger("foresay")

MARKOV = ("vanilla", "gated", "rnn")
DOMINO, SELECTOR = "domino", "selector"
_SOURCE = "the block drafter's config.json"
_PARTS: Mapping[str, tuple[Any, ...]] = {
    **LAYER_PARTS,
    **dict.fromkeys(("use_swa", "backbone_conv", "attention_sink_bias", "dspark_bonus_anchor"), (False, None)),
    "attention_mode": (None, "gqa", "mha"),
    "projector_type": (None, "dflash", "dflash2", "dspark", DOMINO),
}
"""Fields of variants that are not supported, and the values that select none of them."""
_TRAINING = ("num_anchors", "max_anchors", "loss_decay_gamma", "num_target_layers", "training_block_size")
_OTHER_NAMES = {"swa_window_size": "sliding_window", "dflash_query_causal": "is_causal"}
"""Fields that some files have in place of others."""
_ALPHAS = ("ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "selector_loss_weight")
_HIDDEN_LAYERS = "aux_hidden_state_layer_ids"
_READ = (*LAYER, *WINDOWS, *Fields.model_fields, *BlockFields.model_fields, _HIDDEN_LAYERS)
"""Fields that any section of a file may have."""
_KNOWN = {*_READ, *READ_ELSEWHERE, *_PARTS, *_TRAINING, *_ALPHAS, "target_layer_ids", *_OTHER_NAMES}
"""These, those above, and those of training."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Positions that the tokens of a block attend to in a layer."""

    window: int | None = None
    """Most positions up to and including a token's own; None for all."""
    causal: bool = False
    """True if the later positions of the block are not among them (JetSpec)."""


@dataclass(frozen=True, slots=True)
class PathShape:
    """Shape of the part that lets a token's scores depend on the tokens before it in the block; see path.py."""

    kind: str
    """One of MARKOV (DSpark), DOMINO or SELECTOR (DFlash2)."""
    rank: int
    state: int = 0
    """Size of DOMINO's state."""
    candidates: int = 0
    """Tokens of each position among which SELECTOR chooses."""
    free: int = 0
    """Tokens of a block whose scores DOMINO leaves as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(DraftConfig):
    """A block drafter."""

    NOUN: ClassVar[str] = "block drafter"
    hidden_layers: tuple[int, ...]
    sights: tuple[Sight, ...]
    """One for each layer."""
    block_size: int
    """Positions of a block: the last committed token, and mask tokens."""
    mask_token_id: int
    path: PathShape | None = None
    """None: the tokens of a block are drawn independently."""
    convolution: tuple[int, int] | None = None
    """Taps and channels of a group of the convolutions around each sublayer (DFlash2)."""
    has_confidence: bool = False
    """True if it predicts the acceptance of each token."""
    confidence_reads_markov: bool = False
    """True if that prediction reads the previous token's Markov embedding, too."""
    from_anchor: bool = True
    """True if the output of each position is the distribution of the token after it (DSpark); False if it is that of the token at
    it, so that the first position has none (DFlash)."""
    normalizes_queries: bool = True
    """True if the layers normalize queries and keys, as Qwen3's do."""
    embedding_scale: float = 1.0
    keeps_embedding_factor: bool = False
    """True if embeddings that it reads from a Gemma target keep the factor of the target's own module, as those of files that do
    not set `input_embedding_scale` (DFlash)."""
    logits_scale: float = 1.0
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap)."""

    @property
    def reads_factor(self) -> bool:
        """See DraftConfig."""
        return self.keeps_embedding_factor

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        check_int("num_hidden_layers", self.num_layers, 1, 256)
        check_int("block_size", self.block_size, 2, MAX_BLOCK)
        check_int("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1)
        check_flag("from_anchor", self.from_anchor)
        if not self.hidden_layers:
            problem = "is missing: a block drafter reads layers of its target"
            raise ConfigError(problem, param=f"{_SOURCE}: target_layer_ids")
        if self.path is not None:
            check_int("rank", self.path.rank, 1)
        if self.confidence_reads_markov and (self.path is None or self.path.kind not in MARKOV):
            problem = "needs a Markov head, but markov_rank is 0"
            raise ConfigError(problem, param="confidence_head_with_markov", value=True)
        if self.convolution is not None and self.hidden_size % self.convolution[1]:
            text = f"must divide hidden_size={self.hidden_size}"
            raise ConfigError(text, param="conv_group_size", value=self.convolution[1])

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.sights)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def is_dspark(self) -> bool:
        """True if the file has DSpark's layout."""
        markov = self.path is not None and self.path.kind in MARKOV
        plain = self.path is None and self.convolution is None
        return markov or self.has_confidence or (plain and self.from_anchor)

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [..., K] as the drafter's scale and soft cap change them."""
        if self.logits_scale != 1.0:
            logits = logits * self.logits_scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def as_plain(self) -> dict[str, Any]:
        """Return the config.json of the published layout: DSpark's, DFlash2's, or DFlash's with other parts in it."""
        out = {
            "architectures": [self._architecture()],
            "model_type": "qwen3" if self.normalizes_queries else "llama",
            **self.layer,
            "num_hidden_layers": self.num_layers,
            **self._attention(),
            "attention_bias": False,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "block_size": self.block_size,
        }
        fields = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in self.hidden_layers],
            **self._scales(),
        }
        if not self.is_dspark:
            own = {**fields, "block_size": self.block_size, "causal": out["is_causal"], **self._parts()}
            if not self.keeps_embedding_factor:
                own["input_embedding_scale"] = self.embedding_scale
            return {**out, "dflash_config": {**own, **({"shift_label": True} if self.from_anchor else {})}}
        path = self.path
        return {
            **out,
            **fields,
            **({} if self.from_anchor else {"sample_from_anchor": False}),
            "num_anchors": 512,
            "markov_rank": 0 if path is None else path.rank,
            "markov_head_type": "vanilla" if path is None else path.kind,
            "enable_confidence_head": self.has_confidence,
            "confidence_head_with_markov": self.confidence_reads_markov,
        }

    def _architecture(self) -> str:
        if self.is_dspark:
            return "Qwen3DSparkModel"
        return "DFlash2DraftModel" if self.convolution is not None else "DFlashDraftModel"

    def _attention(self) -> dict[str, Any]:
        """Return the fields of the positions that the layers' tokens attend to."""
        slides = [one for one in self.sights if one.window is not None]
        first = next((one for one in self.sights if one.window is None), self.sights[0])
        out: dict[str, Any] = {
            "layer_types": [FULL if one.window is None else SLIDING for one in self.sights],
            "is_causal": first.causal,
        }
        if slides:
            out |= {"sliding_window": slides[0].window, "use_sliding_window": True}
            out |= {"sliding_window_non_causal": not slides[0].causal}
        return out

    def _scales(self) -> dict[str, float]:
        named = {"input_embedding_scale": self.embedding_scale, "output_multiplier": self.logits_scale}
        out = {name: value for name, value in named.items() if value != 1.0}
        return out if self.softcap is None else {**out, "final_logit_softcapping": self.softcap}

    def _parts(self) -> dict[str, Any]:
        """Return the fields of the parts that DFlash's own files do not have."""
        out: dict[str, Any] = {}
        if self.convolution is not None:
            out |= dict(zip(("conv_kernel_size", "conv_group_size"), self.convolution, strict=True))
        path = self.path
        if path is not None and path.kind == SELECTOR:
            out |= {"selector_rank": path.rank, "selector_top_k": path.candidates}
        elif path is not None:
            out |= {"projector_type": DOMINO, "emb_dim": path.rank, "gru_hidden_dim": path.state}
            out |= {"pure_draft_prefix_len": path.free}
        return out

    @classmethod
    def _of_plain(cls, values: Mapping[str, Any]) -> BlockConfig:
        own = object_of(values, "dflash_config")
        values = _with_usual_names(values, own)
        report_unread((values, own), _KNOWN, _SOURCE)
        every = {**values, **own, **merged({"config.json": values, "dflash_config": own}, {**values, **own})}
        layers = layers_of(every, "target_layer_ids", _SOURCE, least=-1) or ()
        # LiquidAI's files have DSpark's Markov head and a dflash_config
        dspark = (
            "dflash_config" not in values or every.get("projector_type") == "dspark" or bool(every.get("markov_rank"))
        )
        keeps = "dflash_config" in values and every.get("input_embedding_scale") is None
        hidden = [i + 1 for i in layers]
        return cls._build(every, every, hidden, from_anchor=dspark, keeps_embedding_factor=keeps)

    @classmethod
    def _of_speculators(cls, values: Mapping[str, Any]) -> BlockConfig:
        kind = values.get("speculators_model_type")
        if kind not in BLOCKS:
            allowed = ", ".join(map(repr, BLOCKS))
            text = f"is not supported; it must be one of {allowed}"
            raise ConfigError(text, param="speculators_model_type", value=kind)
        names = ("transformer_layer_config", "dflash_config")
        sections = {"config.json": values, **{name: object_of(values, name) for name in names}}
        report_unread(sections.values(), _KNOWN, _SOURCE)
        every, layer = merged(sections, _READ), sections[names[0]]
        layers = layers_of(every, _HIDDEN_LAYERS, _SOURCE) or ()
        every = {**values, **every}
        return cls._build({**layer, **every}, every, layers, from_anchor=kind == "dspark", **verifier_of(values))

    @classmethod
    def _build(
        cls,
        layer: Mapping[str, Any],
        values: Mapping[str, Any],
        hidden_layers: Any,
        *,
        from_anchor: bool,
        **named: Any,
    ) -> BlockConfig:
        """Build a configuration. from_anchor: `sample_from_anchor` of a file that does not set it."""
        kind = layer.get("model_type")
        if kind not in ("qwen3", "llama"):
            text = (
                f"model_type={shown(kind)} is not supported for a block drafter's layers; it must be 'qwen3' or 'llama'"
            )
            problem = "is not supported for a block drafter's layers; it must be 'qwen3' or 'llama'"
            raise ConfigError(problem, param="model_type", value=kind)
        for section in (layer, values):
            refuse_parts(section, _PARTS, "block drafters")
        shape = check_layer(layer, _SOURCE)
        fields, block = fields_of(values, _SOURCE), block_fields_of({**values, **_causality(layer)}, _SOURCE)
        for name, own, other, expected in (
            ("num_draft_layers", block.num_draft_layers, "num_hidden_layers", block.num_hidden_layers),
            ("target_hidden_size", fields.target_hidden_size, "hidden_size", layer["hidden_size"]),
        ):
            if own not in (None, expected):
                text = f"differs from {other}={expected}, which is not supported for block drafters"
                raise ConfigError(text, param=name, value=own)
        shifts = block.shift_label if block.sample_from_anchor is None else block.sample_from_anchor
        return cls(
            layer={name: value for name, value in shape.items() if value is not False},
            sights=tuple(Sight(*one) for one in sights_of(block, windows_of(layer, block.num_hidden_layers, _SOURCE))),
            vocab_size=fields.vocab_size,
            draft_vocab_size=fields.draft_vocab_size or fields.vocab_size,
            hidden_layers=tuple(hidden_layers),
            block_size=block.block_size,
            mask_token_id=block.mask_token_id,
            path=_path_of(block),
            convolution=_convolution_of(block),
            has_confidence=bool(block.enable_confidence_head),
            confidence_reads_markov=bool(block.confidence_head_with_markov and block.enable_confidence_head),
            from_anchor=from_anchor if shifts is None else shifts,
            normalizes_queries=kind == "qwen3",
            embedding_scale=block.input_embedding_scale or 1.0,
            logits_scale=block.output_multiplier or 1.0,
            softcap=block.final_logit_softcapping or None,
            **named,
        )


def _with_usual_names(values: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json with the usual names of fields that it has by others. Raises ConfigError for a contradiction."""
    out = dict(values)
    for part in (values, own):
        for name, usual in _OTHER_NAMES.items():
            found = part.get(name)
            if found is None:
                continue
            if out.get(usual) not in (None, found):
                raise ConfigError(f"contradicts {usual}={shown(out[usual])}", param=name, value=found)
            out[usual] = found
    return out


def _causality(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of the layers that the speculators layout has in an object of their own."""
    return {} if layer.get("is_causal") is None else {"is_causal": layer["is_causal"]}


def _path_of(block: BlockFields) -> PathShape | None:
    """Return the shape of the part that reads the tokens before; None without one."""
    found = []
    if block.markov_rank:
        found.append(PathShape(block.markov_head_type or "vanilla", block.markov_rank))
    if block.projector_type == DOMINO:
        rank, state = _both(block, "emb_dim", "gru_hidden_dim")
        free = 1 if block.pure_draft_prefix_len is None else block.pure_draft_prefix_len
        found.append(PathShape(DOMINO, rank, state=state, free=free))
    if block.selector_rank or block.selector_top_k:
        rank, count = _both(block, "selector_rank", "selector_top_k")
        found.append(PathShape(SELECTOR, rank, candidates=count))
    if len(found) > 1:
        kinds = " and ".join(one.kind for one in found)
        raise ConfigError(f"has two parts that read the tokens before ({kinds}); one is supported", param=_SOURCE)
    return found[0] if found else None


def _convolution_of(block: BlockFields) -> tuple[int, int] | None:
    if block.conv_kernel_size or block.conv_group_size:
        return _both(block, "conv_kernel_size", "conv_group_size")
    return None


def _both(block: BlockFields, first: str, second: str) -> tuple[int, int]:
    """Return two fields that go together. Raises ConfigError that names the missing one."""
    values = {name: getattr(block, name) for name in (first, second)}
    for name, value in values.items():
        if not value:
            raise ConfigError("is missing", param=f"{_SOURCE}: {name}")
    return values[first], values[second]


def is_block(values: Mapping[str, Any]) -> bool:
    """Return True if a config.json is that of a block drafter."""
    kind, listed = values.get("speculators_model_type"), values.get("architectures")
    if isinstance(listed, list) and any("eagle3" in str(one).lower() for one in listed):
        return False
    return kind in BLOCKS or "dflash_config" in values or "target_layer_ids" in values
