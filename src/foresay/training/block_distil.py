"""Distillation of a block drafter from a target.

Owns the setup: initial weights, draft vocabulary, saved files. The loop is in fitting.py, the loss in losses.py and
block_student.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foresay.checks import check_int
from foresay.errors import ConfigError
from foresay.models.blocks.config import MAX_BLOCK, BlockConfig
from foresay.models.blocks.files import Block, check_block, write_block
from foresay.models.blocks.module import BlockModule
from foresay.models.sources.wrapping import LoadedModel
from foresay.training.block_student import BlockStudent
from foresay.training.distil import causal, corpus, digest_of_tokens, final_norm, layer_fields, write_note
from foresay.training.fitting import Fitting, Plan, Report
from foresay.training.losses import Objective
from foresay.training.outputs import Text, digest, frequent_tokens
from foresay.training.teacher import TargetPasses, TeacherHead

BLOCK_SIZE = 7
"""Default positions of a block."""
DECAY = 0.7788
"""Default ratio of a position's loss weight to that of the one before: exp(-1/4)."""
LOSS = "ce=0.1, tv=1.8"
"""Default loss: 0.1 CE + 0.9 |p - q|_1 (DSpark)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Shape of a new block drafter; None selects a default that suits the target."""

    hidden_layers: tuple[int, ...] | None = None
    vocabulary_size: int | None = None
    """Draft vocabulary size; None: a sixth of the target's, at least 4,096."""
    feed_forward: int | None = None
    layers: int | None = None
    """Layers; None: one for every 15 of the target, at least 1."""
    block_size: int = BLOCK_SIZE
    markov_rank: int | None = None
    """Rank of the Markov head; None: a ninth of the hidden size. 0: none (DFlash)."""
    confidence: bool = True


def usual_block_layers(num_layers: int) -> tuple[int, ...]:
    """Return the default layers whose hidden states a block drafter reads: some spread evenly, from an early to a late one."""
    count = max(2, min(5, num_layers // 8))
    first, last = min(2, num_layers), max(1, num_layers - 2)
    found = {round(first + i * (last - first) / (count - 1)) for i in range(count)}
    return tuple(sorted(found))


def new_block(target: LoadedModel, texts: Sequence[Text], shape: BlockShape, seed: int) -> Block:
    """Return a block drafter with random weights, whose vocabulary is the most frequent tokens of `texts`."""
    model = causal(target)
    config = model.model.config.get_text_config(decoder=True)
    width, vocab = int(config.hidden_size), model.vocab_size
    size = check_int("vocabulary_size", shape.vocabulary_size or min(vocab, max(4096, vocab // 6)), 1, vocab)
    hidden_layers = shape.hidden_layers or usual_block_layers(model.num_layers)
    if not all(0 <= layer <= model.num_layers for layer in hidden_layers):
        raise ConfigError(
            f"hidden_layers={list(hidden_layers)} must be 0 to {model.num_layers}, the layers of the target"
        )
    rank = max(8, width // 9) if shape.markov_rank is None else shape.markov_rank
    new_config = BlockConfig(
        layer_fields(model, shape.feed_forward),
        shape.layers or max(1, model.num_layers // 15),
        vocab,
        size,
        hidden_layers,
        check_int("block_size", shape.block_size, 2, MAX_BLOCK),
        vocab - 1,
        rank,
        shape.confidence,
        shape.confidence and rank > 0,
        target=target.name,
        target_architectures=(type(model.model).__name__,),
    )
    ids = None if size == vocab else frequent_tokens(texts, size, target.eos_token_ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = BlockModule(new_config)
    with torch.no_grad():
        module.norm.weight.copy_(final_norm(model))  # the scale that the output layer expects
        if module.markov_head is not None:  # drafts start as those of the layers alone
            module.markov_head.markov_w2.weight.zero_()
        if module.confidence_head is not None:
            module.confidence_head.proj.weight.zero_()
            module.confidence_head.proj.bias.zero_()
    return Block(new_config, module, ids)


def resumed_block(target: LoadedModel, block: Block) -> Block:
    """Return a trained block drafter for further training. Raises ConfigError for one of another target."""
    model = causal(target)
    width = int(model.model.config.get_text_config(decoder=True).hidden_size)
    check_block(block.config, model.vocab_size, width, model.num_layers, target.name)
    return Block(block.config, block.module.float(), block.token_ids)


def distil_block(
    target: LoadedModel,
    block: Block,
    training: Sequence[Text],
    held_out: Sequence[Text],
    plan: Plan,
    objective: Objective,
    folder: Path,
    *,
    anchors: int | None = 64,
    decay: float = DECAY,
    states: Path | None = None,
    note: dict[str, Any] | None = None,
    on_progress: Callable[[str, float, str], None] = lambda what, share, note: None,
    tracker: str | None = None,
) -> Report:
    """Train a block drafter on the target's outputs for texts, and save the best one in `folder`.

    anchors: blocks of each text in a training step; None for one at each position. decay: ratio of a position's loss weight to
    that of the position before it. states: a folder that caches the target's outputs; None computes them at each use.
    on_progress: called with the current activity, the share of it that is done, and a note.
    """
    model = causal(target)
    passes = TargetPasses(model, block.config.hidden_layers)
    corpora = [corpus(passes, texts, states, on_progress) for texts in (training, held_out)]
    student = BlockStudent(block, model, anchors=anchors, decay=decay).to(model.device)
    TeacherHead(model, None).check(corpora[1].outputs_of(0))
    settings = {
        "anchors": anchors,
        "decay": decay,
        "target": target.name,
        "shape": {k: v for k, v in block.config.as_plain().items() if isinstance(v, int | float | bool | str)},
        "layers": list(block.config.hidden_layers),
        "tokens": digest_of_tokens(block.token_ids),
        "texts": digest(training),
    }

    def save() -> None:
        write_block(Block(block.config, _in_bf16(block.module), block.token_ids), folder)
        write_note(folder, {"made_by": "foresay distill", "kind": "block", "target": target.name, **(note or {})})

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


def _in_bf16(module: BlockModule) -> BlockModule:
    """Return a copy in bf16, the dtype of forward passes."""
    with torch.device("meta"):
        out = BlockModule(module.config)
        if module.lm_head is not None:
            out.lm_head = nn.Linear(module.lm_head.in_features, module.lm_head.out_features, bias=False)
        if module.embed_tokens is not None:
            out.embed_tokens = nn.Embedding(*module.embed_tokens.weight.shape)
    weights = {name: one.detach().to(torch.bfloat16) for name, one in module.state_dict().items()}
    out.load_state_dict(weights, assign=True)
    return out
