"""GGUF files whose parts contradict each other, the file or every model: refused in a line, before anything is made by them."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from foresay.errors import ModelLoadError
from foresay.models.gguf import values
from foresay.models.gguf.header import read_header
from foresay.models.huggingface import self_check
from foresay.models.sources import source
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model, load_tokenizer
from helpers import fuzz_gguf, tiny
from helpers.fuzzing import outcome_of
from helpers.gguf_image import LIST, TEXT, Image

UINT32 = 4
LARGE = (1 << 64) - 1


def image(base: str = "llama") -> Image:
    return copy.deepcopy(fuzz_gguf.bases()[base])


def refusal(path: Path, parts: Image, load: Callable[[Path], Any] = load_model) -> str:
    """The one line that loading a file gives."""
    with pytest.raises(ModelLoadError) as caught:
        load(parts.write(path))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600 and str(path) in message
    return message


# -- the head ----------------------------------------------------------------------------------------------------------


Change = Callable[[Image], Any]


def counts(**counts: int) -> Change:
    return lambda parts: [setattr(parts, name, value) for name, value in counts.items()]


def value(key: str, value: Any) -> Change:
    return lambda parts: parts.put(key, value)


def twice(what: str) -> Change:
    return lambda parts: getattr(parts, what).append(getattr(parts, what)[3])


def tensor(**values: Any) -> Change:
    return lambda parts: [setattr(parts.tensor("output_norm"), name, value) for name, value in values.items()]


HEADS: dict[str, tuple[Change, str]] = {
    "an unknown version": (counts(version=9), "version"),
    "tensors beyond the file": (counts(num_tensors=1 << 63), "number of tensors is 9223372036854775808, but at most"),
    "values beyond the file": (counts(num_values=LARGE), "number of values is 18446744073709551615, but at most"),
    "a text beyond the file": (value("x", (TEXT, struct.pack("<Q", LARGE))), r"length of the value of 'llama\.x' is 1844"),
    "a list beyond the file": (value("x", (LIST, struct.pack("<IQ", UINT32, 1 << 62))), r"length of the list 'llama\.x' is"),
    "texts beyond the file": (value("x", (LIST, struct.pack("<IQ", TEXT, 1 << 62))), r"length of the list 'llama\.x' is"),
    "nested lists": (value("x", (LIST, struct.pack("<IQ", LIST, 1) * 5000)), r"the list 'llama\.x' is of type 9; lists of"),
    "an unknown type of value": (value("x", (77, b"")), r"the value 'llama\.x' is of type 77; types 0 to 12 are"),
    "a value twice": (twice("values"), r"the value 'llama.\w+' appears twice"),
    "a tensor twice": (twice("tensors"), r"the tensor 'blk.0.\w+.weight' appears twice"),
    "70,000 dimensions": (tensor(dims=[1] * 70_000), "has 70000 dimensions; at most 4"),
    "2^31 dimensions": (tensor(num_dims=1 << 31), "has 2147483648 dimensions; at most 4"),
    "no dimension": (tensor(dims=[]), r"'output_norm.weight' has shape \[\]"),
    "an empty tensor": (tensor(dims=[0]), r"'output_norm.weight' has shape \[0\]"),
    "2^126 numbers": (tensor(dims=[1 << 63, 1 << 63]), "extends past the end of the file"),
    "an alignment of 3": (value("general.alignment", 3), "general.alignment is 3; it must be a power of two"),
    "an alignment of 0": (value("general.alignment", 0), "general.alignment is 0; it must be a power of two"),
    "an alignment of words": (value("general.alignment", "32"), "general.alignment is '32'; it must be a power"),
    "an unknown type of tensor": (tensor(kind=999), "'output_norm.weight' is of type 999, which is unknown"),
    "tensors that overlap": (tensor(offset=64), "the tensors '.*' and '.*' overlap"),
    "a place between": (tensor(offset=7), "begins at 7, which is not a multiple of 32"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_disagrees_with_its_file(tmp_path: Path, kind: str) -> None:
    change, wanted = HEADS[kind]
    parts = image()
    change(parts)
    with pytest.raises(ModelLoadError, match=wanted):
        read_header(parts.write(tmp_path / "x.gguf"))
    assert "damaged or truncated" in refusal(tmp_path / "x.gguf", parts)


def test_a_file_that_is_cut_short_or_none(tmp_path: Path) -> None:
    path, whole = tmp_path / "x.gguf", image().written()
    for kept, where in ((4, ""), (30, ""), (200, ""), (2000, "|extends past"), (-1, "|extends past")):
        path.write_bytes(whole[:kept])
        with pytest.raises(ModelLoadError, match=rf"damaged or truncated \(.*(it ends within its header{where})"):
            load_model(path)
    for raw in (b"", b"GG", b"\x89PNG\r\n", b"ggml" * 10):
        path.write_bytes(raw)
        with pytest.raises(ModelLoadError, match=r"x\.gguf.*download it again"):
            load_model(path)


# -- tokenizers --------------------------------------------------------------------------------------------------------


def test_a_tokenizer_alone_needs_sound_values_and_no_tensors(tmp_path: Path) -> None:
    path, parts = tmp_path / "x.gguf", image()
    parts.tensors = []
    assert load_tokenizer(parts.write(path))("hello").input_ids == tiny.tokenizer()("hello").input_ids
    parts.put("tokenizer.ggml.eos_token_id", 264)
    assert "its value tokenizer.ggml.eos_token_id is 264" in refusal(path, parts, load_tokenizer)


BEYOND = (LIST, struct.pack("<IQQQ", TEXT, 2, LARGE, 1) + b"a")
"""A list of strings of which the last but one has a length that no file has."""
LONG = {"tokenizer.ggml.tokens": ["a" * (1 << 20), *map(str, range(263))], "tokenizer.ggml.merges": None}
"""Merges that a file lacks are looked for by cutting each token everywhere."""
TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "a string beyond the file": (
        {"tokenizer.ggml.tokens": BEYOND},
        "a string of the list 'tokenizer.ggml.tokens' exceeds",
    ),
    "a template without end": ({"tokenizer.chat_template": "{{ 'a' * 4000000000 }}"}, "of memory"),
    "a token of a megabyte": ({**LONG, "tokenizer.ggml.model": "llama"}, "has 1048576 bytes; allowed are at most 1024"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_hostile_tokenizer(tmp_path: Path, kind: str) -> None:
    changes, wanted = TOKENIZERS[kind]
    for load in (load_tokenizer, load_model):
        assert wanted in refusal(tmp_path / "x.gguf", image().changed(changes), load)


# -- tensors -----------------------------------------------------------------------------------------------------------


def resized(dims: list[int]) -> Callable[[Any], None]:
    """Another shape, and bytes for it."""

    def change(one: Any) -> None:
        one.data = one.data[:1] * (torch.Size(dims).numel() * len(one.data) // torch.Size(one.dims).numel())
        one.dims = dims

    return change


def retyped(kind: str) -> Callable[[Any], None]:
    number = gguf.GGMLQuantizationType[kind]

    def change(one: Any) -> None:
        one.kind, one.data = int(number), bytes(torch.Size(one.dims).numel() * gguf.GGML_QUANT_SIZES[number][1])

    return change


def begun(data: bytes) -> Callable[[Any], None]:
    return lambda one: setattr(one, "data", data + one.data[len(data) :])


SHAPES = {
    "token_embd": [64, 263], "output": [32, 264], "output_norm": [1], "blk.1.attn_norm": [65], "blk.0.attn_q": [32, 64],
    "blk.0.attn_k": [64, 64], "blk.0.attn_v": [64, 33], "blk.0.attn_output": [64, 64, 1], "blk.1.ffn_gate": [64, 128],
    "blk.1.ffn_up": [96, 64], "blk.1.ffn_down": [96, 32],
}  # fmt: skip
NO_NUMBER, EXPERTS, NOT_FINITE = (
    struct.pack("<f", float("nan")),
    "blk.1.ffn_up_exps",
    "contains numbers that are not finite",
)
TENSORS: list[tuple[str, str, Callable[[Any], None], str]] = [
    *[("llama", name, resized(dims), f"has shape {dims[::-1]}, but its values describe [") for name, dims in SHAPES.items()],
    # queries and keys are joined to one product: 4-bit blocks of the one were read by the depth of the other
    ("llama-q4_0", "blk.0.attn_q", resized([1 << 20, 64]), "has shape [64, 1048576], but its values describe [64, 64]"),
    ("gpt-oss", EXPERTS, resized([64, 96, 2]), "has shape [2, 96, 64], but its values describe [4, 96, 64]"),
    ("llama", "output_norm", retyped("F64"), "is of type F64; it must be one of F32, F16, BF16"),
    ("llama", "blk.0.attn_norm", retyped("I8"), "is of type I8; it must be one of F32, F16, BF16"),
    ("llama", "blk.0.attn_q", retyped("I32"), "is of type I32, which is not supported for weights"),
    ("llama", "blk.1.attn_q", begun(NO_NUMBER), NOT_FINITE),
    ("llama-q4_0", "blk.1.attn_q", begun(b"\xff\x7f" * 2), NOT_FINITE),
]  # fmt: skip


@pytest.mark.parametrize(("base", "name", "change", "wanted"), TENSORS, ids=range(len(TENSORS)))
def test_a_tensor_that_no_model_has(
    tmp_path: Path, base: str, name: str, change: Callable[[Any], None], wanted: str
) -> None:
    parts = image(base)
    change(parts.tensor(name))
    for dtype in ("auto", "fp32"):
        found = refusal(tmp_path / "x.gguf", parts, partial(load_model, options=LoadOptions(dtype=dtype)))
        assert f"its tensor '{name}.weight' {wanted}" in found


def numbers(count: int, value: float) -> dict[str, Any]:
    return {"rope_freqs.weight": np.full(count, value)}


LARGEST = {"output.weight": np.full((264, 64), 3e38), "output_norm.weight": np.full(64, 3e38)}
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sums": ("llama", LARGEST, "gives scores that are not finite"),
    "no frequency": ("llama", numbers(8, 0.0), "contains 0.0; its numbers must be from"),
    "frequencies that are no numbers": ("llama", numbers(8, np.nan), "contains nan; its numbers must be from"),
    "large frequencies": ("llama", numbers(8, 1e30), "contains 1.0000000150474662e+30; its numbers must be from"),
    "few frequencies": ("llama", numbers(5, 1.0), "5 rotary frequencies, but its model has 8"),
    "a missing tensor": ("llama", {"blk.1.ffn_norm.weight": None}, "(model.layers.1.post_attention_layernorm"),
    "a missing bias": ("qwen2", {"blk.0.attn_q.bias": None}, "(model.layers.0.self_attn.q_proj.bias"),
    "decays that grow": ("qwen35", {"blk.0.ssm_a": np.ones(4)}, "ssm_a' contains numbers that are not negative"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_tensors_that_no_model_has(tmp_path: Path, kind: str) -> None:
    base, tensors, wanted = OTHERS[kind]
    with pytest.raises(ModelLoadError) as caught:
        load_model(image(base).changed({}, tensors).write(tmp_path / "x.gguf"))
    assert wanted in str(caught.value)


def test_an_architecture_that_transformers_dequantises(tmp_path: Path) -> None:
    """A model of far more weights than the file has would be filled with noise first."""
    parts = image()
    parts.values = [one for one in parts.values if not one[0].startswith(b"llama.")]
    sizes = {"block_count": 20, "context_length": 64, "embedding_length": 65536, "feed_forward_length": 65536}
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_epsilon": 1e-5}
    parts = parts.changed({"general.architecture": "starcoder2", **sizes, **heads})
    assert "describe a model of" in refusal(tmp_path / "x.gguf", parts)


def test_one_of_several_files_says_what_reads_them(tmp_path: Path) -> None:
    parts = image().changed({"split.count": (2, b"\2\0")})
    del parts.tensors[-3:]
    assert "one of several files, which only backend='llama.cpp' supports" in refusal(tmp_path / "x.gguf", parts)


def test_the_fuzz_finds_what_is_not_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Control of test_fuzz.py: a loader that takes any epsilon is found out, as is one that raises something else."""
    path = image().changed({"attention.layer_norm_rms_epsilon": -1e30}).write(tmp_path / "x.gguf")
    assert outcome_of(fuzz_gguf.FORMAT, path) == "refused"
    monkeypatch.setattr(values, "FACTORS", {})
    assert outcome_of(fuzz_gguf.FORMAT, path) == "refused", "seen by the pass after loading"
    monkeypatch.setattr(source, "check_scores", lambda *_: None)
    for check in ("check_sizes", "confirm"):
        monkeypatch.setattr(self_check, check, lambda *_: None)
    assert "not finite" in outcome_of(fuzz_gguf.FORMAT, path)
    monkeypatch.setattr(fuzz_gguf, "load_model", lambda *_: 1 // 0)
    assert "ZeroDivisionError" in outcome_of(fuzz_gguf.FORMAT, path)
