"""Functions of transformers' models that passes of ours replace: short chunks of recurrent layers, rotations from a table."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from foresay.models.huggingface.operations import RotaryTable
from foresay.models.huggingface.selective_scan import continues_states, scans

CHUNKED = ("mamba2_chunk_scan", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")


def module_of(name: str, function: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with one function, and the class of a model, whose functions have been replaced."""
    module = ModuleType("chunks_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    setattr(module, name, function)
    continues_states(type("Model", (), {"__module__": module.__name__})())
    return module


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize(("length", "given", "used"), [(1, 64, 1), (3, 64, 4), (4, 256, 4), (70, 64, 64), (33, 64, 64)])
def test_chunks_are_as_long_as_a_pass(
    name: str, length: int, given: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def chunked(first: torch.Tensor, *, chunk_size: int = given) -> None:
        seen.append(chunk_size)

    module = module_of(name, chunked, monkeypatch)
    with scans():
        getattr(module, name)(torch.zeros(2, length, 1))
        getattr(module, name)(torch.zeros(2, length, 1), chunk_size=given)
    getattr(module, name)(torch.zeros(2, length, 1))
    assert seen == [used, used, given]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 13])
def test_short_chunks_agree(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the long ones, for Mamba 2 and gated delta rules."""
    made = torch.Generator().manual_seed(length)
    x, dt = torch.randn(2, length, 4, 8, generator=made), torch.rand(2, length, 4, generator=made)
    decay, inputs, outputs = -torch.rand(4, generator=made), *torch.randn(2, 2, length, 2, 16, generator=made)
    scan = {"D": torch.ones(4), "initial_states": torch.randn(2, 4, 8, 16, generator=made), "return_final_states": True}
    query, key, value = torch.randn(3, 2, length, 4, 8, generator=made)
    rule = {"g": -torch.rand(2, length, 4, generator=made), "beta": torch.rand(2, length, 4, generator=made)}
    rule |= {"initial_state": torch.randn(2, 4, 8, 8, generator=made)}
    flags = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    cases: list[tuple[Any, str, tuple[Any, ...], dict[str, Any]]] = [
        (modeling_mamba2, "mamba2_chunk_scan", (x, dt, decay, inputs, outputs), {"chunk_size": 256, **scan}),
        (modeling_qwen3_next, "torch_chunk_gated_delta_rule", (query, key, value), {**rule, **flags}),
    ]
    for source, name, tensors, given in cases:
        original = getattr(source, name)
        ours = getattr(module_of(name, original, monkeypatch), name)
        with scans():
            found = ours(*tensors, **given)
        for one, other in zip(found, original(*tensors, **given), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# -- rotations ---------------------------------------------------------------------------------------------------------

SMALL, LONG = 32, 200
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": SMALL},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": SMALL
    },
    "longrope": {
        "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": SMALL
    },
}  # fmt: skip


def rotary(kind: str) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=SMALL if kind == "dynamic" else 4 * SMALL,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind]},
    )
    return LlamaRotaryEmbedding(config)


def asked(module: Any, positions: torch.Tensor) -> torch.Tensor:
    return torch.stack([one[0] for one in module(torch.empty(0), positions[None])])


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_gives_what_the_module_gives(kind: str) -> None:
    """Short texts, long ones, and short ones after those; every text is queried about from its first position on."""
    table, alone = RotaryTable(rotary(kind)), rotary(kind)
    for last in (5, SMALL, LONG, 3000, 7, LONG):
        positions = torch.arange(last)
        torch.testing.assert_close(torch.stack(table(positions)), asked(alone, positions), rtol=0, atol=0)
    short, long = (asked(rotary(kind), torch.arange(last))[:, :4] for last in (4, 3000))
    assert torch.equal(short, long) == (kind in RotaryTable.STATIC), "what is kept does not depend on the length"
