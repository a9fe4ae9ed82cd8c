"""GGUF files whose numbers contradict each other, the file or every model: refused in a line, before anything is made by them."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from foresay.errors import ModelLoadError
from foresay.models.gguf import values
from foresay.models.gguf.header import read_header
from foresay.models.huggingface import self_check
from foresay.models.sources import loading
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model, load_tokenizer
from helpers import fuzz_gguf, tiny
from helpers.fuzz_gguf import Image, Tensor
from helpers.fuzzing import outcome_of
from helpers.gguf_files import write_gguf

UINT32, INT32, FLOAT32, TEXT, LIST = 4, 5, 6, 8, 9
LARGE = (1 << 64) - 1


def number(value: float, kind: int = UINT32) -> tuple[int, bytes]:
    return kind, struct.pack("<" + fuzz_gguf.FORMATS[kind], value)


def text(value: str) -> tuple[int, bytes]:
    return TEXT, struct.pack("<Q", len(value.encode())) + value.encode()


def numbers(*values: int) -> tuple[int, bytes]:
    return LIST, struct.pack(f"<IQ{len(values)}I", UINT32, len(values), *values)


def image(base: str = "llama") -> Image:
    return copy.deepcopy(fuzz_gguf.bases()[base])


def put(parts: Image, key: str, value: tuple[int, bytes] | None) -> None:
    """Give a value to a key, or take it away."""
    parts.values = [one for one in parts.values if one[0] != key.encode()]
    if value is not None:
        parts.values.append((key.encode(), *value))


def tensor(parts: Image, name: str) -> Tensor:
    return next(one for one in parts.tensors if one.name == name.encode())


def refusal(path: Path, parts: Image, **options: Any) -> str:
    """The one line that loading a file gives, without the file's name."""
    path.write_bytes(parts.written())
    with pytest.raises(ModelLoadError) as caught:
        load_model(path, LoadOptions(**options))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    assert str(path) in message
    return message


# -- sound files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_a_sound_file_is_its_model(tmp_path: Path, dtype: str) -> None:
    """A file of numbers; a head of Qwen3 here is of 8, not of 128. Others are in test_guarantees.py."""
    model = fuzz_gguf.model("qwen3")
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", model), LoadOptions(dtype=dtype))
    assert loaded.weights == ("GGUF" if dtype == "auto" else "")
    ids = torch.tensor([tiny.tokenizer()("hello world, hello").input_ids])
    with torch.no_grad():
        ours, theirs = loaded.model.model(input_ids=ids).logits.float(), model(ids).logits  # type: ignore[attr-defined]
    error = float((ours - theirs).square().mean().sqrt() / theirs.std())
    assert error < (0.03 if dtype == "auto" else 1e-4)


# -- the head ----------------------------------------------------------------------------------------------------------


def _set(**counts: int) -> Callable[[Image], None]:
    def change(parts: Image) -> None:
        for name, value in counts.items():
            setattr(parts, name, value)

    return change


def _value(key: str, value: tuple[int, bytes]) -> Callable[[Image], None]:
    return lambda parts: put(parts, key, value)


def _twice(what: str) -> Callable[[Image], None]:
    return lambda parts: getattr(parts, what).append(getattr(parts, what)[3])


def _tensor(**values: Any) -> Callable[[Image], None]:
    def change(parts: Image) -> None:
        for name, value in values.items():
            setattr(tensor(parts, "output_norm.weight"), name, value)

    return change


