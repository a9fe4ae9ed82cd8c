"""GGUF files of Granite 4 without recurrent layers: those of Granite 3 with the sizes of layers that they do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from foresay.errors import ModelLoadError
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import read_header
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.families import make
from helpers.gguf_files import write_gguf
from helpers.gguf_scores import difference, scores

AS_CONVERTED: dict[str, Any] = {
    "add_head_count_kv": [2, 2, 2], "add_expert_shared_feed_forward_length": 96, "add_expert_count": 0,
    "add_expert_used_count": 0, "add_ssm_conv_kernel": 4, "add_ssm_state_size": 128, "add_ssm_group_count": 1,
    "add_ssm_inner_size": 128, "add_ssm_time_step_rank": 64, "add_rope_scaling_finetuned": True,
}  # fmt: skip
"""Methods of the writer, and what they write."""


def file_of(path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Path, Any]:
    model = make(
        "granite", 3, vocab_size=len(tiny.tokenizer()), hidden_size=64, intermediate_size=96, attention_multiplier=0.3
    )
    values = {**AS_CONVERTED, **changes}
    intact, heads = gguf.GGUFWriter.add_vocab_size, gguf.GGUFWriter.add_head_count_kv

    def more(writer: gguf.GGUFWriter, size: int) -> None:
        intact(writer, size)
        for method, value in values.items():
            heads(writer, value) if method == "add_head_count_kv" else getattr(writer, method)(value)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_head_count_kv", lambda *given: None)
        patch.setattr(gguf.GGUFWriter, "add_vocab_size", more)
        return write_gguf(path, model), model


def test_a_file_is_read_as_granite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, reference = file_of(tmp_path / "tiny.gguf", monkeypatch)
    assert difference(path, scores(reference)) < 1e-5
    assert "not known" not in caplog.text


@pytest.mark.parametrize(("stated", "wanted"), [(None, "rope"), (True, "rope"), (False, None)])
def test_attention_next_to_states_has_positions_unless_a_file_denies_it(
    stated: bool | None, wanted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intact = gguf.GGUFWriter.add_rope_scaling_finetuned
    given = (lambda *_: None) if stated is None else (lambda writer, _: intact(writer, stated))
    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_scaling_finetuned", given)
    model = make("granitemoehybrid", 3, vocab_size=len(tiny.tokenizer()), shared_intermediate_size=32)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    assert config_of(read_header(path)).position_embedding_type == wanted


@pytest.mark.parametrize(
    ("method", "value", "named"),
    [
        ("add_rope_scaling_finetuned", False, "rope.scaling.finetuned"),
        ("add_head_count_kv", [2, 1, 2], "head_count_kv"),
        ("add_head_count_kv", [2, 2], "head_count_kv"),
        ("add_head_count_kv", [2, 0, 2], "head_count_kv"),
        ("add_expert_shared_feed_forward_length", 95, "expert_shared_feed_forward_length"),
    ],
)
def test_values_that_contradict_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, value: Any, named: str
) -> None:
    path, _ = file_of(tmp_path / "tiny.gguf", monkeypatch, **{method: value})
    with pytest.raises(ModelLoadError, match=named):
        load_model(path)
