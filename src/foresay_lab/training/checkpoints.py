"""Checkpoints of a training run in safetensors and JSON, from which an interrupted run resumes.

Owns the files. A checkpoint folder is replaced atomically.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer

from foresay.errors import ConfigError, ForesayError, ModelLoadError
from foresay.files import usual_modes, writing
from foresay.json_files import Schema, read_limited
from foresay.tensor_files import StoredTensor, check_shapes, load_tensors, stored_tensors

_WEIGHTS, _OPTIMISER, _STATE = "weights.safetensors", "optimiser.safetensors", "state.json"


@dataclass(slots=True)
class State:
    """Progress of a run."""

    epoch: int = 0
    batch: int = 0
    """Index of the next batch of the epoch."""
    step: int = 0
    """Optimiser steps."""
    tokens: int = 0
    """Target distributions trained on so far, over all processes."""
    elapsed_s: float = 0.0
    best: float = -1.0
    """Tokens per pass of the best evaluation."""
    best_step: int = 0
    batch_tokens: int = 0
    """Tokens of a batch once chosen; 0 before."""


@dataclass(slots=True)
class _Stored(State):
    """Contents of the file: progress, and settings that must not change on resumption."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    plan: dict[str, Any] = field(default_factory=dict)
    optimiser: list[str] | None = None
    """Names of the optimisers' tensors; None in a checkpoint of an earlier version."""

    @property
    def state(self) -> State:
        """Progress of the run."""
        return State(**{one.name: getattr(self, one.name) for one in fields(State)})


_STORED: Schema[_Stored] = Schema(_Stored, "the state of a run")


def save_checkpoint(
    folder: Path, state: State, plan: Mapping[str, Any], model: nn.Module, optimisers: Sequence[Optimizer]
) -> None:
    """Replace the checkpoint. plan: settings that must not change on resumption.

    Raises ConfigError if it cannot be written; the previous checkpoint then remains.
    """
    temporary, previous = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    with writing(folder):
        for one in (temporary, previous):
            shutil.rmtree(one, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            tensors, weights = _flat(optimisers), trainable_parameters(model).items()
            save_file({name: one.detach().cpu().contiguous() for name, one in weights}, temporary / _WEIGHTS)
            save_file(tensors, temporary / _OPTIMISER)
            values = {"plan": dict(plan), "optimiser": sorted(tensors), **asdict(state)}
            (temporary / _STATE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            usual_modes(temporary)
            if folder.exists():
                os.replace(folder, previous)
            os.replace(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    shutil.rmtree(previous, ignore_errors=True)


def load_checkpoint(
    folder: Path, plan: Mapping[str, Any], model: nn.Module, optimisers: Sequence[Optimizer]
) -> State | None:
    """Load a checkpoint into a model and its optimisers. Return the progress, or None without a checkpoint.

    Raises ConfigError for a checkpoint of another plan, naming the difference, and for an unreadable one.
    """
    previous = folder.with_name(folder.name + ".old")
    if not folder.exists() and previous.exists():  # killed between the two renames
        os.replace(previous, folder)
    if not (folder / _STATE).is_file():
        return None
    try:
        stored = _STORED.read(read_limited(folder / _STATE), _STATE)
        weights, tensors = stored_tensors([folder / _WEIGHTS]), stored_tensors([folder / _OPTIMISER])
    except (OSError, ForesayError) as error:
        raise _unreadable(folder, error) from None
    theirs = {"processes": 1, **stored.plan}
    ours = json.loads(json.dumps(dict(plan)))
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            text = f"was started with {{{name}}}, not {ours.get(name)!r}; use the same, or remove it"
            raise ConfigError(text, param="folder", value=folder, **{name: theirs.get(name)})
    try:
        shapes = {name: tuple(weight.shape) for name, weight in trainable_parameters(model).items()}
        check_shapes(weights, shapes, _WEIGHTS, "the draft has")
        loaded = load_tensors(weights)
        with torch.no_grad():
            for name, weight in trainable_parameters(model).items():
                weight.copy_(loaded[name])
        if stored.optimiser is not None and (differing := tensors.keys() ^ stored.optimiser):
            raise ModelLoadError(f"{_OPTIMISER} and {_STATE} disagree about {min(differing)!r}")
        _fill(optimisers, tensors)
    except ForesayError as error:
        raise _unreadable(folder, error) from None
    return stored.state


def _unreadable(folder: Path, error: Exception) -> ConfigError:
    text = f"has a checkpoint that cannot be read: {error}; remove it to start again"
    return ConfigError(text, param="folder", value=folder)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's trainable parameters by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def _flat(optimisers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    out = {}
    for optimiser_index, optimiser in enumerate(optimisers):
        for number, values in optimiser.state_dict()["state"].items():
            for name, value in values.items():
                out[f"{optimiser_index}.{number}.{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return out


def _fill(optimisers: Sequence[Optimizer], tensors: Mapping[str, StoredTensor]) -> None:
    """Load the optimisers' state. Raises ModelLoadError for a tensor that fits none of their parameters."""
    states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in optimisers]
    weights = [[weight for group in one.param_groups for weight in group["params"]] for one in optimisers]
    loaded = load_tensors({name: one for name, one in tensors.items() if _fits(one, weights)})
    if unknown := sorted(tensors.keys() - loaded.keys()):
        text = f"{_OPTIMISER} has {unknown[0]!r} of shape {list(tensors[unknown[0]].shape)}, which fits no parameter"
        raise ModelLoadError(text)
    for name, value in loaded.items():
        optimiser_index, number, field = name.split(".", 2)
        states[int(optimiser_index)].setdefault(int(number), {})[field] = value
    for optimiser, state in zip(optimisers, states, strict=True):
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def _fits(tensor: StoredTensor, weights: Sequence[Sequence[torch.Tensor]]) -> bool:
    """True if the name is "optimiser.parameter.field" of a parameter, and the shape is its own (of a "step", a scalar's)."""
    match = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})\.(\w+)", tensor.name, re.ASCII)
    if match is None or int(match[1]) >= len(weights) or int(match[2]) >= len(weights[int(match[1])]):
        return False
    shape = () if match[3] == "step" else tuple(weights[int(match[1])][int(match[2])].shape)
    return tensor.floats and tensor.shape == shape
