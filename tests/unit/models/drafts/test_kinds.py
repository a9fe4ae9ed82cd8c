"""Kinds of drafts by their configurations, and the drafters that decode them, which are tried on the readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from foresay.models.drafts import kinds
from foresay.models.drafts.block_config import SELECTOR, BlockConfig, PathShape, Sight
from foresay.models.drafts.config import HeadConfig
from foresay.models.drafts.kinds import drafter_of, kind_of, refusal
from foresay.models.drafts.parallel_config import ParallelHeadConfig
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
PARALLEL = ParallelHeadConfig(**{one.name: getattr(HEAD, one.name) for one in fields(HEAD)}, mask_token_id=98)
DSPARK = BlockConfig(**BLOCK, path=PathShape("vanilla", 4))
BLOCK2 = BlockConfig(**BLOCK, from_anchor=False, path=PathShape(SELECTOR, 4, candidates=3), convolution=(2, 8))


@pytest.mark.parametrize(
    ("kind", "drafter", "values"),
    [
        ("eagle3", "head", HEAD.as_plain()),
        ("eagle3", "head", HEAD.as_speculators()),
        ("eagle3", "head", {**HEAD.as_plain(), "architectures": None}),
        ("peagle", "block", PARALLEL.as_plain()),
        ("peagle", "block", PARALLEL.as_speculators()),
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


COMMON = {
    "model_type": "qwen3",
    **LAYER,
    "num_hidden_layers": 2,
    "vocab_size": 99,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
"""Fields that all published block drafters have."""
PUBLISHED: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "z-lab's DFlash": (
        {
            "architectures": ["DFlashDraftModel"],
            "block_size": 16,
            "num_target_layers": 4,
            "dflash_config": {"mask_token_id": 98, "target_layer_ids": [1, 2]},
        },
        {"from_anchor": False, "num_draft_tokens": 15, "keeps_embedding_factor": True, "hidden_layers": (2, 3)},
    ),
    "LiquidAI's DSpark": (
        {
            "architectures": ["Qwen3DFlashDraftModel"],
            "block_size": 9,
            "rope_is_neox_style": False,
            "dflash_config": {
                "mask_token_id": 98,
                "target_layer_ids": [1, 2],
                "num_target_layers": 4,
                "markov_rank": 4,
                "enable_confidence_head": True,
            },
        },
        {"from_anchor": True, "num_draft_tokens": 9, "path": PathShape("vanilla", 4), "has_confidence": True},
    ),
    "SpecForge's DSpark": (
        {
            "architectures": ["DFlashDraftModel"],
            "block_size": 7,
            "dflash_config": {
                "mask_token_id": 98,
                "target_layer_ids": [1, 2],
                "projector_type": "dspark",
                "markov_rank": 4,
                "dflash_query_causal": True,
                "swa_window_size": 64,
            },
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"from_anchor": True, "num_draft_tokens": 7, "sights": (Sight(64, causal=True), Sight(causal=True))},
    ),
    "DeepSpec's DSpark": (
        {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 7,
            "mask_token_id": 98,
            "target_layer_ids": [1, 2],
            "num_anchors": 512,
            "markov_rank": 4,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
        {"from_anchor": True, "num_draft_tokens": 7, "confidence_reads_markov": True},
    ),
    "speculators' DFlash": (
        {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "block_size": 8,
            "mask_token_id": 98,
            "draft_vocab_size": 50,
            "aux_hidden_state_layer_ids": [1, 2],
            "transformer_layer_config": COMMON,
        },
        {"from_anchor": False, "num_draft_tokens": 7, "hidden_layers": (1, 2), "draft_vocab_size": 50},
    ),
    "speculators' DSpark": (
        {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "block_size": 8,
            "mask_token_id": 98,
            "markov_rank": 4,
            "aux_hidden_state_layer_ids": [1, 2],
            "transformer_layer_config": COMMON,
        },
        {"from_anchor": True, "num_draft_tokens": 8, "path": PathShape("vanilla", 4)},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read_as_their_engines_read_them(name: str) -> None:
    """Number and position of the draft tokens, above all: a drafter that is read one position off drafts nothing right."""
    values, expected = PUBLISHED[name]
    found = BlockConfig.read({**COMMON, **values})
    assert {field: getattr(found, field) for field in expected} == expected
    assert refusal({**COMMON, **values}) is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor"),
        (
            {"dflash_config": {"swa_window_size": 8}, "sliding_window": 16},
            "swa_window_size=8 contradicts sliding_window=16",
        ),
        ({"architectures": ["Qwen3Eagle3Model"], "model_type": "llama"}, "target_layer_ids"),
        ({"speculators_model_type": "jetspec", "target_layer_ids": None}, "it must be one of"),
    ],
)
def test_parts_of_published_files_that_are_not_decoded_are_named(values: Mapping[str, Any], named: str) -> None:
    base = {**COMMON, "block_size": 8, "mask_token_id": 98, "target_layer_ids": [1, 2]}
    assert named in str(refusal({**base, **values}))


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
        for kind in ("eagle3", "dflash", "dflash2", "dspark", "assistant", "mtp", "model", "peagle", "medusa", "")
    }
    assert {one for one in found.values() if one} <= DRAFTERS.keys()
    assert [kind for kind, drafter in found.items() if drafter is None] == ["medusa", ""]


def test_the_kinds_are_those_that_the_readers_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a reader that no longer takes block drafters takes their kinds away."""
    monkeypatch.setattr(kinds, "KINDS", (HeadConfig,))
    assert drafter_of("dspark") is None and drafter_of("eagle3") == "head"


def test_a_refusal_names_the_part() -> None:
    sliding = {**DSPARK.as_plain(), "layer_types": ["chunked_attention"] * 2}
    assert "chunked_attention" in str(refusal(sliding))
    assert "hidden_size" in str(refusal({}))
    assert refusal({"architectures": ["Gemma4AssistantForCausalLM"]}) is None
