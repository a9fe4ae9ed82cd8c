"""The state of a training run on disk, in safetensors and JSON, so that one that was killed goes on where it was.

Owns the files. A checkpoint is a folder that is there whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from foresay.errors import ConfigError
from foresay.files import usual_modes, writing

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
    """Laws compared so far, over all processes."""
    elapsed_s: float = 0.0
    best: float = -1.0
    """Tokens per pass of the best evaluation."""
    best_step: int = 0


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
            _write(work, state, plan, model, optimisers)
            if folder.exists():
                os.replace(folder, old)
            os.replace(work, folder)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    shutil.rmtree(old, ignore_errors=True)


def _write(
    folder: Path,
    state: State,
    plan: Mapping[str, Any],
    model: torch.nn.Module,
    optimisers: Sequence[torch.optim.Optimizer],
) -> None:
    save_file({name: weight.detach().cpu().contiguous() for name, weight in learned(model).items()}, folder / _WEIGHTS)
    save_file(_flat(optimisers), folder / _OPTIMISER)
    (folder / _STATE).write_text(json.dumps({"plan": dict(plan), **asdict(state)}, indent=2) + "\n", encoding="utf-8")
    usual_modes(folder)


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
        values = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        weights, kept = load_file(folder / _WEIGHTS), load_file(folder / _OPTIMISER)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"cannot read the checkpoint {str(folder)!r}: {error}; remove it to begin anew") from None
    theirs = {"processes": 1, **values.pop("plan")}
    ours = json.loads(json.dumps(dict(plan)))
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise ConfigError(
                f"{str(folder)!r} was begun with {name}={theirs.get(name)!r}, not {ours.get(name)!r}; "
                "give the same, or remove the folder to begin anew"
            )
    with torch.no_grad():
        for name, weight in learned(model).items():
            weight.copy_(weights[name])
    _fill(optimisers, kept)
    return State(**values)


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


def _fill(optimisers: Sequence[torch.optim.Optimizer], kept: Mapping[str, torch.Tensor]) -> None:
    states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in optimisers]
    for name, value in kept.items():
        which, number, field = name.split(".", 2)
        states[int(which)].setdefault(int(number), {})[field] = value
    for optimiser, state in zip(optimisers, states, strict=True):
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
