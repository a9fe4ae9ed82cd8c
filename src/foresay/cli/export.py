"""`foresay export DRAFT FOLDER`: write a draft head or block drafter in another engine's format, with all of its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
import torch

from foresay.cli.command import Given, argument, command, option
from foresay.cli.common import load_options, target_name
from foresay.cli.options import DTYPE, TARGET, TRUST
from foresay.cli.progress import loading
from foresay.errors import ConfigError
from foresay.models.drafts.base import embeddings_of, target_rows
from foresay.models.drafts.block_config import BlockConfig
from foresay.models.drafts.files import LAYOUTS, write_draft
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources.drafts import load_draft
from foresay.models.sources.loading import load_model
from foresay.training.distil import causal


@command(
    argument("HEAD", "A draft head or block drafter: folder, hub id or alias."),
    argument("FOLDER", "The folder to write.", Path),
    TARGET,
    option("--layout NAME", f"File format of a head: {' or '.join(LAYOUTS)}.", "speculators"),
    option("--verifier MODEL", "Name of the target in the other engine.  [default: the model]"),
    DTYPE,
    TRUST,
    examples="foresay export head exported -m Qwen/Qwen2.5-0.5B-Instruct",
)
def run(given: Given) -> int:
    """Write a draft in another engine's format.

    The layers that the draft shares with its target are included: the output layer, and a block drafter's embeddings. vLLM reads
    both formats of heads: speculators, and plain EAGLE-3, which counts layers from 1. Block drafters are written in the layout of
    DSpark, or of DFlash if they have no Markov head.
    """
    layout, folder = given.layout, given.folder
    if layout not in LAYOUTS:
        raise ConfigError(f"--layout {layout!r} must be {' or '.join(LAYOUTS)}")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"{str(folder)!r} exists and is not empty; name another folder")
    with loading("Loading"):
        target = load_model(target_name(given.model), load_options(given))
        found = load_draft(given.head)
    whole = causal(target)
    width = int(whole.model.config.get_text_config(decoder=True).hidden_size)
    layers = found.config.check_target(whole.vocab_size, width, whole.num_layers, target.name)
    is_block = isinstance(found.config, BlockConfig)
    if is_block and "layout" in given.typed:
        raise ConfigError("--layout chooses the file format of a head, and this is a block drafter; drop it")
    if given.verifier and (is_block or layout == "plain"):
        raise ConfigError("--verifier is a field of the layout speculators of heads alone; drop it")
    config = dataclasses.replace(
        found.config,
        hidden_layers=layers,
        target=given.verifier or found.config.target or target.name,
        target_architectures=(type(whole.model).__name__,),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_draft(
        dataclasses.replace(found, config=config),
        folder,
        layout="plain" if is_block else LAYOUTS[layout],
        lm_head=target_rows(whole, found.token_ids),
        embeddings=_embeddings(whole) if is_block else None,
    )
    click.echo(folder)
    click.echo(
        f"  reads layers {', '.join(map(str, layers))} of {config.target}, proposes {config.draft_vocab_size:,} tokens"
    )
    return 0


def _embeddings(target: CausalModel) -> torch.Tensor:
    """The target's embeddings, [V, H], which are included in block drafters."""
    out: torch.Tensor = embeddings_of(target)(torch.arange(target.vocab_size, device=target.device))
    return out
