"""GGUF files whose weights stay in their blocks: what is unpacked, what is written, what is left to transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

import foresay
from foresay.errors import ModelLoadError
from foresay.models.cpu.product import BLOCKS, NativeProduct
from foresay.models.gguf import blocks, header, types
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import StoredTensor, read_header
from foresay.models.gguf.tokenizer import tokenizer_of
from foresay.models.gguf.types import BlockWeight, DenseWeight, Weight, concatenated, read_weight
from foresay.models.hardware import Hardware
from foresay.models.sources import describing
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from foresay.models.sources.wrapping import LoadedModel
from helpers import tiny
from helpers.families import make
from helpers.gguf_files import write_gguf
from helpers.refusals import refused

LAYERS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def llama(*, tied: bool = False, **changes: Any) -> PreTrainedModel:
    """Rows of whole groups, and weights large enough that texts vary."""
    sizes = {"vocab_size": len(tiny.tokenizer()), "hidden_size": 64, "intermediate_size": 96}
    model = make("llama", 4, **sizes, tie_word_embeddings=tied, **changes)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data *= 0.2 / weight.std()
    for name, bias in model.named_parameters():
        if name.endswith("bias"):
            bias.data = torch.randn(bias.shape, generator=torch.Generator().manual_seed(len(name)))
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


@pytest.mark.parametrize(("rows", "width"), [(1, 32), (31, 96), (33, 288), (70, 544)])
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


def test_exponents_of_infinite_weights_are_refused() -> None:
    stored = random_blocks("MXFP4", 3, 64)
    assert BlockWeight((stored,)).is_finite() and file_weights(stored).isfinite().all()
    exponents = stored.data.reshape(3, -1, 17)[..., 0]
    for largest, finite in ((252, True), (253, False), (255, False)):
        exponents[1, 1] = largest
        assert BlockWeight((stored,)).is_finite() == finite
        stored.data.reshape(3, -1, 17)[1, 1, 1] = 0x77
        assert bool(mxfp4_weights(torch.from_numpy(stored.data)).isfinite().all()) == finite


@pytest.mark.parametrize("kind", ["IQ4_NL", "Q2_K", "Q3_K"])
def test_other_types_are_rounded_with_a_warning(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To 8 bits in groups of 32, a few rows at a time; the warning comes once."""
    monkeypatch.setattr(types, "_PIECE_NUMBERS", 1000)
    monkeypatch.setattr(types, "_warned", set())
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = np.random.default_rng(0).integers(0, 60, (7, 512 // numbers * size), dtype=np.uint8)
    stored = StoredTensor((7, 512), kind, data)
    wanted, found = file_weights(stored), read_weight(stored)
    assert isinstance(read_weight(stored), BlockWeight) and isinstance(found, BlockWeight)
    groups = (7, 16, 32)
    error = (found.dense(torch.float32) - wanted).view(groups).abs().amax(2)
    assert (error <= wanted.view(groups).abs().amax(2) / 127 * 0.52 + 8e-6).all()
    assert caplog.text.count(f"weights of type {kind} are rounded to Q8_0") == 1


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_numbers_stay_numbers(kind: str) -> None:
    values = torch.randn(4, 64).to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind])
    found = read_weight(StoredTensor((4, 64), kind, values.view(torch.uint8).numpy()))
    assert isinstance(found, DenseWeight)
    assert torch.equal(found.values, values)


def logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    model = loaded.model.model  # type: ignore[attr-defined]
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=torch.tensor([ids])).logits.float()
    return out


def of(kind: str, *others: str, **more: str) -> dict[str, str]:
    """One type for the products of all layers, and for other tensors."""
    return dict.fromkeys((*LAYERS, *others), kind) | more


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.std())


IDS = tiny.tokenizer()("hello world, hello").input_ids
EIGHT = {"token_embd": "Q8_0", "output": "Q8_0"}


