"""Folders in AWQ, GPTQ, compressed-tensors and FP8: decoded in their stored bits, with the text of the dequantized model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from foresay.decoding.protocols import ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ModelLoadError
from foresay.models.cpu.product import NativeProduct
from foresay.models.huggingface.frozen import FrozenLinear, JointLinear
from foresay.models.sources import quantized_forms
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model, load_weights
from helpers.comparing import NEW, assert_same, plain, prompts
from helpers.quantized import CASES, EXPANDED, VOCAB, Change, folder_of
from helpers.support import Sometimes, run

PARAMS = SamplingParams(max_new_tokens=NEW)


def in_float32(path: Path) -> Any:
    """The kernels without the rounding of inputs, keys and values."""
    loaded: Any = load_model(path, LoadOptions(activations="float32")).model
    loaded.use_fused(torch.float32)
    return loaded


IDS = torch.arange(40)[None] % VOCAB


def scores(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    cache = model.new_cache()
    cache.add_rows(1)
    out: torch.Tensor = model.forward(ModelInput(ids, [ids.shape[1]]), cache).logits
    return out


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_layers_stay_as_they_are_stored(case: str, tmp_path: Path) -> None:
    """Each number is the stored one, up to offsets in float16; layers with the same input are one product."""
    path, reference = folder_of(tmp_path / "tiny", case)
    loaded: Any = load_model(path)
    assert loaded.precision.startswith("bfloat16, ") and loaded.weights == case.split(",")[0].split(" with")[0]
    assert loaded.model.fused.is_native
    has_offsets = "zero" in case or "second" in case or case == "AWQ"
    own, wanted = (one.model.layers[1] for one in (loaded.model.model, reference))
    for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
        layers = [getattr(own.self_attn, name) for name in names]
        assert all(isinstance(one, JointLinear if len(names) > 1 else FrozenLinear) for one in layers)
        product: Any = layers[0].product
        assert isinstance(product, NativeProduct) and product.bits < 9
        weight = torch.cat([getattr(wanted.self_attn, name).weight for name in names])
        assert (product.dense() - weight).abs().max() < (weight.abs().max() / 2**11 if has_offsets else 1e-6)
    found, expected = scores(in_float32(path)), reference(IDS).logits
    assert (found - expected).abs().max() < (1e-2 if has_offsets else 1e-4) * expected.abs().max()


def test_texts_are_those_of_the_dequantized_model(tmp_path: Path) -> None:
    """In float32, with rejected and with accepted drafts."""
    path, reference = folder_of(tmp_path / "tiny", "GPTQ")
    wanted = [plain(reference, prompt) for prompt in prompts()]
    assert len({token for output in wanted for token in output}) > 5, "a model that repeats itself proves little"
    drafter = Sometimes(wanted, VOCAB)
    ours, steps, _ = run(in_float32(path), prompts(), PARAMS, drafter=drafter, gamma=4, join_later=3)
    assert {True, False} == {step.num_accepted == step.num_drafted for step in steps if step.num_drafted}
    for prompt, one, theirs in zip(prompts(), ours, wanted, strict=True):
        assert_same(reference, prompt, one, theirs)


def test_any_draft_and_any_batch_write_the_same(tmp_path: Path) -> None:
    path, _ = folder_of(tmp_path / "tiny", "AWQ")
    model = load_model(path).model
    alone = [run(model, [prompt], PARAMS, gamma=0)[0][0] for prompt in prompts()]
    for gamma, batch in ((1, 6), (4, 3)):
        drafter = Sometimes(alone, VOCAB)
        assert run(model, prompts(), PARAMS, drafter=drafter, gamma=gamma, max_batch_size=batch)[0] == alone


@torch.inference_mode()
def test_a_quantized_output_layer_is_read(tmp_path: Path) -> None:
    path, reference = folder_of(tmp_path / "tiny", "compressed-tensors int4", with_head=True)
    expected = reference(IDS).logits
    assert (scores(in_float32(path)) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_models_of_the_hub_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their id, of what is in the cache."""
    path, _ = folder_of(tmp_path / "tiny", "GPTQ")
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    path.rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_model("org/tiny").precision == "bfloat16, GPTQ weights"


def test_weights_that_are_trained_on_are_numbers(tmp_path: Path) -> None:
    path, reference = folder_of(tmp_path / "tiny", "AWQ")
    dense, _ = load_weights(path, LoadOptions(dtype="fp32"))
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(dense.state_dict()[name], weight)
    assert all(one.requires_grad for one in dense.parameters())


@pytest.mark.parametrize("case", EXPANDED)
@torch.inference_mode()
def test_layers_that_no_kernel_reads_become_numbers(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, reference = folder_of(tmp_path / "tiny", case)
    with caplog.at_level(logging.INFO, "foresay"):
        loaded: Any = load_model(path, LoadOptions(dtype="float32"))
    assert loaded.precision == "float32" and "21 quantized layers of" in caplog.text
    rounds = (CASES | EXPANDED)[case][2]["quant_method"] in ("fp8", "modelopt")
    assert ("how inputs of layers are rounded" in caplog.text) == rounds
    assert load_model(path).precision == "bfloat16"
    torch.testing.assert_close(scores(loaded.model), reference(IDS).logits, rtol=1e-3, atol=1e-3)


def cut(part: str, at: Any) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = next(one for one in tensors if one.endswith(part))
        tensors[name] = tensors[name][at]

    return change


def add(name: str, one: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: one})


def without(part: str) -> Change:
    return lambda tensors: [tensors.pop(one) for one in list(tensors) if one.endswith(part)]


EMBEDDING = "model.embed_tokens.weight"
WRONG: dict[str, tuple[str, Change, str]] = {
    "too few words": ("AWQ", cut("qweight", slice(64)), "do not make a matrix of 128 x 192: .* 3 groups for 64 inputs"),
    "too few scales": ("GPTQ", cut(".scales", (slice(None), slice(8))), r"scales \[8, 3\]"),
    "no scales": ("GPTQ", without(".scales"), "scales"),
    "scales of FP8 that fit nothing": ("FP8", cut("weight_scale_inv", slice(1, None)), "scales are .1, 6. for blocks of 64 x 32"),
    "scales of activations": ("AWQ", add("model.layers.0.mlp.act.scales", torch.ones(192)), r"no layer .* reads .*act\.scales\)"),
    "a quantized embedding": ("FP8", add(EMBEDDING, torch.ones(VOCAB, 128).to(torch.float8_e4m3fn)), "of the type F8_E4M3"),
    "no quantized layer": ("AWQ", without("qweight"), r"it has no tensors named \.qweight"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    kind, change, message = WRONG[case]
    path, _ = folder_of(tmp_path / "tiny", kind, change)
    with pytest.raises(ModelLoadError, match=message):
        load_model(path)


@torch.inference_mode()
def test_another_order_of_bits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    path, reference = folder_of(tmp_path / "tiny", "AWQ")
    monkeypatch.setattr(quantized_forms, "_AWQ_ORDER", tuple(range(8)))
    expected = reference(IDS).logits
    assert (scores(in_float32(path)) - expected).abs().max() > 0.05 * expected.abs().max()
