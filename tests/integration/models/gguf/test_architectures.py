"""Every architecture that is read from GGUF files: the scores and texts of transformers, from numbers and from blocks."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ModelLoadError, UnsupportedModelError
from foresay.models.drafts.base import embeddings_of
from foresay.models.families.family import Architecture
from foresay.models.families.table import ARCHITECTURES
from foresay.models.gguf.header import read_header
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.comparing import NEW, assert_same, plain, prompts
from helpers.families import make
from helpers.gguf_files import architecture_of, write_gguf
from helpers.support import Sometimes, run

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
OLMO3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {**YARN, "truncate": True, "factor": 8.0, "attention_factor": 1.2079441541679836},
}
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 264}
GRANITE = {
    "mamba_n_heads": 16,
    "mamba_d_conv": 3,
    "mamba_n_groups": 2,
    "shared_intermediate_size": 64,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.8,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
}
DENSE_GRANITE = {"num_local_experts": 0, "mamba_conv_bias": False, "position_embedding_type": "rope"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mixtral": ("mixtral", {"num_experts_per_tok": 1}),
    "mistral3": ("mistral", {"sliding_window": None}),
    "ministral3": ("ministral3", {}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", {"mlp_only_layers": [], "moe_intermediate_size": 32}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {"num_hidden_layers": 6}),
    "gemma4": ("gemma4", GEMMA4),
    "gemma4-equal": ("gemma4_equal", {**GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4-moe": ("gemma4_moe", {**GEMMA4, "hidden_size_per_layer_input": 0, "moe_intermediate_size": 32}),
    "phi3": ("phi3", {"sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"max_position_embeddings": 4096, "rope_parameters": OLMO3}),
    "exaone4": ("exaone4", {"head_dim": 16}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "granite": ("granite", {"embedding_multiplier": 3.0}),
    "granitehybrid": ("granitemoehybrid", {**GRANITE, "num_experts_per_tok": 3}),
    "granitehybrid-dense": ("granitemoehybrid", {**GRANITE, **DENSE_GRANITE}),
    "gpt-oss": ("gpt_oss", {"swiglu_limit": 7.0, "max_position_embeddings": 4096, "rope_parameters": YARN}),
    "glm4moe": (
        "glm4_moe",
        {
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False, "norm_eps": 0.3, "conv_L_cache": 4}),
    "qwen35": ("qwen3_5", {"head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3}),
    "lfm2moe": (
        "lfm2_moe",
        {
            "moe_intermediate_size": 32,
            "norm_eps": 0.3,
            "conv_L_cache": 4,
            "num_dense_layers": 1,
            "num_experts_per_tok": 3,
        },
    ),
    "qwen35moe": (
        "qwen3_5_moe",
        {
            "head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3next": (
        "qwen3_next",
        {
            "head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": None}),
}
"""Families of helpers/families.py by the name of a case."""
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
VOCAB = len(tiny.tokenizer())
PARAMS = SamplingParams(max_new_tokens=NEW)


@cache
def model_of(case: str) -> PreTrainedModel:
    family, changes = MODELS[case]
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, **changes}
    model = make(family, 3, **sizes)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight") or weight.dim() == 1:
            weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(1, -1, len(buffer)))
    return model


@cache
def outputs_of(case: str) -> list[list[int]]:
    return [plain(model_of(case), prompt) for prompt in prompts()]


def file_of(case: str, folder: Path, kind: str | None = None) -> Path:
    """kind: the type of all matrices."""
    return write_gguf(folder / f"{case}.gguf", model_of(case), kind=kind)


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model.uncached(torch.tensor([prompts()[3]]))[0].float()
    return out


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of a token's differences as a share of the wanted scores' deviation; the median over the tokens."""
    return float((found - wanted).square().mean(-1).sqrt().median() / wanted.std())


def test_every_architecture_has_a_case() -> None:
    elsewhere = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}  # the models of others, see test_vision.py
    assert {architecture_of(model_of(case))[0] for case in MODELS} | elsewhere == set(ARCHITECTURES)


