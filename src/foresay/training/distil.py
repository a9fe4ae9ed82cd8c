"""Distillation of a draft from a target.

Owns the setup of training for each kind of draft: initial weights, draft vocabulary, saved files. The loop is in fitting.py, the
alignment of distributions in students.py, the losses in losses.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foresay.checks import check_int
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.files import atomic_files, atomic_write
from foresay.models.drafts.base import StoredDraft, target_rows
from foresay.models.drafts.block_config import SELECTOR, BlockConfig, PathShape, Sight
from foresay.models.drafts.block_module import BlockModule
from foresay.models.drafts.config import DraftConfig, HeadConfig, usual_layers
from foresay.models.drafts.files import new_module, write_draft
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources.transformers_errors import quiet_transformers
from foresay.models.sources.wrapping import LoadedModel
from foresay.records.provenance import provenance
from foresay.training.fitting import LOG, Corpus, Fitting, Plan, Report
from foresay.training.losses import Objective
from foresay.training.outputs import Text, digest, frequent_tokens
from foresay.training.processes import Processes
from foresay.training.students import BlockStudent, DraftStudent, HeadStudent, ModelStudent
from foresay.training.teacher import CachedPasses, TargetPasses, TeacherHead

BLOCK_SIZE = 7
"""Default positions of a block."""
CANDIDATES = 16
"""Candidates of each position in a new candidate selector, as in published ones."""
NOTE = "foresay.json"
"""Name of the file that describes how a folder's draft was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Shape of a new draft on hidden states; None selects a default that suits the target."""

    hidden_layers: tuple[int, ...] | None = None
    vocabulary_size: int | None = None
    """Draft vocabulary size; None: a sixth of the target's, at least 4,096."""
    feed_forward: int | None = None
    heads: tuple[int, int] | None = None
    """(query heads, key heads)."""
    own_head: bool = False
    """True to train output rows for the draft vocabulary instead of using the target's."""
    layers: int | None = None
    """Layers of a block drafter; None: one for every 15 of the target, at least 1."""
    block_size: int = BLOCK_SIZE
    """Positions of a block."""
    rank: int | None = None
    """Rank of a block drafter's Markov head or candidate selector; None: a ninth of the hidden size. 0: none (DFlash)."""
    confidence: bool = True
    """True if a block drafter predicts the acceptance of its tokens."""


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
    own = {
        "path": PathShape("vanilla", rank) if rank else None,
        "has_confidence": shape.confidence,
        "confidence_reads_markov": shape.confidence and rank > 0,
    }
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
    """Return the kind of a draft on hidden states."""
    if not isinstance(config, BlockConfig):
        return "head"
    return "block" if config.convolution is None else "dflash2"


