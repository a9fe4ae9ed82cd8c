"""Drafts on hidden states before training: their kinds, shapes, initial weights and vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import nn

from foresay.checks import check_int
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.models.drafts.base import StoredDraft, target_rows
from foresay.models.drafts.block_config import SELECTOR, BlockConfig, PathShape, Sight
from foresay.models.drafts.block_module import BlockModule
from foresay.models.drafts.config import DraftConfig, HeadConfig, usual_layers
from foresay.models.drafts.kinds import new_module
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources.wrapping import LoadedModel
from foresay_lab.training.outputs import Text, frequent_tokens
from foresay_lab.training.students import BlockStudent, DraftStudent, HeadStudent

BLOCK_SIZE = 7
"""Default positions of a block."""
CANDIDATES = 16
"""Candidates of each position in a new candidate selector, as in published ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Shape of a new draft on hidden states; None selects a default that suits the target."""

    hidden_layers: tuple[int, ...] | None = None
    vocabulary_size: int | None = None
    """Draft vocabulary size; None: a sixth of the target's, at least 4,096."""
    feed_forward: int | None = None
    own_head: bool = False
    """True to train output rows for the draft vocabulary instead of using the target's."""
    layers: int | None = None
    """Layers of a block drafter; None: one for every 15 of the target, at least 1."""
    block_size: int = BLOCK_SIZE
    """Positions of a block."""
    rank: int | None = None
    """Rank of a block drafter's Markov head or candidate selector; None: a ninth of the hidden size. 0: none (DFlash)."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Differences between the kinds of drafts on hidden states in training."""

    configured: Callable[[CausalModel, DraftShape, dict[str, Any]], DraftConfig]
    """Configuration of a new draft, from the target, its shape and the arguments that all kinds have."""
    usual_layers: Callable[[int], tuple[int, ...]]
    """Layers of a target of so many that are read by default."""
    student: Callable[..., DraftStudent]
    setting: str
    """Name of the student's own argument, and its default."""
    default: int
    decay: float
    """Default ratio of a position's loss weight to that of the one before."""
    loss: str
    """Default loss."""