KINDS = [*(of(kind, **EIGHT) for kind in ("Q4_1", "Q4_0", "Q8_0")), of("Q4_1", attn_v="Q8_0"), of("Q4_1", *EIGHT)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kinds", KINDS)
def test_the_scores_are_those_of_the_dequantised_model(
    tmp_path: Path, kinds: dict[str, str], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the rounding of weights to bf16, and of inputs to 8 bits; a machine without kernels reads it dequantized.

    Layers of several types are one call too, and embeddings read rows of their blocks, which may be the head's.
    """
    path = write_gguf(tmp_path / "tiny.gguf", llama(tied=tied), kinds)
    kept: Any = load_model(path)
    whole: Any = load_model(path, LoadOptions(weights="bf16", dtype="bf16"))
    assert kept.weights == "GGUF" and kept.model.fused.is_native
    assert kept.model.num_parameters == whole.model.num_parameters
    wanted = logits(whole, IDS)
    assert difference(logits(kept, IDS), wanted) < 0.08
    other = write_gguf(tmp_path / "other.gguf", tiny.llama())
    assert difference(logits(load_model(other), IDS), wanted) > 0.5, "the bound separates the models"
    if kinds.get("token_embd") == "Q4_1":
        head, table = kept.model.model.lm_head.product, kept.model.model.model.embed_tokens.product
        assert (head.bits, table.bits, head is table) == (5.0, 5.0, tied)
        monkeypatch.setattr(Hardware, "cpu_kernels", False)
        with refused("model", "tiny.gguf"):
            load_model(path)


def test_what_the_layers_hold(tmp_path: Path) -> None:
    kinds = of("Q4_1", attn_v="Q8_0", ffn_down="Q8_0", output="Q8_0")
    del kinds["ffn_gate"]
    model = load_model(write_gguf(tmp_path / "tiny.gguf", llama(), kinds)).model.model  # type: ignore[attr-defined]
    layer = model.model.layers[0]
    joint = layer.self_attn.q_proj.product
    assert joint is layer.self_attn.v_proj.product
    assert [part.bits for part in joint.parts] == [5.0, 8.5]
    assert layer.mlp.up_proj.product.bits == 5.0
    assert layer.mlp.gate_proj.product.bits == 16.0
    assert model.lm_head.product.bits == 8.5


def test_any_draft_and_any_batch_write_the_same(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama(), of("Q4_1"))
    prompts = ["hello world", "you and I", "hello hello hello"]
    plain = foresay.load(path, drafter="none")
    alone = [plain.generate(p, max_new_tokens=24, ignore_eos=True).token_ids for p in prompts]
    assert len(set(map(tuple, alone))) > 1
    drafted = foresay.load(path, drafter="suffix", max_batch_size=2)
    assert [r.token_ids for r in drafted.generate(prompts, max_new_tokens=24, ignore_eos=True)] == alone


def test_an_architecture_that_is_not_read_is_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama(), of("Q4_1"))
    monkeypatch.setattr(describing, "ARCHITECTURES", frozenset())
    assert load_model(path).weights == ""


@pytest.mark.parametrize("options", [{"weights": "bf16"}, {"dtype": "fp32"}, {"device_map": "cpu"}])
def test_whoever_asks_for_something_else_gets_it(tmp_path: Path, options: dict[str, str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama(), of("Q4_1"))
    assert load_model(path, LoadOptions(**options)).weights == ""  # type: ignore[arg-type]


def test_a_file_that_lacks_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = gguf.GGUFWriter.add_tensor

    def without(self: gguf.GGUFWriter, name: str, *args: object, **more: object) -> None:
        if name != "blk.1.ffn_norm.weight":
            add(self, name, *args, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", without)
    path = write_gguf(tmp_path / "tiny.gguf", llama())
    with pytest.raises(ModelLoadError, match=r"lacks 1 of .* \(model.layers.1.post_attention_layernorm"):
        load_model(path)


# -- the head ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_configuration_and_tokenizer_are_those_that_transformers_reads(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "_MAX_SHORT_BYTES", 100)
    if tied:  # older files leave it to be counted
        monkeypatch.setattr(gguf.GGUFWriter, "add_vocab_size", lambda *_: None)
    path = write_gguf(tmp_path / "tiny.gguf", llama(tied=tied))
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
    path = write_gguf(tmp_path / "tiny.gguf", llama(), {"attn_q": "Q4_0", "token_embd": "Q8_0"})
    head, reader = read_header(path), gguf.GGUFReader(path)
    assert head.architecture == "llama"
    assert set(head.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        own = head.tensors[tensor.name]
        assert own.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert own.kind == tensor.tensor_type.name
        assert own.data.tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("kept", [4, 30, 200, 2000, -1])
def test_a_file_that_is_cut_short(tmp_path: Path, kept: int) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama())
    path.write_bytes(path.read_bytes()[:kept])
    where = "" if 0 < kept < 2000 else "extends past the end of the file|"
    with pytest.raises(ModelLoadError, match=rf"damaged or truncated \(.*({where}it ends within its header)"):
        load_model(path)


def test_a_tied_embedding_is_held_once(tmp_path: Path) -> None:
    kinds = of("Q8_0", "token_embd", "output")
    tied, own = (load_model(write_gguf(tmp_path / f"{t}.gguf", llama(tied=t), kinds)) for t in (True, False))
    body = tied.model.model  # type: ignore[attr-defined]
    assert body.lm_head.product is body.model.embed_tokens.product
    ids = torch.tensor([[3, 9, 3]])
    torch.testing.assert_close(
        body.model.embed_tokens(ids)[0, 0].float(), body.lm_head.product.dense()[3].float(), atol=0, rtol=2**-8
    )
    for loaded, is_tied in ((tied, True), (own, False)):
        dense = llama(tied=is_tied)
        assert loaded.model.num_parameters == dense.num_parameters()  # type: ignore[attr-defined]


def rescaled(monkeypatch: pytest.MonkeyPatch, kind: Any, factor: float, factors: torch.Tensor | None = None) -> None:
    """Files written from now on state that positions are scaled."""
    add = gguf.GGUFWriter.write_header_to_file

    def scaled(self: gguf.GGUFWriter) -> None:
        if kind is not None:
            self.add_rope_scaling_type(kind)
            self.add_rope_scaling_factor(factor)
        if factors is not None:
            self.add_tensor("rope_freqs.weight", factors.numpy())
        add(self)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", scaled)


@pytest.mark.parametrize(
    ("kind", "factors", "message"),
    [
        (gguf.RopeScalingType.YARN, None, r"scales its rotary positions \(llama.rope.scaling.type"),
        (None, torch.ones(5), "5 rotary frequencies, but its model has 8"),
    ],
)
def test_scaled_positions_that_nobody_reads_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, factors: torch.Tensor | None, message: str
) -> None:
    rescaled(monkeypatch, kind, 4.0, factors)
    with pytest.raises(ModelLoadError, match=message):
        load_model(write_gguf(tmp_path / "tiny.gguf", llama()))


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
BOUNDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("way", ["llama3", "linear"])
def test_scaled_positions_are_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """As Llama 3.1's files have them: a factor for each frequency; and one for all."""
    rope = LINEAR if way == "linear" else {**LINEAR, **BOUNDS, "rope_type": way}
    model = llama(max_position_embeddings=512, rope_parameters=rope)
    rotary = model.model.rotary_emb
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = plain / rotary.inv_freq
    assert float(factors.max()) == pytest.approx(8.0)
    if way == "llama3":
        rescaled(monkeypatch, None, 1.0, factors)
    else:
        rescaled(monkeypatch, gguf.RopeScalingType.LINEAR, 8.0)
    path = write_gguf(tmp_path / "tiny.gguf", model, of("Q8_0"))
    ids = (tiny.tokenizer()("hello world, hello").input_ids * 30)[:200]
    kept = load_model(path)
    wanted = model(torch.tensor([ids])).logits[0, -40:].detach()
    assert difference(logits(kept, ids)[0, -40:], wanted) < 0.08
    assert difference(logits(load_model(path, LoadOptions(dtype="fp32")), ids)[0, -40:], wanted) < 0.05
    monkeypatch.setattr(blocks, "scale_positions", lambda *_: None)
    assert difference(logits(load_model(path), ids)[0, -40:], wanted) > 0.2, "control: it matters"
    with pytest.raises(ModelLoadError, match="when transformers loads the file"):  # transformers reads neither
        load_model(path, LoadOptions(device_map="cpu"))


@pytest.mark.parametrize(("layers", "scalar"), [(46, 64 // 4), (4, 8)])
def test_the_largest_gemma_scales_its_queries_otherwise(tmp_path: Path, layers: int, scalar: int) -> None:
    writer = gguf.GGUFWriter(tmp_path / "head.gguf", "gemma2")
    sizes = {
        "context_length": 64,
        "embedding_length": 64,
        "block_count": layers,
        "feed_forward_length": 96,
        "head_count": 4,
    }
    sizes |= {"head_count_kv": 2, "key_length": 8, "value_length": 8}
    for name, value in (*sizes.items(), ("layer_norm_rms_eps", 1e-6)):
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    config = config_of(read_header(tmp_path / "head.gguf"))
    assert (config.head_dim, config.query_pre_attn_scalar) == (8, scalar)


@pytest.mark.parametrize("kind", ["Q4_1", None])
def test_biases_lie_as_their_rows_do(tmp_path: Path, kind: str | None) -> None:
    """A Llama's queries and keys are interleaved in the file, biases too."""
    model = llama(attention_bias=True)
    path = write_gguf(tmp_path / "tiny.gguf", model, of(kind) if kind else None)
    loaded = load_model(path).model.model  # type: ignore[attr-defined]
    attn = loaded.model.layers[1].self_attn
    own = [getattr(model.model.layers[1].self_attn, name).bias for name in ("q_proj", "k_proj", "v_proj")]
    found = attn.q_proj.product.bias
    torch.testing.assert_close(found.float(), torch.cat(own).detach(), atol=0.02, rtol=0.01)
    assert not torch.allclose(found[:64].float(), torch.cat(own)[:64].flip(0), atol=0.5), "the order counts"


def test_a_file_that_lacks_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration has them: Qwen2's always has."""
    path = write_gguf(tmp_path / "tiny.gguf", llama(), of("Q4_1"))
    head = describing.config_of

    def with_biases(*args: Any) -> Any:
        config = head(*args)
        config.attention_bias = True
        return config

    monkeypatch.setattr(describing, "config_of", with_biases)
    with pytest.raises(ModelLoadError, match=r"lacks 12 of the model.s tensors \(model.layers.0.self_attn.q_proj.bias"):
        load_model(path)


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


@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_0"), ("Q4_0", "Q4_K"), ("Q8_0", "Q8_0"), ("Q4_0", "Q8_0")])
def test_tensors_of_different_widths_are_not_joined(kinds: tuple[str, str]) -> None:
    def weights(kind: str, width: int) -> Weight:
        stored = gguf.GGMLQuantizationType[kind]
        data = np.zeros(
            (32, width // gguf.GGML_QUANT_SIZES[stored][0] * gguf.GGML_QUANT_SIZES[stored][1]), dtype=np.uint8
        )
        return read_weight(StoredTensor((32, width), kind, data))

    same = concatenated([weights(kind, 512) for kind in kinds])
    assert same is not None
    assert same.product(None).out_features == 64
    with pytest.raises(ModelLoadError, match="rows of 512, 256 weights; they must be equal"):
        concatenated([weights(kinds[0], 512), weights(kinds[1], 256)])


@pytest.mark.parametrize("shape", [(32, 35), (32, 18, 1)])
def test_rows_that_are_not_whole_blocks_are_not_packed(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="whole blocks of 18 bytes"):
        NativeProduct.of_blocks("Q4_0", [np.zeros(shape, dtype=np.uint8)])
    with pytest.raises(ValueError, match="rows of 32, 64 weights are not one matrix"):
        NativeProduct.of_blocks("Q4_0", [np.zeros((1, n), dtype=np.uint8) for n in (18, 36)])
