"""Every architecture that is read from GGUF files: every datum of its entry counts, and blocks score as their numbers do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import foresay
from foresay.errors import ModelLoadError
from foresay.models.drafts.base import embeddings_of
from foresay.models.families.family import Architecture
from foresay.models.families.table import ARCHITECTURES
from foresay.models.gguf.blocks import model_of_file
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import read_header
from foresay.models.gguf.positions import DIVISORS
from foresay.models.gguf.values import checked_header
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers.comparing import NEW, prompts
from helpers.gguf_cases import MODELS, error, file_of, logits, model_of, scores
from helpers.gguf_files import architecture_of, write_gguf
from helpers.gguf_image import image_of

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def test_every_architecture_has_a_case() -> None:
    elsewhere = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}  # the models of others, see test_values.py
    assert {architecture_of(model_of(case))[0] for case in MODELS} | elsewhere == set(ARCHITECTURES)


def dequantized(path: Path) -> torch.Tensor:
    """The scores of a file's numbers by the family's own code."""
    header = checked_header(path)
    return logits(model_of_file(header, config_of(header), torch.float32, in_blocks=False))


@pytest.mark.parametrize(("case", "kind"), [(case, ("Q8_0", "Q4_0", "Q4_1")[i % 3]) for i, case in enumerate(MODELS)])
def test_blocks_score_as_their_numbers_do(case: str, kind: str, tmp_path: Path) -> None:
    """But for the rounding of inputs to 8 bits and of other weights to bf16. Control: the scores of other positions.

    All are counted: the float32 ones of recurrent layers were not.
    """
    path = file_of(case, tmp_path, kind)
    kept = load_model(path)
    assert kept.weights == "GGUF" and kept.model.fused.is_native and kept.model.batch_invariant
    sizes = {name: math.prod(one.shape) for name, one in read_header(path).tensors.items() if name != DIVISORS}
    assert kept.model.num_parameters == sum(sizes.values())
    found, wanted = scores(kept.model), dequantized(path)
    assert error(found, wanted) < 0.1 and error(found.roll(1, 0), wanted) > 0.3


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
    path, wanted = file_of(case, tmp_path), logits(model_of(case))
    assert error(dequantized(path), wanted) < 1e-4
    for name, entry in broken(case, path):
        monkeypatch.setitem(ARCHITECTURES, architecture_of(model_of(case))[0], entry)
        try:
            found = dequantized(path)
        except Exception:  # of a model that cannot be
            continue
        assert not error(found, wanted) < 1e-2, name


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path) -> None:
    """4.25 bits a weight, with biases, the clamped gate, sinks and windows."""
    kinds = {**dict.fromkeys(EXPERTS, "MXFP4"), **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), "Q8_0")}
    image = image_of(model_of("gpt-oss"), kinds)
    path = image.write(tmp_path / "tiny.gguf")
    kept: Any = load_model(path, LoadOptions(activations="float32")).model
    experts = kept.model.model.layers[1].mlp.experts
    assert {one.product.bits for one in (*experts.gate_up, *experts.down)} == {4.25} and kept.fused.is_native
    assert error(scores(kept), scores(load_model(path, LoadOptions(dtype="fp32")).model)) < 0.05
    biases = [one for one in image.tensors if one.name.endswith((b"gate_exps.bias", b"up_exps.bias"))]
    for one in biases:
        one.data = (-np.frombuffer(one.data, np.float32)).tobytes()
    numbers = load_model(image.write(tmp_path / "other.gguf"), LoadOptions(dtype="fp32")).model
    assert biases and error(scores(kept), scores(numbers)) > 0.1, "control: each bias belongs to its output"


@pytest.mark.parametrize("stated", [1, 0])
def test_mtp_layers_are_no_layers_of_the_model(stated: int, tmp_path: Path) -> None:
    """They count as layers of the file; those that it does not state are unknown tensors."""
    values = {"block_count": 3 + stated, "nextn_predict_layers": stated}
    tensors = {"blk.3.nextn.eh_proj.weight": np.zeros((64, 128)), "blk.3.attn_q.weight": np.zeros((128, 64))}
    path = image_of(model_of("glm4moe")).changed(values, tensors).write(tmp_path / "tiny.gguf")
    if stated:
        assert error(scores(load_model(path, LoadOptions(dtype="fp32")).model), logits(model_of("glm4moe"))) < 1e-4
        return
    with pytest.raises(ModelLoadError, match=r"'blk.3.nextn.eh_proj.weight' is not among"):
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


def test_suppressed_tokens_are_never_generated(tmp_path: Path) -> None:
    """As Gemma 4 12B's files state them; the negative control is the same file without them."""
    prompt, image = prompts()[3], image_of(model_of("gemma4"))

    def generated(drafter: str) -> list[int]:
        model = foresay.load(image.write(tmp_path / "tiny.gguf"), dtype="fp32", drafter=drafter)
        return list(model.generate([prompt], max_new_tokens=NEW, ignore_eos=True)[0].token_ids)

    banned = sorted({*generated("none")[:3]})
    image.put("tokenizer.ggml.suppress_tokens", banned)
    ids, options = torch.tensor([prompt]), {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    found = generated("suffix")
    wanted = model_of("gemma4").generate(
        ids, attention_mask=torch.ones_like(ids), suppress_tokens=banned, pad_token_id=0, **options
    )
    assert found == wanted[0, len(prompt) :].tolist() and not {*found} & {*banned}


# -- Qwen3-Next's and Qwen3.5's layers with states -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_tensors_that_join_several_are_read_as_these(tmp_path: Path, kind: str | None) -> None:
    """In older files, and in newer ones: the same bits, from numbers and from blocks."""
    joint, found = ("ssm_in", "gate_up_exps"), []
    for names in ((), joint):
        path = write_gguf(tmp_path / f"{len(names)}.gguf", model_of("qwen3next"), kind=kind, joint=names)
        stored = {one.name.split(".")[-2] for one in gguf.GGUFReader(path).tensors}
        assert ({"ssm_in", "ffn_gate_up_exps"} <= stored) == bool(names) != ({"attn_gate", "ffn_up_exps"} <= stored)
        loaded = load_model(path, LoadOptions(dtype="auto" if kind else "fp32"))
        assert loaded.weights == ("GGUF" if kind else "") and loaded.model.batch_invariant
        found.append(scores(loaded.model))
    assert torch.equal(*found)


@pytest.mark.parametrize("joint", [(), ("ssm_in",)], ids=["apart", "joint"])
def test_kinds_are_told_from_key_heads(tmp_path: Path, joint: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: betas and alphas, or all inputs, read in the file's order; queries and keys written in another."""
    image = image_of(model_of("qwen3next"), joint=joint)

    def difference() -> float:
        path = image.write(tmp_path / "tiny.gguf")
        return error(scores(load_model(path, LoadOptions(dtype="fp32")).model), logits(model_of("qwen3next")))

    assert difference() < 1e-4
    with monkeypatch.context() as patch:
        patch.setitem(ARCHITECTURES, "qwen3next", dataclasses.replace(ARCHITECTURES["qwen3next"], row_order=None))
        assert difference() > 1e-2
    one = image.tensor("blk.0.ssm_in" if joint else "blk.0.attn_qkv")
    one.data = np.roll(np.frombuffer(one.data, np.float32).reshape(*one.dims[::-1]), 16, 0).tobytes()
    assert difference() > 1e-2
