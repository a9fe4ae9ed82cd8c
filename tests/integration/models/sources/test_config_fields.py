"""Fields of config.json and tokenizer_config.json as real files have them: read, without effect, or named in the log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import foresay
from foresay.errors import ModelLoadError, ModelNotFoundError, PromptError
from foresay.models.drafts.block_config import BlockConfig
from foresay.models.drafts.files import write_draft
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources.config_checks import CONFIG_FIELDS, TOKENIZER_FIELDS, report_unread
from foresay.models.sources.loading import load_model, load_tokenizer
from helpers import tiny
from helpers.families import FAMILIES, RECURRENT
from helpers.heads import random_head
from helpers.refusals import refused


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="foresay")


# -- config.json -----------------------------------------------------------------------------------------------------

ROPE = "rope_theta rope_scaling"
COMPUTES = {
    "llama": f"num_key_value_heads rms_norm_eps hidden_act attention_bias mlp_bias head_dim {ROPE}",
    "qwen2": f"use_sliding_window sliding_window max_window_layers rms_norm_eps {ROPE}",
    "qwen3_moe": f"num_experts moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers {ROPE}",
    "gemma3_text": f"query_pre_attn_scalar sliding_window layer_types rope_local_base_freq {ROPE}",
    "phi3": "partial_rotary_factor original_max_position_embeddings sliding_window rope_theta",
    "gpt_neox": "rotary_pct rotary_emb_base use_parallel_residual layer_norm_eps",
    "gpt2": "scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn layer_norm_epsilon",
    "deepseek_v3": f"q_lora_rank kv_lora_rank n_group topk_group routed_scaling_factor rope_interleave {ROPE}",
    "bloom": "layer_norm_epsilon apply_residual_connection_post_layernorm pretraining_tp slow_but_exact",
    "mamba": "state_size conv_kernel expand use_bias use_conv_bias time_step_rank residual_in_fp32",
}
"""Fields of published files that change what a family computes."""


def _logged(values: dict[str, Any], caplog: pytest.LogCaptureFixture, kind: str) -> list[str]:
    caplog.clear()
    report_unread("it", values, AutoConfig.for_model(kind, **values))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("kind", COMPUTES)
def test_fields_that_change_the_computation_are_read(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each is declared by its class, or consumed by it; an invented one is named: the control."""
    default, names = AutoConfig.for_model(kind), COMPUTES[kind].split()
    stored: dict[str, Any] = {name: getattr(default, name, 10000.0) for name in names}
    if "rope_scaling" in names:
        stored["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    assert _logged(stored, caplog, kind) == []
    made = AutoConfig.for_model(kind, **stored)
    for name in names:
        kept = getattr(made, name, None) is not None or stored[name] is None
        assert kept or getattr(made, "rope_parameters", None), name
    (line,) = _logged({**stored, "use_invented_norm": True}, caplog, kind)
    assert line.endswith("are ignored: use_invented_norm")


def test_fields_that_transformers_writes_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    for kind in sorted({kind for kind, _ in (FAMILIES | RECURRENT).values()}):
        values = AutoConfig.for_model(kind).to_dict()
        report_unread("it", values, AutoConfig.for_model(**values))
        assert not [one for one in caplog.records if one.name == "foresay"], kind


def test_fields_without_effect_and_unknown_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Further fields of published Llama files; those of a part are named with it."""
    further = {"pretraining_tp": 1, "_name_or_path": "x", "use_qk_norm": True}
    more: dict[str, Any] = dict.fromkeys(CONFIG_FIELDS) | further
    assert all(CONFIG_FIELDS.values())
    for name in ("model_type", "auto_map", "quantization_config", "torch_dtype", "use_cache"):
        del more[name]
    tiny.save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | more), encoding="utf-8")
    load_model(tmp_path)
    (line,) = [one.getMessage() for one in caplog.records if "config.json" in one.getMessage()]
    assert line.endswith("are ignored: use_qk_norm")
    inner = {"text_config": {"model_type": "gemma3_text", "invented": 1, "hidden_size": 8}}
    (line,) = _logged(inner, caplog, "gemma3")
    assert line.endswith("are ignored: text_config.invented")


# -- tokenizer_config.json -------------------------------------------------------------------------------------------

TOKENIZER_VALUES: dict[str, Any] = {
    "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": None, "additional_special_tokens": ["<user>"],
    "extra_special_tokens": {}, "added_tokens_decoder": {}, "add_bos_token": False, "add_prefix_space": False,
    "split_special_tokens": False, "chat_template": tiny.CHAT_TEMPLATE, "clean_up_tokenization_spaces": True,
    "model_max_length": 1e30, "padding_side": "left", "truncation_side": "left", "legacy": False, "sp_model_kwargs": {},
    "spaces_between_special_tokens": False, "use_default_system_prompt": False, "response_schema": {},
    "model_input_names": ["input_ids", "attention_mask"], "errors": "replace", "image_token": "<user>",
    "tokenizer_class": "PreTrainedTokenizerFast", "is_local": True, "backend": "tokenizers", "name_or_path": "somewhere",
}  # fmt: skip
"""Fields of published files."""


def test_fields_of_tokenizer_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(TOKENIZER_VALUES), encoding="utf-8")
    text = "hello <user> world ,"
    tokenizer = load_tokenizer(tmp_path)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert tokenizer(text).input_ids == tiny.tokenizer()(text).input_ids
    done = foresay.load(tmp_path).generate("hello", max_new_tokens=4)
    assert done.text == tiny.tokenizer().decode(done.token_ids, clean_up_tokenization_spaces=False)
    caplog.clear()
    path.write_text(json.dumps({**TOKENIZER_VALUES, "normalise_invented": True, "zero_width": 1}), encoding="utf-8")
    load_tokenizer(tmp_path)
    (line,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert line.endswith("are ignored: normalise_invented, zero_width")
    assert all(TOKENIZER_FIELDS.values())


# -- folders that lack something -------------------------------------------------------------------------------------


def test_a_folder_without_a_vocabulary_takes_token_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.save(tmp_path)
    for lost in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / lost).unlink()
        caplog.clear()
        generator = foresay.load(tmp_path)
        (line,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert line.startswith(f"{tmp_path} has no tokenizer")
        with pytest.raises((ModelLoadError, ModelNotFoundError), match="tokenizer"):
            load_tokenizer(tmp_path)
    assert len(generator.generate([40, 41, 42], max_new_tokens=5).token_ids) == 5
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        with refused("tokenizer", kind=PromptError):
            generator.generate(prompt)
    assert foresay.load(tmp_path, tokenizer=tiny.tokenizer()).generate("hello", max_new_tokens=2).text
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"no protocol buffer")
    with pytest.raises(ModelLoadError) as caught:
        foresay.load(tmp_path)
    assert not str(caught.value).rstrip().endswith(":") and "\n" not in str(caught.value), "an error in full"


DRAFTS: dict[str, tuple[dict[str, Any], str]] = {
    "eagle3": ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "head"),
    "an eagle_config": ({"model_type": "llama", "eagle_config": {}}, "head"),
    "speculators": ({"speculators_model_type": "eagle3", "transformer_layer_config": {}}, "head"),
    "dflash": ({"model_type": "qwen3", "dflash_config": {"target_layer_ids": [1, 2]}}, "block"),
    "dspark": ({"speculators_model_type": "dspark"}, "block"),
    "layers of a target": ({"model_type": "deepseek_mtp"}, "mtp"),
    "by its architecture": ({"model_type": "llama", "architectures": ["DeepSeekMTPModel"]}, "mtp"),
}


def test_the_folder_of_another_draft_names_its_drafter(tmp_path: Path) -> None:
    target, folder = tiny.save(tmp_path / "target"), tmp_path / "draft"
    folder.mkdir()
    for values, drafter in DRAFTS.values():
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
        wanted = rf"load its target with drafter='{drafter}\({folder}\)'" if drafter != "mtp" else "with drafter='mtp'"
        assert BlockConfig.describes(values) is (drafter == "block")
        with pytest.raises(ModelLoadError, match=wanted):
            load_model(folder)
    for arguments in ({"target": target, "draft": folder}, {"target": target, "drafter": f"model({folder})"}):
        with pytest.raises(ModelLoadError, match=wanted):
            foresay.load(**arguments)


def test_a_head_that_foresay_wrote_names_its_drafter(tmp_path: Path) -> None:
    weights = tiny.llama()
    target = tiny.save(tmp_path / "target", weights)
    for layout in ("plain", "speculators"):
        folder = tmp_path / layout
        folder.mkdir()
        write_draft(random_head(CausalModel(weights)), folder, layout=layout)
        with pytest.raises(ModelLoadError, match=r"load its target with drafter='head\("):
            foresay.load(target, draft=folder)
        assert foresay.load(target, drafter=f"head({folder})").generate("hello", max_new_tokens=3).token_ids


def test_a_draft_and_another_drafter_contradict() -> None:
    with refused("drafter", "suffix"):
        foresay.load(tiny.llama(), draft=tiny.llama(), drafter="suffix")
