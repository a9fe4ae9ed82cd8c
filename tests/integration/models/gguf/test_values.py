"""Values of GGUF files: each that changes what a model computes is honoured, or refused by name before anything is made by it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foresay.errors import ModelLoadError
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import read_header
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers.families import FAMILIES
from helpers.gguf_cases import OLMO3, logits, made, scores
from helpers.gguf_image import Image, image_of
from helpers.refusals import refused

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN, YARN = OLMO3[SLIDING], OLMO3[FULL]
VISION = {
    "qwen2vl": ("qwen2", {}),
    "qwen3vl": ("qwen3", {"head_dim": 16}),
    "qwen3vlmoe": ("qwen3moe", {"head_dim": 16}),
}
"""Files of models that read images in other programs -> the case of their text."""
GRANITE4: dict[str, Any] = {
    "attention.head_count_kv": [2, 2, 2], "expert_shared_feed_forward_length": 96, "expert_count": 0, "expert_used_count": 0,
    "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 1, "ssm.inner_size": 128, "ssm.time_step_rank": 64,
    "rope.scaling.finetuned": True,
}  # fmt: skip
"""Values that llama.cpp's converter adds to files of Granite 4 without recurrent layers, which else are those of Granite 3."""
SECTIONS = {"rope.dimension_sections": [2, 3, 3, 0]}


def model_of(name: str, **changes: Any) -> Any:
    """The model of a case of helpers/gguf_cases.py, of an architecture with images, or of Granite 4 as Granite 3."""
    case, own = VISION.get(name, (name.removesuffix(" as 4"), {}))
    return made(case, **{**own, **changes})


@cache
def sound(name: str) -> Image:
    image = image_of(model_of(name))
    if name not in VISION:
        return image.changed(GRANITE4 if name == "granite as 4" else {})
    return image.renamed(name).changed(SECTIONS if name == "qwen2vl" else {**SECTIONS, "n_deepstack_layers": 3})


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """As a share of the range."""
    return float((found - wanted).abs().max() / (wanted.max() - wanted.min()))


def of_kernels(path: Path) -> torch.Tensor:
    model: Any = load_model(path, LoadOptions(dtype="fp32")).model
    assert model.fused.is_native
    return scores(model)


# -- honoured ----------------------------------------------------------------------------------------------------------


def layers(kinds: str) -> dict[str, Any]:
    return {"layer_types": [SLIDING if one == "S" else FULL for one in kinds], "sliding_window": 8}


def ministral(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**FAMILIES["ministral3"][1]["rope_parameters"], **changes}}


def olmo(sliding: dict[str, Any] = PLAIN, **full: Any) -> dict[str, Any]:
    return {"rope_parameters": {FULL: {**YARN, **full}, SLIDING: sliding}}


