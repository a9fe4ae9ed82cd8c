"""Rotations from a table are the rotary module's own, whatever its kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foresay.models.huggingface.operations import RotaryTable

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
