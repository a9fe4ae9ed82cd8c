"""The table of models whose guarantees are tested: each family, from each format, on each engine that runs it.

Models are made once a process, and tests leave them as they are. Passes over pages are in tests/unit/models/gpu.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from foresay.decoding.sampling_params import SamplingParams
from foresay.models.families import table
from foresay.models.huggingface import fused as fused_layers
from foresay.models.huggingface.causal import CausalModel, is_recurrent
from foresay.models.huggingface.linears import freeze_linears, quantizer
from foresay.models.huggingface.recurrent import RecurrentModel
from foresay.models.huggingface.self_check import use_fused_layers
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import families, gguf_cases
from helpers.comparing import MARGIN, NEW, prompts
from helpers.families import FAMILIES, RECURRENT
from helpers.gguf_cases import MODELS
from helpers.quantized import folder_of
from helpers.support import run

HYBRIDS = ("lfm2", "qwen3_5", "lfm2_moe", "qwen3_next", "qwen3_5_moe", "granitemoehybrid")
"""Families with recurrent layers that the kernels run."""
READ = sorted(name for name, (kind, _) in FAMILIES.items() if kind in table.FAMILIES)
"""Families without recurrent layers that the kernels run."""


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused layers run by PyTorch's operations, as where the kernels do not run them."""

    def refused(*given: Any, **named: Any) -> None:
        raise LookupError("the kernels do not run such layers")

    monkeypatch.setattr(fused_layers, "NativeLayers", refused)


class Cell(NamedTuple):
    """A row of the table."""

    family: str
    """A family of helpers/families.py, or a case of helpers/gguf_cases.py or helpers/quantized.py."""
    format: str
    """"folder", "gguf", or "quantized" for a case of helpers/quantized.py."""
    engine: str
    """"own code" of the family, or "kernels"."""

    def __str__(self) -> str:
        return ", ".join(self)

    @property
    def vocab(self) -> int:
        return families.VOCAB if self.format == "folder" else gguf_cases.VOCAB


def on(engine: str, *names: str) -> list[Cell]:
    """The cells of families in folders."""
    return [Cell(name, "folder", engine) for name in names]


OWN = on("own code", *FAMILIES, *RECURRENT)
KERNELS = on("kernels", *READ, *HYBRIDS)
FILES = [Cell(name, "gguf", "kernels") for name in MODELS]
QUANTIZED = [Cell(name, "quantized", "kernels") for name in ("GPTQ", "AWQ", "MXFP4")]


@functools.cache
def reference_of(family: str, format: str = "folder") -> PreTrainedModel:
    """The model by transformers, to be left as it is."""
    if format == "quantized":
        with tempfile.TemporaryDirectory() as folder:
            return folder_of(Path(folder) / "tiny", family)[1]
    return gguf_cases.model_of(family) if format == "gguf" else families.make(family)


def assert_greedy(model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Each token is the likeliest of one pass of transformers over the whole text, or closer to it than MARGIN."""
    with torch.no_grad():
        scores = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    gap = scores.max(-1).values - scores[range(len(output)), list(output)]
    assert float(gap.max()) < MARGIN, (int(gap.argmax()), output)


@functools.cache
def outputs_of(cell: Cell) -> list[list[int]]:
    """Output of a cell's model after `prompts()` without drafts, which transformers would write."""
    found = run(target_of(cell), prompts(), SamplingParams(max_new_tokens=NEW), gamma=0)[0]
    for prompt, one in zip(prompts(), found, strict=True):
        assert_greedy(reference_of(cell.family, cell.format), prompt, one)
    return found


def fused(model: PreTrainedModel, weights: str = "float32") -> CausalModel:
    """A model of a family on the kernels. weights: "float32", "bfloat16", "int8" or "int4"."""
    rounds = [quantizer(int(weights[3:]))] if weights.startswith("int") else []
    model = model.to(torch.bfloat16) if weights == "bfloat16" else model
    freeze_linears(model, *rounds, all_dtypes=True)
    found = (RecurrentModel if is_recurrent(model) else CausalModel)(model)
    assert use_fused_layers(found) is None
    assert found.fused is not None and found.fused.is_native and found.batch_invariant
    return found


def made(cell: Cell, weights: str = "float32", seed: int | None = None) -> Any:
    """A model of its own. weights: see `fused`; of files "float32", or the stored bits. seed: of other weights."""
    if cell.format == "gguf":
        with tempfile.TemporaryDirectory() as folder:
            path = gguf_cases.file_of(cell.family, Path(folder), None if weights == "float32" else "Q8_0")
            return load_model(path, LoadOptions(dtype="fp32") if weights == "float32" else LoadOptions()).model
    if cell.format == "quantized":
        with tempfile.TemporaryDirectory() as folder:
            path, exact = folder_of(Path(folder) / "tiny", cell.family)[0], weights == "float32"
            found: Any = load_model(path, LoadOptions(activations="float32" if exact else "auto")).model
        if exact:  # without the rounding of inputs, keys and values
            found.use_fused(torch.float32)
        return found
    model = copy.deepcopy(reference_of(cell.family)) if seed is None else families.make(cell.family, seed)
    if cell.engine == "kernels":
        return fused(model, weights)
    return (RecurrentModel if is_recurrent(model) else CausalModel)(model)


target_of = functools.cache(made)
"""The model that all tests of a process share."""
