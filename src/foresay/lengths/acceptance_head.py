"""The acceptance head: P(accepted) of a draft token from the draft's last hidden state (SpecDec++, Huang et al. 2024).

Owns the layers and the files: N residual blocks x + SiLU(W x + b), then a linear layer to two scores; the second entry of their
softmax is c = P(accepted). Knows neither drafters nor decoding.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import nn

from foresay.checks import check_int
from foresay.errors import ConfigError, ModelLoadError, ModelNotFoundError
from foresay.files import atomic_files
from foresay.json_files import Schema, read_limited
from foresay.tensor_files import StoredTensor, check_shapes, load_tensors, stored_tensors

_CONFIG, _WEIGHTS, _KIND = "config.json", "model.safetensors", "foresay-acceptance-head"


MAX_BLOCKS, MAX_WIDTH = 64, 1 << 18
Blocks = Annotated[int, Field(ge=0, le=MAX_BLOCKS)]


class _Config(BaseModel):
    """The number of blocks under our field name and those of published heads. Other fields are ignored."""

    model_config = ConfigDict(strict=True)

    blocks: Blocks | None = None
    num_layers: Blocks | None = None
    assist_acc_head_num_layers: Blocks | None = None


_CONFIG_SCHEMA: Schema[_Config] = Schema(_Config, "the configuration of an acceptance head")


class AcceptanceHead(nn.Module):
    """Network that predicts c = P(accepted) for the token that a draft pass consumed."""

    def __init__(self, hidden_size: int, blocks: int = 3) -> None:
        """hidden_size: width H of the draft's hidden states. blocks: number N of residual blocks; 0 gives a linear head."""
        super().__init__()
        check_int("hidden_size", hidden_size, 1)
        self.blocks = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size) for _ in range(check_int("blocks", blocks, 0, MAX_BLOCKS))
        )
        self.out = nn.Linear(hidden_size, 2)
        for block in self.blocks:  # each block starts as the identity
            assert isinstance(block, nn.Linear)
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    @property
    def hidden_size(self) -> int:
        """Width H of the hidden states that the head reads."""
        return self.out.in_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the two scores [..., 2], rejected and accepted, for hidden states [..., H] of any dtype."""
        x = hidden.to(self.out.weight.dtype)
        for block in self.blocks:
            x = x + F.silu(block(x))
        scores: torch.Tensor = self.out(x)
        return scores

    def accepted(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return c = P(accepted), [...] float32, for hidden states [..., H]."""
        out: torch.Tensor = self(hidden).float().softmax(-1)[..., 1]
        return out

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json and model.safetensors into an existing folder. Raises ConfigError if they cannot be written."""
        config = {"kind": _KIND, "hidden_size": self.hidden_size, "blocks": len(self.blocks)}
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in self.state_dict().items()}
        with atomic_files(folder) as work:
            save_file(tensors, work / _WEIGHTS)
            (work / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> AcceptanceHead:
        """Load a head from a folder: ours or a published one, whose blocks may share one weight ("0.linear.weight", ...).

        Raises ModelNotFoundError for a folder without weights, ModelLoadError for weights that are not an acceptance head's.
        """
        path = Path(folder)
        file, what = path / _WEIGHTS, f"the acceptance head in {str(folder)!r}"
        if not file.exists():
            raise ModelNotFoundError(f"the folder {str(folder)!r} has no {_WEIGHTS}; is it an acceptance head?")
        stored, blocks = _named(stored_tensors([file]), _declared_blocks(path))
        last = stored.get("out.weight")
        if last is None or len(last.shape) != 2 or last.shape[0] != 2 or not 1 <= last.shape[1] <= MAX_WIDTH:
            raise ModelLoadError(f"{str(file)!r} has no output layer with two scores; is it an acceptance head?")
        if blocks > MAX_BLOCKS:
            raise ModelLoadError(f"{what} has {blocks} blocks; at most {MAX_BLOCKS} are supported")
        with torch.device("meta"):
            head = AcceptanceHead(last.shape[1], blocks)
        wanted = {name: tuple(weight.shape) for name, weight in head.named_parameters()}
        if "out.bias" not in stored:
            del wanted["out.bias"]
        check_shapes(stored, wanted, what, "the width of its output layer gives")
        read = load_tensors({one.name: one for one in stored.values()})  # a weight shared by all blocks is read once
        weights = {name: tensor.float() for name, tensor in read.items()}
        tensors = {name: weights[one.name] for name, one in stored.items()}
        head.load_state_dict({"out.bias": torch.zeros(2)} | tensors, assign=True)
        return head.eval()


def _declared_blocks(path: Path) -> int | None:
    """Return the number of blocks in config.json (published heads call them layers); None if it has none or is missing."""
    try:
        config = _CONFIG_SCHEMA.read(read_limited(path / _CONFIG), str(path / _CONFIG))
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        raise ModelLoadError(f"cannot read {str(path / _CONFIG)!r}: {error}") from None
    known = (config.blocks, config.num_layers, config.assist_acc_head_num_layers)
    return next((blocks for blocks in known if blocks is not None), None)


def _named(tensors: dict[str, StoredTensor], declared: int | None) -> tuple[dict[str, StoredTensor], int]:
    """Return the tensors under our names, and the number of blocks."""
    if any(name.startswith(("blocks.", "out.")) for name in tensors):
        return dict(tensors), len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    linear = {name.removeprefix("model."): weight for name, weight in tensors.items()}
    numbers = sorted({int(name.split(".")[0]) for name in linear if name.split(".")[0].isdigit()})
    inner = [n for n in numbers if f"{n}.linear.weight" in linear]
    last = [n for n in numbers if f"{n}.weight" in linear]
    count = max(len(inner), last[-1] if last else 0, declared or 0)
    out: dict[str, StoredTensor] = {}
    for i in range(min(count, MAX_BLOCKS)):
        source = i if i in inner else inner[0] if inner else i  # a weight shared by all blocks is stored once
        for part in ("weight", "bias"):
            if f"{source}.linear.{part}" in linear:
                out[f"blocks.{i}.{part}"] = linear[f"{source}.linear.{part}"]
    for part in ("weight", "bias"):
        if last and f"{last[-1]}.{part}" in linear:
            out[f"out.{part}"] = linear[f"{last[-1]}.{part}"]
    read = {one.name for one in out.values()}
    return out | {name: one for name, one in tensors.items() if one.name not in read}, count  # the others are refused
