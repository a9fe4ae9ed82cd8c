"""GGUF files of families whose layers with windows are listed: OLMo-3 (in files of OLMo-2) and EXAONE-4."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from foresay.errors import ModelLoadError
from foresay.models.families.table import ARCHITECTURES
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import read_header
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.families import make
from helpers.gguf_scores import Write, difference, file_of, scores

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 128}
ROPE = {SLIDING: {"rope_type": "default", "rope_theta": 10000.0}, FULL: YARN}
NAMES = {"olmo3": "olmo2", "exaone4": "exaone4"}


def model_of(family: str, **changes: Any) -> Any:
    sizes = {"vocab_size": len(tiny.tokenizer()), "hidden_size": 64, "intermediate_size": 96, "sliding_window": 8}
    own = {"rope_parameters": ROPE, "max_position_embeddings": 4096} if family == "olmo3" else {"head_dim": 16}
    return make(family, 3, **{**sizes, "num_hidden_layers": 4, **own, **changes})


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(
    ("stated", "wanted"),
    [(None, "SSSF"), (4, "SSSF"), (2, "SFSF"), ([True, False, False, True], "SFFS"), ([False] * 4, "FFFF")],
)
def test_layers_with_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, stated: Any, wanted: str
) -> None:
    """A list, a period, or each fourth layer without a window."""
    key = f"{NAMES[family]}.attention.sliding_window_pattern"
    add: dict[type, Write] = {
        type(None): lambda writer: None,
        int: lambda writer: writer.add_uint32(key, stated),
        list: lambda writer: writer.add_array(key, stated),
    }
    path = file_of(tmp_path / "tiny.gguf", model_of(family), monkeypatch, sliding_window_pattern=add[type(stated)])
    kinds = [SLIDING if one == "S" else FULL for one in wanted]
    assert config_of(read_header(path)).layer_types == kinds
    reference = model_of(family, layer_types=kinds)
    assert difference(path, scores(reference)) < 1e-5
    other = model_of(family, layer_types=[FULL, SLIDING, SLIDING, FULL])
    assert difference(path, scores(other)) > 1e-3, "control"


def test_positions_of_windows_are_not_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And may have a base of their own. Control: YaRN in all layers."""
    model = model_of("olmo3", rope_parameters={SLIDING: {"rope_type": "default", "rope_theta": 500.0}, FULL: YARN})
    intact = gguf.GGUFWriter.add_sliding_window

    def window(writer: gguf.GGUFWriter) -> None:
        intact(writer, 8)
        writer.add_rope_freq_base_swa(500.0)

    path = file_of(tmp_path / "tiny.gguf", model, monkeypatch, sliding_window=window)
    assert difference(path, scores(model)) < 1e-5
    whole = ARCHITECTURES["olmo2"]
    [(key, one)] = whole.variants.items()

    def scaled(stated: Any, fields: dict[str, Any]) -> dict[str, Any]:
        assert one.derive is not None
        found = one.derive(stated, fields)
        full = found["rope_parameters"][FULL]
        return {**found, "rope_parameters": {FULL: full, SLIDING: {**full, "rope_theta": 500.0}}}

    monkeypatch.setitem(ARCHITECTURES, "olmo2", replace(whole, variants={key: replace(one, derive=scaled)}))
    assert difference(path, scores(model)) > 1e-3


def add(name: str, value: Any, kind: str = "uint32") -> Write:
    return lambda writer: getattr(writer, f"add_{kind}")(f"olmo2.{name}", value)


@pytest.mark.parametrize(
    ("method", "key", "value", "kind", "named"),
    [
        *[
            ("sliding_window_pattern", "attention.sliding_window_pattern", value, kind, named)
            for value, kind, named in (
                (0, "uint32", "pattern is 0"), (5000, "uint32", "pattern is 5000"), ("SF", "string", "pattern is"),
                ([True] * 3, "array", "is a list of 3"),
            )
        ],
        ("rope_scaling_factor", "rope.scaling.factor", 4.0, "float32", None),
        ("rope_scaling_factor", "rope.scaling.factor", None, "", "rope.scaling.factor is 'missing'"),
        ("rope_freq_base", "rope.freq_base_swa", 0.5, "float32", "rope.freq_base_swa is 0.5"),
        ("rope_freq_base", "rope.scaling.yarn_attn_factor", 1.1, "float32", "yarn_attn_factor is 1.1"),
        ("rope_freq_base", "rope.scaling.yarn_attn_factor", 1, "uint32", "yarn_attn_factor is 1;"),
        ("rope_freq_base", "rope.scaling.attn_factor", 1.459, "float32", "scaling.attn_factor is 1.45"),
        ("rope_freq_base", "rope.scaling.yarn_log_multiplier", 0.1, "float32", "yarn_log_multiplier is 0.1"),
        ("rope_freq_base", "rope.scaling.yarn_ext_factor", 0.5, "float32", "yarn_ext_factor is 0.5"),
        ("sliding_window", "attention.sliding_window", 1 << 31, "uint32", "sliding_window is 2147483648"),
    ],
)  # fmt: skip
def test_values_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, key: str, value: Any, kind: str, named: str | None
) -> None:
    """Another factor of the positions alone is honoured."""
    write = add(key, value, kind) if kind else lambda writer: None
    path = file_of(tmp_path / "tiny.gguf", model_of("olmo3"), monkeypatch, **{method: write})
    if named is None:
        assert config_of(read_header(path)).rope_parameters[FULL]["factor"] == 4.0
        return
    with pytest.raises(ModelLoadError, match=named.replace(".", r"\.")):
        load_model(path)


@pytest.mark.parametrize("name", ["rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"])
def test_the_usual_factor_of_yarn_may_be_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As converters copy it from OLMo-3's configuration."""
    model = model_of("olmo3", rope_parameters={**ROPE, FULL: {**YARN, "attention_factor": 1.2079441541679836}})
    stated = {"rope_scaling_yarn_attn_factor": add(name, 1.2079441541679836, "float32")}
    path = file_of(tmp_path / "tiny.gguf", model, monkeypatch, **stated)
    assert difference(path, scores(model)) < 1e-5


def test_positions_of_exaone_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Llama 3's scaling, as a tensor. Control: the model without it."""
    model, divisors = model_of("exaone4"), np.linspace(1, 8, 8, dtype=np.float32)
    intact = gguf.GGUFWriter.add_sliding_window

    def window(writer: gguf.GGUFWriter) -> None:
        intact(writer, 8)
        writer.add_tensor("rope_freqs.weight", divisors)

    path, plain = file_of(tmp_path / "tiny.gguf", model, monkeypatch, sliding_window=window), scores(model)
    model.model.rotary_emb.inv_freq /= torch.from_numpy(divisors)
    assert difference(path, scores(model)) < 1e-5 < 1e-3 < difference(path, plain)
