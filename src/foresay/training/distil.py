"""Distillation of a draft from a target.

Owns the setup of training for each kind of draft: initial weights, draft vocabulary, saved files. The loop is in fitting.py, the
losses in losses.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foresay.checks import check_int
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.files import atomic_files, atomic_write
from foresay.models.heads.config import HeadConfig, usual_layers
from foresay.models.heads.files import Head, check_target, write_head
from foresay.models.heads.model import target_rows
from foresay.models.heads.module import HeadModule
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources.transformers_errors import quiet_transformers
from foresay.models.sources.wrapping import LoadedModel
from foresay.records.provenance import provenance
from foresay.training.fitting import LOG, Corpus, Fitting, Plan, Report
from foresay.training.losses import Objective
from foresay.training.outputs import Text, digest, frequent_tokens
from foresay.training.processes import Processes
from foresay.training.students import HeadStudent, ModelStudent
from foresay.training.teacher import CachedPasses, TargetPasses, TeacherHead

NOTE = "foresay.json"
"""Name of the file that describes how a folder's draft was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Shape of a new head; None selects a default that suits the target."""

    hidden_layers: tuple[int, ...] | None = None
    vocabulary_size: int | None = None
    """Draft vocabulary size; None: a sixth of the target's, at least 4,096."""
    feed_forward: int | None = None
    heads: tuple[int, int] | None = None
    """(query heads, key heads)."""
    own_head: bool = False
    """True to train output rows for the draft vocabulary instead of using the target's."""


def causal(target: LoadedModel) -> CausalModel:
    """Return the target's model. Raises UnsupportedModelError for a model without hidden states."""
    if not isinstance(target.model, CausalModel):
        raise UnsupportedModelError(
            f"drafts are trained only for decoder-only transformers models, and {target.name!r} is not one"
        )
    return target.model


