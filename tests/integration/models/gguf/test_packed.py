"""Packed weights kept between loads: later loads map them, and whatever is wrong with them makes the next load pack again."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.models.cpu.product import NativeProduct
from foresay.models.gguf import blocks, packed
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import passes, tiny
from helpers.families import make
from helpers.gguf_files import write_gguf
from helpers.refusals import refused

MIXED = {"attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q8_0", "attn_output": "Q4_1", "ffn_gate": "Q5_0"}
MIXED |= {"ffn_up": "Q5_1", "ffn_down": "Q8_0", "token_embd": "Q8_0"}
PARTS = 7
"""Parts of one type: six of a layer, and the embedding."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for packed weights, which are kept as by default; compiled kernels stay where they are."""
    monkeypatch.delenv("FORESAY_PACKED_GB", raising=False)
    monkeypatch.setattr(packed, "cache_dir", lambda: tmp_path)
    return tmp_path / "packed"


def write(path: Path, factor: float = 1.0, family: str = "llama") -> Path:
    """Several types in one joint product, biases, rows in another order than the file's, and a tied embedding."""
    sizes = {"vocab_size": len(tiny.tokenizer()), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    own = {} if family == "llama" else {"head_dim": 16, "moe_intermediate_size": 32, "mlp_only_layers": []}
    model = make(family, 3, **sizes, tie_word_embeddings=True, attention_bias=family == "llama", **own)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
        else:
            weight.data *= factor
    return write_gguf(path, model, MIXED if family == "llama" else None, kind="Q4_1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf")


def scores(path: Path) -> torch.Tensor:
    return passes.scores(load_model(path).model, torch.arange(5, 25)[None]).clone()


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types that are packed, as they are packed."""
    found: list[str] = []
    original = NativeProduct.of_blocks.__func__  # type: ignore[attr-defined]

    def counted(cls: Any, kind: str, *args: Any, **kwargs: Any) -> NativeProduct:
        found.append(kind)
        product: NativeProduct = original(cls, kind, *args, **kwargs)
        return product

    monkeypatch.setattr(NativeProduct, "of_blocks", classmethod(counted))
    return found


def files(cache: Path) -> list[Path]:
    packed.settle()
    return sorted(cache.iterdir()) if cache.exists() else []


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_later_load_maps_what_the_first_one_packed(
    cache: Path, tmp_path: Path, packs: list[str], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is packed, and no block of the file is read; every weight and score has the same bits."""
    path = write(tmp_path / "tiny.gguf", family=family)
    with monkeypatch.context() as patch:
        patch.setenv("FORESAY_PACKED_GB", "0")
        wanted = scores(path)
    assert files(cache) == [] and len(packs) >= PARTS
    first: Any = load_model(path).model
    assert len(files(cache)) == 1
    packs.clear()
    read, kinds = blocks.read_weight, set()
    monkeypatch.setattr(blocks, "read_weight", lambda tensor: kinds.add(tensor.kind) or read(tensor))
    assert torch.equal(scores(path), wanted) and packs == [] and kinds == {"F32"}
    second: Any = load_model(path).model
    for (name, one), (_, two) in zip(first.model.named_modules(), second.model.named_modules(), strict=True):
        if (a := getattr(one, "product", None)) is not None:
            b = two.product
            assert torch.equal(a.dense(), b.dense()), name
            assert a.bias is b.bias is None or torch.equal(a.bias, b.bias), name
            assert (a.bits, a.nbytes, len(a.parts)) == (b.bits, b.nbytes, len(b.parts)), name


def test_the_first_load_reports_what_it_writes(
    cache: Path, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where and how much, if that is much; while it packs, it names the file. Loads that write nothing log nothing."""
    shown = list[str]()
    load_model(path, LoadOptions(progress=shown.append))
    assert shown[-1] == "Packing tiny.gguf for this processor, once: 0.0 GB" and not caplog.messages
    files(cache)[0].unlink()
    monkeypatch.setattr(packed, "_ANNOUNCED", 1)
    for is_first in (True, False):
        caplog.clear()
        load_model(path)
        assert any(str(cache) in one and "tiny.gguf was packed" in one for one in caplog.messages) is is_first
        packed.settle()
    shown.clear()
    load_model(path, LoadOptions(progress=shown.append))
    assert not shown
    monkeypatch.setenv("FORESAY_PACKED_GB", "0")
    load_model(path)
    assert not caplog.messages


def part(number: int, value: Any) -> Callable[[bytes], bytes]:
    """Change a part of the first line, in as many bytes."""

    def change(data: bytes) -> bytes:
        line, rest = data.split(b"\n", 1)
        index = json.loads(line)
        next(iter(index.values()))[0][number] = value
        return json.dumps(index).encode().ljust(len(line)) + b"\n" + rest

    return change


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "half of the weights": lambda data: data[: len(data) // 2],
    "nothing": lambda data: b"",
    "no line": lambda data: data.replace(b"\n", b" "),
    "half of the line": lambda data: b"{" * 4095 + data[4095:],
    "parts that are a list": lambda data: b"[1]".ljust(4095) + data[4095:],
    "more bytes": lambda data: data + b"more",
    "an unknown type": part(0, "Q9_9"),
    "no rows": part(1, 0),
    "more rows than there are": part(1, 1 << 40),
    "half a block": part(2, 40),
    "a fraction": part(2, 64.5),
    "a negative size": part(2, -64),
}


def test_damaged_weights_are_packed_again(cache: Path, path: Path, packs: list[str]) -> None:
    """Control: of a file that fits its own first line but not the model, the weights that it lacks, in memory."""
    wanted = scores(path)
    [file] = files(cache)
    sound = file.read_bytes()
    for name, damage in DAMAGES.items():
        file.write_bytes(damage(sound))
        packs.clear()
        assert torch.equal(scores(path), wanted) and len(packs) == PARTS, name
        assert files(cache) == [file] and file.read_bytes() == sound, name
    first = next(iter(json.loads(sound.split(b"\n", 1)[0]))).encode()
    file.write_bytes(sound.replace(first, b"?" * len(first), 1))
    packs.clear()
    assert torch.equal(scores(path), wanted) and 0 < len(packs) < PARTS


def test_another_file_or_other_kernels_pack_again(
    cache: Path, path: Path, packs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file has other weights but the same size and modification time; the third only another modification time."""
    first, state = scores(path), path.stat()
    write(path, 1.25)
    assert path.stat().st_size == state.st_size
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    packs.clear()
    second = scores(path)
    assert not torch.equal(first, second) and len(packs) == PARTS
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert torch.equal(scores(path), second) and len(packs) == 2 * PARTS
    assert len(files(cache)) == 3
    monkeypatch.setattr(packed, "source_digest", lambda: "another layout")
    assert torch.equal(scores(path), second) and len(packs) == 3 * PARTS


def test_the_least_recently_used_are_removed(cache: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores(path)
    [first] = files(cache)
    size, found = first.stat().st_size, [first]
    monkeypatch.setenv("FORESAY_PACKED_GB", str(2.5 * size / 1e9))
    for i in (1, 2):
        for age, file in enumerate(reversed(found)):
            os.utime(file, (1000.0 - age, 1000.0 - age))
        os.utime(path, ns=(0, i))
        scores(path)
        found += set(files(cache)) - set(found)
    assert set(files(cache)) == set(found[1:])
    monkeypatch.setenv("FORESAY_PACKED_GB", str(0.5 * size / 1e9))
    os.utime(path, ns=(0, 3))
    scores(path)
    assert set(files(cache)) == set(found[1:]), "one that exceeds the limit alone is not written, and removes nothing"


def test_a_disk_that_refuses(cache: Path, path: Path, packs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is full, or the folder cannot be made: all is in memory, and what may not have reached the disk is not trusted."""

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for where, call in ((os, "fsync"), (os, "replace"), (Path, "mkdir")):
        with monkeypatch.context() as patch:
            patch.setattr(where, call, fails)
            wanted = scores(path)
            assert files(cache) == []
    packs.clear()
    assert torch.equal(scores(path), wanted) and len(packs) == PARTS and len(files(cache)) == 1


def test_an_error_or_a_replaced_file_keeps_nothing(cache: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file's weights must not become the new file's."""
    fill = blocks.fill

    def replaced(*args: Any) -> None:
        fill(*args)
        os.utime(path, ns=(0, 5))

    monkeypatch.setattr(blocks, "fill", replaced)
    scores(path)
    assert files(cache) == []
    monkeypatch.setattr(blocks, "fill", lambda *_: (_ for _ in ()).throw(OSError("the file went away")))
    with pytest.raises(Exception, match="the file went away"):
        load_model(path)
    assert files(cache) == []


@pytest.mark.usefixtures("cache")
def test_invalid_limits_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("-1", "much", "nan", "inf"):
        monkeypatch.setenv("FORESAY_PACKED_GB", text)
        with refused("FORESAY_PACKED_GB"):
            load_model(path)


@pytest.mark.usefixtures("cache")
def test_a_load_keeps_no_descriptors(path: Path) -> None:
    """But for the map of the weights: a server needs them for its clients."""
    count = len(os.listdir("/proc/self/fd"))
    kept = [load_model(path), load_model(path)]
    packed.settle()
    assert len(os.listdir("/proc/self/fd")) <= count + 2 * len(kept)
