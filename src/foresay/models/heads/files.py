"""Draft heads on disk: config.json and safetensors, in the layouts that other engines read.

Owns the tensors' names. Tensors are checked against the configuration before their data is read. Knows no target model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import nn

from foresay.errors import ConfigError, ModelLoadError, ModelNotFoundError
from foresay.files import atomic_files
from foresay.json_files import parse_object, read_limited
from foresay.models.heads.config import HeadConfig, usual_layers
from foresay.models.heads.module import HeadModule, rotary_embedding
from foresay.tensor_files import StoredTensor, check_shapes, load_tensors, stored_tensors

WEIGHTS = "model.safetensors"
Layout = Literal["plain", "speculators"]
LAYOUTS: Mapping[str, Layout] = {"plain": "plain", "speculators": "speculators"}
OFFSETS, DRAFTABLE = "d2t", "t2d"
"""Names of the tensors that list the draft vocabulary: offsets of its ids, and a mask of the target's."""


@dataclass(frozen=True, slots=True)
class Head:
    """A stored head: its configuration, its weights and the tokens that it can draft."""

    config: HeadConfig
    module: HeadModule
    token_ids: torch.Tensor | None
    """[K] int64, ascending; None for the whole vocabulary of the target."""


def read_head(folder: str | Path) -> Head:
    """Read a head from a folder, with its weights in the stored dtype.

    Raises ModelNotFoundError if there is no config.json or no safetensors file, ModelLoadError for weights that are missing, of
    another shape or unknown, and ConfigError for an invalid or unsupported configuration.
    """
    folder = Path(folder)
    config = HeadConfig.read(read_config(folder))
    stored = {_own_name(name): tensor for name, tensor in stored_in(folder).items()}
    stored.pop(DRAFTABLE, None)  # redundant: the offsets determine it
    ids = read_token_ids(stored.pop(OFFSETS, None), config.vocab_size, config.draft_vocab_size, "the head")
    found = stored.get("fc.weight")
    width = config.target_hidden_size
    if found is None or len(found.shape) != 2 or not found.shape[1] or found.shape[1] % width:
        raise ModelLoadError(
            f"the head in {str(folder)!r} has no fc.weight [out, in] whose `in` is a multiple of {width}"
        )
    with torch.device("meta"):
        module = HeadModule(config, found.shape[1] // width)
        if "lm_head.weight" in stored:
            module.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if "embed_tokens.weight" in stored:
            module.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    wanted = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    check_shapes(stored, wanted, f"the head in {str(folder)!r}", "its config.json gives")
    if width != config.hidden_size and None in (module.lm_head, module.embed_tokens):
        raise ModelLoadError(
            f"the head in {str(folder)!r} has hidden size {config.hidden_size} and its target {width}, so its file must contain "
            "embed_tokens and lm_head"
        )
    module.load_state_dict(load_tensors(stored), assign=True)
    module.rotary = rotary_embedding(config.layer)  # its frequencies are buffers, not weights
    return Head(config, module, ids)


def write_head(
    head: Head, folder: str | Path, *, layout: Layout = "plain", lm_head: torch.Tensor | None = None
) -> None:
    """Write a head into an existing folder. Both files are written completely before either is replaced.

    lm_head: [K, D], rows of the target's output layer, for engines that require them in the file. Raises ConfigError if the
    files cannot be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.module.state_dict().items()}
    if lm_head is not None and "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = lm_head.detach().cpu().to(tensors["fc.weight"].dtype).contiguous()
    if head.token_ids is not None:
        tensors |= vocabulary_tensors(head.token_ids, head.config.vocab_size)
    values = head.config.as_speculators() if layout == "speculators" else head.config.as_plain()
    values["torch_dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    with atomic_files(folder) as work:
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def vocabulary_tensors(token_ids: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return the tensors that list a draft vocabulary, [K] int64 ascending."""
    draftable = torch.zeros(vocab_size, dtype=torch.bool)
    draftable[token_ids] = True
    return {OFFSETS: token_ids - torch.arange(len(token_ids)), DRAFTABLE: draftable}


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read a folder's config.json. Raises ModelNotFoundError if there is none, and ModelLoadError if it cannot be read."""
    path = folder / "config.json"
    try:
        return parse_object(read_limited(path), str(path))
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"the folder {str(path.parent)!r} contains no config.json; give the folder of a draft head"
        ) from None
    except (OSError, ConfigError) as error:
        raise ModelLoadError(f"cannot read {str(path)!r}: {error}") from None


def stored_in(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a folder's safetensors files. Raises ModelNotFoundError if there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin"))
        found = (
            "only pickled weights, which can run code; convert them to safetensors"
            if pickled
            else "no safetensors file"
        )
        raise ModelNotFoundError(f"the folder {str(folder)!r} contains {found}")
    return stored_tensors(files)


def _own_name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def read_token_ids(stored: StoredTensor | None, vocab_size: int, count: int, source: str) -> torch.Tensor | None:
    """Return the ids of a draft vocabulary of `count` tokens, [K] int64 ascending; None for the whole vocabulary.

    source: the draft, for errors. Raises ModelLoadError if the tensor is missing or invalid.
    """
    if stored is None:
        if count != vocab_size:
            raise ModelLoadError(
                f"{source} drafts {count} of {vocab_size} tokens, but its file has no d2t to list them"
            )
        return None
    if stored.shape == (count,) and stored.dtype in ("I64", "I32"):
        ids = torch.arange(count) + load_tensors({OFFSETS: stored})[OFFSETS].long()
        if bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size:
            return ids
    raise ModelLoadError(f"{source}'s d2t must be integer offsets of {count} ascending token ids below {vocab_size}")


def check_target(config: HeadConfig, vocab_size: int, hidden_size: int, num_layers: int, name: str) -> tuple[int, ...]:
    """Return the layers of a target whose hidden states a head reads. Raises ConfigError if the head does not fit the target."""
    for quantity, expected, actual in (
        ("vocabulary", config.vocab_size, vocab_size),
        ("hidden size", config.target_hidden_size, hidden_size),
    ):
        if expected != actual:
            raise ConfigError(
                f"the head was made for a target with a {quantity} of {expected}, but {name!r} has {actual}"
            )
    layers = config.hidden_layers or usual_layers(num_layers)
    if max(layers) > num_layers:
        raise ConfigError(f"the head reads layer {max(layers)} of its target, but {name!r} has only {num_layers}")
    return layers