PATTERN = "attention.sliding_window_pattern"
USUAL = YARN["attention_factor"]
DIVISORS = np.linspace(1, 8, 8, dtype=np.float32)
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
UNSCALED = ministral(mscale=None, mscale_all_dim=None)
HONOURED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "windows as usual": ("olmo3", {PATTERN: None}, layers("SSSF"), layers("FSSF")),
    "a list of windows": ("olmo3", {PATTERN: [True, False, False, True]}, layers("SFFS"), layers("FSSF")),
    "a period of windows": ("exaone4", {PATTERN: 2}, layers("SFSF"), layers("FSSF")),
    "each fourth without": ("exaone4", {PATTERN: 4}, layers("SSSF"), layers("FSSF")),
    "no window": ("exaone4", {PATTERN: [False] * 4}, layers("FFFF"), layers("FSSF")),
    "Gemma's period": ("gemma2", {PATTERN: 2}, {}, None),
    "Gemma's list": ("gemma2", {PATTERN: [True, False, True]}, {}, None),
    "a period without a window": ("qwen2", {PATTERN: 3}, {}, None),
    "Phi's window": ("phi3", {"attention.sliding_window": 8}, {"sliding_window": 8}, {}),
    "a base of windows": (
        "olmo3", {"rope.freq_base_swa": 500.0}, olmo({**PLAIN, "rope_theta": 500.0}), olmo({**YARN, "rope_theta": 500.0}),
    ),
    "Gemma's base": ("gemma3", {"rope.freq_base_swa": 1e4}, {}, None),
    "YaRN's factor": ("olmo3", {"rope.scaling.yarn_attn_factor": None}, {}, olmo(attention_factor=1.0)),
    "YaRN's factor, as in its configuration": ("olmo3", {"rope.scaling.attn_factor": USUAL}, {}, None),
    "another factor of positions": (
        "olmo3", {"rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": None}, olmo(factor=4.0, attention_factor=None), {},
    ),
    "queries scaled by positions": (
        "ministral3", {"attention.temperature_scale": 0.25}, ministral(llama_4_scaling_beta=0.25), {},
    ),
    "Ministral's factor": ("ministral3", {"rope.scaling.yarn_log_multiplier": 1.0}, {}, UNSCALED),
    "no factor": ("ministral3", {"rope.scaling.yarn_log_multiplier": 0.0}, UNSCALED, {}),
    "the length": ("ministral3", {"attention.temperature_length": 8}, {}, None),
    "the length by default": ("ministral3", {"attention.temperature_length": 0}, {}, None),
    "a usual factor": ("ministral3", {"rope.scaling.yarn_ext_factor": 1.0}, {}, None),
    "no scale": ("mistral3", {"attention.temperature_scale": 0.0}, {}, None),
    "a usual scale": ("llama", {"attention.scale": 0.25}, {}, None),
    "positions divided": ("llama", LINEAR, {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 8.0}}, {}),
    "Granite 4": ("granite as 4", {}, {}, None),
    **{name: (name, {}, {}, None) for name in VISION},
}  # fmt: skip
"""A file, its values, the model that it is, and one that it is not: changes of the file's own."""


