"""GGUF files whose weights stay in their blocks: what is unpacked, what is written, what is left to transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from foresay.errors import ModelLoadError
from foresay.models.cpu import low_bits
from foresay.models.cpu.product import BLOCKS, NativeProduct
from foresay.models.families.table import ARCHITECTURES
from foresay.models.gguf import header, types
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import StoredTensor, read_header
from foresay.models.gguf.tokenizer import tokenizer_of
from foresay.models.gguf.types import BlockWeight, DenseWeight, concatenated, read_weight
from foresay.models.hardware import Hardware
from foresay.models.huggingface.frozen import FrozenExperts
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.broken_kernels import Broken
from helpers.families import make
from helpers.fuzz_gguf import EXPERTS, LAYERS
from helpers.gguf_cases import error, scores
from helpers.gguf_files import write_gguf
from helpers.gguf_image import image_of
from helpers.refusals import refused


def model_of(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """Rows of whole groups, and weights large enough that texts vary."""
    sizes = {"vocab_size": len(tiny.tokenizer()), "hidden_size": 64, "intermediate_size": 96}
    model = make(family, 4, **sizes, **changes)
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            weight.data *= 0.2 / weight.std()
        elif name.endswith("bias"):
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
    return model


def random_blocks(kind: str, rows: int, width: int, seed: int = 0) -> StoredTensor:
    """Random levels, and scales that are tiny, ordinary and large."""
    dice, (numbers, size) = np.random.default_rng(seed), BLOCKS[kind][:2]
    data = dice.integers(0, 256, (rows, width // numbers, size), dtype=np.uint8)
    scales = dice.normal(size=(rows, width // numbers, 2)) * 10.0 ** dice.integers(-6, 3, (rows, width // numbers, 1))
    if kind == "MXFP4":  # subnormal scales, too
        data[..., 0] = dice.choice((0, 1, 2, 110, 120, 128, 135), (rows, width // numbers))
        return StoredTensor((rows, width), kind, data.reshape(rows, -1))
    first, end = types._SCALES.get(kind, (0, 4))
    data[..., first:end] = scales.astype(np.float16).view(np.uint8)[..., : end - first]
    return StoredTensor((rows, width), kind, data.reshape(rows, -1))


def file_weights(tensor: StoredTensor) -> torch.Tensor:
    """As llama.cpp's own package dequantizes them."""
    return torch.from_numpy(gguf.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.kind]))


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_kept_as_in_the_file(kind: str) -> None:
    """Whole panels and not, rows in another order; products with inputs that are not rounded, and with those that are."""
    stored = random_blocks(kind, 45, 512)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(0))
    weight = read_weight(stored)
    assert isinstance(weight, BlockWeight)
    wanted = file_weights(stored)
    torch.testing.assert_close(weight.dense(torch.float32), wanted, atol=0, rtol=0)
    product = weight.reordered(order).product(None)
    bound = 3e-7 * wanted.abs().amax(1, keepdim=True)[order]
    assert ((product.dense() - wanted[order]).abs() <= bound).all()
    x = torch.randn(30, 512, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ wanted[order].double().t()
    size = wanted[order].double().norm(dim=1) * 512**0.5
    errors = {}
    for activations in ("int8", "float32"):
        product.activations = activations
        errors[activations] = float(((product(x).double() - exact).abs() / size).max())
    assert errors["float32"] < 1e-6 and 1e-6 < errors["int8"] < 2e-3


FLOATS_4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of 4-bit floats: two bits of exponent, one of mantissa."""


def mxfp4_weights(data: torch.Tensor) -> torch.Tensor:
    """The numbers of blocks [rows, blocks * 17], by their definition: [rows, blocks * 32]."""
    blocks = data.view(len(data), -1, 17)
    codes = torch.cat([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], -1).long()
    signs = 1.0 - 2.0 * (codes >> 3)
    return (signs * FLOATS_4[codes & 7] * 2.0 ** (blocks[..., :1].float() - 127)).flatten(1)


@pytest.mark.parametrize(("rows", "width"), [(1, 32), (31, 96), (70, 544)])
def test_4_bit_floats_are_multiplied_exactly(rows: int, width: int) -> None:
    """Products and sums of whole numbers are exact in any order; a row has the same bits in any number of rows."""
    stored = random_blocks("MXFP4", rows, width)
    stored.data.reshape(rows, -1, 17)[..., 0] = 127
    wanted = mxfp4_weights(torch.from_numpy(stored.data))
    torch.testing.assert_close(file_weights(stored), wanted, atol=0, rtol=0)
    product = BlockWeight((stored,)).product(None)
    assert product.bits == 4.25 and torch.equal(product.dense(), wanted)
    x = torch.randint(-127, 128, (40, width), generator=torch.Generator().manual_seed(2)).float()
    x[:, ::32] = 127.0  # so that rounding to 8 bits changes nothing
    for activations in ("int8", "float32"):
        product.activations = activations
        whole = product(x)
        assert torch.equal(whole, x @ wanted.t()), "exact"
        assert not torch.equal(whole, x @ wanted.roll(1, 1).t()), "control: the order of weights"
        for count in (1, 2, 3, 5, 9, 13, 17):
            assert torch.equal(product(x[:count]), whole[:count])


FACTORS = {"IQ2_XXS": 8, "IQ2_XS": 8, "IQ2_S": 8, "IQ3_XXS": 4}


def exact(kind: str) -> bool:
    """True if products of whole numbers are exact for any number of rows: scales are whole, and all sums are below 2^24."""
    stored = random_blocks(kind, 70, 768)
    first, end = types._SCALES.get(kind, (0, 4))
    one = np.array([FACTORS.get(kind, 1)] * 2, np.float16).view(np.uint8)
    stored.data.reshape(70, 3, -1)[..., first:end] = one[: end - first]
    product, wanted = BlockWeight((stored,)).product(None), file_weights(stored).double()
    x = torch.randint(-2, 3, (40, 768), generator=torch.Generator().manual_seed(2)).float()
    x[:, ::256] = 127.0
    x[:, 256:512] *= 2  # a scale of its own
    x[:, 40] = 63.4  # 63 with the scale of its 256 inputs, and 63.4 with that of its 32
    whole = product(x)
    same = (torch.equal(product(x[:count]), whole[:count]) for count in (1, 2, 3, 4, 5, 9, 13, 17, 26))
    return torch.equal(whole.double(), x.round().double() @ wanted.t()) and all(same)


SUPERS = ("the first group's multiple for all", "the offset of the first of two groups")
SUPERS += ("256 inputs with the scale of the first", "256 products that depend on the rows of their tile")
FAULTS = dict.fromkeys(("Q4_K", "Q5_K", "Q6_K", "Q2_K"), SUPERS)
FAULTS |= dict.fromkeys(("Q3_K", "IQ2_XS"), ("third bits of the other depths",))
FAULTS |= dict.fromkeys(("IQ2_XXS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), ("codes of the next table entry",))


@pytest.mark.parametrize("kind", FAULTS)
def test_super_blocks_are_multiplied_exactly(kind: str, broken_kernels: Broken) -> None:
    """256 inputs share a scale, and all groups of 256 weights are added as integers."""
    assert exact(kind)
    for fault in FAULTS[kind]:
        with broken_kernels(fault):
            assert not exact(kind), f"control: {fault}"


def test_weights_that_another_package_reads_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types are taken apart by what the package of GGUF files dequantizes: other numbers are noticed."""
    stored, honest = random_blocks("IQ2_S", 3, 512), gguf.dequantize
    assert low_bits.unpacked("IQ2_S", stored.data).shape == (3, 2 * low_bits.UNPACKED)
    monkeypatch.setattr(gguf, "dequantize", lambda *given: honest(*given) + np.float32(0.25))
    with pytest.raises(ValueError, match="blocks of IQ2_S"):
        low_bits.unpacked("IQ2_S", stored.data)


def test_exponents_of_infinite_weights_are_refused() -> None:
    stored = random_blocks("MXFP4", 3, 64)
    assert BlockWeight((stored,)).is_finite() and file_weights(stored).isfinite().all()
    exponents = stored.data.reshape(3, -1, 17)[..., 0]
    for largest, finite in ((252, True), (253, False), (255, False)):
        exponents[1, 1] = largest
        assert BlockWeight((stored,)).is_finite() == finite
        stored.data.reshape(3, -1, 17)[1, 1, 1] = 0x77
        assert bool(mxfp4_weights(torch.from_numpy(stored.data)).isfinite().all()) == finite


@pytest.mark.parametrize("kind", ["IQ1_S", "TQ1_0", "TQ2_0"])
def test_other_types_are_rounded_with_a_warning(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To 8 bits in groups of 32, two million weights at a time; the warning comes once."""
    monkeypatch.setattr(types, "_warned", set())
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = np.random.default_rng(0).integers(0, 60, (5000, 512 // numbers * size), dtype=np.uint8)
    stored = StoredTensor((5000, 512), kind, data)
    wanted, found = file_weights(stored), read_weight(stored)
    assert isinstance(read_weight(stored), BlockWeight) and isinstance(found, BlockWeight)
    groups = (5000, 16, 32)
    error = (found.dense(torch.float32) - wanted).view(groups).abs().amax(2)
    assert (error <= wanted.view(groups).abs().amax(2) / 127 * 0.52 + 8e-6).all()
    assert caplog.text.count(f"weights of type {kind} are rounded to Q8_0") == 1


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_numbers_stay_numbers(kind: str) -> None:
    values = torch.randn(4, 64).to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind])
    found = read_weight(StoredTensor((4, 64), kind, values.view(torch.uint8).numpy()))
    assert isinstance(found, DenseWeight)
    assert torch.equal(found.values, values)


@pytest.mark.parametrize("tied", [False, True])
def test_what_the_layers_hold(tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of several types are one call; embeddings read rows of their blocks, which may be the head's; biases lie as rows do.

    A Llama's queries and keys are interleaved in the file. A machine without kernels reads the file dequantized.
    """
    model, kinds = model_of(tie_word_embeddings=tied, attention_bias=True), dict.fromkeys(LAYERS, "Q4_1")
    kinds |= {"attn_v": "Q8_0", "ffn_gate": "F32", "ffn_down": "Q8_0", "token_embd": "Q4_1", "output": "Q4_1"}
    path = write_gguf(tmp_path / "tiny.gguf", model, kinds)
    kept: Any = load_model(path).model
    layer, head = kept.model.model.layers[1], kept.model.lm_head.product
    joint, embedding = layer.self_attn.q_proj.product, kept.model.model.embed_tokens
    assert joint is layer.self_attn.v_proj.product and [part.bits for part in joint.parts] == [5.0, 8.5]
    products = (layer.mlp.up_proj.product, layer.mlp.gate_proj.product, head, embedding.product)
    assert [one.bits for one in products] == [5.0, 16.0, 5.0, 5.0] and (head is embedding.product) == tied
    assert kept.num_parameters == model.num_parameters()
    found = embedding(torch.tensor([[3, 9, 3]]))[0, 0].float()
    torch.testing.assert_close(found, embedding.product.dense()[3].float(), atol=0, rtol=2**-8)
    own = torch.cat([getattr(model.model.layers[1].self_attn, f"{name}_proj").bias for name in "qkv"]).detach()
    torch.testing.assert_close(joint.bias.float(), own, atol=0.02, rtol=0.01)
    wanted = scores(load_model(path, LoadOptions(weights="bf16", dtype="bf16")).model)
    assert error(scores(kept), wanted) < 0.08
    other = load_model(write_gguf(tmp_path / "other.gguf", tiny.llama()))
    assert error(scores(other.model), wanted) > 0.5, "the bound separates the models"
    monkeypatch.setattr(Hardware, "cpu_kernels", False)
    with refused("model", "tiny.gguf"):
        load_model(path)


@pytest.mark.parametrize("kinds", [("Q5_1", "Q8_0", "Q4_1"), ("F16", "F16", "F16"), ("Q8_0", "F16", "Q8_0")], ids=str)
def test_experts_are_those_of_the_file(tmp_path: Path, kinds: tuple[str, str, str]) -> None:
    """Gate and up projections of two types, unquantized, and mixed; the family's own code over the same weights agrees."""
    model = model_of("qwen3_moe", head_dim=16, moe_intermediate_size=32, mlp_only_layers=[])
    types_of = dict.fromkeys(LAYERS, "Q8_0") | dict(zip(EXPERTS, kinds, strict=True))
    path = write_gguf(tmp_path / "tiny.gguf", model, types_of)
    tensors = {one.name: one for one in gguf.GGUFReader(path).tensors}
    loaded: Any = load_model(path).model
    assert loaded.fused.is_native
    for n, layer in enumerate(loaded.model.model.layers):
        own = layer.mlp.experts
        assert isinstance(own, FrozenExperts)
        for short, stack in (("gate", own.gate_up), ("up", own.gate_up), ("down", own.down)):
            one = tensors[f"blk.{n}.ffn_{short}_exps.weight"]
            wanted = torch.from_numpy(gguf.dequantize(one.data, one.tensor_type)).float()
            found = torch.stack([part.product.dense() for part in stack])
            found = {"gate": found[:, :32], "up": found[:, 32:], "down": found}[short].float()
            torch.testing.assert_close(found, wanted.view_as(found), atol=2e-3, rtol=5e-3 if "F16" in kinds else 2e-3)
    ours, loaded.fused = scores(loaded), None
    assert error(ours, scores(loaded)) < 0.05


def test_what_is_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that requests something else gets it, and an architecture that is not read is dequantized."""
    path = write_gguf(tmp_path / "tiny.gguf", model_of(), dict.fromkeys(LAYERS, "Q4_1"))
    for options in (LoadOptions(weights="bf16"), LoadOptions(device_map="cpu")):
        assert load_model(path, options).weights == ""
    monkeypatch.delitem(ARCHITECTURES, "llama")
    assert load_model(path).weights == ""


# -- the head ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_configuration_and_tokenizer_are_those_that_transformers_reads(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "MAX_SHORT_BYTES", 100)
    older = {"vocab_size": None} if tied else {}  # which leave it to be counted
    path = image_of(model_of(tie_word_embeddings=tied)).changed(older).write(tmp_path / "tiny.gguf")
    head = read_header(path)
    config, whole = config_of(head), AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    assert {**config.to_dict(), "_name_or_path": ""} == {**whole.to_dict(), "_name_or_path": ""}
    assert config.tie_word_embeddings == tied
    ours, theirs = tokenizer_of(head), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    named = {"bos_token": "<bos>", "eos_token": "<eos>"}  # and no token that the file lacks
    assert ours.special_tokens_map == named and ours.get_vocab() == tiny.tokenizer().get_vocab()
    text = "hello <eos> wörld\n"
    assert ours(text) == theirs(text) and ours.decode(ours(text).input_ids) == text
    assert len(head.short_values) < 1500, "without the vocabulary"


def test_the_head_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model_of(), {"attn_q": "Q4_0", "token_embd": "Q8_0"})
    head, reader = read_header(path), gguf.GGUFReader(path)
    assert head.architecture == "llama"
    assert set(head.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        own = head.tensors[tensor.name]
        assert own.shape == tuple(int(n) for n in reversed(tensor.shape)) and own.kind == tensor.tensor_type.name
        assert own.data.tobytes() == tensor.data.tobytes()


# -- products ----------------------------------------------------------------------------------------------------------


def test_parts_of_several_types_are_stacked() -> None:
    stored = [random_blocks(kind, rows, 512) for kind, rows in [("Q4_K", 40), ("Q4_K", 8), ("Q6_K", 33), ("Q8_0", 5)]]
    weight, bias = BlockWeight(tuple(stored)), torch.randn(86)
    product, wanted = weight.product(bias), torch.cat(list(map(file_weights, stored)))
    assert [part.out_features for part in product.parts] == [48, 33, 5]
    torch.testing.assert_close(product.dense(), wanted, atol=1e-5, rtol=1e-6)
    x = torch.randn(70, 512)
    product.activations = "float32"
    exact = x.double() @ wanted.double().t() + bias.double()
    assert ((product(x).double() - exact).abs() / (wanted.double().norm(dim=1) * 512**0.5)).max() < 1e-6
    product.activations = "int8"
    whole = product(x)
    assert all(torch.equal(product(x[i : i + 3]), whole[i : i + 3]) for i in range(0, 66, 11))
    with refused("activations", "bf16"):
        product.activations = "bf16"


@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_K"), ("Q8_0", "Q8_0")], ids=str)
def test_tensors_of_different_widths_are_not_joined(kinds: tuple[str, str]) -> None:
    same = concatenated([read_weight(random_blocks(kind, 32, 512)) for kind in kinds])
    assert same is not None and same.product(None).out_features == 64
    with pytest.raises(ModelLoadError, match="rows of 512, 256 weights; they must be equal"):
        concatenated([read_weight(random_blocks(kinds[0], 32, width)) for width in (512, 256)])


def test_rows_that_are_not_whole_blocks_are_not_packed() -> None:
    for shape in ((32, 35), (32, 18, 1)):
        with pytest.raises(ValueError, match="whole blocks of 18 bytes"):
            NativeProduct.of_blocks("Q4_0", [np.zeros(shape, dtype=np.uint8)])
    with pytest.raises(ValueError, match="rows of 32, 64 weights are not one matrix"):
        NativeProduct.of_blocks("Q4_0", [np.zeros((1, n), dtype=np.uint8) for n in (18, 36)])
