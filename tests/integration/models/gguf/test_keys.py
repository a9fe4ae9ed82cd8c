"""Every key of GGUF files is read, refused unless its value changes nothing, or irrelevant; others are named in the log."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest

import foresay
from foresay.errors import ModelLoadError
from foresay.models.gguf import keys
from foresay.models.gguf.header import read_header
from foresay.models.gguf.keys import check_keys
from foresay.models.sources.loading import load_model, load_tokenizer
from foresay.models.sources.location import is_gguf
from helpers.gguf_cases import file_of, model_of
from helpers.gguf_image import Image, image_of
from helpers.gguf_vocabularies import write_vocabulary

REFUSED: dict[Any, str] = {
    "adapter": "general.type",
    True: """tokenizer.ggml.remove_extra_whitespaces tokenizer.ggml.normalizer.lowercase tokenizer.ggml.normalizer.strip_accents
        A.use_parallel_residual A.swin_norm A.norm_before_residual""",
    False: "A.attention.causal A.expert_weights_norm",
    (1, 2): "tokenizer.ggml.precompiled_charsmap A.rope.dimension_sections A.swiglu_clamp_exp",
    2.5: """A.logit_scale A.residual_scale A.embedding_scale A.expert_weights_scale A.expert_group_scale
        A.router_logit_softcapping A.attention.output_scale A.attention.value_scale A.attention.clamp_kqv
        A.attention.max_alibi_bias A.attention.temperature_scale A.attention.group_norm_epsilon A.rope.scaling.attn_factor
        A.rope.scaling.alpha A.swiglu_clamp_shexp""",
    2: """A.attention.shared_kv_layers A.attention.temperature_length A.attention.q_lora_rank A.attention.kv_lora_rank
        A.attention.key_length_mla A.attention.value_length_mla A.attention.key_length_swa A.attention.value_length_swa
        A.attention.group_norm_groups A.rope.dimension_count_swa A.moe_latent_size A.expert_shared_count A.expert_group_count
        A.expert_shared_feed_forward_length A.expert_group_used_count A.experts_per_group A.expert_gating_func
        A.leading_dense_block_count A.nextn_predict_layers A.n_deepstack_layers A.rescale_every_n_layers A.token_shift_count
        A.embedding_length_per_layer_input A.moe_every_n_layers A.interleave_moe_layer_step A.full_attention_interval""",
}
"""A value that changes a result -> keys."""
OTHER_FAMILIES = (
    r"(ssm|kda|wkv|posnet|convnext|shortconv|altup|attention\.indexer)\..*|time_(mix|decay)_extra_dim"
    r"|activation_sparsity_scale|expert_chunk_feed_forward_length"
    r"|attention\.(decay|iclr|value_residual_mix|gate)_lora_rank|attention\.relative_buckets_count"
)
"""Keys that the families that are read do not have: read by transformers for others, or logged."""
OTHER_FILES = r"(adapter|imatrix|clip|diffusion|xielu|split)\..*"
"""Namespaces of adapters, image encoders and such, which are no models, and of parts of a model."""


def of_gguf(table: type = gguf.Keys) -> Iterator[str]:
    """Keys of the package that writes such files, for a model of architecture A."""
    for name, value in vars(table).items():
        if isinstance(value, type):
            yield from of_gguf(value)
        elif isinstance(value, str) and not name.startswith("_"):
            for dense in ("dense_2", "dense_3") if "{dense}" in value else ("",):
                yield value.format(arch="A", id=0, name="tool_use", dense=dense)


def checked(path: Path, key: str, value: Any) -> None:
    """Check a file with one value."""
    stored = list(value) if isinstance(value, tuple) else value
    image = Image([], []).changed({"general.architecture": "llama", key.removeprefix("A."): stored})
    check_keys(read_header(image.write(path)), ("general", "tokenizer", "model"))


def test_no_key_of_a_model_is_unknown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key that is not refused is read, or need not be; some that the package lacks are among them."""
    more = ("tokenizer.ggml.suppress_tokens", "A.rope.scale_linear", "general.source.huggingface.repository")
    other = re.compile(rf"{OTHER_FILES}|A\.({OTHER_FAMILIES})")
    refused = {key for text in REFUSED.values() for key in text.split()}
    assert refused == {
        f"{space}.{one}".replace("model.", "A.", 1) for space in keys.NEUTRAL for one in keys.NEUTRAL[space]
    }
    known = {*refused, "general.architecture"}
    found = [key for key in (*more, *of_gguf()) if key not in known and not other.fullmatch(key)]
    assert len(found) > 130
    for key in found:
        checked(tmp_path / "a.gguf", key, "text" if key.startswith("general.") and key != "general.alignment" else 32)
        assert caplog.messages == [], key


@pytest.mark.parametrize(("value", "text"), REFUSED.items(), ids=map(str, REFUSED))
def test_a_value_that_changes_a_result_is_refused(
    tmp_path: Path, value: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    for key in text.split():
        space, _, short = key.replace("A.", "model.", 1).partition(".")
        with pytest.raises(
            ModelLoadError, match=rf"its value {re.escape(key.replace('A.', 'llama.', 1))} is .*supported"
        ):
            checked(tmp_path / "a.gguf", key, value)
        for same in keys.NEUTRAL[space][short]:
            checked(tmp_path / "a.gguf", key, same)
        assert caplog.messages == []


def test_an_unknown_key_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where a whole file is loaded, and then once."""
    for key in ("new_factor", "ssm.group_count", "tokenizer.ggml.new_flag", "general.new"):
        caplog.clear()
        checked(tmp_path / "a.gguf", key, 1)
        [record] = caplog.records
        assert (record.name, record.levelno) == ("foresay", logging.WARNING) and key in record.getMessage()
    image = image_of(model_of("llama"))
    for values, count in (({}, 0), ({"new_factor": 2.0}, 1)):
        caplog.clear()
        load_model(image.changed(values).write(tmp_path / "tiny.gguf"))
        assert sum("not known" in one and "llama.new_factor" in one for one in caplog.messages) == count


def test_named_chat_templates_are_kept(tmp_path: Path) -> None:
    """Templates for calls, which transformers chooses when there are tools."""
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with tools"}
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", others=templates))
    assert tokenizer.get_chat_template() == "plain"
    assert tokenizer.get_chat_template(tools=[{}]) == "with tools"


def test_a_file_of_any_name_is_read_by_its_first_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that Ollama keeps; another file is still refused."""
    blob = file_of("llama", tmp_path).rename(tmp_path / "sha256-0123")
    assert load_model(blob).weights == "GGUF"
    with monkeypatch.context() as denied:
        denied.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
        assert not is_gguf(blob)
    assert is_gguf(blob) and not is_gguf(tmp_path) and not is_gguf(tmp_path / "none")
    blob.write_bytes(b"GG")
    with pytest.raises(ModelLoadError, match=r"is a file, but not a \.gguf file"):
        foresay.load(blob)
