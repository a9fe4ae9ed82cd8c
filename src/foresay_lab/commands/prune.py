"""`foresay distill --kind pruned`: cut a smaller model of the same family out of a model's weights."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from foresay.checks import check_int
from foresay.cli.command import Given
from foresay.cli.common import load_options, target_name
from foresay.cli.progress import advancing, loading
from foresay.errors import ConfigError
from foresay.files import usual_modes, work_folder, writing
from foresay.models.sources.loading import load_weights
from foresay_lab.commands.options import layer_numbers
from foresay_lab.data.datasets import load_items
from foresay_lab.training.corpus import CorpusReader
from foresay_lab.training.distil import NOTE, save_model, write_note
from foresay_lab.training.importance import Importance, measure
from foresay_lab.training.prune import Shape, choose_kept, layers_to_keep, pruned

_LENGTH = 512
"""Tokens measured at a time."""


def make(given: Given) -> Iterator[str]:
    """Write the smaller model to a folder, and return lines about it.

    The most important dimensions, heads and neurons are kept, and the layers that --keep chooses.
    """
    name, folder, text = target_name(given.model), given.output, list(given.text)
    check_int("tokens", given.tokens, 1)
    _check_folder(folder, force=given.force)
    reader = CorpusReader(text) if text else None
    with loading(f"Loading {name}") as progress:
        whole_model, tokenizer = load_weights(name, load_options(given, progress=progress))
    is_list, whole = given.keep.replace(",", "").replace(" ", "").isdigit(), Shape.of(whole_model.config)
    numbers = layer_numbers(given.keep, "keep", "0,15,29") if is_list else None
    sizes = {name: getattr(given, name) for name in ("hidden", "kv_heads", "feed_forward")}
    sizes |= {"heads": given.attention_heads, "layers": given.layers}
    if numbers is not None and given.layers is None:
        sizes["layers"] = len(numbers)
    shape, importance = whole.smaller(**sizes), None
    if given.keep == "important" or dataclasses.replace(shape, layers=whole.layers) != whole:
        importance = _measured(whole_model, tokenizer, reader, given.tokens)
    layers = layers_to_keep(numbers or given.keep, shape.layers, whole.layers, importance)
    small = pruned(whole_model, shape, choose_kept(whole, shape, layers, importance))
    note = {
        "made_by": "foresay distill --kind pruned",
        "model": name,
        "layers_kept": list(layers),
        "shape": dataclasses.asdict(shape),
        "measured_on": importance and {"files": text or "shipped prompts", "tokens": importance.num_tokens},
    }
    _write(folder, small, tokenizer, note)
    before, after = (sum(p.numel() for p in one.parameters()) for one in (whole_model, small))
    yield str(folder)
    yield f"  layers: {', '.join(map(str, layers))} of {whole.layers}"
    yield (
        f"  hidden {shape.hidden} of {whole.hidden}, heads {shape.heads}/{shape.kv_heads} of {whole.heads}/{whole.kv_heads}, "
        f"feed-forward {shape.feed_forward} of {whole.feed_forward}"
    )
    yield f"  parameters: {before / 1e6:,.1f} M to {after / 1e6:,.1f} M"
    if importance is not None:
        yield f"  measured on {importance.num_tokens:,} tokens"
    yield f"  train it: foresay distill FOLDER --draft {folder}"


def _measured(model: Any, tokenizer: Any, reader: CorpusReader | None, tokens: int) -> Importance:
    if tokenizer is None:
        raise ConfigError("is missing, so the model's importance cannot be measured on text", param="tokenizer")
    with advancing("Measuring") as advance:
        return measure(model, _batches(_texts(reader), tokenizer, tokens), lambda done: advance(done, tokens))


def _texts(reader: CorpusReader | None) -> Iterator[str]:
    """Documents, the large ones in pieces."""
    if reader is None:
        return (item.prompt for item in load_items() if isinstance(item.prompt, str))
    return (piece.text for piece in reader.pieces())


def _batches(texts: Iterator[str], tokenizer: Any, tokens: int) -> Iterator[torch.Tensor]:
    """Token ids [1, T] int64, at most `tokens` in total."""
    waiting: list[int] = []
    for text in texts:
        waiting += tokenizer(text).input_ids
        while len(waiting) >= _LENGTH and tokens > 0:
            size = min(_LENGTH, tokens)
            yield torch.tensor([waiting[:size]])
            waiting, tokens = waiting[_LENGTH:], tokens - size
        if tokens <= 0:
            return
    if waiting:
        yield torch.tensor([waiting[:tokens]])


def _check_folder(folder: Path, *, force: bool) -> None:
    """Raise ConfigError for a folder that could not be written in the end."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError("is a file; name a folder", param="folder", value=folder)
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ConfigError("is not empty; add --force to replace it", param="folder", value=folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / NOTE).is_file():
        raise ConfigError("was not made by foresay, and is not replaced; name another", param="folder", value=folder)
    parent = folder.resolve().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError("does not exist or is not writable", param="folder", value=parent)


def _write(folder: Path, model: Any, tokenizer: Any, note: dict[str, Any]) -> None:
    """Write the whole folder, or nothing."""
    folder = folder.resolve()
    with writing(folder), work_folder(folder.name, folder.parent) as work:
        made = work / folder.name
        save_model(model, tokenizer, made)
        write_note(made, note)
        usual_modes(made)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(made, folder)
