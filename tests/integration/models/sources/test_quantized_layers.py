"""Folders in AWQ, GPTQ, FP8, MXFP4 and others: decoded in their stored bits, with the text of the dequantized model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import PreTrainedModel

from foresay.errors import ModelLoadError
from foresay.models.cpu.product import NativeProduct
from foresay.models.huggingface.frozen import FrozenExperts, FrozenLinear, JointLinear
from foresay.models.sources import quantized_forms
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model, load_weights
from helpers import tiny
from helpers.passes import scores
from helpers.quantized import CASES, EXPANDED, VOCAB, Change, folder_of

IDS = torch.arange(40)[None] % VOCAB


def in_float32(path: Path) -> Any:
    """The kernels without the rounding of inputs, keys and values."""
    loaded: Any = load_model(path, LoadOptions(activations="float32")).model
    loaded.use_fused(torch.float32)
    return loaded


@torch.inference_mode()
def difference(path: Path, reference: PreTrainedModel) -> float:
    """Between the kernels' scores and those of the numbers, as a share of the largest."""
    expected = reference(IDS).logits
    return float((scores(in_float32(path), IDS) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_layers_stay_as_they_are_stored(case: str, tmp_path: Path) -> None:
    """Each number is the stored one, up to offsets in float16; layers with the same input are one product."""
    path, reference = folder_of(tmp_path / "tiny", case, layers=1, with_head=case == "compressed-tensors int4")
    loaded: Any = load_model(path)
    assert loaded.precision.startswith("bfloat16, ") and loaded.weights == case.split(",")[0].split(" with")[0]
    assert loaded.model.fused.is_native
    has_offsets = "zero" in case or "second" in case or case == "AWQ"
    own, wanted = (one.model.layers[0].self_attn for one in (loaded.model.model, reference))
    for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
        layers = [getattr(own, name) for name in names]
        assert all(isinstance(one, JointLinear if len(names) > 1 else FrozenLinear) for one in layers)
        product: Any = layers[0].product
        assert isinstance(product, NativeProduct) and product.bits < 9
        weight = torch.cat([getattr(wanted, name).weight for name in names])
        assert (product.dense() - weight).abs().max() < (weight.abs().max() / 2**11 if has_offsets else 1e-6)
    assert difference(path, reference) < (1e-2 if has_offsets else 1e-4)


def test_experts_stay_in_their_blocks(tmp_path: Path) -> None:
    """Each number is the stored one; no layer is expanded."""
    path, reference = folder_of(tmp_path / "tiny", "MXFP4", layers=1)
    loaded: Any = load_model(path)
    assert loaded.precision == "bfloat16, MXFP4 weights" and loaded.model.fused.is_native
    own, dense = loaded.model.model.model.layers[0].mlp.experts, reference.model.layers[0].mlp.experts
    assert isinstance(own, FrozenExperts)
    assert {one.product.bits for one in (*own.gate_up, *own.down)} == {4.25}
    for i, (gate_up, down) in enumerate(zip(own.gate_up, own.down, strict=True)):
        rows = dense.gate_up_proj[i].T
        assert torch.equal(gate_up.product.dense().float(), torch.cat([rows[::2], rows[1::2]]))
        assert torch.equal(down.product.dense().float(), dense.down_proj[i].T)
        assert torch.equal(gate_up.bias.float(), dense.gate_up_proj_bias[i].view(-1, 2).T.flatten())
    assert all(one.dim() < 3 for one in loaded.model.model.parameters())


def test_scores_of_experts_are_those_of_the_numbers(tmp_path: Path) -> None:
    """Controls: neighbours stored as the halves of a block, and gates before ups."""

    def halves(weights: dict[str, torch.Tensor]) -> None:
        for blocks in (one for name, one in weights.items() if name.endswith("_blocks")):
            fours = torch.cat([blocks & 15, blocks >> 4], -1)
            blocks.copy_(fours[..., ::2] | fours[..., 1::2] << 4)

    def gates_first(weights: dict[str, torch.Tensor]) -> None:
        for name in (name for name in weights if "gate_up_proj_" in name and weights[name].dtype == torch.uint8):
            weights[name] = torch.cat([weights[name][:, ::2], weights[name][:, 1::2]], 1)

    assert difference(*folder_of(tmp_path / "tiny", "MXFP4")) < 1e-4
    assert difference(*folder_of(tmp_path / "halves", "MXFP4", halves)) > 1e-2
    assert difference(*folder_of(tmp_path / "gates", "MXFP4", gates_first)) > 1e-2


def test_another_order_of_bits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    path, reference = folder_of(tmp_path / "tiny", "AWQ", layers=1)
    unpacked = quantized_forms.unpacked
    monkeypatch.setattr(quantized_forms, "unpacked", lambda words, bits, order=None: unpacked(words, bits))
    assert difference(path, reference) > 0.05


def test_other_formats_are_made_of_the_numbers(tmp_path: Path) -> None:
    path, reference = folder_of(tmp_path / "tiny", "MXFP4")
    with torch.inference_mode():
        wanted = reference(IDS).logits
    for options, most in ((LoadOptions(dtype="fp32"), 1e-4), (LoadOptions(weights="int8"), 0.2)):
        loaded = load_model(path, options)
        assert loaded.weights == ("int8" if options.bits else "")
        error = (scores(loaded.model, IDS).float() - wanted).square().mean(-1).sqrt().median() / wanted.std()
        assert float(error) < most, "the median, as rounding may select other experts"


@pytest.mark.parametrize("case", ["AWQ", "MXFP4"])
def test_weights_that_are_trained_on_are_numbers(case: str, tmp_path: Path) -> None:
    path, reference = folder_of(tmp_path / "tiny", case)
    dense, _ = load_weights(path, LoadOptions(dtype="fp32"))
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(dense.state_dict()[name], weight)
    assert all(one.requires_grad for one in dense.parameters())


def test_info_names_the_format(tmp_path: Path, shell: tiny.Shell) -> None:
    path, _ = folder_of(tmp_path / "tiny", "MXFP4", layers=1)
    code, out, _ = shell("info", str(path))
    assert code == 0 and "experts in MXFP4 as stored" in out
    assert "fused layers, kernels compiled for this machine" in out and "same bits: yes" in out


def test_models_of_the_hub_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their id, of what is in the cache."""
    path, _ = folder_of(tmp_path / "tiny", "GPTQ", layers=1)
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    path.rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_model("org/tiny").precision == "bfloat16, GPTQ weights"


@pytest.mark.parametrize("case", EXPANDED)
@torch.inference_mode()
def test_layers_that_no_kernel_reads_become_numbers(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, reference = folder_of(tmp_path / "tiny", case, layers=1)
    with caplog.at_level(logging.INFO, "foresay"):
        loaded: Any = load_model(path, LoadOptions(dtype="float32"))
    assert loaded.precision == "float32" and "7 quantized layers of" in caplog.text
    rounds = (CASES | EXPANDED)[case][2]["quant_method"] in ("fp8", "modelopt")
    assert ("how inputs of layers are rounded" in caplog.text) == rounds
    assert case != "FP8" or load_model(path).precision == "bfloat16"
    torch.testing.assert_close(scores(loaded.model, IDS), reference(IDS).logits, rtol=1e-3, atol=1e-3)


def change_of(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change the first tensor whose name ends so."""

    def changed(tensors: dict[str, torch.Tensor]) -> None:
        name = next(one for one in tensors if one.endswith(part))
        tensors[name] = change(tensors[name]).contiguous()

    return changed


def cut(part: str, at: Any) -> Change:
    return change_of(part, lambda one: one[at])


def add(name: str, one: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: one})


def without(*parts: str) -> Change:
    return lambda tensors: [tensors.pop(one) for one in list(tensors) if one.endswith(parts)]


def with_255(one: torch.Tensor) -> torch.Tensor:
    one.view(-1)[7:8].fill_(255)
    return one


EMBEDDING = "model.embed_tokens.weight"
WRONG: dict[str, tuple[str, Change, str]] = {
    "too few words": ("AWQ", cut("qweight", slice(64)), "do not make a matrix of 128 x 192: .* 3 groups for 64 inputs"),
    "too few scales": ("GPTQ", cut(".scales", (slice(None), slice(8))), r"scales \[8, 3\]"),
    "no scales": ("GPTQ", without(".scales"), "scales"),
    "scales of FP8 that fit nothing": ("FP8", cut("weight_scale_inv", slice(1, None)), "scales are .1, 6. for blocks of 64 x 32"),
    "scales of activations": ("AWQ", add("model.layers.0.mlp.act.scales", torch.ones(192)), r"no layer .* reads .*act\.scales\)"),
    "a quantized embedding": ("FP8", add(EMBEDDING, torch.ones(VOCAB, 128).to(torch.float8_e4m3fn)), "of the type F8_E4M3"),
    "no quantized layer": ("AWQ", without("qweight"), r"it has no tensors named \.qweight"),
    "experts without scales": ("MXFP4", without("down_proj_scales"), r"experts\.down_proj are missing"),
    "experts without blocks": ("MXFP4", without("gate_up_proj_blocks"), r"experts\.gate_up_proj are missing"),
    "fewer experts": ("MXFP4", cut("down_proj_blocks", slice(2)), r"down_proj are of torch\.uint8 in the shape \[2, 64, 3"),
    "fewer rows": ("MXFP4", cut("gate_up_proj_scales", (slice(None), slice(8))), r"in the shape \[4, 8, 2\]"),
    "numbers": ("MXFP4", change_of("down_proj_scales", torch.Tensor.float), r"are of torch\.float32"),
    "an exponent that is no number": ("MXFP4", change_of("down_proj_scales", with_255), "contain 255"),
    "no biases": ("MXFP4", without("down_proj_bias"), "1 weights are missing"),
    "no layer's": ("MXFP4", without("down_proj_blocks", "down_proj_scales"), "1 weights are missing|only a part of"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    kind, change, message = WRONG[case]
    path, _ = folder_of(tmp_path / "tiny", kind, change, layers=1)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
