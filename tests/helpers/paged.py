"""Flat tokens over pages, and attention over them in a few lines of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foresay.decoding import sampling_kernels
from foresay.decoding.protocols import ModelInput
from foresay.models.gpu import attention, flat, pages, passes, rows, trees
from foresay.models.gpu.attention import Visible
from foresay.models.gpu.flat import Buffers, PagedTokens
from foresay.models.hardware import Hardware
from foresay.models.huggingface import family_layers, fused, linears
from helpers.families import joint_of, whole_product
from helpers.interpreted import look_up_types

PAGE = 16
"""Slots of a page in the interpreter, where a longer prompt is more programs."""
MOST_HEADS = 4
"""Most key heads of attention that is tried by itself."""


def few_programs(monkeypatch: pytest.MonkeyPatch, product: Any = whole_product) -> None:
    """A program of the interpreter takes a millisecond, so that pages are small. product: of layers that read the same input."""
    for module in (attention, flat, pages, passes, rows, trees):
        monkeypatch.setattr(module, "PAGE", PAGE)
    monkeypatch.setattr(attention, "SPLITS", 1)
    monkeypatch.setattr(sampling_kernels, "SPAN", 128)
    monkeypatch.setattr(passes, "MAX_ROWS", 32)
    for module in (family_layers, fused):
        monkeypatch.setattr(module, "product_of", product)


def loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a GPU with kernels, which compute in float32, also where models are loaded."""
    few_programs(monkeypatch, joint_of)
    monkeypatch.setattr(Hardware, "gpu_kernels", True)
    monkeypatch.setattr(Hardware, "native_dtype", torch.float32)
    monkeypatch.setattr(linears, "freeze_model", lambda weights, *_, **how: None)


@contextmanager
def language_of_the_interpreter() -> Iterator[None]:
    """Triton's language for the interpreter, which would otherwise replace its functions for each launch and each call.

    It also computes every sum of integers twice, to assert that none overflows, and asserts with options.debug alone.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder, options = interpreter.interpreter_builder, interpreter.interpreter_builder.options
    with pytest.MonkeyPatch.context() as patch:
        replaced = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", lambda fn: SimpleNamespace(restore=lambda: None))
        patch.setattr(builder, "options", replace(options, sanitize_overflow=options.debug))
        look_up_types(patch)
        yield
        replaced.restore()


def sum_products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, whose products are NumPy's: these sum by the position of a row, unlike a tile of a GPU."""
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, c: Any, *_: Any) -> Any:
        total = (a.data.astype(np.float32)[:, :, None] * b.data.astype(np.float32)[None]).sum(1, dtype=np.float32)
        return interpreter.TensorHandle(total + c.data, c.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def of_rows(
    starts: Sequence[int],
    counts: Sequence[int],
    parents: Sequence[Sequence[int] | None],
    pages: torch.Tensor,
    tile: int,
    padding: int = 0,
    *,
    is_prompt: bool = False,
) -> Visible:
    """counts[i] tokens after the starts[i] cached ones of row i, whose pages are given."""
    width = max(counts)
    ids = torch.zeros(len(counts), width, dtype=torch.int64)
    tree = None
    if parents[-1] is not None:
        tree = torch.tensor([[*(one or ()), *[0] * (width - len(one or ()))] for one in parents])
    cache: Any = SimpleNamespace(lengths=list(starts), reserve=lambda row, count: None)
    tokens = PagedTokens.of(ModelInput(ids, list(counts), parents=tree), cache, tile)
    tiles = tokens.num_tiles if is_prompt else None
    buffers = Buffers(len(tokens) + padding, pages.int(), tile, key_heads=MOST_HEADS, num_tiles=tiles)
    buffers.fill(tokens, ids)
    return buffers.visible


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    at: Visible,
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See attention.attend; the queries are kept."""
    (count, heads, dim), key_heads, out = query.shape, key.shape[1], query.clone()
    for n in range(count):
        if not at.ends[n]:
            continue
        pages, first = at.pages[at.rows[n]].long(), int(at.firsts[n])
        keys, values = (one[pages].transpose(0, 1).reshape(key_heads, -1, dim) for one in (key, value))
        sees = torch.arange(keys.shape[1]) < first
        if window is not None:
            sees &= torch.arange(keys.shape[1]) > int(at.positions[n]) - window
        for bit in range(64):
            rest = int(at.seen[n]) % (1 << 64) >> bit
            if rest & 1 and (window is None or rest.bit_count() <= window):
                sees[first + bit] = True
        keys, values = (one[:, sees].repeat_interleave(heads // key_heads, 0) for one in (keys, values))
        scores = torch.einsum("hd,hsd->hs", query[n], keys) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], 1)
        out[n] = torch.einsum("hs,hsd->hd", scores.softmax(-1)[:, : keys.shape[1]], values)
    return out
