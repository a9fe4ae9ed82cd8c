"""Packed weights kept between loads: later loads map them, and whatever is wrong with them makes the next load pack again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.errors import ConfigError
from foresay.models.cpu.product import NativeProduct, StackedProduct
from foresay.models.gguf import blocks, packed
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.families import make
from helpers.gguf_files import write_gguf

MIXED = {"attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q8_0", "attn_output": "Q4_1", "ffn_gate": "Q5_0"}
MIXED |= {"ffn_up": "Q5_1", "ffn_down": "Q8_0", "token_embd": "Q8_0"}
PARTS = 19
"""Parts of one type: six in each of three layers, and the embedding."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for packed weights, which are kept as by default; compiled kernels stay where they are."""
    monkeypatch.delenv("FORESAY_PACKED_GB", raising=False)
    monkeypatch.setattr(packed, "_root", lambda: tmp_path / "packed")
    return tmp_path / "packed"


def write(path: Path, factor: float = 1.0) -> Path:
    """Several types in one joint product, biases, rows in another order than the file's, and a tied embedding."""
    model = make(
        "llama",
        3,
        vocab_size=len(tiny.tokenizer()),
        hidden_size=64,
        intermediate_size=96,
        tie_word_embeddings=True,
        attention_bias=True,
    )
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
        else:
            weight.data *= factor
    return write_gguf(path, model, MIXED)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf")


def scores(path: Path) -> torch.Tensor:
    from foresay.decoding.protocols import ModelInput
    from foresay.decoding.rows import Row, Rows
    from foresay.decoding.sampling_params import SamplingParams

    model, ids = load_model(path).model, list(range(5, 25))
    cache = model.new_cache()
    model.admit(Rows([Row(0, ids, SamplingParams(), limit=30)]), 0, cache)
    return model.forward(ModelInput(torch.tensor([ids]), [len(ids)]), cache).scores().clone()


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


def folders(cache: Path) -> list[Path]:
    packed.settle()
    return [folder for folder in cache.iterdir() if not folder.name.startswith(".")]


