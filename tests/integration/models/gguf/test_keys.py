"""Every key that GGUF files carry: read, refused unless its value changes nothing, or irrelevant for a stated reason."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import foresay
from foresay.decoding.protocols import ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ModelLoadError
from foresay.models.gguf import keys
from foresay.models.gguf.header import read_header
from foresay.models.gguf.keys import check_keys
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model, load_tokenizer
from foresay.models.sources.location import is_gguf
from helpers import fuzz_gguf, tiny
from helpers.families import make
from helpers.gguf_files import write_gguf
from helpers.gguf_vocabularies import write_vocabulary

READ = """
general.architecture general.alignment general.name split.count tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens
tokenizer.ggml.token_type tokenizer.ggml.scores tokenizer.ggml.merges tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id
tokenizer.ggml.eot_token_id tokenizer.ggml.eom_token_id tokenizer.ggml.unknown_token_id tokenizer.ggml.padding_token_id
tokenizer.ggml.fim_pad_token_id tokenizer.ggml.fim_rep_token_id tokenizer.ggml.fim_sep_token_id tokenizer.ggml.add_bos_token
tokenizer.ggml.add_eos_token tokenizer.ggml.suppress_tokens
tokenizer.ggml.add_space_prefix tokenizer.chat_template tokenizer.chat_templates A.vocab_size
A.context_length A.embedding_length A.block_count A.feed_forward_length A.expert_feed_forward_length A.expert_count
A.expert_used_count A.attn_logit_softcapping A.final_logit_softcapping A.attention.head_count A.attention.head_count_kv
A.attention.key_length A.attention.value_length A.attention.layer_norm_epsilon A.attention.layer_norm_rms_epsilon
A.attention.sliding_window A.attention.sliding_window_pattern A.attention.scale A.rope.dimension_count A.rope.freq_base
A.rope.freq_base_swa A.rope.scaling.type A.rope.scaling.factor A.rope.scale_linear A.rope.scaling.original_context_length
A.rope.scaling.yarn_beta_fast A.rope.scaling.yarn_beta_slow
"""
"""A stands for the architecture. A sliding window is read for the families that llama.cpp gives one, and for Phi-3."""
IRRELEVANT = {
    "each tensor states its own type": "general.quantization_version general.file_type",
    "provenance": """general.author general.version general.organization general.finetune general.basename general.description
        general.quantized_by general.size_label general.license general.license.name general.license.link general.url general.doi
        general.uuid general.repo_url general.source.url general.source.doi general.source.uuid general.source.repo_url
        general.source.huggingface.repository general.base_model.count general.base_model.0.name general.base_model.0.author
        general.base_model.0.version general.base_model.0.organization general.base_model.0.description general.base_model.0.url
        general.base_model.0.doi general.base_model.0.uuid general.base_model.0.repo_url general.dataset.count
        general.dataset.0.name general.dataset.0.author general.dataset.0.version general.dataset.0.organization
        general.dataset.0.description general.dataset.0.url general.dataset.0.doi general.dataset.0.uuid
        general.dataset.0.repo_url general.tags general.languages""",
    "defaults of llama.cpp's own programs; requests state how they sample": """general.sampling.sequence general.sampling.top_k
        general.sampling.top_p general.sampling.min_p general.sampling.xtc_probability general.sampling.xtc_threshold
        general.sampling.temp general.sampling.penalty_last_n general.sampling.penalty_repeat general.sampling.mirostat
        general.sampling.mirostat_tau general.sampling.mirostat_eta""",
    "for pairs of texts": """tokenizer.ggml.token_type_count tokenizer.ggml.seperator_token_id tokenizer.ggml.mask_token_id
        tokenizer.ggml.cls_token_id tokenizer.ggml.add_sep_token""",
    "who completes between two texts writes these tokens": """tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_suf_token_id
        tokenizer.ggml.fim_mid_token_id tokenizer.ggml.prefix_token_id tokenizer.ggml.suffix_token_id
        tokenizer.ggml.middle_token_id""",
    "another form of the vocabulary that is read": "tokenizer.huggingface.json tokenizer.rwkv.world",
    "read if there is a chat template without a name": "tokenizer.chat_template.tool_use",
    "for kinds of scaling that are refused": """A.rope.scaling.finetuned A.rope.scaling.yarn_log_multiplier
        A.rope.scaling.yarn_ext_factor A.rope.scaling.yarn_attn_factor
        """,
    "for embeddings and classes": """A.pooling_type A.classifier.output_labels A.embedding_length_out A.features_length
        A.dense_2_feat_in A.dense_2_feat_out A.dense_3_feat_in A.dense_3_feat_out""",
    "llama.cpp reads the same layout whatever it states": "A.tensor_data_layout",
    "for encoders with decoders": "A.decoder_start_token_id A.decoder_block_count",
}
"""Reason -> keys."""
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
"""Keys that the families in values.ARCHITECTURES do not have: read by transformers for others, or logged."""
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


def words(text: str) -> list[str]:
    return text.split()


def checked(path: Path, key: str, value: Any) -> None:
    """Check a file with one value more."""
    key = key.replace("A.", "llama.", 1) if key.startswith("A.") else key
    writer = gguf.GGUFWriter(path, "llama")
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    writer.add_array(key, list(value)) if isinstance(value, tuple) else add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check_keys(read_header(path), ("general", "tokenizer", "model"))


def test_the_table_has_every_key() -> None:
    table = [*words(READ), *(key for text in (*IRRELEVANT.values(), *REFUSED.values()) for key in words(text))]
    assert len(table) == len(set(table))
    rest = {key for key in {*of_gguf()} - {*table} if not re.fullmatch(OTHER_FILES, key)}
    assert [key for key in sorted(rest) if not re.fullmatch(r"A\." + f"({OTHER_FAMILIES})", key)] == []
    reasons = {reason for table in keys.IRRELEVANT.values() for reason in table.values()}
    assert reasons == set(IRRELEVANT)
    neutral = {("A" if space == "model" else space) + f".{name}" for space, one in keys.NEUTRAL.items() for name in one}
    assert neutral == {key for text in REFUSED.values() for key in words(text)}


@pytest.mark.parametrize("key", [*words(READ), *(key for text in IRRELEVANT.values() for key in words(text))])
def test_a_key_that_is_read_or_irrelevant_is_not_mentioned(
    tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    if key != "general.architecture":
        checked(tmp_path / "a.gguf", key, "text" if key.startswith("general.") and key != "general.alignment" else 32)
    assert caplog.messages == []


@pytest.mark.parametrize(("key", "value"), [(key, value) for value, text in REFUSED.items() for key in words(text)])
def test_a_value_that_changes_a_result_is_refused(
    tmp_path: Path, key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    name = key.replace("A.", "llama.", 1) if key.startswith("A.") else key
    with pytest.raises(ModelLoadError, match=rf"its value {re.escape(name)} is .*no other value is supported"):
        checked(tmp_path / "a.gguf", key, value)
    space, _, short = key.partition(".")
    for same in keys.NEUTRAL["model" if space == "A" else space][short]:
        checked(tmp_path / "a.gguf", key, same)
    assert caplog.messages == []


@pytest.mark.parametrize("key", ["A.new_factor", "A.ssm.group_count", "tokenizer.ggml.new_flag", "general.new"])
def test_an_unknown_key_is_one_line(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    checked(tmp_path / "a.gguf", key, 1)
    [record] = caplog.records
    assert (record.name, record.levelno) == ("foresay", logging.WARNING)
    assert key.replace("A.", "llama.") in record.message


# -- whole files -------------------------------------------------------------------------------------------------------


def changed(monkeypatch: pytest.MonkeyPatch, path: Path, model: Any, key: str, value: Any) -> Path:
    """A model's file with one value more."""
    own = gguf.GGUFWriter.add_block_count

    def add(writer: Any, count: int) -> None:
        own(writer, count)
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        kinds[type(value)](key, value)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_block_count", add)
        return write_gguf(path / "tiny.gguf", model)


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
@pytest.mark.parametrize(
    ("family", "name", "value", "sound"),
    [
        ("llama", "attention.scale", 0.5, False),
        ("llama", "attention.scale", 0.25, True),
        ("llama", "logit_scale", 0.5, False),
        ("gemma3", "rope.freq_base_swa", 5e5, False),
        ("gemma3", "rope.freq_base_swa", 1e4, True),
        ("gemma2", "attention.sliding_window_pattern", 2, True),
        ("gemma2", "attention.sliding_window_pattern", [True, False], True),
        ("gemma2", "attention.sliding_window_pattern", [False, True], False),
        ("gemma2", "attention.sliding_window_pattern", 3, False),
        ("qwen2", "attention.sliding_window_pattern", 3, True),  # it has no windows
    ],
)
def test_values_are_compared_with_the_model(
    tmp_path: Path, family: str, name: str, value: Any, sound: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = changed(monkeypatch, tmp_path, fuzz_gguf.model(family), f"{family}.{name}", value)
    if sound:
        load_model(path, LoadOptions(dtype=dtype))
        return
    with pytest.raises(ModelLoadError, match=rf"its value {family}\.{re.escape(name)} is"):
        load_model(path, LoadOptions(dtype=dtype))


def test_the_window_of_phi_3_is_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the passes that decoding makes; the negative control is the same file without it."""
    model = fuzz_gguf.model("phi3", sliding_window=8)
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        wanted = model(ids).logits[0]
    errors = []
    for path in (
        changed(monkeypatch, tmp_path, model, "phi3.attention.sliding_window", 8),
        write_gguf(tmp_path / "plain.gguf", model),
    ):
        loaded = load_model(path, LoadOptions(dtype="fp32")).model
        kept = loaded.new_cache()
        loaded.admit(Rows([Row(0, ids[0].tolist(), SamplingParams(), limit=41)]), 0, kept)
        scores = loaded.forward(ModelInput(ids, [40]), kept).scores()[0].float()
        errors.append(float((scores - wanted).square().mean().sqrt() / wanted.std()))
    assert errors[0] < 1e-3 < 0.1 < errors[1]


def test_an_unknown_key_of_a_whole_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(write_gguf(tmp_path / "tiny.gguf", fuzz_gguf.model("llama")))
    assert [one for one in caplog.messages if "not known" in one] == []
    load_model(changed(monkeypatch, tmp_path, fuzz_gguf.model("llama"), "llama.new_factor", 2.0))
    assert len([one for one in caplog.messages if "llama.new_factor" in one]) == 1


def test_named_chat_templates_are_kept(tmp_path: Path) -> None:
    """Templates for calls, which transformers chooses when there are tools."""
    path = write_vocabulary(tmp_path / "a.gguf", template="plain", tool_template="with tools")
    tokenizer = load_tokenizer(path)
    assert tokenizer.get_chat_template() == "plain"
    assert tokenizer.get_chat_template(tools=[{}]) == "with tools"


def test_a_file_of_any_name_is_read_by_its_first_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that Ollama keeps; another file is still refused."""
    named = write_gguf(tmp_path / "tiny.gguf", make("llama", 2, vocab_size=len(tiny.tokenizer())))
    blob = tmp_path / "sha256-0123"
    blob.write_bytes(named.read_bytes())
    texts = [
        foresay.load(path, drafter="none", dtype="fp32").generate([5, 9, 3], max_new_tokens=8) for path in (named, blob)
    ]
    assert texts[0].token_ids == texts[1].token_ids
    with monkeypatch.context() as denied:
        denied.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
        assert not is_gguf(blob)
    assert is_gguf(blob) and not is_gguf(tmp_path) and not is_gguf(tmp_path / "none")
    blob.write_bytes(b"GG")
    with pytest.raises(ModelLoadError, match=r"is a file, but not a \.gguf file"):
        foresay.load(blob)
