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


COMMON = {**LAYER, "num_hidden_layers": 2, "vocab_size": 99, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
COMMON |= {"model_type": "qwen3", "tie_word_embeddings": False}
"""Fields that all published block drafters have."""
AT_TOP = {"mask_token_id": 98, "target_layer_ids": [1, 2]}
SPECULATORS = {"mask_token_id": 98, "aux_hidden_state_layer_ids": [1, 2], "transformer_layer_config": COMMON}
MARKOV, VANILLA = {"markov_rank": 4, "enable_confidence_head": True}, PathShape("vanilla", 4)
MARKOV_AT_TOP = {**MARKOV, "markov_head_type": "vanilla", "confidence_head_with_markov": True}
VERIFIER = {"speculators_config": {"verifier": {"name_or_path": "org/t", "architectures": ["X"]}}}
SPECFORGE = {**AT_TOP, "projector_type": "dspark", "markov_rank": 4, "dflash_query_causal": True, "swa_window_size": 64}
PUBLISHED: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "z-lab's DFlash": (
        "DFlashDraftModel",
        {"block_size": 16, "num_target_layers": 4, "dflash_config": AT_TOP},
        {"from_anchor": False, "num_draft_tokens": 15, "keeps_embedding_factor": True, "hidden_layers": (2, 3)},
    ),
    "LiquidAI's DSpark": (
        "Qwen3DFlashDraftModel",
        {"block_size": 9, "rope_is_neox_style": False, "dflash_config": {**AT_TOP, "num_target_layers": 4, **MARKOV}},
        {"from_anchor": True, "num_draft_tokens": 9, "path": VANILLA, "has_confidence": True},
    ),
    "SpecForge's DSpark": (
        "DFlashDraftModel",
        {"block_size": 7, "layer_types": ["sliding_attention", "full_attention"], "dflash_config": SPECFORGE},
        {"from_anchor": True, "num_draft_tokens": 7, "sights": (Sight(64, causal=True), Sight(causal=True))},
    ),
    "DeepSpec's DSpark": (
        "Qwen3DSparkModel",
        {"block_size": 7, **AT_TOP, "num_anchors": 512, **MARKOV_AT_TOP},
        {"from_anchor": True, "num_draft_tokens": 7, "confidence_reads_markov": True},
    ),
    "speculators' DFlash": (
        "DFlashDraftModel",
        {"speculators_model_type": "dflash", "block_size": 8, "draft_vocab_size": 50, **SPECULATORS},
        {"from_anchor": False, "num_draft_tokens": 7, "hidden_layers": (1, 2), "draft_vocab_size": 50},
    ),
    "speculators' DSpark": (
        "DSparkDraftModel",
        {"speculators_model_type": "dspark", "block_size": 8, **MARKOV_AT_TOP, **SPECULATORS, **VERIFIER},
        {"from_anchor": True, "num_draft_tokens": 8, "path": VANILLA, "hidden_layers": (1, 2), "mask_token_id": 98}
        | {"has_confidence": True, "confidence_reads_markov": True, "target": "org/t", "target_architectures": ("X",)},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read_as_their_engines_read_them(name: str) -> None:
    """Number and position of the draft tokens, above all: a drafter that is read one position off drafts nothing right."""
    architecture, fields, expected = PUBLISHED[name]
    values = {**COMMON, **fields, "architectures": [architecture]}
    found = BlockConfig.read(values)
    assert {field: getattr(found, field) for field in expected} == expected and refusal(values) is None


def test_parts_of_published_files_that_are_not_decoded_are_named() -> None:
    base = {**COMMON, "block_size": 8, **AT_TOP}
    cases: list[tuple[Mapping[str, Any], str]] = [
        ({**base, "dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias"),
        ({**base, "dspark_bonus_anchor": True}, "dspark_bonus_anchor"),
        ({**base, "dflash_config": {"swa_window_size": 8}, "sliding_window": 16}, "swa_window_size=8 contradicts"),
        ({**base, "architectures": ["Qwen3Eagle3Model"], "model_type": "llama"}, "target_layer_ids"),
        ({**base, "speculators_model_type": "jetspec", "target_layer_ids": None}, "it must be one of"),
        ({**DSPARK.as_plain(), "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({}, "hidden_size"),
    ]
    for values, named in cases:
        assert named in str(refusal(values))
    assert refusal({"architectures": ["Gemma4AssistantForCausalLM"]}) is None


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


def test_the_drafters_of_the_kinds_that_the_readers_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a reader that no longer takes block drafters takes their kinds away."""
    read = ("eagle3", "peagle", "dflash", "dflash2", "dspark", "assistant", "mtp", "model")
    assert {drafter_of(kind) for kind in read} <= DRAFTERS.keys()
    assert not any(map(drafter_of, ("medusa", "")))
    monkeypatch.setattr(kinds, "KINDS", (HeadConfig,))
    assert drafter_of("dspark") is None and drafter_of("eagle3") == "head"