def causal(target: LoadedModel) -> CausalModel:
    """Return the target's model. Raises UnsupportedModelError for a model without hidden states."""
    if not isinstance(target.model, CausalModel):
        raise UnsupportedModelError(
            f"drafts are trained only for decoder-only transformers models, and {target.name!r} is not one"
        )
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
        raise ConfigError(
            f"must be 0 to {model.num_layers}, the layers of the target", param="hidden_layers", value=list(layers)
        )
    layer = layer_fields(model, shape.feed_forward)
    if shape.heads is not None:
        layer |= dict(zip(("num_attention_heads", "num_key_value_heads"), shape.heads, strict=True))
    common: dict[str, Any] = {
        "layer": layer,
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
        raise ConfigError("this draft has an output layer for the tokens that it drafts; drop --vocabulary-size")
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


def distil(
    target: LoadedModel,
    draft: StoredDraft,
    training: Sequence[Text],
    held_out: Sequence[Text],
    plan: Plan,
    objective: Objective,
    folder: Path,
    *,
    decay: float | None = None,
    states: Path | None = None,
    note: dict[str, Any] | None = None,
    on_progress: Callable[[str, float, str], None] = lambda what, share, note: None,
    tracker: str | None = None,
    **setting: Any,
) -> Report:
    """Train a head or block drafter on the target's outputs for texts, and save the best one in `folder`.

    decay: ratio of a position's loss weight to that of the one before. states: a folder that caches the target's outputs; None
    computes them at each use. on_progress: called with the current activity, the share of it that is done, and a note. tracker:
    see Fitting. setting: `steps` of a head, tokens drafted in a row in training; `anchors` of a block drafter, blocks of each
    text in a training step, None for one at each position.
    """
    model, name = causal(target), kind_of(draft.config)
    kind = KINDS[name]
    own = {kind.setting: kind.default, "decay": kind.decay if decay is None else decay, **setting}
    layers = draft.config.hidden_layers or usual_layers(model.num_layers)
    student = kind.student(draft, model, **own).to(model.device)
    settings = {
        **own,
        "layers": list(layers),
        "shape": {k: v for k, v in draft.config.as_plain().items() if k not in ("eagle_config", "dflash_config")},
        "own_head": draft.module.lm_head is not None,
        "tokens": digest_of_tokens(draft.token_ids),
    }

    def save() -> None:
        write_draft(draft.stored_in(torch.bfloat16), folder)
        write_note(folder, {"made_by": "foresay distill", "kind": name, "target": target.name, **(note or {})})

    texts = (training, held_out)
    more: dict[str, Any] = {"on_progress": on_progress, "tracker": tracker}
    return _fit(target, student, layers, texts, states, save, settings, plan, objective, folder, **more)


def distil_model(
    target: LoadedModel,
    draft: Any,
    tokenizer: Any,
    training: Sequence[Text],
    held_out: Sequence[Text],
    plan: Plan,
    objective: Objective,
    folder: Path,
    *,
    freeze_embeddings: bool = True,
    token_ids: torch.Tensor | None = None,
    states: Path | None = None,
    note: dict[str, Any] | None = None,
    **more: Any,
) -> Report:
    """Train a draft model with the target's vocabulary on the target's distributions, and save the best one in `folder`.

    draft: a transformers model, saved in transformers' format. freeze_embeddings: do not train embeddings and output layer, most
    of a small draft's weights. token_ids: [K], the draft vocabulary of decoding: training compares only these tokens, and the
    saved model has all. states, note, more: see `distil`.
    """
    model = causal(target)
    config = draft.config.get_text_config(decoder=True)
    if int(config.vocab_size) < model.vocab_size:
        raise ConfigError(
            f"the draft's vocabulary has {config.vocab_size} tokens, fewer than the target's {model.vocab_size}"
        )
    draft = draft.float().to(model.device)
    if freeze_embeddings:
        _freeze_embeddings(draft)

    def save() -> None:
        _save_model(draft, tokenizer, folder)
        write_note(folder, {"made_by": "foresay distill", "kind": "model", "target": target.name, **(note or {})})

    settings = {
        "shape": {k: v for k, v in config.to_dict().items() if isinstance(v, int | float)},
        "freeze_embeddings": freeze_embeddings,
        "tokens": digest_of_tokens(token_ids),
    }
    student = ModelStudent(draft, model, token_ids)
    return _fit(target, student, (), (training, held_out), states, save, settings, plan, objective, folder, **more)


def _freeze_embeddings(draft: Any) -> None:
    for layer in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        if layer is not None:
            layer.requires_grad_(False)


def _save_model(draft: Any, tokenizer: Any, folder: Path) -> None:
    """Save a transformers model in bf16, with its tokenizer if there is one."""
    with quiet_transformers():
        weights = {name: weight.to(torch.bfloat16) for name, weight in draft.state_dict().items()}
        with atomic_files(folder) as temporary:
            draft.save_pretrained(temporary, state_dict=weights)
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)


def _fit(
    target: LoadedModel,
    student: Any,
    layers: tuple[int, ...],
    texts: tuple[Sequence[Text], Sequence[Text]],
    states: Path | None,
    save: Callable[[], None],
    settings: dict[str, Any],
    plan: Plan,
    objective: Objective,
    folder: Path,
    *,
    on_progress: Callable[[str, float, str], None] = lambda what, share, note: None,
    tracker: str | None = None,
) -> Report:
    """Train a student on (training, held-out) texts; see `distil`."""
    passes = TargetPasses(causal(target), layers)
    training, held_out = (corpus(passes, one, states, on_progress) for one in texts)
    TeacherHead(causal(target), None).check(held_out.outputs_of(0))
    return Fitting(
        student,
        objective,
        training,
        held_out,
        plan,
        folder,
        save,
        settings={**settings, "target": target.name, "texts": digest(texts[0])},
        on_progress=lambda share, text: on_progress("Training", share, text),
        tracker=tracker,
    ).run()


def corpus(
    passes: TargetPasses,
    texts: Sequence[Text],
    states: Path | None,
    on_progress: Callable[[str, float, str], None],
) -> Corpus:
    """Return texts with the target's outputs for them. states: a folder that caches the outputs."""
    if states is None:
        return Corpus(texts, lambda index: passes(texts[index]))
    cached = CachedPasses(states, passes)
    processes = Processes(passes.target.device)
    for number in range(processes.index, len(texts), processes.count):
        cached.prepare(texts[number])
        on_progress("Reading", (number + 1) / len(texts), f"{len(texts)} texts")
    processes.wait()
    return Corpus(texts, lambda index: cached(texts[index]))


def digest_of_tokens(token_ids: torch.Tensor | None) -> str | None:
    """Return an identifier of a choice of tokens; None for all tokens."""
    return None if token_ids is None else sha256(token_ids.numpy().tobytes()).hexdigest()[:16]


def write_note(folder: Path, note: dict[str, Any]) -> None:
    """Write the file that describes how a draft was made."""
    text = json.dumps({**note, "log": LOG, "provenance": provenance()}, indent=2)
    with atomic_write(folder / NOTE) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