@pytest.mark.parametrize("case", MODELS)
def test_texts_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """In float32, in ragged batches, with rejected and with accepted drafts."""
    reference, wanted = model_of(case), outputs_of(case)
    assert len({token for output in wanted for token in output}) > 5, "a model that repeats itself proves little"
    loaded: Any = load_model(file_of(case, tmp_path), LoadOptions(dtype="fp32"))
    assert loaded.weights == "" and loaded.model.fused is not None and loaded.model.fused.compiled
    drafter = Sometimes(wanted, VOCAB)
    ours, steps, engine = run(loaded.model, prompts(), PARAMS, drafter=drafter, gamma=4, join_later=3)
    assert engine.draft_failures == 0
    assert any(step.num_accepted < step.num_drafted for step in steps)
    assert any(step.num_accepted == step.num_drafted == 4 for step in steps)
    for prompt, one, theirs in zip(prompts(), ours, wanted, strict=True):
        assert_same(reference, prompt, one, theirs)


@pytest.mark.parametrize("case", MODELS)
def test_blocks_score_as_their_numbers_do(case: str, tmp_path: Path) -> None:
    """On the kernels; a token's bits depend neither on drafts nor on the batch."""
    path = file_of(case, tmp_path, "Q8_0")
    kept: Any = load_model(path, LoadOptions(activations="float32"))
    assert kept.weights == "GGUF" and kept.model.fused.compiled
    numbers = scores(load_model(path, LoadOptions(dtype="fp32")).model)
    assert error(scores(kept.model), numbers) < 0.05
    rounded = load_model(path).model
    alone = [run(rounded, [prompt], PARAMS, gamma=0)[0][0] for prompt in prompts()]
    for gamma, batch in ((1, 6), (4, 3)):
        drafter = Sometimes(alone, VOCAB)
        assert run(rounded, prompts(), PARAMS, drafter=drafter, gamma=gamma, max_batch_size=batch)[0] == alone


def broken(case: str, path: Path) -> Iterator[tuple[str, Architecture]]:
    """(name of an entry's datum, the entry without it or with its opposite) for all that the file uses."""
    header, (name, one) = read_header(path), architecture_of(model_of(case))
    flags = ["norms_from_one", *["interleaved"] * ("blk.0.attn_q.weight" in header.tensors)]
    for flag in flags:
        yield flag, dataclasses.replace(one, variants={}, **{flag: not getattr(one, flag)})
    for order in ("row_order", "column_order"):
        if getattr(one, order) is not None:
            yield order, dataclasses.replace(one, **{order: None})
    if one.yarn:
        yield "yarn", dataclasses.replace(one, yarn={})
    for key in one.fields:
        if header.values.get(f"{name}.{key}"):
            fewer = {other: field for other, field in one.fields.items() if other != key}
            yield key, dataclasses.replace(one, variants={}, fields=fewer)