HEADS: dict[str, tuple[Callable[[Image], None], str]] = {
    "an unknown version": (_set(version=9), "version"),
    "tensors beyond the file": (_set(num_tensors=1 << 63), "number of tensors is 9223372036854775808, but at most"),
    "values beyond the file": (_set(num_values=LARGE), "number of values is 18446744073709551615, but at most"),
    "a text beyond the file": (_value("x", (TEXT, struct.pack("<Q", LARGE))), "length of the value of 'x' is 1844"),
    "a list beyond the file": (_value("x", (LIST, struct.pack("<IQ", UINT32, 1 << 62))), "length of the list 'x' is"),
    "texts beyond the file": (_value("x", (LIST, struct.pack("<IQ", TEXT, 1 << 62))), "length of the list 'x' is"),
    "nested lists": (_value("x", (LIST, struct.pack("<IQ", LIST, 1) * 5000)), "the list 'x' is of type 9; lists of"),
    "an unknown type of value": (_value("x", (77, b"")), "the value 'x' is of type 77; types 0 to 12 are"),
    "a value twice": (_twice("values"), r"the value 'llama.\w+' appears twice"),
    "a tensor twice": (_twice("tensors"), r"the tensor 'blk.0.\w+.weight' appears twice"),
    "70,000 dimensions": (_tensor(dims=[1] * 70_000), "has 70000 dimensions; at most 4"),
    "2^31 dimensions": (_tensor(num_dims=1 << 31), "has 2147483648 dimensions; at most 4"),
    "no dimension": (_tensor(dims=[]), r"'output_norm.weight' has shape \[\]"),
    "an empty tensor": (_tensor(dims=[0]), r"'output_norm.weight' has shape \[0\]"),
    "2^126 numbers": (_tensor(dims=[1 << 63, 1 << 63]), "extends past the end of the file"),
    "an alignment of 3": (_value("general.alignment", number(3)), "general.alignment is 3; it must be a power of two"),
    "an alignment of 0": (_value("general.alignment", number(0)), "general.alignment is 0; it must be a power of two"),
    "an alignment of words": (_value("general.alignment", text("32")), "general.alignment is '32'; it must be a power"),
    "an unknown type of tensor": (_tensor(kind=999), "'output_norm.weight' is of type 999, which is unknown"),
    "tensors that overlap": (_tensor(offset=64), "the tensors '.*' and '.*' overlap"),
    "a place between": (_tensor(offset=7), "begins at 7, which is not a multiple of 32"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_disagrees_with_its_file(tmp_path: Path, kind: str) -> None:
    change, wanted = HEADS[kind]
    parts = image()
    change(parts)
    path = tmp_path / "x.gguf"
    path.write_bytes(parts.written())
    with pytest.raises(ModelLoadError, match=wanted):
        read_header(path)
    assert "damaged or truncated" in refusal(path, parts)


# -- values ------------------------------------------------------------------------------------------------------------

NO_FACTORS = [number(value, FLOAT32) for value in (0, float("nan"), float("inf"), -2)]
VALUES: dict[str, list[tuple[int, bytes] | None]] = {
    "llama.block_count": [
        *(number(value) for value in (0, 3, 1, 100_000)), number(1 << 63, 10), number(-1, INT32), None, text("2"),
        number(2.0, FLOAT32), numbers(2, 2),
    ],
    "llama.embedding_length": [number(0), number(32), number(1 << 31), None],
    "llama.feed_forward_length": [number(0), number(95), numbers(96, 96), None],
    "llama.context_length": [number(0), number(1 << 31), None],
    "llama.attention.head_count": [number(0), number(3), number(8), number(1 << 31), None],
    "llama.attention.head_count_kv": [number(0), number(3), number(4), number(8), number(-2, INT32)],
    "llama.attention.key_length": [number(8), number(0), number(1 << 31)],
    "llama.attention.value_length": [number(8)],
    "llama.attention.layer_norm_rms_epsilon": [*NO_FACTORS, None],
    "tokenizer.ggml.suppress_tokens": [number(3), numbers(0, 1 << 20), numbers(*range(2000))],
    "llama.rope.dimension_count": [number(0), number(15), number(8), number(1 << 31)],
    "llama.rope.freq_base": NO_FACTORS,
    "llama.rope.scaling.factor": NO_FACTORS,
    "llama.vocab_size": [number(0), number(263), number(265), number(1 << 31)],
    "tokenizer.ggml.bos_token_id": [number(264), number(-1, INT32), text("<bos>")],
    "tokenizer.ggml.eos_token_id": [number(1 << 31), numbers(1)],
    "tokenizer.ggml.token_type": [numbers(1, 1, 1), number(1)],
    "tokenizer.ggml.scores": [numbers(*range(264))],
    "tokenizer.ggml.tokens": [numbers(*range(264)), text("hello")],
    "tokenizer.ggml.merges": [numbers(1), number(1)],
    "general.architecture": [None, number(1), text(""), text("two\nlines"), text("x" * 1000)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in VALUES.items() for value in values], ids=str
)
def test_a_value_that_no_model_has(tmp_path: Path, key: str, value: tuple[int, bytes] | None) -> None:
    """Out of range, of another type, missing, or in contradiction to the tensors: which then are named instead."""
    parts = image()
    put(parts, key, value)
    message = refusal(tmp_path / "x.gguf", parts)
    if "its value " in message:
        assert f"its value {key}" in message or "_length" in key or "dimension_count" in message
        assert "; allowed is " in message
    else:
        assert "its tensor '" in message or "of the model's tensors" in message, message


def test_a_tokenizer_alone_needs_sound_values_and_no_tensors(tmp_path: Path) -> None:
    path, parts = tmp_path / "x.gguf", image()
    parts.tensors = []
    path.write_bytes(parts.written())
    assert load_tokenizer(path)("hello").input_ids == tiny.tokenizer()("hello").input_ids
    put(parts, "tokenizer.ggml.eos_token_id", number(264))
    path.write_bytes(parts.written())
    with pytest.raises(ModelLoadError, match=r"its value tokenizer\.ggml\.eos_token_id is 264"):
        load_tokenizer(path)


def test_a_string_longer_than_its_file(tmp_path: Path) -> None:
    """The last but one string of a list has a length that no file has."""
    parts = image()
    stored = struct.pack("<QQ", LARGE, 1) + b"a"
    put(parts, "tokenizer.ggml.tokens", (LIST, struct.pack("<IQ", TEXT, 2) + stored))
    assert "a string of the list 'tokenizer.ggml.tokens' exceeds the file" in refusal(tmp_path / "x.gguf", parts)


def test_a_chat_template_without_end(tmp_path: Path) -> None:
    path, parts = tmp_path / "x.gguf", image()
    put(parts, "tokenizer.chat_template", text("{{ 'a' * 4000000000 }}"))
    path.write_bytes(parts.written())
    for load in (load_tokenizer, load_model):
        with pytest.raises(ModelLoadError, match="of memory"):
            load(path)


def test_a_token_of_a_megabyte(tmp_path: Path) -> None:
    """Merges that a file lacks are looked for by cutting each token everywhere."""
    path, parts = tmp_path / "x.gguf", image()
    words = [b"a" * (1 << 20), *(b"%d" % i for i in range(263))]
    stored = b"".join(struct.pack("<Q", len(word)) + word for word in words)
    put(parts, "tokenizer.ggml.tokens", (LIST, struct.pack("<IQ", TEXT, len(words)) + stored))
    put(parts, "tokenizer.ggml.model", text("llama"))
    put(parts, "tokenizer.ggml.merges", None)
    path.write_bytes(parts.written())
    with pytest.raises(ModelLoadError, match="has 1048576 bytes; allowed are at most 1024"):
        load_tokenizer(path)


# -- tensors -----------------------------------------------------------------------------------------------------------


def _resized(parts: Image, name: str, dims: list[int]) -> None:
    """Another shape, and bytes for it."""
    one = tensor(parts, name)
    count = torch.Size(dims).numel()
    one.data = one.data[:1] * (count * len(one.data) // torch.Size(one.dims).numel())
    one.dims = dims


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("token_embd", [64, 263]), ("output", [32, 264]), ("output_norm", [1]), ("blk.1.attn_norm", [65]),
        ("blk.0.attn_q", [32, 64]), ("blk.0.attn_k", [64, 64]), ("blk.0.attn_v", [64, 33]), ("blk.0.attn_output", [64, 64, 1]),
        ("blk.1.ffn_gate", [64, 128]), ("blk.1.ffn_up", [96, 64]), ("blk.1.ffn_down", [96, 32]),
    ],
)  # fmt: skip
def test_a_tensor_of_another_shape(tmp_path: Path, name: str, dims: list[int], dtype: str) -> None:
    parts = image()
    _resized(parts, f"{name}.weight", dims)
    message = refusal(tmp_path / "x.gguf", parts, dtype=dtype)
    assert f"its tensor '{name}.weight' has shape {dims[::-1]}, but its values describe [" in message


def test_queries_wider_than_keys(tmp_path: Path) -> None:
    """They are joined to one product: 4-bit blocks of the one were read by the depth of the other."""
    parts = image("llama-q4_0")
    _resized(parts, "blk.0.attn_q.weight", [1 << 20, 64])
    message = refusal(tmp_path / "x.gguf", parts)
    assert "its tensor 'blk.0.attn_q.weight' has shape [64, 1048576], but its values describe [64, 64]" in message


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("output_norm.weight", "F64", "F64; it must be one of F32, F16, BF16"),
        ("blk.0.attn_norm.weight", "I8", "I8; it must be one of F32, F16, BF16"),
        ("blk.0.attn_q.weight", "I32", "I32, which is not supported for weights"),
    ],
)
def test_a_tensor_of_another_type(tmp_path: Path, name: str, kind: str, message: str) -> None:
    parts = image()
    one, number_of = tensor(parts, name), gguf.GGMLQuantizationType[kind]
    one.kind, one.data = int(number_of), bytes(torch.Size(one.dims).numel() * gguf.GGML_QUANT_SIZES[number_of][1])
    assert f"'{name}' is of type {message}" in refusal(tmp_path / "x.gguf", parts)


