"""GGUF files of Mistral 3: with queries scaled by their position (Ministral 3, Devstral 2), and without (Mistral Small 3)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from foresay.errors import ModelLoadError
from foresay.models.families import table
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import read_header
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.families import FAMILIES, make
from helpers.gguf_scores import Write, difference, file_of, scores

KEY = "mistral3"


def model_of(**rope: Any) -> Any:
    parameters = {**FAMILIES["ministral3"][1]["rope_parameters"], **rope}
    sizes = {"vocab_size": len(tiny.tokenizer()), "hidden_size": 64, "intermediate_size": 96}
    return make("ministral3", 3, **sizes, rope_parameters=parameters)


def test_queries_are_scaled_after_the_original_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty tokens, six times the original context. Control: the check at loading rejects others."""
    path = file_of(tmp_path / "tiny.gguf", model_of(), monkeypatch)
    assert difference(path, scores(model_of())) < 1e-5
    monkeypatch.setitem(table.FAMILIES, "ministral3", replace(table.FAMILIES["ministral3"], scales_queries=False))
    plain: Any = load_model(path, LoadOptions(dtype="fp32")).model
    assert plain.fused is None


@pytest.mark.parametrize(("logarithm", "factors"), [(1.0, {}), (0.0, {"mscale": None, "mscale_all_dim": None})])
def test_the_factor_of_yarn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logarithm: float, factors: dict[str, Any]
) -> None:
    """1, or YaRN's usual one; each differs from the other."""
    write = {"rope_scaling_yarn_log_mul": add("rope.scaling.yarn_log_multiplier", logarithm)}
    path = file_of(tmp_path / "tiny.gguf", model_of(), monkeypatch, **write)
    usual = {"mscale": None, "mscale_all_dim": None}
    assert difference(path, scores(model_of(**factors))) < 1e-5
    assert difference(path, scores(model_of(**({} if factors else usual)))) > 1e-3, "control"


def add(name: str, value: Any, kind: str = "float32") -> Write:
    return lambda writer: getattr(writer, f"add_{kind}")(f"{KEY}.{name}", value)


def without(writer: gguf.GGUFWriter) -> None:
    """Write nothing."""


def test_a_file_without_a_scale_is_a_mistral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": len(tiny.tokenizer()), "hidden_size": 64, "intermediate_size": 96}
    model = make("mistral", 3, **sizes, sliding_window=None)
    for scale in (without, add("attention.temperature_scale", 0.0)):
        path = file_of(tmp_path / "tiny.gguf", model, monkeypatch, vocab_size=scale)
        config = config_of(read_header(path))
        assert (config.model_type, config.sliding_window) == ("mistral", None)
        assert difference(path, scores(model)) < 1e-5


@pytest.mark.parametrize(
    ("method", "write", "named"),
    [
        ("vocab_size", add("attention.temperature_length", 8, "uint32"), None),
        ("vocab_size", add("attention.temperature_length", 0, "uint32"), None),
        ("vocab_size", add("rope.scaling.yarn_ext_factor", 1.0), None),
        ("vocab_size", add("attention.temperature_length", 9, "uint32"), "temperature_length is 9"),
        ("attn_temperature_scale", add("attention.temperature_scale", float("nan")), "temperature_scale is nan"),
        ("attn_temperature_scale", add("attention.temperature_scale", -0.1), "temperature_scale is -0.1"),
        ("attn_temperature_scale", add("attention.temperature_scale", 1e9), "temperature_scale is 1000000000"),
        ("attn_temperature_scale", add("attention.temperature_scale", 1, "uint32"), "temperature_scale is 1;"),
        ("attn_temperature_scale", without, "scales its rotary positions"),
        ("rope_scaling_yarn_log_mul", add("rope.scaling.yarn_log_multiplier", 0.1), "yarn_log_multiplier is 0.1"),
        ("rope_scaling_yarn_log_mul", add("rope.scaling.yarn_log_multiplier", [1, 2], "array"), "is a list of 2"),
        ("rope_freq_base", add("rope.freq_base", 1.0), "rope.freq_base is 1.0"),
        ("rope_scaling_type", without, "scales its rotary positions"),
        ("rope_scaling_factor", without, "rope.scaling.factor is 'missing'"),
        ("rope_scaling_orig_ctx_len", without, "original_context_length is 'missing'"),
        ("vocab_size", add("rope.scaling.yarn_attn_factor", 0.5), "yarn_attn_factor is 0.5"),
        ("vocab_size", add("expert_count", 4, "uint32"), "expert_count is 4"),
    ],
)
def test_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, write: Write, named: str | None) -> None:
    """Each is honoured, or refused by name."""
    path = file_of(tmp_path / "tiny.gguf", model_of(), monkeypatch, **{method: write})
    if named is None:
        assert difference(path, scores(model_of())) < 1e-5
        return
    with pytest.raises(ModelLoadError, match=named.replace(".", r"\.")):
        load_model(path)