@pytest.mark.parametrize("case", HONOURED)
def test_a_value_is_honoured(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name, values, own, other = HONOURED[case]
    found = of_kernels(sound(name).changed(values).write(tmp_path / "tiny.gguf"))
    assert difference(found, logits(model_of(name, **own))) < 1e-5
    assert other is None or difference(found, logits(model_of(name, **other))) > 1e-3, "control"
    assert "not known" not in caplog.text and ("for text only" in caplog.text) == (name in VISION)


@pytest.mark.parametrize("family", ["exaone4", "llama"])
def test_positions_are_divided_by_a_tensor(family: str, tmp_path: Path) -> None:
    """As Llama 3's scaling is stored. Control: the model without it; transformers reads neither."""
    model = model_of(family)
    path = sound(family).changed({}, {"rope_freqs.weight": DIVISORS}).write(tmp_path / "tiny.gguf")
    found, plain = of_kernels(path), logits(model)
    model.model.rotary_emb.inv_freq /= torch.from_numpy(DIVISORS)
    assert difference(found, logits(model)) < 1e-5 < 1e-3 < difference(found, plain)
    for scaled in (path, sound("llama").changed(LINEAR).write(tmp_path / "linear.gguf")):
        with pytest.raises(ModelLoadError, match="when transformers loads the file"):
            load_model(scaled, LoadOptions(device_map="cpu"))


FIELDS = [
    ("gemma2", {"block_count": 46}, "query_pre_attn_scalar", 64 // 4),  # the largest one scales its queries otherwise
    ("gemma2", {}, "query_pre_attn_scalar", 8),
    ("granitehybrid", {"rope.scaling.finetuned": None}, "position_embedding_type", "rope"),
    ("granitehybrid", {"rope.scaling.finetuned": True}, "position_embedding_type", "rope"),
    ("granitehybrid", {"rope.scaling.finetuned": False}, "position_embedding_type", None),
    *(
        (name, values, "layer_types", ["linear_attention"] * 3 + [FULL])
        for name, values in (
            ("qwen3next", {"full_attention_interval": None}),  # as in older files
            ("qwen3next", {"attention.recurrent_layers": [True, True, True, False]}),
            ("qwen35", {"full_attention_interval": 2, "attention.recurrent_layers": [True, True, True, False]}),
        )
    ),
    ("mistral3", {}, "sliding_window", None),
    ("llama", {"tokenizer.ggml.tokens": None}, "vocab_size", 264),
]


@pytest.mark.parametrize(("name", "values", "field", "wanted"), FIELDS, ids=range(len(FIELDS)))
def test_a_field_of_the_configuration(
    tmp_path: Path, name: str, values: dict[str, Any], field: str, wanted: Any
) -> None:
    assert getattr(config_of(read_header(sound(name).changed(values).write(tmp_path / "a.gguf"))), field) == wanted


# -- refused -----------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
NO_FACTORS = [0.0, NAN, INF, -2.0]
UNSTATED, SHAPE, ROTATED = "scales its rotary positions", "has shape", "rope.dimension_count is 16"
REFUSED: dict[str, list[tuple[str, Any] | tuple[str, Any, str]]] = {
    "llama": [
        *[("block_count", one) for one in (0, 100_000, 1 << 63, -1, None, "2", 2.0, [2, 2])],
        ("block_count", 2, "its tensor 'blk.2."),
        ("block_count", 4, "lacks 9 of the model's tensors"),
        *[("embedding_length", one) for one in (0, 1 << 31, None)],
        *[("feed_forward_length", one) for one in (0, [96, 96], None)],
        *[("context_length", one) for one in (0, 1 << 31, None)],
        *[("attention.head_count", one) for one in (0, 1 << 31, None)],
        ("attention.head_count", 3, "head_count_kv is 2; allowed is a divisor of the 3 heads"),
        *[("attention.head_count_kv", one) for one in (0, 3, 8, -2)],
        *[(name, one, SHAPE) for name, one in (("feed_forward_length", 95), ("attention.head_count_kv", 4))],
        *[("attention.key_length", one) for one in (0, 1 << 31)],
        *[(name, one, ROTATED) for name, one in (("embedding_length", 32), ("attention.head_count", 8))],
        ("attention.key_length", 8, ROTATED),
        *[("attention.layer_norm_rms_epsilon", one) for one in (*NO_FACTORS, None)],
        *[("rope.dimension_count", one) for one in (0, 15, 8, 1 << 31)],
        *[(name, one) for name in ("rope.freq_base", "rope.scaling.factor") for one in NO_FACTORS],
        *[("vocab_size", one) for one in (0, 263, 265, 1 << 31)],
        *[("tokenizer.ggml.suppress_tokens", one) for one in (3, [0, 1 << 20], [*range(2000)])],
        *[("tokenizer.ggml.bos_token_id", one) for one in (264, -1, "<bos>")],
        *[("tokenizer.ggml.eos_token_id", one) for one in (1 << 31, [1])],
        *[("tokenizer.ggml.token_type", one) for one in ([1, 1, 1], 1)],
        *[("tokenizer.ggml.tokens", one) for one in ([*range(264)], "hello")],
        *[("tokenizer.ggml.merges", one) for one in ([1], 1)],
        *[("general.architecture", one) for one in (None, 1, "", "two\nlines", "x" * 1000)],
        ("attention.value_length", 8),
        ("tokenizer.ggml.scores", [*range(264)]),
        ("attention.scale", 0.5),
        ("logit_scale", 0.5),
        ("rope.scaling.type", "yarn", UNSTATED),
    ],
    "gemma2": [(PATTERN, [False, True, False]), (PATTERN, 3)],
    "gemma3": [("rope.freq_base_swa", 5e5)],
    "qwen3moe": [(name, None) for name in ("expert_count", "expert_used_count", "expert_feed_forward_length")],
    "gpt-oss": [
        *[(f"rope.scaling.{name}", None) for name in ("factor", "original_context_length")],
        ("expert_used_count", None),
        ("rope.scaling.yarn_attn_factor", 0.7),
    ],
    "olmo3": [
        *[(PATTERN, one) for one in (0, 5000, "SF", [True] * 3)],
        *[("rope.scaling.yarn_attn_factor", one) for one in (1.1, 1)],
        ("rope.scaling.factor", None),
        ("rope.freq_base_swa", 0.5),
        ("rope.scaling.attn_factor", 1.459),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("attention.sliding_window", 1 << 31),
    ],
    "ministral3": [
        *[("attention.temperature_scale", one) for one in (NAN, -0.1, 1e9, 1)],
        *[(name, None, UNSTATED) for name in ("attention.temperature_scale", "rope.scaling.type")],
        *[("rope.scaling.yarn_log_multiplier", one) for one in (0.1, [1, 2])],
        *[(f"rope.scaling.{name}", None) for name in ("factor", "original_context_length")],
        ("attention.temperature_length", 9),
        ("rope.freq_base", 1.0),
        ("rope.scaling.yarn_attn_factor", 0.5),
        ("expert_count", 4),
    ],
    "granite as 4": [
        *[("attention.head_count_kv", one) for one in ([2, 1, 2], [2, 2], [2, 0, 2])],
        ("rope.scaling.finetuned", False),
        ("expert_shared_feed_forward_length", 95),
    ],
    **{name: [("rope.dimension_sections", one) for one in (None, [2, 3, 2, 0], [9, -1, 0, 0])] for name in VISION},
    "lfm2": [
        *[("attention.head_count_kv", one) for one in (2, [0, 2, 1], [0, 2], [0, 3, 0])],
        *[(name, None) for name in ("shortconv.l_cache", "rope.freq_base", "attention.layer_norm_rms_epsilon")],
    ],
    "qwen35": [
        *[("full_attention_interval", one) for one in (0, None)],
        *[("rope.dimension_sections", one) for one in ([1, 1, 1, 0], [3, 0, 0, 1], None)],
        ("ssm.group_count", None),
        ("ssm.group_count", 3, "ssm.time_step_rank"),
        ("ssm.inner_size", 65),
        ("ssm.state_size", 1 << 40),
        ("rope.dimension_count", 64),
    ],
    "qwen3next": [
        ("attention.recurrent_layers", one) for one in ([True] * 4, [True, False], [True, True, True, False, False])
    ],
    "granitehybrid": [
        *[("expert_used_count", one) for one in (None, 0, 99)],
        *[(name, None) for name in ("ssm.group_count", "ssm.conv_kernel", "expert_shared_feed_forward_length")],
        ("ssm.group_count", 3, "ssm.time_step_rank"),
        ("ssm.inner_size", 65),
        ("ssm.inner_size", 192, SHAPE),
        ("attention.head_count_kv", 2),
        ("expert_shared_feed_forward_length", 65, SHAPE),
    ],
    "granitehybrid-dense": [("expert_shared_feed_forward_length", 65)],
    "glm4moe": [("nextn_predict_layers", 4)],
}
"""Files -> keys with values that are missing, out of range, of another type, or contradict what is named instead."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_no_model_has_is_refused_by_name(tmp_path: Path, name: str) -> None:
    for key, value, *other in REFUSED[name]:
        path = sound(name).changed({key: value}).write(tmp_path / "x.gguf")
        with pytest.raises(ModelLoadError) as caught:
            load_model(path)
        message, wanted = str(caught.value), other or [f"{key} is", str(path), "; allowed is "]
        assert all(one in message for one in wanted), (key, value, message)
        assert "\n" not in message and len(message) < 600


def test_options_of_transformers_loader_are_refused_for_states(tmp_path: Path) -> None:
    with refused("device_map", "cpu"):
        load_model(sound("qwen35").write(tmp_path / "tiny.gguf"), LoadOptions(device_map="cpu"))
