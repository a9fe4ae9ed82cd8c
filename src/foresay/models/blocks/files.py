"""Block drafters on disk: config.json and safetensors, in the published layouts.

Owns the tensors' names. Tensors are checked against the configuration before their data is read. Knows no target model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from foresay.errors import ConfigError
from foresay.files import atomic_files
from foresay.models.blocks.config import BlockConfig
from foresay.models.blocks.module import BlockModule
from foresay.models.heads.files import (
    DRAFTABLE,
    OFFSETS,
    WEIGHTS,
    read_config,
    read_token_ids,
    stored_in,
    vocabulary_tensors,
)
from foresay.models.heads.module import rotary_embedding
from foresay.tensor_files import check_shapes, load_tensors


@dataclass(frozen=True, slots=True)
class Block:
    """A stored block drafter: its configuration, its weights and the tokens that it can draft."""

    config: BlockConfig
    module: BlockModule
    token_ids: torch.Tensor | None
    """[K] int64, ascending; None for the whole vocabulary of the target."""


def is_block(values: Mapping[str, Any]) -> bool:
    """Return True if a config.json is that of a block drafter."""
    kind = values.get("speculators_model_type")
    return kind in ("dflash", "dspark") or "dflash_config" in values or "target_layer_ids" in values


def read_block(folder: str | Path) -> Block:
    """Read a block drafter from a folder, with its weights in the stored dtype.

    Raises ModelNotFoundError if there is no config.json or no safetensors file, ModelLoadError for weights that are missing, of
    another shape or unknown, and ConfigError for an invalid or unsupported configuration.
    """
    folder = Path(folder)
    source = f"the block drafter in {str(folder)!r}"
    config = BlockConfig.read(read_config(folder))
    stored = {name.removeprefix("model."): tensor for name, tensor in stored_in(folder).items()}
    stored.pop(DRAFTABLE, None)  # redundant: the offsets determine it
    ids = read_token_ids(stored.pop(OFFSETS, None), config.vocab_size, config.draft_vocab_size, source)
    with torch.device("meta"):
        module = BlockModule(config)
        if "lm_head.weight" in stored:
            module.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if "embed_tokens.weight" in stored:
            module.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    wanted = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    check_shapes(stored, wanted, source, "its config.json gives")
    module.load_state_dict(load_tensors(stored), assign=True)
    module.rotary = rotary_embedding(config.layer)  # its frequencies are buffers, not weights
    return Block(config, module, ids)


def write_block(
    block: Block,
    folder: str | Path,
    *,
    lm_head: torch.Tensor | None = None,
    embeddings: torch.Tensor | None = None,
) -> None:
    """Write a block drafter into an existing folder. Both files are written completely before either is replaced.

    lm_head: [K, D], embeddings: [V, D], the target's, for engines that require them in the file. Raises ConfigError if the files
    cannot be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in block.module.state_dict().items()}
    dtype = tensors["fc.weight"].dtype
    for name, given in (("lm_head.weight", lm_head), ("embed_tokens.weight", embeddings)):
        if given is not None and name not in tensors:
            tensors[name] = given.detach().cpu().to(dtype).contiguous()
    if block.token_ids is not None:
        tensors |= vocabulary_tensors(block.token_ids, block.config.vocab_size)
    values = {**block.config.as_plain(), "torch_dtype": str(dtype).removeprefix("torch.")}
    with atomic_files(folder) as work:
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def check_block(config: BlockConfig, vocab_size: int, hidden_size: int, num_layers: int, name: str) -> None:
    """Raise ConfigError if a block drafter does not fit a target."""
    for quantity, expected, actual in (
        ("vocabulary", config.vocab_size, vocab_size),
        ("hidden size", config.hidden_size, hidden_size),
    ):
        if expected != actual:
            raise ConfigError(
                f"the block drafter was made for a target with a {quantity} of {expected}, but {name!r} has {actual}"
            )
    if max(config.hidden_layers) > num_layers:
        raise ConfigError(
            f"the block drafter reads layer {max(config.hidden_layers)} of its target, but {name!r} has only {num_layers}"
        )