def new_head(target: LoadedModel, texts: Sequence[Text], shape: HeadShape, seed: int) -> Head:
    """Return a head with random weights and the target's width, whose vocabulary is the most frequent tokens of `texts`."""
    model = causal(target)
    config = model.model.config.get_text_config(decoder=True)
    width, vocab = int(config.hidden_size), model.vocab_size
    size = shape.vocabulary_size or min(vocab, max(4096, vocab // 6))
    ids = _draft_tokens(target, texts, size)
    num_heads = int(config.num_attention_heads)
    heads, key_heads = shape.heads or (num_heads, int(getattr(config, "num_key_value_heads", None) or num_heads))
    layers = shape.hidden_layers or usual_layers(model.num_layers)
    if not all(0 <= layer <= model.num_layers for layer in layers):
        raise ConfigError(f"hidden_layers={list(layers)} must be 0 to {model.num_layers}, the layers of the target")
    new_config = HeadConfig(
        {
            **layer_fields(model, shape.feed_forward),
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
        },
        vocab,
        size,
        width,
        layers,
        norm_before_residual=True,
        target=target.name,
        target_architectures=(type(model.model).__name__,),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = HeadModule(new_config, len(layers))
    with torch.no_grad():  # the scale that the output layer expects; training would not reach it from ones
        module.norm.weight.copy_(final_norm(model))
    if shape.own_head:
        module.lm_head = nn.Linear(width, size, bias=False)
        with torch.no_grad():
            module.lm_head.weight.copy_(target_rows(model, ids))
    return Head(new_config, module, ids)


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


def resumed_head(target: LoadedModel, head: Head, tokens: tuple[Sequence[Text], int] | None = None) -> Head:
    """Return a trained head for further training.

    tokens: (texts, size), to draft the `size` most frequent tokens of these texts from now on; None: those it drafts already.
    Raises ConfigError for a head of another target, and for new tokens of a head with an output layer for its own.
    """
    model = causal(target)
    width = int(model.model.config.get_text_config(decoder=True).hidden_size)
    check_target(head.config, model.vocab_size, width, model.num_layers, target.name)
    if tokens is None:
        return Head(head.config, head.module.float(), head.token_ids)
    if head.module.lm_head is not None:
        raise ConfigError("this head has its own output layer, for the tokens that it drafts; drop --vocabulary-size")
    ids = _draft_tokens(target, *tokens)
    size = model.vocab_size if ids is None else len(ids)
    return Head(replace(head.config, draft_vocab_size=size), head.module.float(), ids)


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


def distil_head(
    target: LoadedModel,
    head: Head,
    training: Sequence[Text],
    held_out: Sequence[Text],
    plan: Plan,
    objective: Objective,
    folder: Path,
    *,
    steps: int = 5,
    decay: float = 0.8,
    states: Path | None = None,
    note: dict[str, Any] | None = None,
    on_progress: Callable[[str, float, str], None] = lambda what, share, note: None,
    tracker: str | None = None,
) -> Report:
    """Train a head on the target's outputs for texts, and save the best one in `folder`.

    steps: tokens drafted in a row during training. decay: ratio of a step's loss weight to that of the previous step.
    states: a folder that caches the target's outputs; None computes them at each use. on_progress: called with the current
    activity, the share of it that is done, and a note.
    """
    model = causal(target)
    passes = TargetPasses(model, head.config.hidden_layers or usual_layers(model.num_layers))
    corpora = [corpus(passes, texts, states, on_progress) for texts in (training, held_out)]
    student = HeadStudent(head, model, steps=steps, decay=decay).to(model.device)
    TeacherHead(model, None).check(corpora[1].outputs_of(0))
    settings = {
        "steps": steps,
        "decay": decay,
        "layers": list(passes.hidden_layers),
        "target": target.name,
        "shape": {k: v for k, v in head.config.as_plain().items() if k != "eagle_config"},
        "own_head": head.module.lm_head is not None,
        "tokens": digest_of_tokens(head.token_ids),
        "texts": digest(training),
    }

    def save() -> None:
        saved = Head(head.config, _in_bf16(head.module), head.token_ids)
        write_head(saved, folder)
        write_note(folder, {"made_by": "foresay distill", "kind": "head", "target": target.name, **(note or {})})

    fitting = Fitting(
        student,
        objective,
        corpora[0],
        corpora[1],
        plan,
        folder,
        save,
        settings=settings,
        on_progress=lambda share, text: on_progress("Training", share, text),
        tracker=tracker,
    )
    return fitting.run()


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
    on_progress: Callable[[str, float, str], None] = lambda what, share, note: None,
    tracker: str | None = None,
) -> Report:
    """Train a draft model with the target's vocabulary on the target's distributions, and save the best one in `folder`.

    draft: a transformers model, saved in transformers' format. freeze_embeddings: do not train embeddings and output layer, most
    of a small draft's weights. token_ids: [K], the draft vocabulary of decoding: training compares only these tokens, and the
    saved model has all.
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
    passes = TargetPasses(model, ())
    corpora = [corpus(passes, texts, states, on_progress) for texts in (training, held_out)]
    TeacherHead(model, None).check(corpora[1].outputs_of(0))

    def save() -> None:
        _save_model(draft, tokenizer, folder)
        write_note(folder, {"made_by": "foresay distill", "kind": "model", "target": target.name, **(note or {})})

    fitting = Fitting(
        ModelStudent(draft, model, token_ids),
        objective,
        corpora[0],
        corpora[1],
        plan,
        folder,
        save,
        settings={
            "texts": digest(training),
            "target": target.name,
            "shape": {k: v for k, v in config.to_dict().items() if isinstance(v, int | float)},
            "freeze_embeddings": freeze_embeddings,
            "tokens": digest_of_tokens(token_ids),
        },
        on_progress=lambda share, text: on_progress("Training", share, text),
        tracker=tracker,
    )
    return fitting.run()


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


def _in_bf16(module: HeadModule) -> HeadModule:
    """Return a copy in bf16, the dtype of forward passes."""
    with torch.device("meta"):
        out = HeadModule(module.config, module.num_states)
        if module.lm_head is not None:
            out.lm_head = nn.Linear(module.lm_head.in_features, module.lm_head.out_features, bias=False)
    out.load_state_dict(
        {name: one.detach().to(torch.bfloat16) for name, one in module.state_dict().items()}, assign=True
    )
    return out


def write_note(folder: Path, note: dict[str, Any]) -> None:
    """Write the file that describes how a draft was made."""
    text = json.dumps({**note, "log": LOG, "provenance": provenance()}, indent=2)
    with atomic_write(folder / NOTE) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
