"""Kinds of drafts by their configurations, and the drafters that decode them, which are tried on the readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from foresay.models.drafts import kinds
from foresay.models.drafts.block_config import SELECTOR, BlockConfig, PathShape, Sight
from foresay.models.drafts.config import HeadConfig
from foresay.models.drafts.kinds import drafter_of, kind_of, refusal
from foresay.spec.recipes import DRAFTERS

LAYER = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 24, "head_dim": 8}
HEAD = HeadConfig(
    layer=LAYER,
    vocab_size=99,
    draft_vocab_size=50,
    hidden_layers=(1, 2),
    target_hidden_size=32,
    norm_before_residual=True,
)
BLOCK: dict[str, Any] = {
    "layer": LAYER,
    "vocab_size": 99,
    "draft_vocab_size": 99,
    "hidden_layers": (1, 2),
    "sights": (Sight(), Sight()),
    "block_size": 5,
    "mask_token_id": 98,
}
DSPARK = BlockConfig(**BLOCK, path=PathShape("vanilla", 4))
BLOCK2 = BlockConfig(**BLOCK, from_anchor=False, path=PathShape(SELECTOR, 4, candidates=3), convolution=(2, 8))


@pytest.mark.parametrize(
    ("kind", "drafter", "values"),
    [
        ("eagle3", "head", HEAD.as_plain()),
        ("eagle3", "head", HEAD.as_speculators()),
        ("eagle3", "head", {**HEAD.as_plain(), "architectures": None}),
        ("dflash2", "block", BLOCK2.as_plain()),
        ("dflash2", "block", {**BLOCK2.as_plain(), "architectures": ["Other"]}),
        ("dspark", "block", DSPARK.as_plain()),
        ("dspark", "block", {**DSPARK.as_plain(), "architectures": ["Other"]}),
        ("dflash", "block", BlockConfig(**BLOCK, from_anchor=False).as_plain()),
        ("dflash", "block", {**BlockConfig(**BLOCK, from_anchor=False).as_plain(), "architectures": "DFlash"}),
    ],
)
def test_what_is_written_is_recognized_and_accepted(kind: str, drafter: str, values: Mapping[str, Any]) -> None:
    assert (kind_of(values), drafter_of(kind), refusal(values)) == (kind, drafter, None)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("assistant", {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"}),
        ("peagle", {"speculators_model_type": "peagle"}),
        (None, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
        (None, {"architectures": 7, "speculators_model_type": ["eagle3"]}),
        (None, {}),
    ],
)
def test_other_configurations(kind: str | None, values: Mapping[str, Any]) -> None:
    assert kind_of(values) == kind


def test_a_drafter_of_that_name_exists() -> None:
    found = {
        kind: drafter_of(kind)
        for kind in ("eagle3", "dflash", "dflash2", "dspark", "assistant", "mtp", "model", "medusa", "peagle", "")
    }
    assert {one for one in found.values() if one} <= DRAFTERS.keys()
    assert [kind for kind, drafter in found.items() if drafter is None] == ["medusa", "peagle", ""]


def test_the_kinds_are_those_that_the_readers_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a reader that no longer takes block drafters takes their kinds away."""
    monkeypatch.setattr(kinds, "is_block", lambda values: False)
    assert drafter_of("dspark") is None and drafter_of("eagle3") == "head"


def test_a_refusal_names_the_part() -> None:
    sliding = {**DSPARK.as_plain(), "layer_types": ["chunked_attention"] * 2}
    assert "chunked_attention" in str(refusal(sliding))
    assert "hidden_size" in str(refusal({}))
    assert refusal({"architectures": ["Gemma4AssistantForCausalLM"]}) is None
