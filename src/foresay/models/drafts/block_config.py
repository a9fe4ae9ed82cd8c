"""Configurations of block drafters, in the layouts of config.json that other engines read and write.

DFlash's and DFlash2's files have a `dflash_config`, DSpark's the same fields at the top, and vLLM's speculators layout has all
kinds. Layers of the target are counted from 0 for the output of the first layer in the first two, and as here in the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from foresay.checks import check_flag, check_int
from foresay.errors import ConfigError
from foresay.models.drafts.config import KIND, OTHERS, VERIFIER, WINDOWS, DraftConfig
from foresay.models.drafts.fields import FULL, LAYER, LAYER_PARTS, OFF, SLIDING, Fields, Layout, same

MARKOV = ("vanilla", "gated", "rnn")
DOMINO, SELECTOR = "domino", "selector"
_BLOCK = same("mask_token_id", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_MARKOV = same("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_PARTS = same(
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("projector_type", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len"),
)
PATHS: Mapping[str, Mapping[str, str]] = {
    **{kind: {"rank": "markov_rank"} for kind in MARKOV},
    DOMINO: {"rank": "emb_dim", "state": "gru_hidden_dim", "free": "pure_draft_prefix_len"},
    SELECTOR: {"rank": "selector_rank", "candidates": "selector_top_k"},
}
"""Kind of a path -> part of its shape -> field."""
_TOP = {
    **same("model_type", *LAYER, "num_hidden_layers", *WINDOWS, "sliding_window_non_causal", "vocab_size"),
    **same("draft_vocab_size", "tie_word_embeddings", "block_size"),
    "causal": "is_causal",
}
_READ_LAYERS = {"hidden_layers": "target_layer_ids"}
_SPECULATORS = {"hidden_layers": "aux_hidden_state_layer_ids"}


def _layout(tables: Mapping[str, Mapping[str, str]], embeddings: int = 0) -> Layout:
    return Layout(
        noun="block drafters",
        tables=tables,
        others={
            **OTHERS,
            **same("sample_from_anchor", "target_hidden_size", "causal", *_TOP, *_BLOCK, *_MARKOV, *_PARTS),
            "dflash_query_causal": "causal",
            "is_causal": "causal",
            "shift_label": "sample_from_anchor",
            "swa_window_size": "sliding_window",
            "num_draft_layers": "num_hidden_layers",
        },
        allowed={
            **LAYER_PARTS,
            **dict.fromkeys(("use_swa", "backbone_conv", "attention_sink_bias", "dspark_bonus_anchor"), OFF),
            "attention_mode": (None, "gqa", "mha"),
            "projector_type": (None, "dflash", "dflash2", "dspark", DOMINO),
            "model_type": ("qwen3", "llama"),
        },
        unread=(
            *("num_anchors", "max_anchors", "loss_decay_gamma", "num_target_layers", "training_block_size"),
            *("ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "selector_loss_weight"),
            *("target_layer_ids", "aux_hidden_state_layer_ids"),
        ),
        embeddings=embeddings,
    )


_IN_DFLASH = {**_BLOCK, **_READ_LAYERS, **_PARTS, **same("block_size", "causal"), "sample_from_anchor": "shift_label"}
_DFLASH = _layout({"": _TOP, "dflash_config": _IN_DFLASH}, -1)
_DSPARK = _layout({"": {**_TOP, **_BLOCK, **_READ_LAYERS, **_MARKOV, **same("sample_from_anchor")}}, -1)
_OTHER = _layout(
    {"": _SPECULATORS, "transformer_layer_config": {}, "dflash_config": {}, "speculators_config.verifier": VERIFIER}
)


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
    DRAFTER: ClassVar[str] = "block"
    NEEDED: ClassVar[tuple[str, ...]] = ("block_size", "mask_token_id", "num_hidden_layers")
    PLAIN: ClassVar[Layout] = _DFLASH
    SPECULATORS: ClassVar[Mapping[str, Layout]] = dict.fromkeys(("dflash", "dspark", "dflash2"), _OTHER)
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
        check_int("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1)
        check_flag("from_anchor", self.from_anchor)
        if not self.hidden_layers:
            problem = "is missing: a block drafter reads layers of its target"
            raise ConfigError(problem, param="target_layer_ids")
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

    def fields(self) -> dict[str, Any]:
        """See DraftConfig."""
        first = next((one for one in self.sights if one.window is None), self.sights[0])
        named = {"input_embedding_scale": self.embedding_scale, "output_multiplier": self.logits_scale}
        out = {
            **DraftConfig.fields(self),
            "model_type": "qwen3" if self.normalizes_queries else "llama",
            "num_hidden_layers": self.num_layers,
            "layer_types": [FULL if one.window is None else SLIDING for one in self.sights],
            "causal": first.causal,
            **{name: value for name, value in named.items() if value != 1.0},
            **({} if self.softcap is None else {"final_logit_softcapping": self.softcap}),
        }
        if slides := [one for one in self.sights if one.window is not None]:
            out |= {"sliding_window": slides[0].window, "use_sliding_window": True}
            out |= {"sliding_window_non_causal": not slides[0].causal}
        return out | self._parts()

    def _parts(self) -> dict[str, Any]:
        """Return the fields of the parts of DSpark, or of those that DFlash's own files do not have."""
        path, out = self.path, dict[str, Any]()
        if self.is_dspark:
            return {
                **({} if self.from_anchor else {"sample_from_anchor": False}),
                "markov_rank": 0 if path is None else path.rank,
                "markov_head_type": "vanilla" if path is None else path.kind,
                "enable_confidence_head": self.has_confidence,
                "confidence_head_with_markov": self.confidence_reads_markov,
            }
        if self.from_anchor:
            out["sample_from_anchor"] = True
        if not self.keeps_embedding_factor:
            out["input_embedding_scale"] = self.embedding_scale
        if self.convolution is not None:
            out |= dict(zip(("conv_kernel_size", "conv_group_size"), self.convolution, strict=True))
        if path is not None:
            out |= {name: getattr(path, part) for part, name in PATHS[path.kind].items()}
            out |= {"projector_type": DOMINO} if path.kind == DOMINO else {}
        return out

    def as_plain(self) -> dict[str, Any]:
        """Return the config.json of the published layout: DSpark's, DFlash2's, or DFlash's with other parts in it."""
        if self.is_dspark:
            own = {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
        else:
            own = {"architectures": ["DFlashDraftModel" if self.convolution is None else "DFlash2DraftModel"]}
        return {**own, **(_DSPARK if self.is_dspark else _DFLASH).write(self.fields()), "attention_bias": False}

    @classmethod
    def describes(cls, values: Mapping[str, Any]) -> bool:
        """See DraftConfig."""
        listed = values.get("architectures")
        if isinstance(listed, list) and any("eagle3" in str(one).lower() for one in listed):
            return False
        return values.get(KIND) in tuple(cls.SPECULATORS) or "dflash_config" in values or "target_layer_ids" in values

    @classmethod
    def usual(cls, values: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """See DraftConfig."""
        if KIND in values:
            return {"sample_from_anchor": values[KIND] == "dspark"}
        # LiquidAI's files have DSpark's Markov head and a dflash_config
        is_dflash, scale = "dflash_config" in values, found.get("input_embedding_scale")
        dspark = not is_dflash or found.get("projector_type") == "dspark" or bool(found.get("markov_rank"))
        return {"sample_from_anchor": dspark, "keeps_embedding_factor": is_dflash and scale is None}

    @classmethod
    def own(cls, fields: Fields) -> dict[str, Any]:
        """See DraftConfig."""
        count, causal = fields.num_hidden_layers or 0, bool(fields.causal)
        # the speculators layout lets layers with windows alone be causal
        slides = causal if fields.sliding_window_non_causal is None else not fields.sliding_window_non_causal
        confident, width = bool(fields.enable_confidence_head), fields.target_hidden_size
        if width not in (None, fields.hidden_size):
            raise ConfigError(f"must be hidden_size={fields.hidden_size}", param="target_hidden_size", value=width)
        return {
            "sights": tuple(Sight(one, causal if one is None else slides) for one in fields.windows(count)),
            "path": _path_of(fields),
            "convolution": _convolution_of(fields),
            "has_confidence": confident,
            "confidence_reads_markov": bool(fields.confidence_head_with_markov and confident),
            "from_anchor": bool(fields.sample_from_anchor),
            "normalizes_queries": fields.model_type == "qwen3",
            "embedding_scale": fields.input_embedding_scale or 1.0,
            "logits_scale": fields.output_multiplier or 1.0,
            "softcap": fields.final_logit_softcapping or None,
        }


def _path_of(fields: Fields) -> PathShape | None:
    """Return the shape of the part that reads the tokens before; None without one."""
    kinds: list[str] = [fields.markov_head_type or "vanilla"] if fields.markov_rank else []
    kinds += [DOMINO] if fields.projector_type == DOMINO else []
    kinds += [SELECTOR] if fields.selector_rank or fields.selector_top_k else []
    free = 1 if fields.pure_draft_prefix_len is None else fields.pure_draft_prefix_len
    found = []
    for kind in kinds:
        parts = {part: _needed(fields, name) for part, name in PATHS[kind].items() if part != "free"}
        found.append(PathShape(kind, free=free if kind == DOMINO else 0, **parts))
    if len(found) > 1:
        text = f"has two parts that read the tokens before ({' and '.join(kinds)}); one is supported"
        raise ConfigError(text, param="config.json")
    return found[0] if found else None


def _convolution_of(fields: Fields) -> tuple[int, int] | None:
    if fields.conv_kernel_size or fields.conv_group_size:
        return _needed(fields, "conv_kernel_size"), _needed(fields, "conv_group_size")
    return None


def _needed(fields: Fields, name: str) -> int:
    """Return a field that goes together with others. Raises ConfigError without it."""
    if not (value := getattr(fields, name)):
        raise ConfigError("is missing", param=name)
    return int(value)
