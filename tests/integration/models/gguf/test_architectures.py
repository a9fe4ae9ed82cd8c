"""Every architecture that is read from GGUF files: every datum of its entry counts, and blocks score as their numbers do."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ModelLoadError, UnsupportedModelError
from foresay.models.drafts.base import embeddings_of
from foresay.models.families.family import Architecture
from foresay.models.families.table import ARCHITECTURES
from foresay.models.gguf.header import read_header
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers.comparing import NEW, prompts
from helpers.gguf_cases import MODELS, VOCAB, error, file_of, model_of, scores, scores_of
from helpers.gguf_files import architecture_of, write_gguf
from helpers.support import Sometimes, run

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
PARAMS = SamplingParams(max_new_tokens=NEW)


def test_every_architecture_has_a_case() -> None:
    elsewhere = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}  # the models of others, see test_vision.py
    assert {architecture_of(model_of(case))[0] for case in MODELS} | elsewhere == set(ARCHITECTURES)


@pytest.mark.parametrize("case", MODELS)
def test_blocks_score_as_their_numbers_do(case: str, tmp_path: Path) -> None:
    path = file_of(case, tmp_path, "Q8_0")
    kept: Any = load_model(path, LoadOptions(activations="float32"))
    assert kept.weights == "GGUF" and kept.model.fused.is_native
    numbers = scores(load_model(path, LoadOptions(dtype="fp32")).model)
    assert error(scores(kept.model), numbers) < 0.05


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
    assert {one.product.bits for one in (*experts.gate_up, *experts.down)} == {4.25} and kept.fused.is_native
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