def test_a_later_load_maps_what_the_first_one_packed(
    cache: Path, path: Path, packs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is packed, and no block of the file is read; every weight and score has the same bits."""
    monkeypatch.setenv("FORESAY_PACKED_GB", "0")
    wanted = scores(path)
    assert not cache.exists() and len(packs) == PARTS
    packs.clear()
    monkeypatch.delenv("FORESAY_PACKED_GB")
    assert torch.equal(scores(path), wanted) and len(packs) == PARTS
    packs.clear()
    read, names = blocks.read_weight, []

    def counted(tensor: Any) -> Any:
        names.append(tensor.kind)
        return read(tensor)

    monkeypatch.setattr(blocks, "read_weight", counted)
    assert torch.equal(scores(path), wanted)
    assert packs == [] and set(names) == {"F32"}
    [folder] = folders(cache)
    assert sorted(one.name for one in folder.iterdir()) == ["index.json", "weights.bin"]


def test_the_products_are_equal(cache: Path, path: Path) -> None:
    first, second = (load_model(path).model.model for _ in range(2))  # type: ignore[attr-defined]
    kinds = set()
    for (name, one), (_, other) in zip(first.named_modules(), second.named_modules(), strict=True):
        product = getattr(one, "product", None)
        if product is not None:
            assert torch.equal(product.dense(), other.product.dense()), name
            assert (product.bias is None) == (other.product.bias is None), name
            assert product.bias is None or torch.equal(product.bias, other.product.bias), name
            assert product.bits == other.product.bits and product.nbytes == other.product.nbytes, name
            kinds.add(type(product))
    assert kinds == {NativeProduct, StackedProduct}


def cut(folder: Path) -> None:
    os.truncate(folder / "weights.bin", (folder / "weights.bin").stat().st_size // 2)


def no_weights(folder: Path) -> None:
    (folder / "weights.bin").unlink()


def no_json(folder: Path) -> None:
    (folder / "index.json").write_text("{")


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        change(index)
        (folder / "index.json").write_text(json.dumps(index))

    return damage


def part(number: int, value: Any) -> Callable[[Path], None]:
    def change(index: dict[str, Any]) -> None:
        next(iter(index["parts"].values()))[0][number] = value

    return edited(change)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "half of the weights": cut,
    "no weights": no_weights,
    "half of the index": no_json,
    "no size": edited(lambda index: index.pop("size")),
    "a size that is text": edited(lambda index: index.update(size="1")),
    "parts that are a list": edited(lambda index: index.update(parts=[])),
    "an unknown type": part(0, "Q9_9"),
    "no rows": part(1, 0),
    "more rows than there are": part(1, 1 << 40),
    "half a block": part(2, 40),
    "a fraction": part(2, 64.5),
    "a place beyond the end": part(3, 1 << 30),
    "a place between lines of the cache": part(3, 32),
    "a negative place": part(3, -4096),
    "another start of the machine, before the disk had them": edited(lambda index: index.update(boot="earlier")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_packed_again(cache: Path, path: Path, packs: list[str], damage: str) -> None:
    wanted = scores(path)
    [folder] = folders(cache)
    DAMAGES[damage](folder)
    packs.clear()
    assert torch.equal(scores(path), wanted) and len(packs) == PARTS
    assert folders(cache) == [folder]
    packs.clear()
    assert torch.equal(scores(path), wanted) and packs == []


def test_a_wrong_shape_is_packed_in_memory(cache: Path, path: Path, packs: list[str]) -> None:
    """Control: an index that fits its own file but not the model's."""
    wanted = scores(path)
    [folder] = folders(cache)
    part(1, 32)(folder)
    packs.clear()
    assert torch.equal(scores(path), wanted) and 0 < len(packs) < PARTS


def test_weights_that_reached_the_disk_survive_a_restart(
    cache: Path, path: Path, packs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = scores(path)
    [folder] = folders(cache)
    assert json.loads((folder / "index.json").read_text())["boot"] == ""
    monkeypatch.setattr(packed, "_boot_id", lambda: "the next start")
    packs.clear()
    assert torch.equal(scores(path), wanted) and packs == []


def test_another_file_in_the_same_place_is_packed(cache: Path, path: Path, packs: list[str]) -> None:
    """The second file has other weights but the same size and modification time; the third only another modification time."""
    first, state = scores(path), path.stat()
    write(path, 1.25)
    assert path.stat().st_size == state.st_size
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    packs.clear()
    second = scores(path)
    assert not torch.equal(first, second) and len(packs) == PARTS
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    packs.clear()
    assert torch.equal(scores(path), second) and len(packs) == PARTS
    assert len(folders(cache)) == 3


@pytest.mark.parametrize("name", ["source_digest", "_code_digest"])
def test_other_kernels_or_code_pack_again(
    cache: Path, path: Path, packs: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    scores(path)
    monkeypatch.setattr(packed, name, lambda: "another layout or order of rows")
    packs.clear()
    scores(path)
    assert len(packs) == PARTS


def test_the_least_recently_used_are_removed(
    cache: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores(path)
    [first] = folders(cache)
    size = (first / "weights.bin").stat().st_size
    monkeypatch.setenv("FORESAY_PACKED_GB", str(2.5 * size / 1e9))
    names = [first]
    for i in (1, 2):
        os.utime(path, ns=(0, i))
        scores(path)
        [new] = set(folders(cache)) - set(names)
        names.append(new)
        for age, folder in enumerate(reversed(names)):
            if folder.exists():
                os.utime(folder / "index.json", (1000.0 - age, 1000.0 - age))
    assert set(folders(cache)) == set(names[1:])
    monkeypatch.setenv("FORESAY_PACKED_GB", str(0.5 * size / 1e9))
    os.utime(path, ns=(0, 3))
    scores(path)
    assert set(folders(cache)) == set(names[1:]), "one that exceeds the limit alone removes nothing"


@pytest.mark.parametrize("call", ["posix_fallocate", "mkdir", "disk_usage", "rename"])
def test_a_disk_that_refuses(
    cache: Path, path: Path, packs: list[str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It is full, the folder cannot be made or renamed, or has little room: all is in memory."""
    wanted, count = scores(path), 0
    for folder in folders(cache):
        shutil.rmtree(folder)

    def fails(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "disk_usage":
        monkeypatch.setattr(shutil, call, lambda _: type("Usage", (), {"free": 10_000}))
    else:
        monkeypatch.setattr(os if call == "posix_fallocate" else Path, call, fails)
    assert torch.equal(scores(path), wanted)
    assert call == "disk_usage" or count > 0
    monkeypatch.undo()
    assert list(cache.iterdir()) == []


def test_an_error_leaves_nothing(cache: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of the file system, which is not taken for one of the cache."""
    monkeypatch.setattr(blocks, "_fill", lambda *_: (_ for _ in ()).throw(OSError("the file went away")))
    with pytest.raises(Exception, match="the file went away"):
        load_model(path)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("text", ["-1", "much", "nan", "inf"])
def test_invalid_limits_are_refused(cache: Path, path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FORESAY_PACKED_GB", text)
    with pytest.raises(ConfigError, match=f"FORESAY_PACKED_GB='{text}' must be a number of gigabytes"):
        load_model(path)


def test_processes_that_load_together(path: Path, tmp_path: Path) -> None:
    """Each packs, one of them keeps; the last text is the first's."""
    code = (
        "import sys\n"
        "import foresay\n"
        "from foresay.models.gguf.packed import settle\n"
        "one = foresay.load(sys.argv[1], drafter='none')\n"
        "print(one.generate([5, 6, 7, 8], max_new_tokens=8).token_ids)\n"
        "settle()\n"
    )
    kernels = packed.cache_dir() / "native"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(kernels)
    environment = {**os.environ, "FORESAY_CACHE": str(tmp_path / "cache"), "FORESAY_PACKED_GB": "1"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    outputs = [process.communicate() for process in [start(), start()]] + [start().communicate()]
    texts = {out for out, _ in outputs}
    assert len(texts) == 1 and "[" in next(iter(texts)), outputs
    assert len([one for one in (tmp_path / "cache" / "packed").iterdir() if not one.name.startswith(".")]) == 1


def test_a_limit_below_the_weights_writes_nothing(
    cache: Path, path: Path, packs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = scores(path)
    size = (folders(cache)[0] / "weights.bin").stat().st_size
    shutil.rmtree(cache)
    monkeypatch.setenv("FORESAY_PACKED_GB", str(0.9 * size / 1e9))
    packs.clear()
    assert torch.equal(scores(path), wanted) and len(packs) == PARTS and not cache.exists()


def test_a_load_keeps_no_descriptors(cache: Path, path: Path) -> None:
    """But for the map of the weights: a server needs them for its clients."""
    count = len(os.listdir("/proc/self/fd"))
    kept = [load_model(path), load_model(path)]
    packed.settle()
    assert len(os.listdir("/proc/self/fd")) <= count + 2 * len(kept)


def test_a_file_replaced_while_it_loads_is_not_kept(cache: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file's weights must not become the new file's."""
    fill = blocks._fill

    def replaced(*args: Any) -> None:
        fill(*args)
        os.utime(path, ns=(0, 5))

    monkeypatch.setattr(blocks, "_fill", replaced)
    scores(path)
    assert folders(cache) == []
    monkeypatch.setattr(blocks, "_fill", fill)
    scores(path)
    assert len(folders(cache)) == 1


def test_weights_that_another_process_kept_meanwhile_stay(
    cache: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = blocks._fill

    def slower(*args: Any) -> None:
        monkeypatch.setattr(blocks, "_fill", fill)
        load_model(path)
        packed.settle()
        fill(*args)

    monkeypatch.setattr(blocks, "_fill", slower)
    kept: list[int] = []
    rename = Path.rename

    def counted(self: Path, target: Path) -> Path:
        kept.append(1)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", counted)
    scores(path)
    assert len(folders(cache)) == 1 and len(kept) == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_weights_that_cannot_be_written_are_not_trusted(
    cache: Path, path: Path, packs: list[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(packed.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(code, "not written")))
        scores(path)
        assert folders(cache) == []
    packs.clear()
    scores(path)
    assert len(packs) == PARTS and len(folders(cache)) == 1


def test_a_machine_that_does_not_say_when_it_started(
    cache: Path, path: Path, packs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are trusted once they have reached the disk, and not before."""
    monkeypatch.setattr(packed, "_BOOT_ID", cache / "none")
    scores(path)
    [folder] = folders(cache)
    packs.clear()
    scores(path)
    assert packs == []
    edited(lambda index: index.update(boot="unknown"))(folder)
    scores(path)
    assert len(packs) == PARTS


def test_folders_of_killed_loads_are_removed(cache: Path, path: Path) -> None:
    stale = cache / ".another-file-1234.work"
    stale.mkdir(parents=True)
    os.utime(stale, (0, 0))
    scores(path)
    assert not stale.exists() and len(folders(cache)) == 1