@pytest.mark.parametrize(("base", "name"), [("llama", "blk.1.attn_q.weight"), ("llama-q4_0", "blk.1.attn_q.weight")])
def test_a_weight_that_is_not_finite(tmp_path: Path, base: str, name: str) -> None:
    parts = image(base)
    one = tensor(parts, name)
    one.data = b"\xff\x7f" * 2 + one.data[4:]  # NaN in float16; with what follows it, in float32 too
    if base == "llama":
        one.data = struct.pack("<f", float("nan")) + one.data[4:]
    assert f"its tensor '{name}' contains numbers that are not finite" in refusal(tmp_path / "x.gguf", parts)


def test_finite_weights_whose_sums_are_not(tmp_path: Path) -> None:
    parts = image()
    for name in ("output.weight", "output_norm.weight"):
        one = tensor(parts, name)
        one.data = struct.pack("<f", 3e38) * (len(one.data) // 4)
    assert "gives scores that are not finite" in refusal(tmp_path / "x.gguf", parts)


@pytest.mark.parametrize(
    ("value", "wanted"), [(0.0, "contains 0.0"), (float("nan"), "contains nan"), (1e30, "contains 1.0000000150474")]
)
def test_factors_of_positions(tmp_path: Path, value: float, wanted: str) -> None:
    parts = image()
    parts.tensors.append(Tensor(b"rope_freqs.weight", [8], 0, struct.pack("<8f", *[value] * 8)))
    message = refusal(tmp_path / "x.gguf", parts)
    assert f"its tensor 'rope_freqs.weight' {wanted}" in message and "; its numbers must be from" in message


def test_an_architecture_that_transformers_dequantises(tmp_path: Path) -> None:
    """A model of far more weights than the file has would be filled with noise first."""
    parts = image()
    for key, _, _ in list(parts.values):
        if key.startswith(b"llama."):
            put(parts, key.decode(), None)
    put(parts, "general.architecture", text("starcoder2"))
    sizes = {"block_count": 20, "context_length": 64, "embedding_length": 65536, "feed_forward_length": 65536}
    for name, size in {**sizes, "attention.head_count": 4, "attention.head_count_kv": 2}.items():
        put(parts, f"starcoder2.{name}", number(size))
    put(parts, "starcoder2.attention.layer_norm_epsilon", number(1e-5, FLOAT32))
    assert "describe a model of" in refusal(tmp_path / "x.gguf", parts)


def test_one_of_several_files_says_what_reads_them(tmp_path: Path) -> None:
    parts = image()
    put(parts, "split.count", number(2, 2))
    del parts.tensors[-3:]
    message = refusal(tmp_path / "x.gguf", parts)
    assert "one of several files, which only backend='llama.cpp' supports" in message


# -- at random ---------------------------------------------------------------------------------------------------------


def test_the_fuzz_finds_what_is_not_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Control of test_fuzz.py: a loader that takes any epsilon is found out, as is one that raises something else."""
    path, parts = tmp_path / "x.gguf", image()
    put(parts, "llama.attention.layer_norm_rms_epsilon", number(-1e30, FLOAT32))
    path.write_bytes(parts.written())
    assert outcome_of(fuzz_gguf.FORMAT, path) == "refused"
    monkeypatch.setattr(values, "FACTORS", {})
    assert outcome_of(fuzz_gguf.FORMAT, path) == "refused", "seen by the pass after loading"
    monkeypatch.setattr(loading, "check_scores", lambda *_: None)
    for check in ("check_sizes", "confirm"):
        monkeypatch.setattr(self_check, check, lambda *_: None)
    assert "not finite" in outcome_of(fuzz_gguf.FORMAT, path)
    monkeypatch.setattr(fuzz_gguf, "load_model", lambda *_: 1 // 0)
    assert "ZeroDivisionError" in outcome_of(fuzz_gguf.FORMAT, path)
