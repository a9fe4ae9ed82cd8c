"""Heads on disk: config.json and safetensors, in the layout that other engines read.

Owns the tensors' names. What is there is compared with what the configuration says before anything is used. Knows no target.
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
from foresay.models.heads.module import HeadModule, rotary_of
from foresay.tensor_files import StoredTensor, check_shapes, load_tensors, stored_tensors

WEIGHTS = "model.safetensors"
Layout = Literal["plain", "speculators"]
LAYOUTS: Mapping[str, Layout] = {"plain": "plain", "speculators": "speculators"}
_OFFSETS, _WRITABLE = "d2t", "t2d"


@dataclass(frozen=True, slots=True)
class Head:
    """A head as it is kept: its weights, and the tokens that it can write."""

    config: HeadConfig
    module: HeadModule
    token_ids: torch.Tensor | None
    """[K] int64, ascending; None: all of the target's."""


def read_head(folder: str | Path) -> Head:
    """A head from a folder, its weights in the dtype they are kept in.

    Raises ModelNotFoundError without a config.json or safetensors, ModelLoadError for weights that are missing, of another shape
    or unknown, and ConfigError for a configuration that is not read here.
    """
    folder = Path(folder)
    config = HeadConfig.read(_json(folder / "config.json"))
    stored = {_own_name(name): tensor for name, tensor in _stored(folder).items()}
    stored.pop(_WRITABLE, None)  # the offsets give the same
    ids = _token_ids(stored.pop(_OFFSETS, None), config)
    found = stored.get("fc.weight")
    width = config.target_hidden_size
    if found is None or len(found.shape) != 2 or not found.shape[1] or found.shape[1] % width:
        raise ModelLoadError(f"the head in {str(folder)!r} has no fc.weight of whole hidden states of {width} numbers")
    with torch.device("meta"):
        module = HeadModule(config, found.shape[1] // width)
        if "lm_head.weight" in stored:
            module.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if "embed_tokens.weight" in stored:
            module.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    wanted = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    check_shapes(stored, wanted, f"the head in {str(folder)!r}", "its config.json says")
    if width != config.hidden_size and None in (module.lm_head, module.embed_tokens):
        raise ModelLoadError(
            f"the head in {str(folder)!r} is {config.hidden_size} wide and its target {width}, so that it needs "
            "embed_tokens and lm_head of its own"
        )
    module.load_state_dict(load_tensors(stored), assign=True)
    module.rotary = rotary_of(config)  # whose frequencies are no weights
    return Head(config, module, ids)


def write_head(
    head: Head, folder: str | Path, *, layout: Layout = "plain", lm_head: torch.Tensor | None = None
) -> None:
    """Write a head into a folder that exists; each file is replaced whole, once both are written.

    lm_head: [K, D], the target's rows, for engines that want them in the file. Raises ConfigError where it cannot be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.module.state_dict().items()}
    if lm_head is not None and "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = lm_head.detach().cpu().to(tensors["fc.weight"].dtype).contiguous()
    if head.token_ids is not None:
        tensors[_OFFSETS] = head.token_ids - torch.arange(len(head.token_ids))
        writable = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        writable[head.token_ids] = True
        tensors[_WRITABLE] = writable
    values = head.config.as_speculators() if layout == "speculators" else head.config.as_plain()
    values["torch_dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    with atomic_files(folder) as work:
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _json(path: Path) -> Mapping[str, Any]:
    try:
        return parse_object(read_limited(path), str(path))
    except FileNotFoundError:
        raise ModelNotFoundError(f"the folder {str(path.parent)!r} holds no config.json; is it a head?") from None
    except (OSError, ConfigError) as error:
        raise ModelLoadError(f"cannot read {str(path)!r}: {error}") from None


def _stored(folder: Path) -> dict[str, StoredTensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin"))
        why = "only pickled weights, which can run code; convert them to safetensors" if pickled else "no safetensors"
        raise ModelNotFoundError(f"the folder {str(folder)!r} holds {why}")
    return stored_tensors(files)


def _own_name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _token_ids(stored: StoredTensor | None, config: HeadConfig) -> torch.Tensor | None:
    if stored is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ModelLoadError(
                f"the head writes {config.draft_vocab_size} of {config.vocab_size} tokens and does not say which: it has no d2t"
            )
        return None
    if stored.shape == (config.draft_vocab_size,) and stored.dtype in ("I64", "I32"):
        ids = torch.arange(config.draft_vocab_size) + load_tensors({_OFFSETS: stored})[_OFFSETS].long()
        if bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < config.vocab_size:
            return ids
    raise ModelLoadError(
        f"the head's d2t must name {config.draft_vocab_size} different tokens of {config.vocab_size}, in order"
    )


def check_target(config: HeadConfig, vocab_size: int, hidden_size: int, num_layers: int, name: str) -> tuple[int, ...]:
    """The hidden states that a head reads of a target. Raises ConfigError where it was made for another one."""
    for what, own, others in (
        ("vocabulary", config.vocab_size, vocab_size),
        ("hidden size", config.target_hidden_size, hidden_size),
    ):
        if own != others:
            raise ConfigError(f"the head was made for a target with a {what} of {own}, and {name!r} has {others}")
    layers = config.hidden_layers or usual_layers(num_layers)
    if max(layers) > num_layers:
        raise ConfigError(f"the head reads layer {max(layers)} of its target, and {name!r} has {num_layers}")
    return layers
