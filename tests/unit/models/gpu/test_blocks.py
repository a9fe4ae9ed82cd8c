"""Products over quantized blocks in Triton's interpreter, against the weights that the gguf package reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from foresay.models.gpu import blocks, product
from foresay.models.gpu.blocks import BlockProduct, StackedProduct
from foresay.models.gpu.levels import E4M3, KINDS, Levels
from foresay.models.huggingface import linears
from helpers.gguf_files import random_blocks

CPU = torch.device("cpu")
SIZES = {
    "Q8_0": (40, 7 * 32),
    "Q4_0": (33, 5 * 32),
    "Q4_1": (33, 5 * 32),
    "Q5_0": (33, 96),
    "Q5_1": (33, 7 * 32),
    "Q4_K": (40, 512),
}
SIZES |= {"Q5_K": (36, 256), "Q6_K": (35, 256), "MXFP4": (33, 7 * 32)}


def stored(kind: str, seed: int = 0) -> tuple[Any, torch.Tensor]:
    return random_blocks(kind, *SIZES[kind], seed)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, weight = stored(kind)
    bias = torch.randn(len(weight))
    found = BlockProduct(Levels.of_file(kind, data), torch.float32, CPU, bias)
    torch.testing.assert_close(found.dense(), weight, rtol=1e-6, atol=1e-7)
    assert (found.out_features, found.in_features) == tuple(weight.shape) and found.bits < 9
    torch.manual_seed(0)
    x = torch.randn(2, 3, weight.shape[1])
    expected = x @ weight.T + bias
    torch.testing.assert_close(found(x), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(blocks, "_SLICE", 16)
    for most in (blocks.MOST, 32):  # by the kernel in groups of 64 tokens, and by dequantized weights in slices
        monkeypatch.setattr(blocks, "MOST", most)
        torch.testing.assert_close(found(x.repeat(12, 1, 1)), expected.repeat(12, 1, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("exponents", [(0, 1), (2, 100), (160, 252)])
def test_exponents_of_any_size_are_exact(exponents: tuple[int, int]) -> None:
    """Exponents of MXFP4: of 0 and 1 half the scale is a subnormal number."""
    data, _ = stored("MXFP4")
    data.reshape(len(data), -1, 17)[..., 0] = np.random.default_rng(1).choice(exponents, (len(data), 7))
    weight = torch.from_numpy(np.array(gguf.dequantize(data, gguf.GGMLQuantizationType.MXFP4)))
    found = BlockProduct(Levels.of_file("MXFP4", data), torch.float32, CPU, None)
    assert torch.equal(found.dense(), weight)
    assert torch.equal(found(torch.eye(weight.shape[1])[:3]), weight[:, :3].T)


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "4 bits with levels that stand for 0, one scale for 128 weights": {"bits": 4, "per": 4, "zeros": (0, 16)},
    "8 bits with such levels": {"bits": 8, "per": 2, "zeros": (-128, 128)},
    "4 bits with offsets": {"bits": 4, "mins": True},
    "floats of 8 bits": {"bits": 8, "per": 4, "is_float": True},
}


def levels_of(kind: str, rows: int = 37, depth: int = 288) -> tuple[Levels, torch.Tensor]:
    """Random levels, scales and zeros, and their weights. 288 weights are nine groups, not a multiple of four."""
    given = dict(CHECKPOINTS[kind])
    rng, bits, per = np.random.default_rng(len(kind)), given.pop("bits"), given.pop("per", 1)
    levels = rng.integers(0, 1 << bits, (rows, depth), dtype=np.uint8)
    count = -(-depth // 32 // per)
    scales = rng.uniform(0.001, 0.02, (rows, count)).astype(np.float16)
    numbers = torch.from_numpy(levels.view(np.int8).copy() if bits == 8 else levels).float()
    if given.get("is_float"):
        levels[levels & 127 == 127] = 0  # these are no numbers
        numbers = torch.from_numpy(levels).view(torch.float8_e4m3fn).float() / E4M3
    if (span := given.pop("zeros", None)) is not None:
        given["zeros"] = rng.integers(*span, (rows, count), dtype=np.int8)
        numbers = numbers - torch.from_numpy(given["zeros"]).repeat_interleave(32 * per, 1)[:, :depth]
    weight = numbers * torch.from_numpy(scales).float().repeat_interleave(32 * per, 1)[:, :depth]
    if given.pop("mins", False):
        given["mins"] = rng.uniform(-0.1, 0.1, (rows, count)).astype(np.float16)
        weight = weight - torch.from_numpy(given["mins"]).float().repeat_interleave(32 * per, 1)[:, :depth]
    return Levels(bits=bits, group=32, levels=levels, scales=scales, per=per, **given), weight


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_weights_are_those_of_a_checkpoint(kind: str) -> None:
    """Control: a scale serves one group fewer."""
    levels, weight = levels_of(kind)
    found = BlockProduct(levels, torch.float32, CPU, None)
    torch.testing.assert_close(found.dense(), weight, rtol=1e-6, atol=1e-7)
    torch.manual_seed(0)
    x = torch.randn(3, weight.shape[1])
    torch.testing.assert_close(found(x), x @ weight.T, rtol=1e-4, atol=1e-4)
    if levels.per > 1:
        found._how = replace(levels, per=levels.per - 1)
        assert not torch.allclose(found(x), x @ weight.T, atol=1e-2)


@pytest.mark.parametrize(("bits", "depth"), [(8, 80), (8, 64), (4, 96)])
def test_rounded_weights_are_those_of_cpus(bits: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of eight bits may end within a group."""
    torch.manual_seed(depth)
    weight, x, bias = torch.randn(40, depth), torch.randn(3, depth), torch.randn(40)
    found: Any = linears._on_gpu(bits, weight, bias)
    native = linears.quantizer(bits)(weight, bias)
    torch.testing.assert_close(found.dense(), native.dense(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found(x), x @ native.dense().T + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_a_token_has_the_same_bits_alone_and_among_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the inner dimension is divided by the number of tokens."""
    found = BlockProduct(Levels.of_file(kind, stored(kind)[0]), torch.float32, CPU, None)
    torch.manual_seed(1)
    x = torch.randn(9, found.in_features)

    def agrees() -> bool:
        whole = found(x)
        return all(torch.equal(found(x[a:b]), whole[a:b]) for a, b in ((0, 1), (3, 8)))

    monkeypatch.setattr(blocks, "parts_of", lambda *_: 2)
    assert agrees()
    count = iter((1, 2, 4, 2, 1))
    monkeypatch.setattr(blocks, "parts_of", lambda *_: next(count))
    assert not agrees()


def test_swapped_halves_of_a_byte_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    known = blocks._packed

    def swapped(levels: Any, bits: int, group: int) -> Any:
        pairs, high = known(levels, bits, group)
        return (pairs >> 4 | pairs << 4, high) if bits < 8 else (pairs, high)

    monkeypatch.setattr(blocks, "_packed", swapped)
    with pytest.raises(AssertionError):
        test_weights_are_those_of_the_file("Q4_K", monkeypatch)


def test_tensors_of_several_types_are_multiplied_jointly() -> None:
    parts = [BlockProduct(Levels.of_file(kind, stored(kind)[0]), torch.float32, CPU, None) for kind in ("Q6_K", "Q6_K")]
    both, x = StackedProduct(parts), torch.randn(3, parts[0].in_features)
    assert torch.equal(both(x), torch.cat([one(x) for one in parts], 1)) and both.dense().shape[0] == both.out_features
    assert product.TOKENS == 64
