"""Distillation of a draft from a target.

Owns the setup of training and the saved files. Initial weights are in new_drafts.py, the loop in fitting.py, the alignment of
distributions in students.py, the losses in losses.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from foresay.errors import ConfigError
from foresay.files import atomic_files, atomic_write
from foresay.models.drafts.base import StoredDraft
from foresay.models.drafts.config import usual_layers
from foresay.models.drafts.files import write_draft
from foresay.models.sources.transformers_errors import quiet_transformers
from foresay.models.sources.wrapping import LoadedModel
from foresay.records.provenance import provenance
from foresay_lab.training.fitting import LOG, Corpus, Fitting, Plan
from foresay_lab.training.losses import Objective
from foresay_lab.training.new_drafts import KINDS, causal, kind_of
from foresay_lab.training.outputs import Text, digest
from foresay_lab.training.processes import Processes
from foresay_lab.training.students import ModelStudent, Student
from foresay_lab.training.teacher import CachedPasses, TargetPasses, TeacherHead

NOTE = "foresay.json"
"""Name of the file that describes how a folder's draft was made."""


@dataclass(frozen=True, slots=True)
class Learner:
    """A draft in training: what differs between drafts on hidden states and draft models."""

    student: Student
    kind: str
    layers: tuple[int, ...]
    """Layers of the target whose hidden states it reads."""
    settings: Mapping[str, Any]
    """Settings that must not change on resumption."""
    save: Callable[[Path], None]
    """Saves the current draft in a folder."""


def draft_learner(target: LoadedModel, draft: StoredDraft, **own: int | None) -> Learner:
    """Return a head or block drafter in training.

    own: `steps` of a head, tokens drafted in a row in training; `anchors` of a block drafter, blocks of each text in a training
    step, None for one at each position.
    """
    model, name = causal(target), kind_of(draft.config)
    kind, layers = KINDS[name], draft.config.hidden_layers or usual_layers(model.num_layers)
    chosen = {kind.setting: kind.default, "decay": kind.decay, **own}
    settings = {
        **chosen,
        "layers": list(layers),
        "shape": {k: v for k, v in draft.config.as_plain().items() if k not in ("eagle_config", "dflash_config")},
        "own_head": draft.module.lm_head is not None,
        "tokens": digest_of_tokens(draft.token_ids),
    }
    student = kind.student(draft, model, **chosen).to(model.device)
    return Learner(student, name, layers, settings, lambda folder: write_draft(draft.stored_in(torch.bfloat16), folder))


def model_learner(
    target: LoadedModel,
    draft: Any,
    tokenizer: Any,
    *,
    freeze_embeddings: bool = True,
    token_ids: torch.Tensor | None = None,
) -> Learner:
    """Return a draft model with the target's vocabulary in training, which learns the target's distributions.

    draft: a transformers model, saved in transformers' format. freeze_embeddings: do not train embeddings and output layer, most
    of a small draft's weights. token_ids: [K], the draft vocabulary of decoding: training compares only these tokens, and the
    saved model has all.
    """
    model = causal(target)
    config = draft.config.get_text_config(decoder=True)
    if int(config.vocab_size) < model.vocab_size:
        raise ConfigError(f"has {config.vocab_size} tokens, fewer than the target's {model.vocab_size}", param="draft")
    draft = draft.float().to(model.device)
    for layer in (draft.get_input_embeddings(), draft.get_output_embeddings()) if freeze_embeddings else ():
        if layer is not None:
            layer.requires_grad_(False)

    def save(folder: Path) -> None:
        weights = {name: weight.to(torch.bfloat16) for name, weight in draft.state_dict().items()}
        with atomic_files(folder) as temporary:
            save_model(draft, tokenizer, temporary, state_dict=weights)

    settings = {
        "shape": {k: v for k, v in config.to_dict().items() if isinstance(v, int | float)},
        "freeze_embeddings": freeze_embeddings,
        "tokens": digest_of_tokens(token_ids),
    }
    return Learner(ModelStudent(draft, model, token_ids), "model", (), settings, save)


def save_model(model: Any, tokenizer: Any, folder: Path, **more: Any) -> None:
    """Save a transformers model, with its tokenizer if there is one. more: arguments of `save_pretrained`."""
    with quiet_transformers():
        model.save_pretrained(folder, **more)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def distil(
    target: LoadedModel,
    learner: Learner,
    training: Sequence[Text],
    held_out: Sequence[Text],
    plan: Plan,
    objective: Objective,
    folder: Path,
    *,
    states: Path | None = None,
    note: Mapping[str, Any] | None = None,
    on_progress: Callable[[str, float, str], None] = lambda what, share, note: None,
    tracker: str | None = None,
) -> Fitting:
    """Train a draft on the target's outputs for texts, and save the best one in `folder`.

    states: a folder that caches the target's outputs; None computes them at each use. note: further fields of the saved draft's
    note. on_progress: called with the current activity, the share of it that is done, and a note. tracker: see Fitting.
    """
    passes = TargetPasses(causal(target), learner.layers)
    learn, rest = (corpus(passes, one, states, on_progress) for one in (training, held_out))
    TeacherHead(causal(target), None).check(rest.outputs_of(0))

    def save() -> None:
        learner.save(folder)
        made = {"made_by": "foresay distill", "kind": learner.kind, "target": target.name}
        write_note(folder, {**made, **(note or {}), "log": LOG})

    return Fitting(
        learner.student,
        objective,
        learn,
        rest,
        plan,
        folder,
        save,
        settings={**learner.settings, "target": target.name, "texts": digest(training)},
        on_progress=lambda share, text: on_progress("Training", share, text),
        tracker=tracker,
    ).run()


def corpus(
    passes: TargetPasses, texts: Sequence[Text], states: Path | None, on_progress: Callable[[str, float, str], None]
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


def write_note(folder: Path, note: Mapping[str, Any]) -> None:
    """Write the file that describes how a draft was made."""
    with atomic_write(folder / NOTE) as temporary:
        temporary.write_text(json.dumps({**note, "provenance": provenance()}, indent=2) + "\n", encoding="utf-8")