def usual_block_layers(num_layers: int) -> tuple[int, ...]:
    """Return the default layers whose hidden states a block drafter reads: some spread evenly, from an early to a late one."""
    count = max(2, min(5, num_layers // 8))
    first, last = min(2, num_layers), max(1, num_layers - 2)
    found = {round(first + i * (last - first) / (count - 1)) for i in range(count)}
    return tuple(sorted(found))


def _head_config(model: CausalModel, shape: DraftShape, common: dict[str, Any]) -> HeadConfig:
    width = int(common["layer"]["hidden_size"])
    return HeadConfig(**common, target_hidden_size=width, norm_before_residual=True)


def _block_config(model: CausalModel, shape: DraftShape, common: dict[str, Any], **parts: Any) -> BlockConfig:
    rank = _rank(shape, common)
    path = PathShape("vanilla", rank) if rank else None
    own = {"path": path, "has_confidence": True, "confidence_reads_markov": rank > 0}
    return BlockConfig(
        **common,
        sights=(Sight(),) * (shape.layers or max(1, model.num_layers // 15)),
        block_size=shape.block_size,
        mask_token_id=model.vocab_size - 1,
        **(parts or own),
    )


def _dflash2_config(model: CausalModel, shape: DraftShape, common: dict[str, Any]) -> BlockConfig:
    rank, width = _rank(shape, common), int(common["layer"]["hidden_size"])
    path = PathShape(SELECTOR, rank, candidates=CANDIDATES) if rank else None
    return _block_config(model, shape, common, path=path, convolution=(2, gcd(width, 16)), from_anchor=False)


def _rank(shape: DraftShape, common: dict[str, Any]) -> int:
    return max(8, int(common["layer"]["hidden_size"]) // 9) if shape.rank is None else shape.rank


KINDS = {
    "head": Kind(_head_config, usual_layers, HeadStudent, "steps", 5, 0.8, "forward_kl"),
    # DSpark: exp(-1/4), 0.1 CE + 0.9 |p - q|_1
    "block": Kind(_block_config, usual_block_layers, BlockStudent, "anchors", 64, 0.7788, "ce=0.1, tv=1.8"),
    "dflash2": Kind(_dflash2_config, usual_block_layers, BlockStudent, "anchors", 64, 0.7788, "ce=0.1, tv=1.8"),
}
"""Kinds of drafts on hidden states by name."""


def kind_of(config: DraftConfig) -> str:
    """Return the kind of a draft on hidden states. Raises ConfigError for one that is not trained."""
    if type(config) is HeadConfig:
        return "head"
    if not isinstance(config, BlockConfig):
        raise ConfigError(f"is a {config.NOUN}, which is not trained; train a head or a block drafter", param="draft")
    return "block" if config.convolution is None else "dflash2"


def causal(target: LoadedModel) -> CausalModel:
    """Return the target's model. Raises UnsupportedModelError for a model without hidden states."""
    if not isinstance(target.model, CausalModel):
        text = f"drafts are trained only for decoder-only transformers models, and {target.name!r} is not one"
        raise UnsupportedModelError(text)
    return target.model


def new_draft(kind: str, target: LoadedModel, texts: Sequence[Text], shape: DraftShape, seed: int) -> StoredDraft:
    """Return a draft of a kind with random weights and the target's width.

    Its vocabulary is the most frequent tokens of `texts`. Raises ConfigError for layers that the target does not have.
    """
    model = causal(target)
    vocab = model.vocab_size
    size = shape.vocabulary_size or min(vocab, max(4096, vocab // 6))
    ids = _draft_tokens(target, texts, size)
    layers = shape.hidden_layers or KINDS[kind].usual_layers(model.num_layers)
    if not all(0 <= layer <= model.num_layers for layer in layers):
        text = f"must be 0 to {model.num_layers}, the layers of the target"
        raise ConfigError(text, param="hidden_layers", value=list(layers))
    common: dict[str, Any] = {
        "layer": layer_fields(model, shape.feed_forward),
        "vocab_size": vocab,
        "draft_vocab_size": size,
        "hidden_layers": layers,
        "target": target.name,
        "target_architectures": (type(model.model).__name__,),
    }
    config = KINDS[kind].configured(model, shape, common)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = new_module(config, len(layers))
    with torch.no_grad():  # the scale that the output layer expects; training would not reach it from ones
        module.norm.weight.copy_(final_norm(model))
        if isinstance(module, BlockModule):  # drafts start as those of the layers alone
            last = [] if module.path is None else module.path.products()[-1:]
            for weight in (*last, *([] if module.confidence_head is None else module.confidence_head.parameters())):
                weight.zero_()
    if shape.own_head:
        module.lm_head = nn.Linear(config.hidden_size, size, bias=False)
        with torch.no_grad():
            module.lm_head.weight.copy_(target_rows(model, ids))
    return StoredDraft(config, module, ids)


def layer_fields(model: CausalModel, feed_forward: int | None) -> dict[str, Any]:
    """Return the fields of a LlamaConfig for a draft's layer with the target's sizes. feed_forward: None for the target's."""
    config = model.model.config.get_text_config(decoder=True)
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or width // heads),
        "intermediate_size": feed_forward or int(getattr(config, "intermediate_size", None) or 4 * width),
        "hidden_act": "silu",
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-5)),
        "rope_theta": float(rope.get("rope_theta", 10_000.0)),
        "max_position_embeddings": int(model.max_length),
    }


def resumed_draft(
    target: LoadedModel, draft: StoredDraft, tokens: tuple[Sequence[Text], int] | None = None
) -> StoredDraft:
    """Return a trained draft for further training.

    tokens: (texts, size), to draft the `size` most frequent tokens of these texts from now on; None: those it drafts already.
    Raises ConfigError for a draft of another target, and for new tokens of one with an output layer for its own.
    """
    model = causal(target)
    width = int(model.model.config.get_text_config(decoder=True).hidden_size)
    draft.config.check_target(model.vocab_size, width, model.num_layers, target.name)
    if tokens is None:
        return StoredDraft(draft.config, draft.module.float(), draft.token_ids)
    if draft.module.lm_head is not None or isinstance(draft.module, BlockModule):
        text = "does not apply: this draft has an output layer for the tokens that it drafts; drop it"
        raise ConfigError(text, param="vocabulary_size")
    ids = _draft_tokens(target, *tokens)
    size = model.vocab_size if ids is None else len(ids)
    return StoredDraft(replace(draft.config, draft_vocab_size=size), draft.module.float(), ids)


def _draft_tokens(target: LoadedModel, texts: Sequence[Text], size: int) -> torch.Tensor | None:
    """Return the `size` most frequent tokens of texts, ascending; None for all tokens of the target."""
    check_int("vocabulary_size", size, 1, target.model.vocab_size)
    return None if size == target.model.vocab_size else frequent_tokens(texts, size, target.eos_token_ids)


def final_norm(model: CausalModel) -> torch.Tensor:
    """Return the weight of the target's final norm, [H]; ones for a family that stores it elsewhere."""
    norm = getattr(model.model.base_model, "norm", None)
    weight = getattr(norm, "weight", None)
    width = int(model.model.config.get_text_config(decoder=True).hidden_size)
    if weight is None or tuple(weight.shape) != (width,):
        return torch.ones(width)
    from_one = type(norm).__name__.startswith("Gemma")
    out: torch.Tensor = weight.detach().float().cpu() + (1.0 if from_one else 0.0)
    return out
