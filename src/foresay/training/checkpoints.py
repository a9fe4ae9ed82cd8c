"""The state of a training run on disk, in safetensors and JSON, so that one that was killed goes on where it was.

Owns the files. A checkpoint is a folder that is there whole or not at all.
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

from foresay.errors import ConfigError, ForesayError, ModelLoadError
from foresay.files import usual_modes, writing
from foresay.json_files import Schema, read_limited
from foresay.tensor_files import StoredTensor, check_shapes, load_tensors, stored_tensors

_WEIGHTS, _OPTIMISER, _STATE = "weights.safetensors", "optimiser.safetensors", "state.json"


@dataclass(slots=True)
class State:
    """How far a run is."""

    epoch: int = 0
    batch: int = 0
    """Of the epoch, the next one."""
    step: int = 0
    """Optimiser steps."""
    tokens: int = 0
    """Distributions compared so far, over all processes."""
    elapsed_s: float = 0.0
    best: float = -1.0
    """Tokens per pass of the best evaluation."""
    best_step: int = 0
    batch_tokens: int = 0
    """Tokens of a batch, once settled; 0 before."""


@dataclass(slots=True)
class _Stored(State):
    """The file: how far the run is, and what a later run must agree with."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    plan: dict[str, Any] = field(default_factory=dict)
    optimiser: list[str] | None = None
    """Names of the optimisers' tensors; None in a checkpoint of an earlier version."""

    @property
    def state(self) -> State:
        """How far the run is."""
        return State(**{one.name: getattr(self, one.name) for one in fields(State)})


_STORED: Schema[_Stored] = Schema(_Stored, "the state of a run")


def save_checkpoint(
    folder: Path,
    state: State,
    plan: Mapping[str, Any],
    model: torch.nn.Module,
    optimisers: Sequence[torch.optim.Optimizer],
) -> None:
    """Write a checkpoint in the place of the one before. plan: what a later run must agree with.

    Raises ConfigError where it cannot be written; the one before is left as it was.
    """
    work, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    with writing(folder):
        for one in (work, old):
            shutil.rmtree(one, ignore_errors=True)
        try:
            work.mkdir(parents=True)
            weights, kept = learned(model), _flat(optimisers)
            save_file({name: weight.detach().cpu().contiguous() for name, weight in weights.items()}, work / _WEIGHTS)
            save_file(kept, work / _OPTIMISER)
            values = {"plan": dict(plan), "optimiser": sorted(kept), **asdict(state)}
            (work / _STATE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            usual_modes(work)
            if folder.exists():
                os.replace(folder, old)
            os.replace(work, folder)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(
    folder: Path, plan: Mapping[str, Any], model: torch.nn.Module, optimisers: Sequence[torch.optim.Optimizer]
) -> State | None:
    """Fill a model and its optimisers, and say how far the run was; None where there is no checkpoint.

    Raises ConfigError for a checkpoint of another plan, naming what differs, and for one that cannot be read.
    """
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():  # killed between two renames
        os.replace(old, folder)
    if not (folder / _STATE).is_file():
        return None
    try:
        found = _STORED.read(read_limited(folder / _STATE), _STATE)
        weights, kept = stored_tensors([folder / _WEIGHTS]), stored_tensors([folder / _OPTIMISER])
    except (OSError, ForesayError) as error:
        raise _unreadable(folder, error) from None
    theirs = {"processes": 1, **found.plan}
    ours = json.loads(json.dumps(dict(plan)))
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise ConfigError(
                f"{str(folder)!r} was begun with {name}={theirs.get(name)!r}, not {ours.get(name)!r}; "
                "give the same, or remove the folder to start again"
            )
    try:
        wanted = {name: tuple(weight.shape) for name, weight in learned(model).items()}
        check_shapes(weights, wanted, _WEIGHTS, "the draft has")
        read = load_tensors(weights)
        with torch.no_grad():
            for name, weight in learned(model).items():
                weight.copy_(read[name])
        if found.optimiser is not None and (differing := kept.keys() ^ found.optimiser):
            raise ModelLoadError(f"{_OPTIMISER} and {_STATE} disagree about {min(differing)!r}")
        _fill(optimisers, kept)
    except ForesayError as error:
        raise _unreadable(folder, error) from None
    return found.state


def _unreadable(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(f"cannot read the checkpoint {str(folder)!r}: {error}; remove it to start again")


def learned(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """A model's parameters that are trained, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def _flat(optimisers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    out = {}
    for which, optimiser in enumerate(optimisers):
        for number, values in optimiser.state_dict()["state"].items():
            for name, value in values.items():
                out[f"{which}.{number}.{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return out


def _fill(optimisers: Sequence[torch.optim.Optimizer], kept: Mapping[str, StoredTensor]) -> None:
    """Give the optimisers their state. Raises ModelLoadError for a tensor that none of their parameters can have."""
    states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in optimisers]
    weights = [[weight for group in one.param_groups for weight in group["params"]] for one in optimisers]
    tensors = load_tensors({name: one for name, one in kept.items() if _fits(one, weights)})
    if unknown := sorted(kept.keys() - tensors.keys()):
        raise ModelLoadError(
            f"{_OPTIMISER} has {unknown[0]!r} of shape {list(kept[unknown[0]].shape)}, which fits no parameter"
        )
    for name, value in tensors.items():
        which, number, field = name.split(".", 2)
        states[int(which)].setdefault(int(number), {})[field] = value
    for optimiser, state in zip(optimisers, states, strict=True):
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def _fits(stored: StoredTensor, weights: Sequence[Sequence[torch.Tensor]]) -> bool:
    """True if the name is "optimiser.parameter.field" of a parameter that is there, and the shape is its own or a scalar's."""
    found = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})\.(\w+)", stored.name, re.ASCII)
    if found is None or int(found[1]) >= len(weights) or int(found[2]) >= len(weights[int(found[1])]):
        return False
    return stored.floats and stored.shape in ((), tuple(weights[int(found[1])][int(found[2])].shape))
