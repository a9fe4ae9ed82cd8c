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
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from foresay.errors import ConfigError, ModelLoadError, ModelNotFoundError
from foresay.files import atomic_files
from foresay.models.heads.config import HeadConfig, usual_layers
from foresay.models.heads.module import HeadModule

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
    tensors = {_own_name(name): tensor for name, tensor in _tensors(folder).items()}
    tensors.pop(_WRITABLE, None)  # says the same as the offsets
    ids = _token_ids(tensors.pop(_OFFSETS, None), config)
    found = tensors.get("fc.weight")
    width = config.target_hidden_size
    if found is None or found.shape[1] % width:
        raise ModelLoadError(f"the head in {str(folder)!r} has no fc.weight of whole hidden states of {width} numbers")
    with torch.device("meta"):
        module = HeadModule(config, int(found.shape[1]) // width)
        if "lm_head.weight" in tensors:
            module.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if "embed_tokens.weight" in tensors:
            module.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    _compare(folder, module, tensors)
    module.load_state_dict(tensors, assign=True)
    module.rotary = HeadModule(config, 1).rotary  # whose frequencies are no weights
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
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFoundError(f"the folder {str(path.parent)!r} holds no config.json; is it a head?") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(found, dict):
        raise ModelLoadError(f"{str(path)!r} must hold an object")
    return found


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin"))
        why = "only pickled weights, which can run code; convert them to safetensors" if pickled else "no safetensors"
        raise ModelNotFoundError(f"the folder {str(folder)!r} holds {why}")
    out: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            out |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"cannot read {str(file)!r}: {error}") from None
    return out


def _own_name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _token_ids(offsets: torch.Tensor | None, config: HeadConfig) -> torch.Tensor | None:
    if offsets is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ModelLoadError(
                f"the head writes {config.draft_vocab_size} of {config.vocab_size} tokens and does not say which: it has no d2t"
            )
        return None
    ids = torch.arange(len(offsets)) + offsets.long()
    ascends = len(ids) < 2 or bool((ids[1:] > ids[:-1]).all())
    if len(ids) != config.draft_vocab_size or int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or not ascends:
        raise ModelLoadError(
            f"the head's d2t must name {config.draft_vocab_size} different tokens of {config.vocab_size}, in order"
        )
    return ids


def _compare(folder: Path, module: HeadModule, tensors: Mapping[str, torch.Tensor]) -> None:
    wanted = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        problem = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which a head has not"
        raise ModelLoadError(f"the head in {str(folder)!r} {problem}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelLoadError(
                f"{name} of the head in {str(folder)!r} is {list(tensors[name].shape)}, and its config.json says {list(shape)}"
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
