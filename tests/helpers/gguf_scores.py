"""Scores of tiny models, and of the GGUF files that are written of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from foresay.decoding.protocols import ModelInput
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers.comparing import prompts
from helpers.gguf_files import write_gguf

Write = Callable[[gguf.GGUFWriter], object]


def file_of(path: Path, model: Any, monkeypatch: pytest.MonkeyPatch, **instead: Write) -> Path:
    """instead: what methods of the writer do without "add_", in place of what they write."""
    with monkeypatch.context() as patch:
        for method, write in instead.items():
            patch.setattr(gguf.GGUFWriter, f"add_{method}", lambda self, *given, write=write: write(self))
        return write_gguf(path, model)


def scores(model: Any) -> torch.Tensor:
    """Return the scores of a model of transformers after each token of a text."""
    with torch.inference_mode():
        out: torch.Tensor = model(torch.tensor([prompts()[3]])).logits[0]
    return out


def difference(path: Path, wanted: torch.Tensor) -> float:
    """Between the kernels' scores of a file and others, as a share of their range."""
    model: Any = load_model(path, LoadOptions(dtype="fp32")).model
    assert model.fused.is_native
    cache, ids = model.new_cache(), torch.tensor([prompts()[3]])
    cache.add_rows(1)
    found = model.forward(ModelInput(ids, [ids.shape[1]]), cache).scores()[0]
    return float((found - wanted).abs().max() / (wanted.max() - wanted.min()))