@pytest.mark.parametrize("case", MODELS)
def test_every_datum_of_an_entry_counts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: an entry without one of them describes another model, or none."""
    path, wanted = file_of(case, tmp_path), scores_of(case)
    assert error(scores(load_model(path, LoadOptions(dtype="fp32")).model), wanted) < 1e-4
    for name, entry in broken(case, path):
        monkeypatch.setitem(ARCHITECTURES, architecture_of(model_of(case))[0], entry)
        try:
            found = scores(load_model(path, LoadOptions(dtype="fp32")).model)
        except (ModelLoadError, UnsupportedModelError):
            continue
        assert not error(found, wanted) < 1e-2, name


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path) -> None:
    """4.25 bits a weight, with biases, the clamped gate, sinks and windows; bits do not depend on drafts or the batch."""
    kinds = {**dict.fromkeys(EXPERTS, "MXFP4"), **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), "Q8_0")}
    path = write_gguf(tmp_path / "tiny.gguf", model_of("gpt-oss"), kinds)
    kept: Any = load_model(path, LoadOptions(activations="float32")).model
    experts = kept.model.model.layers[1].mlp.experts
    assert {one.product.bits for one in (*experts.gate_up, *experts.down)} == {4.25} and kept.fused.compiled
    numbers: Any = load_model(path, LoadOptions(dtype="fp32")).model
    assert error(scores(kept), scores(numbers)) < 0.05
    other = copy.deepcopy(model_of("gpt-oss"))
    for layer in other.model.layers:
        layer.mlp.experts.gate_up_proj_bias.data.neg_()
    numbers = load_model(write_gguf(tmp_path / "other.gguf", other, kinds), LoadOptions(dtype="fp32")).model
    assert error(scores(kept), scores(numbers)) > 0.1, "control: each bias belongs to its output"
    rounded = load_model(path).model
    alone = [run(rounded, [prompt], PARAMS, gamma=0)[0][0] for prompt in prompts()]
    for gamma, batch in ((1, 6), (4, 3)):
        drafter = Sometimes(alone, VOCAB)
        assert run(rounded, prompts(), PARAMS, drafter=drafter, gamma=gamma, max_batch_size=batch)[0] == alone


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scaling.original_context_length", "expert_used_count"])
def test_values_without_a_default_are_required(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = gguf.GGUFWriter.add_key_value

    def fewer(self: gguf.GGUFWriter, key: str, *args: Any, **more: Any) -> None:
        if key != f"gpt-oss.{name}":
            add(self, key, *args, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", fewer)
    with pytest.raises(ModelLoadError, match=f"its value gpt-oss.{name} is 'missing'; allowed is a number; it has no"):
        load_model(file_of("gpt-oss", tmp_path))


def test_other_kinds_of_yarn_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = gguf.GGUFWriter.add_rope_scaling_type

    def more(self: gguf.GGUFWriter, kind: Any) -> None:
        add(self, kind)
        self.add_rope_scaling_yarn_attn_factor(0.7)

    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_scaling_type", more)
    with pytest.raises(ModelLoadError, match=r"its value gpt-oss\.rope\.scaling\.yarn_attn_factor is 0\.69"):
        load_model(file_of("gpt-oss", tmp_path))


@pytest.mark.parametrize("stated", [1, 0, 4])
def test_mtp_layers_are_no_layers_of_the_model(stated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as layers of the file; those that it does not state are unknown tensors."""
    add = gguf.GGUFWriter.add_block_count

    def more(self: gguf.GGUFWriter, count: int) -> None:
        add(self, count + (stated == 1))
        self.add_nextn_predict_layers(stated)
        self.add_tensor("blk.3.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))
        self.add_tensor("blk.3.attn_q.weight", np.zeros((128, 64), np.float32))

    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", more)
    path = file_of("glm4moe", tmp_path)
    if stated == 1:
        assert error(scores(load_model(path, LoadOptions(dtype="fp32")).model), scores_of("glm4moe")) < 1e-4
    else:
        problem = "less than the 3 layers" if stated else "'blk.3.nextn.eh_proj.weight' is not among"
        with pytest.raises(ModelLoadError, match=problem):
            load_model(path)


def test_embeddings_with_a_factor_stay_in_their_blocks(tmp_path: Path) -> None:
    """Drafts read the same rows without the factor, as in other engines."""
    loaded: Any = load_model(file_of("gemma4", tmp_path, "Q8_0")).model
    body, ids = loaded.model.model, torch.tensor([[5, 9, 70]])
    assert (body.embed_tokens.product.bits, body.embed_tokens_per_layer.product.bits) == (8.5, 8.5)
    own = embeddings_of(loaded)(ids)
    assert torch.equal(own * 8.0, body.embed_tokens(ids)), "sqrt(64), the hidden size"
    wanted = model_of("gemma4").model.embed_tokens_per_layer(ids).detach()
    assert error(body.embed_tokens_per_layer(ids)[0].float(), wanted[0]) < 0.01


def test_suppressed_tokens_are_never_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gemma 4 12B's files state them; the negative control is the same file without them."""
    reference, prompt = model_of("gemma4"), prompts()[3]
    plain_text = (
        foresay.load(file_of("gemma4", tmp_path), dtype="fp32", drafter="none")
        .generate([prompt], max_new_tokens=NEW, ignore_eos=True)[0]
        .token_ids
    )
    banned = sorted({*plain_text[:3]})
    add = gguf.GGUFWriter.add_tokenizer_model

    def more(self: gguf.GGUFWriter, name: str) -> None:
        add(self, name)
        self.add_array("tokenizer.ggml.suppress_tokens", banned)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", more)
    model = foresay.load(file_of("gemma4", tmp_path), dtype="fp32", drafter="suffix")
    found = model.generate([prompt], max_new_tokens=NEW, ignore_eos=True)[0].token_ids
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    wanted = reference.generate(ids, attention_mask=torch.ones_like(ids), suppress_tokens=banned, **options)
    assert list(found) == wanted[0, len(prompt) :].tolist() and not {*found} & {*banned}


def scores_of(case: str) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model_of(case)(torch.tensor([prompts()[3]])).logits[0]
    return out
